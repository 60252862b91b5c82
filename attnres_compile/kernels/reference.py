"""The method in a few lines of PyTorch, for any dtype: what everything else is tested against.

Equations: arXiv 2603.15031, section on the full form; ``gain`` and ``normalized`` as in docs/method.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def mix(
    query: Tensor,
    sources: Sequence[Tensor],
    dim: int = -1,
    eps: float = 1e-6,
    gain: float | None = None,
    scale: float = 1.0,
    normalized: bool = False,
) -> Tensor:
    """Depth attention of one site: ``gain * sum_i softmax_i(scale * <query, RMSNorm(v_i)>) * v_i``.

    Args:
        query: the pseudo-query, shape ``[d]``.
        sources: N tensors of one shape whose dimension ``dim`` has size ``d``.
        dim: the feature dimension of the sources.
        eps: added to the mean square of a source.
        gain: factor on the mix; ``None`` is N, with which a zero query gives the plain sum.
        scale: factor on the logits.
        normalized: mix ``RMSNorm(v_i)`` instead of ``v_i``.

    Returns:
        A tensor of the sources' shape and dtype, computed in that dtype.
    """
    v = torch.stack(list(sources)).movedim(dim if dim < 0 else dim + 1, -1)
    keys = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    weights = torch.softmax(scale * (keys * query.to(v.dtype)).sum(-1, keepdim=True), dim=0)
    mixed = (weights * (keys if normalized else v)).sum(0) * (len(sources) if gain is None else gain)
    return mixed.movedim(-1, dim)


def inter(
    queries: Sequence[Tensor],
    sources: Sequence[Tensor],
    dim: int = -1,
    eps: float = 1e-6,
    scale: float = 1.0,
    normalized: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Phase 1: for each query :func:`mix` with gain 1, and the log-sum-exp of its logits, one number per token."""
    mixes = [mix(query, sources, dim, eps, 1.0, scale, normalized) for query in queries]
    v = torch.stack([source.movedim(dim, -1) for source in sources])
    keys = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    return mixes, [torch.logsumexp(scale * (keys * query.to(v.dtype)).sum(-1), dim=0) for query in queries]


def merge(
    query: Tensor,
    mixed: Tensor,
    lse: Tensor,
    partial: Tensor,
    dim: int = -1,
    eps: float = 1e-6,
    gain: float = 1.0,
    scale: float = 1.0,
    normalized: bool = False,
) -> Tensor:
    """Phase 2: ``gain`` times the mix of all that ``mixed`` and ``lse`` stand for, and of the partial sum."""
    v = partial.movedim(dim, -1)
    key = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    logits = torch.stack([lse, scale * (key * query.to(v.dtype)).sum(-1)])
    values = torch.stack([mixed.movedim(dim, -1), key if normalized else v])
    return gain * (torch.softmax(logits, dim=0).unsqueeze(-1) * values).sum(0).movedim(-1, dim)


def site(
    query: Tensor,
    sources: Sequence[Tensor],
    mixed: Tensor | None = None,
    lse: Tensor | None = None,
    branch: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm: str = "",
    norm_eps: float = 1e-6,
    dim: int = -1,
    eps: float = 1e-6,
    gain: float = 1.0,
    scale: float = 1.0,
    normalized: bool = False,
) -> tuple[Tensor, Tensor]:
    """A :func:`mix`, or :func:`merge`, with the addition before it and the norm after it; and the last source read."""
    last = sources[-1] if branch is None else sources[-1] + branch
    if mixed is None or lse is None:
        h = mix(query, [*sources[:-1], last], dim, eps, gain, scale, normalized)
    else:
        h = merge(query, mixed, lse, last, dim, eps, gain, scale, normalized)
    rows = h.movedim(dim, -1)
    if norm == "rmsnorm":
        rows = torch.nn.functional.rms_norm(rows, rows.shape[-1:], norm_weight, norm_eps)
    elif norm == "layernorm":
        rows = torch.nn.functional.layer_norm(rows, rows.shape[-1:], norm_weight, norm_bias, norm_eps)
    return rows.movedim(-1, dim), last
