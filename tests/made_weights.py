"""Depth weights made up by hand, for the views."""

from __future__ import annotations

import numpy as np

from attnres_compile import DepthWeights, StreamWeights


def make(layers: int = 3, size: int | None = 2, kinds: bool = True, prefix: str = "model.") -> StreamWeights:
    """Two sublayers per layer, ``size`` sublayers per block (``None``: the full form); weights fall off with age."""
    count = 2 * layers
    blocks = tuple(tuple(range(s, min(s + (size or 1), count))) for s in range(0, count, size or 1))
    partial = any(len(block) > 1 for block in blocks)
    sources = ("root", *(f"block {n}" for n in range(1, len(blocks) + 1)), *(("partial",) if partial else ()))
    weights = np.full((count + 1, len(sources)), np.nan)
    for row in range(count + 1):
        finished = sum(block[-1] < row for block in blocks)
        columns = list(range(finished + 1))
        if partial and any(block[0] < row <= block[-1] for block in blocks):
            columns.append(len(sources) - 1)
        raw = 0.5 ** np.arange(len(columns))[::-1]
        weights[row, columns] = raw / raw.sum()
    p = np.where(np.isfinite(weights) & (weights > 0), weights, 1.0)
    names = [f"{prefix}layers.{i // 2}.{('input_layernorm', 'post_attention_layernorm')[i % 2]}" for i in range(count)]
    sites = (*names, f"{prefix}norm")
    return StreamWeights(
        name=f"{prefix}stream0",
        sites=sites,
        kinds=((*(("attention", "mlp") * layers), "output") if kinds else ("",) * (count + 1)),
        readers=tuple((site,) for site in sites),
        sources=sources,
        weights=weights,
        std=np.where(np.isfinite(weights), 0.1, np.nan),
        entropy=-(p * np.log(p)).sum(1) + 0.0,
        tokens=1234,
        gain="sum",
        blocks=blocks,
        index=tuple(range(count + 1)),
    )


def found(*streams: StreamWeights) -> DepthWeights:
    return DepthWeights(streams or (make(),))
