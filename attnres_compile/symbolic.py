"""``torch.fx`` and converted models: a tracer takes the class's ``forward`` and would see the plain sum.

``torch.fx.symbolic_trace`` and all that stands on ``torch.fx.Tracer`` (``create_feature_extractor`` of torchvision,
``prepare_fx``) begin with ``type(model).forward``, and do not enter modules of ``torch.nn``; nothing that stands in a
module's instance is asked. So ``Tracer.trace`` itself is asked, from the first conversion in a process on.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from torch import fx, nn

from attnres_compile import calls
from attnres_compile.errors import PlainExecutionError

_INSTALLING = threading.Lock()
_OURS = "_attnres_asks"


def install() -> None:
    """Have ``torch.fx.Tracer.trace`` refuse models that hold a converted module; doing it again is free."""
    with _INSTALLING:
        original = fx.Tracer.trace
        if hasattr(original, _OURS):
            return

        @functools.wraps(original)
        def trace(self: fx.Tracer, root: Any, *args: Any, **kwargs: Any) -> fx.Graph:
            if isinstance(root, nn.Module):
                _refuse(root)
            return original(self, root, *args, **kwargs)

        setattr(trace, _OURS, True)
        fx.Tracer.trace = trace  # type: ignore[method-assign]


def _refuse(root: nn.Module) -> None:
    from attnres_compile.conversion import methods_of  # it installs this

    for path, module in root.named_modules():
        if any(not calls.is_plain(method.key) for method in methods_of(module)):
            raise refusal(path)


def refusal(path: str = "") -> PlainExecutionError:
    """The error for a converted module under a tracer."""
    return PlainExecutionError(
        "torch.fx, which would symbolically trace it, cannot carry the depth attention of a transformed model",
        module=path,
        remedy="Use attnres_compile.export_program(model, example_inputs); or revert it, trace it, and use "
        "attnres_compile.rewrite_graph. `with attnres_compile.plain(model):` it is traced as the original",
    )


__all__ = ["install", "refusal"]
