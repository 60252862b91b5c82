"""Depth attention as straight-line tensor code over the list of sources, forward and backward.

No stacking: what is made per source is one number per token, and products that a compiler fuses away. This is the
CPU and default implementation of ``attnres::mix``, and what Inductor opens it up into where no kernel of ours
serves. :func:`reads` and :func:`reads_backward` are the whole of it, for any number of queries over the same sources;
:mod:`plain_phases` builds the other operators from them. Equations: arXiv 2603.15031, and docs/method.md for the
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

# Values of ``slots``, one per source in a backward: no gradient wanted, or one with nothing to add it to. What is not
# negative says which of the accumulated gradients to add it to.
UNWANTED = -2
FRESH = -1


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sources of ``dtype`` are computed in: float64 for float64, float32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def mix(
    query: Tensor,
    sources: Sequence[Tensor],
    dim: int,
    eps: float,
    gain: float,
    scale: float,
    normalized: bool,
) -> Tensor:
    """``gain * sum_i softmax_i(scale * <query, RMSNorm(v_i)>) * v_i``.

    Args:
        query: shape ``[d]``, any floating dtype.
        sources: N >= 1 tensors of one shape and dtype whose dimension ``dim`` has size d.
        dim: the feature dimension.
        eps: added to the mean square of a source.
        gain: factor on the mix. With ``gain == N`` and a zero query every coefficient is exactly 1.
        scale: factor on the logits.
        normalized: mix ``RMSNorm(v_i)`` instead of ``v_i``.

    Returns:
        A new tensor of the sources' dtype, with the strides of ``torch.empty_like(sources[0])``.
    """
    (mixed,), _ = reads([query], sources, dim, eps, gain, scale, normalized)
    return like(mixed, sources[0])


def mix_backward(
    grad: Tensor,
    query: Tensor,
    sources: Sequence[Tensor],
    dim: int,
    eps: float,
    gain: float,
    scale: float,
    normalized: bool,
) -> list[Tensor]:
    """Gradients of :func:`mix`, given that of its result.

    Args:
        grad: gradient of the result, of the sources' shape. The other arguments are those of :func:`mix`.

    Returns:
        The query's gradient in the query's dtype, then each source's, like ``torch.empty_like`` of the source.
    """
    wide = grad.to(compute_dtype(sources[0].dtype))
    slots = [FRESH] * len(sources)
    return reads_backward([wide], [None], [query], sources, [], slots, dim, eps, gain, scale, normalized)


def reads(
    queries: Sequence[Tensor],
    sources: Sequence[Tensor],
    dim: int,
    eps: float,
    gain: float,
    scale: float,
    normalized: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """:func:`mix` for several queries over the same sources.

    Returns:
        The mixes, and the log-sum-exps of their logits with ``dim`` kept as a dimension of size 1; all in the compute
        dtype, in the order of ``queries``.
    """
    compute = compute_dtype(sources[0].dtype)
    along = [spread(query.to(compute), sources[0], dim) for query in queries]
    logits: list[list[Tensor]] = [[] for _ in queries]
    scales = []
    for source in sources:
        v = source.to(compute)
        rms = torch.rsqrt((v * v).mean(dim, keepdim=True) + eps)
        for held, query in zip(logits, along, strict=True):
            held.append((v * query).sum(dim, keepdim=True) * rms * scale)
        scales.append(rms)
    mixes, lses = [], []
    for held in logits:
        parts, total, top = _softmax_parts(held)
        mixed: Tensor | None = None
        for source, part, rms in zip(sources, parts, scales, strict=True):
            # In this order the quotient is exactly 1 for equal logits and gain = N.
            weight = part * gain / total
            term = (weight * rms if normalized else weight) * source.to(compute)
            mixed = term if mixed is None else mixed + term
        assert mixed is not None
        mixes.append(mixed)
        lses.append(top + torch.log(total))
    return mixes, lses


def reads_backward(
    grads: Sequence[Tensor],
    lse_grads: Sequence[Tensor | None],
    queries: Sequence[Tensor],
    sources: Sequence[Tensor],
    accumulated: Sequence[Tensor],
    slots: Sequence[int],
    dim: int,
    eps: float,
    gain: float,
    scale: float,
    normalized: bool,
) -> list[Tensor]:
    """Gradients of :func:`reads`. The softmax is computed again from the sources, so nothing else needs keeping.

    Args:
        grads: the mixes' gradients, in the compute dtype.
        lse_grads: the log-sum-exps' gradients, in the compute dtype and with ``dim`` kept, or ``None``.
        accumulated, slots: see :data:`UNWANTED`; an accumulated gradient is added before the one rounding.

    Returns:
        Each query's gradient in the query's dtype, then each wanted source's, like ``torch.empty_like`` of the source.
    """
    compute = compute_dtype(sources[0].dtype)
    size = sources[0].shape[dim]
    count = len(queries)
    along = [spread(query.to(compute), sources[0], dim) for query in queries]
    scales: list[Tensor] = []
    dots: list[list[Tensor]] = [[] for _ in queries]
    slopes: list[list[Tensor]] = [[] for _ in queries]
    logits: list[list[Tensor]] = [[] for _ in queries]
    for source in sources:
        v = source.to(compute)
        rms = torch.rsqrt((v * v).mean(dim, keepdim=True) + eps)
        scales.append(rms)
        for read in range(count):
            dot = (v * along[read]).sum(dim, keepdim=True)
            slope = (v * grads[read]).sum(dim, keepdim=True) * gain
            dots[read].append(dot)
            slopes[read].append(slope * rms if normalized else slope)
            logits[read].append(dot * rms * scale)
    weights: list[list[Tensor]] = []
    shares: list[list[Tensor]] = []
    deltas = []
    for read in range(count):
        parts, total, _ = _softmax_parts(logits[read])
        weights.append([part / total for part in parts])
        # In this order, as in the mix, the quotient is exactly 1 for equal logits and gain = N.
        shares.append([part * gain / total for part in parts])
        delta = reduce(torch.add, [w * slope for w, slope in zip(weights[read], slopes[read], strict=True)])
        lse_grad = lse_grads[read]
        # A log-sum-exp's slope along each logit is the weight: its gradient stands beside the mix's slopes.
        deltas.append(delta if lse_grad is None else delta - lse_grad)
    source_grads: list[Tensor] = []
    sums: list[Tensor | None] = [None] * count
    for index, (source, rms, slot) in enumerate(zip(sources, scales, slots, strict=True)):
        v = source.to(compute)
        moved: Tensor | None = None
        pulls: Tensor | None = None
        for read in range(count):
            weight, slope, share = weights[read][index], slopes[read][index], shares[read][index]
            logit_grad = weight * (slope - deltas[read]) * scale
            of_query = logit_grad * rms
            # Both the key's norm and the value's (``normalized``) pull the source towards itself.
            pull = of_query * dots[read][index]
            pull = pull + weight * slope if normalized else pull
            pulls = _sum(pulls, pull)
            moved = _sum(moved, (share * rms if normalized else share) * grads[read] + of_query * along[read])
            sums[read] = _sum(sums[read], of_query * v)
        assert moved is not None and pulls is not None
        if slot != UNWANTED:
            gradient = moved - pulls * rms * rms / size * v
            source_grads.append(like(added(gradient, accumulated, slot), source))
    query_grads = [like(across(total, dim), query) for total, query in zip(sums, queries, strict=True)]
    return [*query_grads, *source_grads]


def added(gradient: Tensor, accumulated: Sequence[Tensor], slot: int) -> Tensor:
    """``gradient``, added to what ``slot`` says is there already."""
    return gradient + accumulated[slot].to(gradient.dtype) if slot >= 0 else gradient


def like(value: Tensor, model: Tensor) -> Tensor:
    """``value`` in the dtype of ``model`` and with the strides of ``torch.empty_like(model)``; never ``model``."""
    value = value.to(model.dtype)
    wanted = torch.empty_like(model)
    if value.stride() == wanted.stride():
        return value
    if torch._C._are_functorch_transforms_active():
        # There a new tensor does not take what a transform wraps.
        order = sorted(range(value.dim()), key=wanted.stride, reverse=True)
        return value.permute(order).contiguous().permute(sorted(range(value.dim()), key=order.__getitem__))
    return wanted.copy_(value)


def spread(vector: Tensor, source: Tensor, dim: int) -> Tensor:
    """``vector`` of shape ``[d]``, shaped to broadcast along ``dim`` of ``source``."""
    dim %= source.dim()
    return vector if dim == source.dim() - 1 else vector.view(-1, *[1] * (source.dim() - 1 - dim))


def across(value: Tensor | None, dim: int) -> Tensor:
    """The sum of ``value`` over all its dimensions but ``dim``."""
    assert value is not None
    others = [axis for axis in range(value.dim()) if axis != dim % value.dim()]
    return value.sum(others) if others else value


def _sum(total: Tensor | None, term: Tensor) -> Tensor:
    return term if total is None else total + term


def _softmax_parts(logits: list[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Numerators of a softmax over the list, their sum, and the largest logit."""
    top = reduce(torch.maximum, logits)
    parts = [torch.exp(logit - top) for logit in logits]
    return parts, reduce(torch.add, parts), top
