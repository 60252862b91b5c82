"""Generated kernels behind the operators: what ``attnres::site`` and ``attnres::inter`` run on CUDA and ROCm devices.

PyTorch calls both kinds of device CUDA. Under AOTAutograd an operator that a kernel serves is traced as its launch,
as ``torch.library.triton_op`` does it, so that Inductor and AOTInductor see the kernel itself; ``torch.export`` keeps
the operator. Everything else - other devices, and what no kernel serves - runs the plain code.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.triton import set_wrap_triton_enabled
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from attnres_compile.kernels.checks import CHECKS
from attnres_compile.kernels.ops import LIBRARY
from attnres_compile.kernels.phase_ops import PLAIN

# For each operator, where the sources and the feature dimension stand among its arguments.
SERVED = {"inter": (1, 2), "inter_backward": (2, 7), "site": (1, 9), "site_backward": (2, 13)}
_KNOWN = (torch.Tensor, FakeTensor, FunctionalTensor)


def launcher(name: str, arguments: tuple[Any, ...]) -> Callable[..., list[Tensor]] | None:
    """What launches generated kernels for one call of an operator, or ``None`` where none serves it.

    Args:
        name: the operator's, without its namespace.
        arguments: all of its arguments, in the schema's order.
    """
    at, of = SERVED[name]
    first, dim = arguments[at][0], arguments[of]
    # Features that are last, or contiguous as in channels-last images: kernels read rows.
    rows = dim % first.dim() == first.dim() - 1 or first.stride(dim) == 1
    if first.device.type != "cuda" or not rows:
        return None
    try:
        # Imported late: it needs Triton, which is not on every platform.
        launch: Any = importlib.import_module("attnres_compile.kernels.launch")
    except ImportError:
        return None
    return getattr(launch, name) if launch.served(first.dtype, int(first.shape[dim]), first.device) else None


def _on_device(name: str) -> Callable[..., list[Tensor]]:
    """The operator's implementation for the dispatch key CUDA."""

    def run(*arguments: Any) -> list[Tensor]:
        CHECKS[name](*arguments)
        launch = launcher(name, arguments)
        # Kernels meet real tensors here: nothing has to be recorded.
        with set_wrap_triton_enabled(False):
            found: list[Tensor] = (launch or PLAIN[name])(*arguments)
            return found

    return run


def _traced(name: str) -> Callable[..., Any]:
    """The rule for the operator under ``FunctionalTensorMode``, which is how AOTAutograd traces."""

    def rule(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        from torch.export._trace import custom_triton_ops_decomposition_disabled

        launch = None if custom_triton_ops_decomposition_disabled() else launcher(name, args)
        if launch is None:
            return mode.__torch_dispatch__(op, types, args, kwargs)
        if not all(issubclass(kind, _KNOWN) for kind in types):
            return NotImplemented
        CHECKS[name](*args)
        with mode:
            return launch(*args)

    return rule


for _name in SERVED:
    LIBRARY.impl(_name, _on_device(_name), "CUDA")
    torch.library.register_torch_dispatch(f"attnres::{_name}", FunctionalTensorMode, _traced(_name), lib=LIBRARY)
