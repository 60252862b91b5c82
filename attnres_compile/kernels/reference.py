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
