"""Small networks for tests that count residual sublayers, and how they are counted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.helpers import randomize
from tests.zoo.survey.count import Count, count

WIDTH = 6


class MLP(nn.Sequential):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Net(nn.Module):
    """A body between an input and an output projection."""

    def __init__(self, *layers: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.into = nn.Linear(width, width)
        self.layers = nn.ModuleList(layers)
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self.into(x)))


class Block(nn.Module):
    """``add(x, f(x), gamma)`` with a norm, a branch, and a vector."""

    def __init__(self, add: Callable[..., Tensor], branch: nn.Module | None = None, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.f = branch or MLP(width)
        self.gamma = nn.Parameter(torch.ones(width))
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        return self.add(x, self.f(self.norm(x)), self.gamma)


def counted(model: nn.Module, *shape: int, seed: int = 0) -> Count:
    x = torch.randn(shape or (2, 5, WIDTH), generator=torch.Generator().manual_seed(seed))
    return count(randomize(model, seed), {"x": x})


class Wrap(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.into, self.model = nn.Linear(WIDTH, WIDTH), model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(self.into(x))
