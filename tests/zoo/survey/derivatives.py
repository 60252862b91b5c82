"""How one tensor follows from another in autograd's graph: as it is, up to order and fixed factors, or otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Edge = tuple[Any, int]  # a node of autograd's graph and which of its outputs

# Relative, per element. Fixed scales are exact to rounding; anything learned and random is off by far more.
TOLERANCE = 1e-6


def scale(value: Edge, earlier: Sequence[Edge | None], like: Tensor) -> list[Tensor | None]:
    """For each earlier value, by what factor it stands in ``value``; ``None`` where it does not stand in it as it is.

    An earlier value s stands in a value v when the derivative of v by s is a permutation of the elements times factors
    that are constant along all dimensions of s but at most one. Two vectors through the transposed derivative tell: a
    vector of ones gives the factors d, and a random vector r gives d times r in another order.

    Args:
        value: v.
        earlier: the values s.
        like: a tensor of v's shape and dtype.
    """
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)
    ones = torch.ones_like(probe)
    start = torch.autograd.graph.GradientEdge(*value)
    wanted = [torch.autograd.graph.GradientEdge(*e) for e in earlier if e is not None]

    def pulled(vector: Tensor) -> Sequence[Tensor | None]:
        return torch.autograd.grad([start], wanted, [vector], retain_graph=True, allow_unused=True)

    factors, turned = pulled(ones), pulled(probe)
    return [
        None if d is None or r is None else _factor(d.double(), r.double(), probe.double())
        for d, r in zip(factors, turned, strict=True)
    ]


def _factor(d: Tensor, r: Tensor, probe: Tensor) -> Tensor | None:
    if d.numel() != probe.numel() or not bool(torch.isfinite(d).all()) or bool((d.abs() < 1e-9).any()):
        return None
    if not _along_one(d):
        return None
    back = r / d
    if back.shape == probe.shape and _close(back, probe):
        return d
    back, probe = back.flatten().sort().values, probe.flatten().sort().values
    return d if _close(back, probe) else None


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= TOLERANCE * b.abs().max())


def _along_one(d: Tensor) -> bool:
    """Whether ``d`` varies along one dimension at most."""
    if d.numel() <= 1:
        return True
    size = TOLERANCE * float(d.abs().max())
    varying = [axis for axis in range(d.ndim) if float((d.amax(axis) - d.amin(axis)).max()) > size]
    return len(varying) <= 1
