"""The two phases of depth attention, and one whole site, as straight-line tensor code: forward and backward.

Phase 1 (:func:`inter`) reads the finished blocks for several queries at once, phase 2 (:func:`merge`) joins one of
its mixes with the running partial sum. :func:`site` is either form of a read together with its neighbours: the
addition that makes the partial sum before it, and the norm that reads it. Equations: arXiv 2603.15031, Algorithm 1;
gradients in docs/method.md. Arguments and results are those of the operators of the same names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnres_compile.kernels.plain import (
    UNWANTED,
    across,
    added,
    compute_dtype,
    like,
    reads,
    reads_backward,
    spread,
)


def inter(
    queries: Sequence[Tensor], sources: Sequence[Tensor], dim: int, eps: float, scale: float, normalized: bool
) -> list[Tensor]:
    """Phase 1: the softmax-normalised mix for each of S queries, and the log-sum-exp of its logits.

    Args:
        queries: S >= 1 tensors of shape ``[d]``.
        sources, dim, eps, scale, normalized: as for :func:`plain.mix`.

    Returns:
        S mixes like ``torch.empty_like(sources[0])``, then S contiguous log-sum-exps of the compute dtype and the
        sources' shape without ``dim``.
    """
    mixes, lses = reads(queries, sources, dim, eps, 1.0, scale, normalized)
    return [*(like(mixed, sources[0]) for mixed in mixes), *(per_token(lse, sources[0], dim) for lse in lses)]


def inter_backward(
    grads: Sequence[Tensor],
    queries: Sequence[Tensor],
    sources: Sequence[Tensor],
    mixes: Sequence[Tensor],
    lses: Sequence[Tensor],
    accumulated: Sequence[Tensor],
    slots: Sequence[int],
    dim: int,
    eps: float,
    scale: float,
    normalized: bool,
) -> list[Tensor]:
    """Gradients of :func:`inter`.

    Args:
        grads: gradients of the S mixes, then of the S log-sum-exps.
        mixes, lses: what :func:`inter` returned. Kernels save themselves a pass over the sources with them; this code
            does not read them.
        accumulated, slots: see :data:`plain.UNWANTED`.

    Returns:
        Each query's gradient in the query's dtype, then each wanted source's.
    """
    compute = compute_dtype(sources[0].dtype)
    count = len(queries)
    wide = [grad.to(compute) for grad in grads[:count]]
    lse_grads = [grad.to(compute).unsqueeze(dim) for grad in grads[count:]]
    return reads_backward(wide, lse_grads, queries, sources, accumulated, slots, dim, eps, 1.0, scale, normalized)


def merge(
    query: Tensor,
    mixed: Tensor,
    lse: Tensor,
    partial: Tensor,
    dim: int,
    eps: float,
    gain: float,
    scale: float,
    normalized: bool,
) -> Tensor:
    """Phase 2: ``gain * (mixed + t * (value(partial) - mixed))`` with ``t = sigmoid(s(partial) - lse)``.

    Args:
        query: shape ``[d]``.
        mixed, lse: a mix of :func:`inter` for this query, and its log-sum-exp.
        partial: the source that phase 1 did not see, like ``mixed``.
        dim, eps, gain, scale, normalized: as for :func:`plain.mix`.

    Returns:
        A new tensor like ``torch.empty_like(partial)``.
    """
    return like(_merged(query, mixed, lse, partial, dim, eps, gain, scale, normalized), partial)


def merge_backward(
    grad: Tensor,
    query: Tensor,
    mixed: Tensor,
    lse: Tensor,
    partial: Tensor,
    dim: int,
    eps: float,
    gain: float,
    scale: float,
    normalized: bool,
) -> list[Tensor]:
    """Gradients of :func:`merge` for the query, the mix, the log-sum-exp and the partial sum."""
    wide = grad.to(compute_dtype(partial.dtype))
    query_grad, mixed_grad, lse_grad, partial_grad = _merged_backward(
        wide, query, mixed, lse, partial, dim, eps, gain, scale, normalized
    )
    return [query_grad, mixed_grad, lse_grad, like(partial_grad, partial)]


def site(
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
    keep: bool,
) -> list[Tensor]:
    """One site with its neighbours.

    Args:
        query, dim, eps, gain, scale, normalized: as for :func:`plain.mix`.
        sources: what the site reads; exactly the partial sum where ``mixed`` and ``lse`` are given (a merge).
        branch: added to the last source first; the sum, rounded to the sources' dtype, takes that source's place.
        norm: ``"rmsnorm"`` or ``"layernorm"`` of the mix over ``dim``, or ``""``.
        norm_weight, norm_bias, norm_eps: of that norm.
        keep: also return what the backward of a mix asks for.

    Returns:
        The result, [the new partial sum], [the mix before its norm], [the log-sum-exp]: those that there are.
    """
    found = []
    if branch is not None:
        compute = compute_dtype(sources[-1].dtype)
        sources = [*sources[:-1], like(sources[-1].to(compute) + branch.to(compute), sources[-1])]
        found.append(sources[-1])
    h, total = _read(query, sources, mixed, lse, dim, eps, gain, scale, normalized)
    if keep and total is not None:
        found += [h] if norm else []
        found.append(per_token(total, sources[0], dim))
    return [_normed(h, norm_weight, norm_bias, norm, norm_eps, dim) if norm else h, *found]


def site_backward(
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
    norm: str,
    norm_eps: float,
    dim: int,
    eps: float,
    gain: float,
    scale: float,
    normalized: bool,
) -> list[Tensor]:
    """Gradients of :func:`site`, given that of its first result.

    Args:
        sources: with the new partial sum last where there was a branch. Its gradient is the branch's too.
        h, total: the mix before its norm and its log-sum-exp; ``None`` for a merge. Kernels need both, this code
            computes what it is not given.
        accumulated, slots: see :data:`plain.UNWANTED`.

    Returns:
        Of the query, [the norm's weight], [the norm's bias], [the mix, the log-sum-exp of a merge], each wanted source.
    """
    g = grad.to(compute_dtype(sources[0].dtype))
    parameters: list[Tensor] = []
    if norm:
        if h is None:
            h, _ = _read(query, sources, mixed, lse, dim, eps, gain, scale, normalized)
        g, parameters = _normed_backward(g, h, norm_weight, norm_bias, norm, norm_eps, dim)
    options = (dim, eps, gain, scale, normalized)
    if mixed is None or lse is None:
        query_grad, *grads = reads_backward([g], [None], [query], sources, accumulated, slots, *options)
        return [query_grad, *parameters, *grads]
    query_grad, mixed_grad, lse_grad, partial_grad = _merged_backward(g, query, mixed, lse, sources[0], *options)
    wanted = [like(added(partial_grad, accumulated, slot), sources[0]) for slot in slots if slot != UNWANTED]
    return [query_grad, *parameters, mixed_grad, lse_grad, *wanted]


def token_shape(source: Tensor, dim: int) -> list[int]:
    """The shape of ``source`` without ``dim``."""
    shape = list(source.shape)
    del shape[dim]
    return shape


def empty_per_token(source: Tensor, dim: int) -> Tensor:
    """An uninitialised number of the compute dtype for each token of ``source``, contiguous."""
    return source.new_empty(token_shape(source, dim), dtype=compute_dtype(source.dtype))


def per_token(value: Tensor, source: Tensor, dim: int) -> Tensor:
    """``value``, whose ``dim`` has size 1, without it and contiguous."""
    return like(value.squeeze(dim), empty_per_token(source, dim))


def _read(
    query: Tensor,
    sources: Sequence[Tensor],
    mixed: Tensor | None,
    lse: Tensor | None,
    dim: int,
    eps: float,
    gain: float,
    scale: float,
    normalized: bool,
) -> tuple[Tensor, Tensor | None]:
    """The mix or merge, rounded, and the log-sum-exp of a mix with ``dim`` kept."""
    if mixed is None or lse is None:
        (value,), (total,) = reads([query], sources, dim, eps, gain, scale, normalized)
        return like(value, sources[0]), total
    return merge(query, mixed, lse, sources[0], dim, eps, gain, scale, normalized), None


def _merged(
    query: Tensor,
    mixed: Tensor,
    lse: Tensor,
    partial: Tensor,
    dim: int,
    eps: float,
    gain: float,
    scale: float,
    normalized: bool,
) -> Tensor:
    """:func:`merge` before its rounding."""
    compute = compute_dtype(partial.dtype)
    v, o = partial.to(compute), mixed.to(compute)
    rms = torch.rsqrt((v * v).mean(dim, keepdim=True) + eps)
    logit = (v * spread(query.to(compute), v, dim)).sum(dim, keepdim=True) * rms * scale
    share = torch.sigmoid(logit - lse.to(compute).unsqueeze(dim))
    return gain * (o + share * ((v * rms if normalized else v) - o))


def _merged_backward(
    g: Tensor,
    query: Tensor,
    mixed: Tensor,
    lse: Tensor,
    partial: Tensor,
    dim: int,
    eps: float,
    gain: float,
    scale: float,
    normalized: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients for the query, the mix, the log-sum-exp, and the partial sum, the last one before its rounding."""
    compute = compute_dtype(partial.dtype)
    v, o = partial.to(compute), mixed.to(compute)
    q = spread(query.to(compute), v, dim)
    rms = torch.rsqrt((v * v).mean(dim, keepdim=True) + eps)
    dot = (v * q).sum(dim, keepdim=True)
    distance = dot * rms * scale - lse.to(compute).unsqueeze(dim)
    # Each from its own side: one minus a share near 1 would lose what is left of the other.
    share, rest = torch.sigmoid(distance), torch.sigmoid(-distance)
    value = v * rms if normalized else v
    slope = gain * (g * (value - o)).sum(dim, keepdim=True)
    logit_grad = share * rest * slope
    of_query = logit_grad * scale * rms
    # Both the key's norm and the value's (``normalized``) pull the partial sum towards itself.
    pull = of_query * dot
    of_grad = gain * share
    if normalized:
        pull = pull + of_grad * (g * value).sum(dim, keepdim=True)
        of_grad = of_grad * rms
    partial_grad = of_grad * g + of_query * q - pull * rms * rms / v.shape[dim] * v
    return (
        like(across(of_query * v, dim), query),
        like(gain * rest * g, mixed),
        like(-logit_grad.squeeze(dim), lse),
        partial_grad,
    )


def _normed(h: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str, norm_eps: float, dim: int) -> Tensor:
    """RMSNorm or LayerNorm of ``h`` over ``dim``, like ``h``."""
    out, _ = _standardised(h, norm, norm_eps, dim)
    out = out if weight is None else out * spread(weight.to(out.dtype), h, dim)
    out = out if bias is None else out + spread(bias.to(out.dtype), h, dim)
    return like(out, h)


def _normed_backward(
    g: Tensor, h: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str, norm_eps: float, dim: int
) -> tuple[Tensor, list[Tensor]]:
    """The gradient for ``h`` in the compute dtype, and those of the weight and bias that there are."""
    standard, rms = _standardised(h, norm, norm_eps, dim)
    parameters = [] if weight is None else [like(across(g * standard, dim), weight)]
    parameters += [] if bias is None else [like(across(g, dim), bias)]
    g = g if weight is None else g * spread(weight.to(g.dtype), h, dim)
    inward = g - standard * (g * standard).mean(dim, keepdim=True)
    inward = inward - g.mean(dim, keepdim=True) if norm == "layernorm" else inward
    return rms * inward, parameters


def _standardised(h: Tensor, norm: str, norm_eps: float, dim: int) -> tuple[Tensor, Tensor]:
    """``h`` in the compute dtype with unit mean square (and zero mean for a LayerNorm), and the factor on it."""
    x = h.to(compute_dtype(h.dtype))
    x = x - x.mean(dim, keepdim=True) if norm == "layernorm" else x
    rms = torch.rsqrt((x * x).mean(dim, keepdim=True) + norm_eps)
    return x * rms, rms
