"""Every site of a run against the definition of depth attention, as the run goes by."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnres_compile.comparison import compare
from attnres_compile.kernels import reference

_MIX = torch.ops.attnres.mix.default
_BACKWARD = torch.ops.attnres.mix_backward.default
# No source's gradient is measured against less than this share of the largest one of its site.
FLOOR = 0.1


class SitesByDefinition(TorchDispatchMode):
    """While open, computes each ``attnres::mix`` and its backward again, by
    :func:`attnres_compile.kernels.reference.mix` in float64 and by autograd, and keeps how far apart the two are.

    Attributes:
        output, gradient: largest relative errors so far; ``None`` before the first.
        sites: calls of ``attnres::mix`` so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.output: float | None = None
        self.gradient: float | None = None
        self.sites = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A converted model compiles itself at its first call; most modes forbid that."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Compared at once: what it is given, and what it gives, may be written into later.
        result = func(*args, **(kwargs or {}))
        if func is _MIX:
            self.sites += 1
            query, sources, *options = args
            wanted = reference.mix(query.double(), [source.double() for source in sources], *options)
            self.output = _larger(self.output, _distance([wanted], [result], 0.0))
        elif func is _BACKWARD:
            # Below autograd nothing is recorded; a thread of its own is not below it.
            with ThreadPoolExecutor(1) as pool:
                of_query, *of_sources = pool.submit(_differentiated, *args).result()
            for wanted_part, got in (([of_query], result[:1]), (of_sources, result[1:])):
                self.gradient = _larger(self.gradient, _distance(wanted_part, got, FLOOR))
        return result


def _differentiated(grad: Tensor, query: Tensor, sources: list[Tensor], *options: Any) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().double().requires_grad_() for tensor in (query, *sources)]
    mixed = reference.mix(leaves[0], leaves[1:], *options)
    return torch.autograd.grad(mixed, leaves, grad.detach().double())


def _distance(wanted: Any, got: Any, floor: float) -> float:
    before, after = ({str(at): tensor for at, tensor in enumerate(each)} for each in (wanted, got))
    found = compare(before, after, floor, dtypes=False)
    return math.inf if found.error is None or not found.equal else found.error


def _larger(before: float | None, new: float) -> float:
    return new if before is None else max(before, new)
