"""Depth attention of one site, written out (arXiv 2603.15031): the definition and nothing beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnres_compile.config import AttnResConfig


def attend(
    query: Tensor, key_norm: Tensor | None, sources: Sequence[Tensor], axis: int, config: AttnResConfig
) -> Tensor:
    """``gain * sum_i softmax_i(scale * <w, g * RMSNorm(v_i)>) * v_i``.

    Args:
        query: w, shape ``[d]``.
        key_norm: g, the weight of the key norm, shape ``[d]``, or ``None``.
        sources: the v_i, of one shape, whose dimension ``axis`` has size d.
        axis: the dimension of the features.
        config: gain, eps, value option and logit scale.
    """
    rows = [source.movedim(axis, -1) for source in sources]
    keys = [v / torch.sqrt((v * v).mean(-1, keepdim=True) + config.eps) for v in rows]
    weight = query if key_norm is None else query * key_norm
    scale = config.scale_for(query.numel())
    logits = torch.stack([scale * (key * weight.to(key.dtype)).sum(-1) for key in keys])
    shares = torch.softmax(logits, 0)
    values = keys if config.value == "normalized" else rows
    mixed = torch.stack([share.unsqueeze(-1) * value for share, value in zip(shares, values, strict=True)]).sum(0)
    return (mixed * (len(sources) if config.gain == "sum" else 1.0)).movedim(-1, axis)
