"""Sites that hand their sources on, so that a source's gradient is added up inside the backward operators.

A reader of what a site handed on, instead of what the site was given, computes the same; its gradient then reaches
that site's backward, which adds its own in the sweep that it makes anyway. Autograd alone would add the gradients of
a source that many sites read with an operator of its own for each: three tensors of traffic instead of one.

Saved for the backward are the inputs, numbers per token, and the mix before a fused norm.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnres_compile.kernels.phase_autograd import inter_gradients, site_gradients, site_results
from attnres_compile.kernels.plain import FRESH, UNWANTED


@functools.cache
def fingerprint() -> str:
    """A digest of this package's operators and kernels, for the keys of caches that hold code made by them."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".cpp")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def site_through(
    query: Tensor,
    sources: Sequence[Tensor],
    mixed: Tensor | None,
    lse: Tensor | None,
    branch: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: str,
    norm_eps: float,
    dim: int,
    eps: float,
    gain: float,
    scale: float,
    normalized: bool,
) -> tuple[Tensor, ...]:
    """One site with its neighbours, and its sources handed on for later readers to use.

    Args:
        query, sources, mixed, lse, branch, norm_weight, norm_bias, norm, norm_eps: as for ``attnres::site``.
        dim, eps, gain, scale, normalized: as for ``attnres::site``.

    Returns:
        The site's result, then the sources as aliases; with a ``branch``, the new partial sum in the last one's place.
    """
    options = (norm, norm_eps, dim, eps, gain, scale, normalized)
    given = (query, mixed, lse, branch, norm_weight, norm_bias)
    if _records([*given, *sources]):
        apply: Any = _SiteThrough.apply
        handed_on: tuple[Tensor, ...] = apply(options, *given, *sources)
        return handed_on
    found = torch.ops.attnres.site.default(
        query, list(sources), mixed, lse, branch, norm_weight, norm_bias, *options, False
    )
    read, _, _ = site_results(found, sources, mixed is not None, branch is not None, norm, False)
    return found[0], *read


def inter_through(
    queries: Sequence[Tensor], sources: Sequence[Tensor], dim: int, eps: float, scale: float, normalized: bool
) -> tuple[Tensor, ...]:
    """Phase 1 for several queries, and its sources handed on for later readers to use.

    Args:
        queries, sources, dim, eps, scale, normalized: as for ``attnres::inter``.

    Returns:
        The S mixes, the S log-sum-exps, then the sources as aliases.
    """
    options = (dim, eps, scale, normalized)
    if _records([*queries, *sources]):
        apply: Any = _InterThrough.apply
        handed_on: tuple[Tensor, ...] = apply(options, len(queries), *queries, *sources)
        return handed_on
    return *torch.ops.attnres.inter.default(list(queries), list(sources), *options), *sources


def _records(inputs: Iterable[Tensor | None]) -> bool:
    """Whether anything will be differentiated."""
    return torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in inputs)


def _gather(wanted: Sequence[bool], later: Sequence[Tensor | None]) -> tuple[list[int], list[Tensor]]:
    """``slots`` and ``accumulated``, from which sources want a gradient and what later readers sent."""
    slots: list[int] = []
    accumulated: list[Tensor] = []
    for wants, value in zip(wanted, later, strict=True):
        if not wants or value is None:
            slots.append(FRESH if wants else UNWANTED)
        else:
            slots.append(len(accumulated))
            accumulated.append(value)
    return slots, accumulated


class _SiteThrough(torch.autograd.Function):
    """``attnres::site`` that hands its sources on."""

    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, ...]:
        query, mixed, lse, branch, norm_weight, norm_bias, *sources = inputs
        found = torch.ops.attnres.site.default(
            query, sources, mixed, lse, branch, norm_weight, norm_bias, *options, True
        )
        read, h, total = site_results(found, sources, mixed is not None, branch is not None, options[0], True)
        ctx.options = options
        ctx.branch_dtype = None if branch is None else branch.dtype
        ctx.save_for_backward(query, mixed, lse, norm_weight, norm_bias, h, total, *read)
        ctx.set_materialize_grads(False)
        moves = [source.requires_grad for source in sources]
        moves[-1] = moves[-1] or (branch is not None and branch.requires_grad)
        ctx.mark_non_differentiable(*[source for source, moving in zip(read, moves, strict=True) if not moving])
        return found[0], *read

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *later: Tensor | None) -> tuple[Tensor | None, ...]:
        _, *wants_given, wants_weight, wants_bias = ctx.needs_input_grad[:7]
        wants_query, wants_mixed, wants_lse, wants_branch = wants_given
        wants_sources = ctx.needs_input_grad[7:]
        wanted = [*wants_sources[:-1], wants_sources[-1] or wants_branch]
        given: Sequence[Tensor | None] = [None] * 5
        sources: list[Tensor | None] = list(later)
        if grad is not None:
            query, mixed, lse, norm_weight, norm_bias, h, total, *read = ctx.saved_tensors
            slots, accumulated = _gather(wanted, later)
            given, found = site_gradients(
                grad, query, read, mixed, lse, norm_weight, norm_bias, h, total, accumulated, slots, ctx.options
            )
            results = iter(found)
            sources = [next(results) if wants else None for wants in wanted]
        last = sources[-1]
        wants = (wants_query, wants_weight, wants_bias, wants_mixed, wants_lse)
        of_query, of_weight, of_bias, of_mixed, of_lse = (
            value if needed else None for needed, value in zip(wants, given, strict=True)
        )
        # The new partial sum's gradient is both operands'.
        of_branch = last.to(ctx.branch_dtype) if wants_branch and last is not None else None
        before = [*sources[:-1], last if wants_sources[-1] else None]
        return None, of_query, of_mixed, of_lse, of_branch, of_weight, of_bias, *before


class _InterThrough(torch.autograd.Function):
    """``attnres::inter`` that hands its sources on."""

    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], count: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        queries, sources = list(inputs[:count]), list(inputs[count:])
        found = torch.ops.attnres.inter.default(queries, sources, *options)
        ctx.options, ctx.count = options, count
        ctx.save_for_backward(*queries, *sources, *found)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[source for source in sources if not source.requires_grad])
        return *found, *sources

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        count = ctx.count
        own, later = grads[: 2 * count], grads[2 * count :]
        wants_queries = ctx.needs_input_grad[2 : 2 + count]
        wanted = ctx.needs_input_grad[2 + count :]
        if all(grad is None for grad in own):
            return None, None, *[None] * count, *later
        saved = ctx.saved_tensors
        queries, sources, found = saved[:count], saved[count : -2 * count], saved[-2 * count :]
        slots, accumulated = _gather(wanted, later)
        query_grads, source_grads = inter_gradients(own, queries, sources, found, accumulated, slots, ctx.options)
        results = iter(source_grads)
        return (
            None,
            None,
            *(value if wants else None for wants, value in zip(wants_queries, query_grads, strict=True)),
            *(next(results) if wants else None for wants in wanted),
        )
