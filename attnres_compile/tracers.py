"""What traces or saves a model in a way that would lose its depth attention is refused, by name.

What a thread does is asked of that thread alone: torch's own flags of exporting and compiling are one for all threads.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental import proxy_tensor

from attnres_compile import calls
from attnres_compile.errors import PlainExecutionError

REMEDY = (
    "Use attnres_compile.export_program(model, example_inputs); or revert it, export, and use "
    "attnres_compile.rewrite_graph"
)
_TORCH = Path(torch.__file__).parent
_EXPORTERS = (str(_TORCH / "export"), str(_TORCH / "_export"))


@functools.cache
def _while_traced() -> type[PlainExecutionError]:
    """The class of an error that dynamo hands on as it is; of all others it makes failures of its own."""
    from torch._dynamo.exc import ShortenTraceback  # Importing this package loads no compiler.

    class WhileTracedError(PlainExecutionError, ShortenTraceback):
        def __init__(self, what: str, *, remedy: str) -> None:
            self.what, self.module, self.where, self.remedy = what, "", "", remedy
            self.first_useful_frame = None
            RuntimeError.__init__(self, self._message())

        def __reduce__(self) -> tuple[object, ...]:
            return functools.partial(PlainExecutionError, self.what, remedy=self.remedy), ()

    return WhileTracedError


def refuse() -> None:
    """Raise where this thread traces, and not by dynamo.

    Raises:
        PlainExecutionError: ``torch.export``, ``torch.jit.trace`` or ``make_fx`` is at work.
    """
    if exporting():
        raise refusal("torch.export")
    if torch._C._get_tracing_state() is not None:
        raise refusal("torch.jit.trace")
    if proxy_tensor.get_proxy_mode() is not None and (
        # Before dispatch there is one such mode for all threads.
        torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        or any(code.co_filename == proxy_tensor.__file__ and code.co_name == "dispatch_trace" for code in _codes())
    ):
        raise refusal("make_fx")


@calls.asked_while_traced
def refuse_strict_export() -> None:
    """Raise where what dynamo traces is to be exported. Asked by traced code, and answered when it is traced.

    Raises:
        PlainExecutionError: it is.
    """
    if exporting():
        raise refusal("torch.export", traced=True)


def refuse_script() -> None:
    """Raises:
    PlainExecutionError: always.
    """
    raise refusal("torch.jit.script")


def refuse_pickled_graph(owner: nn.Module) -> None:
    """Raise for a converted graph module that is pickled: it would be made anew of its code alone.

    Raises:
        PlainExecutionError: ``owner`` is a graph module, and this is no deep copy, which keeps what it needs.
    """
    if isinstance(owner, fx.GraphModule) and not _is_copying():
        raise PlainExecutionError(
            "a pickled torch.fx.GraphModule keeps its code alone, without the depth attention of a transformed one",
            remedy="Save its state_dict; to load it, transform the graph module again and load that",
        )


def _is_copying() -> bool:
    return any(code.co_name == "__deepcopy__" and code.co_filename == _GRAPH_MODULE for code in _codes())


_GRAPH_MODULE = fx.GraphModule.__deepcopy__.__code__.co_filename


def exporting() -> bool:
    """Whether ``torch.export`` is at work in this thread."""
    # torch 2.11 answers is_exporting() with True in every graph that dynamo traces; the flag behind it is right.
    flag = getattr(torch.compiler, "_is_exporting_flag", None)
    if not (torch.compiler.is_exporting() if flag is None else flag):
        return False
    return any(code.co_filename.startswith(_EXPORTERS) for code in _codes())


def _codes() -> Iterator[Any]:
    frame = sys._getframe(1)
    with contextlib.suppress(AttributeError):
        while True:
            yield frame.f_code
            frame = frame.f_back  # type: ignore[assignment]


def refusal(tracer: str, traced: bool = False, remedy: str = REMEDY) -> PlainExecutionError:
    """The error for what would run or save the plain sum.

    Args:
        tracer: what would.
        traced: whether it is raised where dynamo traces: then dynamo hands it on as it is.
        remedy: what to do instead.
    """
    kind = _while_traced() if traced else PlainExecutionError
    return kind(f"{tracer} cannot carry the depth attention of a transformed model", remedy=remedy)
