"""What counts as a weight, and as the same one: casts by example, slices of one parameter, shared scalars."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnres_compile as ac
from tests.passes.by_hand import agrees
from tests.passes.support import WIDTH, Stream, converted, refused

Spelling = Callable[[Stream, int, Tensor], Tensor]


class Stacked(Stream):
    """Weights of all layers in one parameter, and learned scalars of all layers in another."""

    def __init__(self, branch: Spelling, **options: object) -> None:
        super().__init__(lambda net, i, x: x + branch(net, i, x), **options)
        self.w = nn.Parameter(torch.zeros(self.count, WIDTH, WIDTH, dtype=torch.float64))
        self.flat = nn.Parameter(torch.zeros(WIDTH, self.count * WIDTH, dtype=torch.float64))
        self.scalars = nn.Parameter(torch.ones(self.count, dtype=torch.float64))
        self.table = nn.Parameter(torch.ones(self.count, 1, dtype=torch.float64))


# ------------------------------------------------------------------ by example

BY_EXAMPLE: list[Spelling] = [
    lambda net, i, x: F.linear(net.norms[i](x), net.branches[i].weight.type_as(x)),
    lambda net, i, x: F.linear(net.norms[i](x), net.branches[i].weight.to(x)),
    lambda net, i, x: F.linear(net.norms[i](x), net.branches[i].weight.float().to(x)),
    lambda net, i, x: net.norms[i](x) @ net.branches[i].weight.view_as(x[0, :1].expand(WIDTH, -1)),
    lambda net, i, x: net.norms[i](x) @ net.branches[i].weight.expand_as(x.new_zeros(2, WIDTH, WIDTH)),
]


@pytest.mark.parametrize("branch", BY_EXAMPLE)
def test_an_example_lends_its_form_alone(branch: Spelling) -> None:
    converted(Stream(lambda net, i, x: x + branch(net, i, x)))


@pytest.mark.parametrize(
    "made",
    [
        lambda x: torch.zeros_like(x),
        lambda x: torch.full_like(x, 2.0),
        lambda x: x.new_ones(x.shape),
        lambda x: torch.ones(x.shape, dtype=x.dtype).type_as(x),
    ],
)
def test_what_is_made_in_the_form_of_the_stream_is_no_branch(made: Callable[[Tensor], Tensor]) -> None:
    """A learned contraction of it makes no data of it: nothing of the stream is in there."""
    reasons = refused(Stream(lambda net, i, x: x + net.f(i, made(x))))
    assert set(reasons) <= {"unrelated_operands", "constant_operand"}


# ------------------------------------------------------------------ one parameter for all layers

SLICES: list[Spelling] = [
    lambda net, i, x: torch.tanh(x @ net.w[i]),
    lambda net, i, x: torch.tanh(x @ net.w.unbind(0)[i]),
    lambda net, i, x: torch.tanh(x @ net.w.select(0, i)),
    lambda net, i, x: torch.tanh(x @ net.w.narrow(0, i, 1)[0]),
    lambda net, i, x: torch.tanh(x @ net.w.chunk(net.count)[i][0]),
    lambda net, i, x: torch.tanh(x @ net.flat.split(WIDTH, dim=1)[i]),
    lambda net, i, x: torch.tanh(x @ net.flat[:, i * WIDTH : (i + 1) * WIDTH]),
    lambda net, i, x: torch.tanh(x @ net.w.view(2, 2, WIDTH, WIDTH)[i // 2][i % 2]),
    lambda net, i, x: torch.tanh(x @ net.w.index_select(0, torch.tensor([i]))[0]),
    lambda net, i, x: torch.tanh(F.linear(x, net.w.to(torch.float64)[i].t().contiguous())),
    # Scalars of all layers in one parameter, multiplied into a weight of the layer's own.
    lambda net, i, x: F.linear(net.norms[i](x), net.scalars[i] * net.branches[i].weight),
    lambda net, i, x: F.linear(net.norms[i](x), net.branches[i].weight / net.table[i]),
    lambda net, i, x: F.linear(net.norms[i](x), net.scalars.view(-1, 2)[i // 2][i % 2] * net.branches[i].weight),
    # A matrix that all layers share is added to each one's own.
    lambda net, i, x: F.linear(net.norms[i](x), net.w[0] + net.branches[i].weight),
]


@pytest.mark.parametrize("branch", SLICES)
def test_parts_of_one_parameter_are_weights_of_their_own(branch: Spelling) -> None:
    converted(Stacked(branch))


@pytest.mark.parametrize("branch", [SLICES[0], SLICES[10]])
def test_stacked_weights_by_hand(branch: Spelling) -> None:
    net = Stacked(branch)
    # Only what a branch uses has a gradient.
    unused = {SLICES[0]: (net.norms, net.branches), SLICES[10]: ()}[branch]
    for module in unused:
        module.requires_grad_(False)
    agrees(net, branch)


LOOPS: list[Spelling] = [
    lambda net, i, x: torch.tanh(x @ net.w[1]),
    lambda net, i, x: torch.tanh(x @ (net.w[1] if i % 2 else net.w.unbind(0)[1])),
    lambda net, i, x: torch.tanh(x @ net.w.select(0, 1).contiguous()),
    lambda net, i, x: torch.tanh(x @ (net.scalars[i] * net.w[1])),
    lambda net, i, x: torch.tanh(x @ (net.w[0] + net.w[1].t())),
    lambda net, i, x: torch.tanh(x @ net.w.index_select(0, torch.tensor([1]))[0]),
    lambda net, i, x: net.branches[0](x),
    lambda net, i, x: F.linear(x, net.branches[0].weight.type_as(x)),
]


@pytest.mark.parametrize("branch", LOOPS)
def test_the_same_part_again_is_a_loop(branch: Spelling) -> None:
    # A sum of two weights is an ordinary add.
    assert set(refused(Stacked(branch))) - {"constant_operand"} == {"shared_weights"}


def test_a_loop_over_depth_is_converted_when_asked_for() -> None:
    converted(Stacked(LOOPS[0]), config=ac.AttnResConfig(depth_loops=True))
