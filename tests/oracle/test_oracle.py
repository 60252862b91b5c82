"""The oracle agrees with right conversions at random queries, and sees wrong ones that are exact at zero queries."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnres_compile as ac
from attnres_compile import backend, comparison, exactness, graphs
from attnres_compile.inputs import Inputs, as_inputs
from attnres_compile.oracle import DISAGREES, HOLDS, Verdict, judge
from attnres_compile.passes.rewrite import rewrite
from attnres_compile.random_queries import against_oracle
from tests.helpers import randomize
from tests.properties.network import inputs
from tests.properties.rules import CASES, Net

CONFIG = ac.AttnResConfig(num_blocks=2, lowering="eager", min_sublayers=2)
WIDTH, TOKENS = 8, 5


def oracle(model: nn.Module, given: Any, config: ac.AttnResConfig = CONFIG, **options: Any) -> Verdict:
    torch._dynamo.reset()
    return against_oracle(model, as_inputs(given), config, **options)


RULES = [
    *(
        "plain",
        "minus",
        "in place",
        "stacked",
        "builtin sum",
        "fused product",
        "two branches",
        "enclosed",
        "long skips",
    ),
    *("broadcast branch", "casts", "reshapes", "rolls", "learned scales", "first state again", "in order"),
    *("a query per reader", "returned states", "features first", "loop over depth"),
]


@pytest.mark.parametrize("rule", RULES)
def test_right_conversions_hold(rule: str) -> None:
    case = CASES[rule]
    config = dataclasses.replace(CONFIG, **dict(case.options))
    found = oracle(Net(case.body), inputs(), config)
    # A stream that is cast to float32 on its way is as good as that.
    allowed = 1e-5 if found.lowest == "float32" else 1e-10
    assert found.status == HOLDS and found.error is not None and found.error <= allowed, found


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": None, "key_norm_weight": True, "gain": "mean"},
        {"num_blocks": 1, "value": "normalized", "logit_scale": "rsqrt_dim"},
        {"num_blocks": 3, "logit_scale": 0.5, "eps": 1e-2},
    ],
)
def test_every_option_of_the_method(options: dict[str, Any]) -> None:
    config = ac.AttnResConfig(lowering="eager", min_sublayers=2, **options)
    assert oracle(Net(CASES["plain"].body), inputs(), config).status == HOLDS


# ------------------------------------------------------------------ what is exact at zero queries, and wrong


class Faulty(nn.Module):
    """A stream whose forward can leave something out, as a conversion that does not see it would."""

    def __init__(self, body: Callable[[Faulty, Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.body, self.fault = body, False
        self.start, self.end = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        randomize(self.double())

    def branch(self, i: int, x: Tensor) -> Tensor:
        return self.layers[i](self.norms[i](x))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.start(x), self.fault)


def leaky(model: Faulty, x: Tensor, fault: bool) -> Tensor:
    """Adds without gradients, of which a fault makes adds with gradients."""
    with torch.set_grad_enabled(fault):
        x = x + model.branch(0, x)
        x = x + model.branch(1, x)
    x = x + model.branch(2, x)
    return model.end(x + model.branch(3, x))


def written(model: Faulty, x: Tensor, fault: bool) -> Tensor:
    """A branch that is written behind its add; a fault keeps it out of the later sums."""
    for i in range(4):
        branch = model.branch(i, x)
        x = x + branch
        if not fault:
            x = x * 0.5
    return model.end(x)


def changed(model: Faulty, x: Tensor, fault: bool) -> Tensor:
    """A state that is no longer what the add made of it."""
    for i in range(4):
        x = x + model.layers[i](x if fault else F.relu(input=x, inplace=True))
    return model.end(x)


def faulty(model: nn.Module, given: Inputs, config: ac.AttnResConfig) -> nn.Module:
    model.fault = True  # type: ignore[assignment]
    return exactness.convert_copy(model, given, config)


def x() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("body", [leaky, written, changed])
def test_what_a_conversion_does_not_see_is_seen(body: Callable[[Faulty, Tensor, bool], Tensor]) -> None:
    found = oracle(Faulty(body), x(), convert=faulty)
    assert found.status == DISAGREES, found


def test_a_gradient_that_should_not_be_is_named() -> None:
    found = oracle(Faulty(leaky), x(), convert=faulty)
    assert "layers.0.weight exists in only one" in found.note and found.error_output is not None
    assert found.error_output < 1e-10, "the outputs are right, and tell nothing"


def test_a_query_without_its_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: nn.Module, given: Inputs, seed: int) -> comparison.Run:
        found = comparison.run(model, given, seed)
        lost = next(name for name in found.gradients if "attnres" in name)
        return dataclasses.replace(found, gradients={n: g for n, g in found.gradients.items() if n != lost})

    monkeypatch.setattr("attnres_compile.random_queries.run", run)
    found = oracle(Net(CASES["plain"].body), inputs())
    assert found.status == DISAGREES and "query n.1 exists in only one" in found.note


# ------------------------------------------------------------------ the dimension of the features


class Mixer(nn.Module):
    """Sublayers that contract over tokens and over channels, in turn; the norms say which of the two is which."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(6))
        self.layers = nn.ModuleList(nn.Linear(*(2 * [width if i % 2 else tokens])) for i in range(6))
        self.start = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for i, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            y = norm(x)
            x = x + (layer(y) if i % 2 else layer(y.transpose(1, 2)).transpose(1, 2))
        return x


def test_features_are_what_norms_normalise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mix along the other dimension, of the same size, is exact at zero queries."""
    model = randomize(Mixer(6, 6).double())
    given = torch.randn(2, 6, 6, dtype=torch.float64)
    plain = torch.ops.attnres.mix.default
    for dim in (2, 1):

        def forced(graph: torch.fx.Graph, *rest: Any, dim: int = dim) -> None:
            rewrite(graph, *rest)
            for node in graph.nodes:
                if node.target is plain:
                    node.update_arg(2, dim)

        with monkeypatch.context() as patch:
            for module in (backend, graphs):
                patch.setattr(module, "rewrite", forced)
            exact = exactness.verify(model, given, CONFIG, keep_weights=True)
            found = oracle(model, given)
        assert exact.holds
        assert found.status == (HOLDS if dim == 2 else DISAGREES), found


def test_another_size_of_the_features_is_named() -> None:
    model = randomize(Mixer(8, 6).double())
    given = torch.randn(2, 6, 8, dtype=torch.float64)
    made = exactness.convert_copy(copy.deepcopy(model), as_inputs(given), CONFIG)
    (stream,) = ac.report(made).streams
    report = dataclasses.replace(ac.report(made), streams=(dataclasses.replace(stream, feature_dim=6),))
    queries = {site.query: torch.ones(6, dtype=torch.float64) for site in stream.sites if site.query}
    run = comparison.run(model, as_inputs(given), 0)
    found = judge(lambda: copy.deepcopy(model), as_inputs(given), report, CONFIG, queries, {}, run, 0)
    assert found.status == DISAGREES and "is 6 in the report, and 8" in found.note
