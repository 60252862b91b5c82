"""Every error this package raises on purpose.

Each error is one message that says what was wrong, where (module path and the user's ``file:line``) and
what to do about it. Code that catches errors by type can rely on :class:`AttnResError` being their base.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attnres_compile.exactness import Exactness
    from attnres_compile.report import TransformReport


class AttnResError(Exception):
    """Base of all errors of this package.

    Args:
        what: one sentence that says what was wrong.
        module: dotted path of the module concerned, or ``""``.
        where: ``file:line`` in the user's code, or ``""``.
        remedy: what to do, or ``""``.
    """

    def __init__(self, what: str, *, module: str = "", where: str = "", remedy: str = "") -> None:
        self.what = what
        self.module = module
        self.where = where
        self.remedy = remedy
        super().__init__(self._message())

    def _message(self) -> str:
        place = ", ".join(part for part in (self.module and f"module {self.module}", self.where) if part)
        text = f"{self.what} ({place})" if place else self.what
        return f"{text}. {self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions rebuild themselves from ``args`` alone, which would lose the keywords.
        return _rebuild, (type(self), dict(self.__dict__))


def _rebuild(kind: type[AttnResError], state: dict[str, object]) -> AttnResError:
    error = kind.__new__(kind)
    error.__dict__.update(state)
    error.args = (error._message(),)
    return error


class ConfigError(AttnResError, ValueError):
    """A configuration value is unknown, out of range or contradicts another one."""


class ModelError(AttnResError, TypeError):
    """What was given for a model is none, or of a kind that this package cannot look into."""


class InputsError(AttnResError, TypeError):
    """``example_inputs`` is not of a form that can be passed to the model."""


class NoStreamError(AttnResError):
    """No residual stream could be converted. ``report`` says why each add was left alone."""

    def __init__(self, what: str, *, report: TransformReport, **place: str) -> None:
        self.report = report
        super().__init__(what, **place)


class RejectedStreamError(NoStreamError):
    """``strict=True`` and a residual stream would have been left alone."""


class InexactError(AttnResError):
    """``verify=True``, and the converted model does not compute what the original does. ``exactness`` has the numbers;
    the model was reverted.
    """

    def __init__(self, what: str, *, exactness: Exactness, **place: str) -> None:
        self.exactness = exactness
        super().__init__(what, **place)


class CheckpointError(AttnResError):
    """A checkpoint cannot be read or written, or its pseudo-queries are not those of the model's conversion."""


class GraphBreakError(AttnResError):
    """A residual stream runs through a graph break and cannot be followed there, or is lost there in a call."""


class CaptureError(AttnResError):
    """The model could not be traced at all."""


class AlreadyTransformedError(AttnResError):
    """The model is transformed already."""


class AlreadyCompiledError(AttnResError):
    """The model is wrapped by ``torch.compile`` already."""


class AlreadyDistributedError(AttnResError):
    """The model's parameters are in a data-parallel wrapper already, which would not know the pseudo-queries."""


class NotTransformedError(AttnResError):
    """The call needs a transformed model."""


class PlanMismatchError(AttnResError):
    """A later capture of a transformed model does not hold the sites its queries were made for."""


class PlainExecutionError(AttnResError, RuntimeError):
    """A transformed model was about to run without its depth attention."""


class LoweringError(AttnResError):
    """An op of ours was left in a graph that claims to hold none, or a kernel could not be built."""


class KernelError(AttnResError):
    """A kernel was asked for that cannot be generated, compiled or kept on disk."""


class TargetError(AttnResError):
    """A command-line target or input specification names nothing usable."""


class MissingDependencyError(AttnResError, ImportError):
    """A package is needed that is not installed."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, perhaps beneath ``error``: that says nothing of the model, and trying in another way
    would hide it.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        # On the CPU torch raises a RuntimeError like any other, and dynamo hands on no more than the words.
        text = str(error)
        if "DefaultCPUAllocator" in text or text.startswith(("MemoryError:", "OutOfMemoryError:")):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__
    return False
