"""A pre-norm network small enough to be walked by hand, and its depth-attention weights by the paper's equations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.helpers import randomize, randomize_queries, seeded

WIDTH = 6


class Net(nn.Module):
    """``x + branch(norm(x))``, and a norm behind: site number i reads what i branches have added up to."""

    def __init__(self, sublayers: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.root = nn.Linear(4, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(sublayers))
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, WIDTH))
            for _ in range(sublayers)
        )
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.root(x)
        for norm, branch in zip(self.norms, self.branches, strict=True):
            x = x + branch(norm(x))
        return self.last(x)


class Picture(nn.Module):
    """The same over ``[batch, features, height, width]``."""

    def __init__(self, sublayers: int = 5) -> None:
        super().__init__()
        self.root = nn.Conv2d(3, WIDTH, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in range(sublayers))
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(WIDTH, 7, 3, padding=1), nn.GELU(), nn.Conv2d(7, WIDTH, 1))
            for _ in range(sublayers)
        )
        self.last = nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.root(x)
        for norm, branch in zip(self.norms, self.branches, strict=True):
            x = x + branch(norm(x))
        return self.last(x)


def build(kind: type[nn.Module] = Net, dtype: torch.dtype = torch.float64, **options: object) -> nn.Module:
    return randomize(kind(**options)).to(dtype).eval()


def tokens(batch: int = 3, length: int = 5, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(batch, length, 4, generator=seeded(seed), dtype=torch.float64).to(dtype)


def pixels(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 3, 4, 5, generator=seeded(3), dtype=torch.float64).to(dtype)


@dataclass
class Site:
    """One read by hand: names of its sources, and the weights of every token, ``float64[n, tokens]``."""

    sources: list[str]
    weights: Tensor


@torch.no_grad()
def walk(
    net: nn.Module,
    x: Tensor,
    sizes: list[int],
    queries: list[Tensor],
    keys: list[Tensor] | None = None,
    *,
    eps: float = 1e-6,
    scale: float = 1.0,
    gain: str = "sum",
    value: str = "raw",
    dim: int = -1,
) -> list[Site]:
    """Run ``net`` with depth attention at every read and say what each weighs.

    Args:
        sizes: number of branches of each block.
        queries: one per site with more than one source, in depth order.
        keys: weights of the key norms, likewise.
    """
    left, gammas = list(queries), list(keys) if keys is not None else None
    sources, names = [net.root(x)], ["root"]
    sites: list[Site] = []

    def read() -> Tensor:
        rows = torch.stack([source.movedim(dim, -1) for source in sources])  # [n, ..., d]
        if len(sources) == 1:
            sites.append(Site(list(names), torch.ones(1, rows[0, ..., 0].numel(), dtype=torch.float64)))
            return sources[0]
        normed = rows / ((rows**2).sum(-1, keepdim=True) / rows.shape[-1] + eps) ** 0.5
        query = left.pop(0) * (gammas.pop(0) if gammas is not None else 1.0)
        exponentials = (scale * torch.einsum("n...d,d->n...", normed, query.to(rows.dtype))).exp()
        p = exponentials / exponentials.sum(0)
        sites.append(Site(list(names), p.reshape(len(sources), -1).double()))
        mixed = (p.unsqueeze(-1) * (normed if value == "normalized" else rows)).sum(0)
        return (mixed * (len(sources) if gain == "sum" else 1)).movedim(-1, dim)

    number = 0
    for block, size in enumerate(sizes, 1):
        for place in range(size):
            branch = net.branches[number](net.norms[number](read()))
            number += 1
            if place == 0:
                sources.append(branch)
                names.append("partial")
            else:
                sources[-1] = sources[-1] + branch
            if place == size - 1:
                names[-1] = f"block {block}"
    net.last(read())
    assert not left
    return sites


def converted(net: nn.Module, x: Any, std: float = 1.5, **options: Any) -> nn.Module:
    """``net`` transformed, its queries (and key norms) random."""
    ac.transform(net, x, ac.AttnResConfig(lowering="eager", **options))
    randomize_queries(ac.pseudo_queries(net), std=std)
    for name, parameter in net.named_parameters():
        if name.endswith("_key_norm"):
            parameter.data.uniform_(0.3, 1.7)
    return net


def parameters(net: nn.Module) -> tuple[list[Tensor], list[Tensor] | None]:
    keys = net.attnres.key_norms()
    return list(net.attnres.queries().values()), list(keys.values()) if keys else None


def check(found: ac.StreamWeights, wanted: list[Site], tolerance: float) -> None:
    """Every number of a stream against the weights of every token."""
    assert len(found.sites) == len(wanted)
    assert found.tokens == wanted[0].weights.shape[1]
    for row, site in enumerate(wanted):
        columns = [found.sources.index(name) for name in site.sources]
        others = [column for column in range(len(found.sources)) if column not in columns]
        assert np.isnan(found.weights[row, others]).all() and np.isnan(found.std[row, others]).all()
        p = site.weights.numpy()
        assert np.abs(found.weights[row, columns] - p.mean(1)).max() <= tolerance
        assert np.abs(found.std[row, columns] - p.std(1)).max() <= tolerance
        assert abs(found.entropy[row] + (p * np.log(p)).sum(0).mean()) <= 10 * tolerance
        assert abs(found.entropy_of_mean[row] + (p.mean(1) * np.log(p.mean(1))).sum()) <= 10 * tolerance
        assert found.uniform_entropy[row] == pytest.approx(math.log(len(columns)), abs=1e-15)
        assert found.weights[row, columns].sum() == pytest.approx(1.0, abs=1e-12)
        assert found.index[row] == row


def same(a: ac.DepthWeights, b: ac.DepthWeights, tolerance: float = 1e-12) -> bool:
    return len(a.streams) == len(b.streams) and all(
        one.sources == two.sources
        and np.allclose(one.weights, two.weights, rtol=0, atol=tolerance, equal_nan=True)
        and np.allclose(one.std, two.std, rtol=0, atol=tolerance, equal_nan=True)
        and np.allclose(one.entropy, two.entropy, rtol=0, atol=tolerance)
        for one, two in zip(a.streams, b.streams, strict=True)
    )
