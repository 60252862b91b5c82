"""A small residual network whose steps a limit's program writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import attnres_compile as ac

WIDTH = 6
CONFIG = ac.AttnResConfig(num_blocks=2, lowering="eager")


class Steps(nn.Module):
    """``count`` times ``step(network, number, x)``, then a norm."""

    def __init__(self, step: Callable[[Any, int, Tensor], Tensor], count: int = 4) -> None:
        super().__init__()
        self.step, self.count = step, count
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(count))
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.norm = nn.LayerNorm(WIDTH)

    def f(self, i: int, x: Tensor) -> Tensor:
        return self.branches[i](self.norms[i](x))

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for i in range(self.count):
            x = self.step(self, i, x)
        return self.norm(x)


def plain(net: Steps, i: int, x: Tensor) -> Tensor:
    return x + net.f(i, x)


def tokens() -> Tensor:
    return torch.randn(2, 3, WIDTH)
