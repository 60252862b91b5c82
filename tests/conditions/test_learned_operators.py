"""Branches whose weights are used inside one operator: ``torch.cond``, and functions with a gradient of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.conditions.stack import CONFIG, WIDTH, Stack, build, check_by_hand, example


class Chosen(nn.Module):
    """One of two linears, as the data decides; or one that may be left out."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        first = y[0, 0, 0] > 0
        if self.how == "two":
            return torch.cond(first, lambda y: torch.tanh(self.a(y)), lambda y: self.b(y), (y,))
        if self.how == "left out":
            return torch.cond(first, lambda y: torch.zeros_like(y), lambda y: self.b(y), (y,))
        if self.how == "cast":
            return torch.cond(first, lambda y: y @ self.a.weight.t().to(y.dtype), lambda y: y * 2, (y,))

        def inner(y: Tensor) -> Tensor:
            return torch.cond(y[0, 0, 1] > 0, lambda y: self.a(y), lambda y: y.sin(), (y,))

        return torch.cond(first, inner, lambda y: y.cos(), (y,))


@pytest.mark.parametrize("how", ["two", "left out", "cast", "nested"])
def test_a_branch_inside_cond_is_learned(how: str) -> None:
    check_by_hand(build(lambda: Chosen(how)))


class Unlearned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x[0, 0, 0] > 0, lambda y: y.sin(), lambda y: y @ y.transpose(1, 2) @ y, (x,))


def test_a_cond_without_weights_is_not() -> None:
    with pytest.raises(ac.NoStreamError, match="no_learned_branch"):
        ac.transform(build(Unlearned), example(), CONFIG)


@torch._dynamo.allow_in_graph
class Rounded(torch.autograd.Function):
    """A product with rounded operands, as training in eight bits makes it: dynamo is told not to look inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, digits: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.round(decimals=digits).matmul(weight.round(decimals=digits))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.flatten(0, -2).t() @ gradient.flatten(0, -2), None


class RoundedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(x, self.weight.t(), 9) + self.bias.to(x.dtype)  # type: ignore[no-any-return]


def _rounded() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), RoundedLinear(WIDTH, WIDTH), nn.Tanh(), RoundedLinear(WIDTH, WIDTH))


def test_a_function_that_dynamo_does_not_look_into() -> None:
    net = build(_rounded)
    _check_rounded(net, lambda: check_by_hand(net, 1e-6))


def _check_rounded(net: Stack, check: Callable[[], None]) -> None:
    check()
    reasons = {left.reason for left in ac.report(net).rejections}
    assert reasons <= {ac.Reason.CONSTANT_OPERAND}  # the biases
