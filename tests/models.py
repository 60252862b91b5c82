"""Small plain models for tests that are about machinery, not about architectures."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.helpers import randomize

WIDTH = 12


class Block(nn.Module):
    """A pre-norm block of two sublayers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.mixer = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 20), nn.GELU(), nn.Linear(20, WIDTH), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x)).cumsum(1)
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    """Blocks and a final norm: the module that owns the stream."""

    def __init__(self, layers: int = 3, dropout: float = 0.0, between: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 0 and self.between is not None:
                x = self.between(x)
        return self.norm(x)


class Model(nn.Module):
    """An encoder inside a model, with something before and after it."""

    def __init__(
        self,
        layers: int = 3,
        dropout: float = 0.0,
        between: Callable[[Tensor], Tensor] | None = None,
        after: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.encoder = Encoder(layers, dropout, between)
        self.head = nn.Linear(WIDTH, 4)
        self.after = after

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.encoder(self.embed(x))
        if self.after is not None:
            x = self.after(x)
        y = self.head(x)
        return y if scale is None else y * scale


def build(**options: object) -> Model:
    """A :class:`Model` with random weights, in eval mode."""
    return randomize(Model(**options)).eval()  # type: ignore[arg-type, return-value]


def example(batch: int = 2, length: int = 3, seed: int = 0) -> Tensor:
    """An input of :class:`Model`."""
    return torch.randn(batch, length, 5, generator=torch.Generator().manual_seed(seed))


SUBLAYERS = 6
SITES = 6  # the first read of the root is a bypass; the final norm is a site of its own
