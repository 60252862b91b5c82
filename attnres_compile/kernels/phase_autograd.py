"""Autograd of the operators for the two phases and for whole sites.

Backward operators have no formula of their own: they are differentiated through their plain code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnres_compile.kernels import differentiation, phase_ops
from attnres_compile.kernels.ops import LIBRARY
from attnres_compile.kernels.plain import FRESH, UNWANTED


def _slots(wanted: Sequence[bool]) -> list[int]:
    return [FRESH if wants else UNWANTED for wants in wanted]


def _chosen(wanted: Sequence[bool], grads: Sequence[Tensor]) -> list[Tensor | None]:
    """The wanted sources' gradients in their places."""
    found = iter(grads)
    return [next(found) if wants else None for wants in wanted]


def inter_gradients(
    grads: Sequence[Tensor | None],
    queries: Sequence[Tensor],
    sources: Sequence[Tensor],
    found: Sequence[Tensor],
    accumulated: Sequence[Tensor],
    slots: Sequence[int],
    options: tuple[Any, ...],
) -> tuple[list[Tensor | None], list[Tensor]]:
    """``attnres::inter_backward`` for the queries of which any result was used.

    Args:
        grads: gradients of the results of ``attnres::inter``, ``None`` for one that nothing used; not all of them.
        found: those results.

    Returns:
        The queries' gradients in their places, and the wanted sources'.
    """
    count = len(queries)
    used = [read for read in range(count) if grads[read] is not None or grads[count + read] is not None]
    both = [*used, *(count + read for read in used)]
    filled = [torch.zeros_like(found[at]) if (grad := grads[at]) is None else grad for at in both]
    results = torch.ops.attnres.inter_backward.default(
        filled,
        [queries[read] for read in used],
        list(sources),
        [found[read] for read in used],
        [found[count + read] for read in used],
        list(accumulated),
        list(slots),
        *options,
    )
    query_grads: list[Tensor | None] = [None] * count
    for read, value in zip(used, results, strict=False):
        query_grads[read] = value
    return query_grads, list(results[len(used) :])


def _save_inter(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    queries, sources, *options = inputs
    ctx.options = tuple(options)
    ctx.counts = len(queries), len(sources)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*queries, *sources, *output)


def _differentiate_inter(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    queries, sources = ctx.counts
    wants_queries, wants_sources, *_ = ctx.needs_input_grad
    if all(grad is None for grad in grads):
        return [None] * queries, [None] * sources, *[None] * 4
    saved = ctx.saved_tensors
    query_grads, found = inter_gradients(
        grads,
        saved[:queries],
        saved[queries : queries + sources],
        saved[queries + sources :],
        [],
        _slots(wants_sources),
        ctx.options,
    )
    return (
        [value if wants else None for wants, value in zip(wants_queries, query_grads, strict=True)],
        _chosen(wants_sources, found),
        *[None] * 4,
    )


def _save_merge(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.options = inputs[4:]
    ctx.save_for_backward(*inputs[:4])


def _differentiate_merge(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grads = torch.ops.attnres.merge_backward.default(grad, *ctx.saved_tensors, *ctx.options)
    wanted = ctx.needs_input_grad[:4]
    return *(value if wants else None for wants, value in zip(wanted, grads, strict=True)), *[None] * 5


def site_results(
    output: Sequence[Tensor], sources: Sequence[Tensor], merged: bool, branched: bool, norm: str, keep: bool
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """What of the results of ``attnres::site`` its backward takes.

    Returns:
        The sources with the new partial sum, the mix before its norm, and its log-sum-exp; see
        :func:`plain_phases.site`.
    """
    read = [*sources[:-1], output[1]] if branched else list(sources)
    if merged:
        return read, None, None
    if not keep:
        return read, None if norm else output[0], None
    return read, output[-2] if norm else output[0], output[-1]


def site_gradients(
    grad: Tensor,
    query: Tensor,
    sources: Sequence[Tensor],
    mixed: Tensor | None,
    lse: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    h: Tensor | None,
    total: Tensor | None,
    accumulated: Sequence[Tensor],
    slots: Sequence[int],
    options: tuple[Any, ...],
) -> tuple[list[Tensor | None], list[Tensor]]:
    """``attnres::site_backward`` with its results in their places.

    Args:
        options: ``norm, norm_eps, dim, eps, gain, scale, normalized``.

    Returns:
        Gradients of the query, the norm's weight and bias, the mix and the log-sum-exp, ``None`` for what was not
        given; and the wanted sources'.
    """
    if mixed is None and total is None:
        # The site was run without keeping what kernels ask for: run it again with.
        again = torch.ops.attnres.site.default(
            query, list(sources), None, None, None, norm_weight, norm_bias, *options, True
        )
        _, h, total = site_results(again, sources, False, False, options[0], True)
    results = torch.ops.attnres.site_backward.default(
        grad,
        query,
        list(sources),
        mixed,
        lse,
        norm_weight,
        norm_bias,
        h,
        total,
        list(accumulated),
        list(slots),
        *options,
    )
    given = (query, norm_weight, norm_bias, mixed, lse)
    found = iter(results)
    return [None if value is None else next(found) for value in given], list(found)


def _save_site(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    query, sources, mixed, lse, branch, norm_weight, norm_bias, *options, keep = inputs
    ctx.options = tuple(options)
    ctx.branch_dtype = None if branch is None else branch.dtype
    ctx.set_materialize_grads(False)
    # Kept for the backward alone; nothing is differentiated through them.
    ctx.mark_non_differentiable(*output[1 if branch is None else 2 :])
    read, h, total = site_results(output, sources, mixed is not None, branch is not None, options[0], keep)
    ctx.save_for_backward(query, mixed, lse, norm_weight, norm_bias, h, total, *read)


def _differentiate_site(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    wants_query, wants_sources, *wants_rest = ctx.needs_input_grad[:7]
    wants_mixed, wants_lse, wants_branch, wants_weight, wants_bias = wants_rest
    grad = grads[0]
    of_partial = None if ctx.branch_dtype is None else grads[1]
    wanted = [*wants_sources[:-1], wants_sources[-1] or wants_branch]
    if grad is None:
        given: list[Tensor | None] = [None] * 5
        sources: list[Tensor | None] = [*[None] * (len(wanted) - 1), of_partial]
    else:
        query, mixed, lse, norm_weight, norm_bias, h, total, *read = ctx.saved_tensors
        slots = _slots(wanted)
        accumulated = []
        if of_partial is not None and wanted[-1]:
            slots[-1], accumulated = 0, [of_partial]
        given, found = site_gradients(
            grad, query, read, mixed, lse, norm_weight, norm_bias, h, total, accumulated, slots, ctx.options
        )
        sources = _chosen(wanted, found)
    last = sources[-1]
    wants = (wants_query, wants_weight, wants_bias, wants_mixed, wants_lse)
    query_grad, weight_grad, bias_grad, mixed_grad, lse_grad = (
        value if needed else None for needed, value in zip(wants, given, strict=True)
    )
    return (
        query_grad,
        [*sources[:-1], last if wants_sources[-1] else None],
        mixed_grad,
        lse_grad,
        last.to(ctx.branch_dtype) if wants_branch and last is not None else None,
        weight_grad,
        bias_grad,
        *[None] * 8,
    )


def _site_backward_plainly(*arguments: Any) -> list[Tensor]:
    """``plain_phases.site_backward`` from its true inputs: ``h`` and ``total`` are results, kept without a history."""
    before, after = arguments[:7], arguments[9:]
    found: list[Tensor] = phase_ops.PLAIN["site_backward"](*before, None, None, *after)
    return found


for _name, _formula, _keep in (
    ("inter", _differentiate_inter, _save_inter),
    ("merge", _differentiate_merge, _save_merge),
    ("site", _differentiate_site, _save_site),
):
    differentiation.register(LIBRARY, _name, phase_ops.PLAIN[_name], _formula, _keep)
for _name, _plainly in (
    ("inter_backward", phase_ops.PLAIN["inter_backward"]),
    ("merge_backward", phase_ops.PLAIN["merge_backward"]),
    ("site_backward", _site_backward_plainly),
):
    differentiation.register_plainly(LIBRARY, _name, _plainly)
