"""Embeddings that every layer adds to the stream once more, several in one sum, in any order and bracketing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.helpers import gradient_error, outputs_and_gradients, randomize, randomize_queries, relative_error
from tests.passes.by_hand import mixed
from tests.passes.support import WIDTH, converted, tokens

LAYERS = 3
# Three scales, the stream, what it started from, another embedding -> the stream with both injected.
Injection = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

SCALED: list[Injection] = [
    lambda a, b, c, x, x0, y0: a * x + b * x0 + c * y0,
    lambda a, b, c, x, x0, y0: a * x + (b * x0 + c * y0),
    lambda a, b, c, x, x0, y0: c * y0 + a * x + b * x0,
    lambda a, b, c, x, x0, y0: b * x0 + (c * y0 + a * x),
    lambda a, b, c, x, x0, y0: sum([y0 * c, x0 * b, x * a]),
]


class Injected(nn.Module):
    def __init__(self, inject: Injection) -> None:
        super().__init__()
        self.inject = inject
        self.embed, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scales = nn.Parameter(torch.ones(LAYERS, 3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS))
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2 * LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.double()

    def f(self, i: int, x: Tensor) -> Tensor:
        return self.branches[i](self.norms[i](x))

    def forward(self, t: Tensor) -> Tensor:
        x = x0 = self.embed(t)
        y0 = self.second(t)
        for i in range(LAYERS):
            x = self.inject(*self.scales[i], x, x0, y0)
            x = x + self.f(2 * i, x)
            x = x + self.f(2 * i + 1, x)
        return self.head(self.norm(x))


class ByHand(nn.Module):
    """The full form: every branch a source, and what a layer injects, too; a scale on the stream scales them all."""

    def __init__(self, net: Injected, queries: list[Tensor]) -> None:
        super().__init__()
        self.net, self.queries = net, nn.ParameterList(queries)

    def forward(self, t: Tensor) -> Tensor:
        net, left = self.net, list(self.queries)
        x0, y0 = net.embed(t), net.second(t)
        sources: list[Tensor] = []
        for i in range(LAYERS):
            a, b, c = net.scales[i]
            injected = b * x0 + c * y0
            sources = [a * source for source in sources] + [injected] if i else [a * x0 + injected]
            for j in (2 * i, 2 * i + 1):
                read = mixed(left.pop(0), sources) if len(sources) > 1 else sources[0]
                sources.append(net.f(j, read))
        last = mixed(left.pop(0), sources)
        assert not left
        return net.head(net.norm(last))


@pytest.mark.parametrize("inject", SCALED)
def test_one_stream_through_all_layers(inject: Injection) -> None:
    net, x = Injected(inject), tokens()
    randomize(net)
    by_hand = ByHand(net, [torch.empty(WIDTH, dtype=torch.float64) for _ in range(2 * LAYERS)])
    randomize_queries(dict(enumerate(by_hand.queries)))
    want = outputs_and_gradients(by_hand, dict(by_hand.named_parameters()), [x])
    torch._dynamo.reset()
    ac.transform(net, x, ac.AttnResConfig(num_blocks=None, lowering="eager"))
    assert [len(stream.sublayers) for stream in ac.report(net).streams] == [3 * LAYERS - 1]
    queries = list(ac.pseudo_queries(net).values())
    with torch.no_grad():
        for query, value in zip(queries, by_hand.queries, strict=True):
            query.copy_(value)
    named = {f"net.{name}": p for name, p in net.named_parameters() if not name.startswith("attnres")}
    named |= {f"queries.{i}": query for i, query in enumerate(queries)}
    got = outputs_and_gradients(net, named, [x])
    assert relative_error(got.outputs, want.outputs) <= 1e-12
    assert gradient_error(got.gradients, want.gradients) <= 1e-12


@pytest.mark.parametrize(
    "inject",
    [
        lambda a, b, c, x, x0, y0: x + b * x0 + c * y0,
        lambda a, b, c, x, x0, y0: x + (y0 + x0),
        lambda a, b, c, x, x0, y0: y0 + x + b * x0,
    ],
)
def test_without_a_scale_the_sum_is_part_of_the_step_before(inject: Injection) -> None:
    """Nothing reads the stream between a branch and what is injected behind it."""
    converted(Injected(inject), sublayers=2 * LAYERS)
