"""A plain residual stack whose branches are given, and the same with depth attention written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.conditions.depth_stream import DepthStream
from tests.helpers import outputs_and_gradients, randomize, randomize_queries, relative_error, seeded

WIDTH, SIZES = 6, (2, 2, 2)
LAYERS = sum(SIZES)
CONFIG = ac.AttnResConfig(num_blocks=len(SIZES), lowering="eager")


class Stack(nn.Module):
    """``x = x + branch(x)``: a branch has its own norm, and reads the stream as it is."""

    def __init__(self, branch: Callable[[], nn.Module], layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(branch() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for branch in self.branches:
            x = x + branch(x)
        return self.norm(x)

    def by_hand(self, x: Tensor, queries: list[Tensor]) -> Tensor:
        stream = DepthStream(self.embed(x), SIZES, queries)
        for branch in self.branches:
            stream.add(branch(stream.read()))
        return self.norm(stream.read())


def example(seed: int = 0) -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=seeded(seed), dtype=torch.float64)


def build(branch: Callable[[], nn.Module], train: bool = False) -> Stack:
    net = randomize(Stack(branch).double()).train(train)
    assert isinstance(net, Stack)
    return net


def check_by_hand(net: Stack, limit: float = 1e-12) -> None:
    """Convert ``net``: all of its steps; exact at zero queries, and the paper's numbers at random ones."""
    original, x = copy.deepcopy(net), example()
    weights = dict(original.named_parameters())
    ac.transform(net, example(1), CONFIG)
    (stream,) = ac.report(net).streams
    assert len(stream.sublayers) == LAYERS
    own = {name: value for name, value in net.named_parameters() if name in weights}
    got = outputs_and_gradients(net, own, [x])
    want = outputs_and_gradients(original, weights, [x])
    assert relative_error([got.outputs, got.gradients], [want.outputs, want.gradients]) < limit
    queries = ac.pseudo_queries(net)
    randomize_queries(queries)
    hand = {f"query {i}": query.detach().clone().requires_grad_() for i, query in enumerate(queries.values())}
    got = outputs_and_gradients(net, {**own, **queries}, [x])
    want = outputs_and_gradients(
        lambda x: original.by_hand(x, list(hand.values())), {**{name: weights[name] for name in own}, **hand}, [x]
    )
    assert relative_error(got.outputs, want.outputs) < limit
    assert relative_error(list(got.gradients.values()), list(want.gradients.values())) < 100 * limit
