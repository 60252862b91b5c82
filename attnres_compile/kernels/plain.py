"""Depth attention as straight-line tensor code over the list of sources, forward and backward.

No stacking: what is made per source is one number per token, and products that a compiler fuses away. This is the
CPU and default implementation of ``attnres::mix``, and what Inductor opens it up into where no kernel of ours
serves. Equations: arXiv 2603.15031, and docs/method.md for the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor


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
    compute = compute_dtype(sources[0].dtype)
    query = _along(query.to(compute), sources[0], dim)
    logits, scales = [], []
    for source in sources:
        v = source.to(compute)
        rms = torch.rsqrt((v * v).mean(dim, keepdim=True) + eps)
        logits.append((v * query).sum(dim, keepdim=True) * rms * scale)
        scales.append(rms)
    parts, total = _softmax_parts(logits)
    mixed: Tensor | None = None
    for source, part, rms in zip(sources, parts, scales, strict=True):
        # In this order the quotient is exactly 1 for equal logits and gain = N.
        weight = part * gain / total
        term = (weight * rms if normalized else weight) * source.to(compute)
        mixed = term if mixed is None else mixed + term
    assert mixed is not None
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
    compute = compute_dtype(sources[0].dtype)
    size = sources[0].shape[dim]
    g = grad.to(compute)
    q = _along(query.to(compute), sources[0], dim)
    dots, scales, slopes, logits = [], [], [], []
    for source in sources:
        v = source.to(compute)
        rms = torch.rsqrt((v * v).mean(dim, keepdim=True) + eps)
        dot = (v * q).sum(dim, keepdim=True)
        slope = (v * g).sum(dim, keepdim=True) * gain
        dots.append(dot)
        scales.append(rms)
        slopes.append(slope * rms if normalized else slope)
        logits.append(dot * rms * scale)
    parts, total = _softmax_parts(logits)
    weights = [part / total for part in parts]
    # In this order, as in the mix, the quotient is exactly 1 for equal logits and gain = N.
    shares = [part * gain / total for part in parts]
    delta = reduce(torch.add, [weight * slope for weight, slope in zip(weights, slopes, strict=True)])
    grads: list[Tensor] = []
    query_grad: Tensor | None = None
    terms = zip(sources, weights, shares, scales, dots, slopes, strict=True)
    for source, weight, share, rms, dot, slope in terms:
        v = source.to(compute)
        logit_grad = weight * (slope - delta) * scale
        of_query = logit_grad * rms
        # Both the key's norm and the value's (``normalized``) pull the source towards itself.
        pull = logit_grad * dot * rms + weight * slope if normalized else logit_grad * dot * rms
        of_grad = share * rms if normalized else share
        grads.append(like(of_grad * g + of_query * q - pull * rms * rms / size * v, source))
        term = of_query * v
        query_grad = term if query_grad is None else query_grad + term
    assert query_grad is not None
    others = [axis for axis in range(query_grad.dim()) if axis != dim % query_grad.dim()]
    summed = query_grad.sum(others) if others else query_grad
    return [like(summed, query), *grads]


def like(value: Tensor, model: Tensor) -> Tensor:
    """``value`` in the dtype of ``model`` and with the strides of ``torch.empty_like(model)``; never ``model``."""
    value = value.to(model.dtype)
    wanted = torch.empty_like(model)
    return value if value.stride() == wanted.stride() else wanted.copy_(value)


def _along(query: Tensor, source: Tensor, dim: int) -> Tensor:
    """``query`` of shape ``[d]``, shaped to broadcast along ``dim`` of ``source``."""
    dim %= source.dim()
    return query if dim == source.dim() - 1 else query.view(-1, *[1] * (source.dim() - 1 - dim))


def _softmax_parts(logits: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Numerators of a softmax over the list, and their sum."""
    top = reduce(torch.maximum, logits)
    parts = [torch.exp(logit - top) for logit in logits]
    return parts, reduce(torch.add, parts)
