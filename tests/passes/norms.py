"""Norms written as functions of value, weight and bias, for the tests of what is fused."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.passes.lowering import WIDTH

SITE = torch.ops.attnres.site.default


class Norm(nn.Module):
    """A norm written as a function of value, weight and bias."""

    def __init__(self, how: Callable[[Tensor, Tensor, Tensor], Tensor], width: int = WIDTH) -> None:
        super().__init__()
        self.how = how
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.how(x, self.weight, self.bias)


def written(how: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[int], nn.Module]:
    return lambda width: Norm(how, width)


def mean_square(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)
