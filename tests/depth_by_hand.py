"""A pre-norm network small enough to be walked by hand, and its depth-attention weights by the paper's equations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.helpers import randomize, seeded

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
