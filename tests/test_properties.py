"""Random residual networks: converted ones compute what they must, and every add is accounted for."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import attnres_compile as ac
from attnres_compile import graphs
from attnres_compile.errors import PlanMismatchError
from attnres_compile.passes import detect as detect_pass
from attnres_compile.passes import ops, spellings
from attnres_compile.passes import rewrite as rewrite_pass
from attnres_compile.passes.detect import detect
from attnres_compile.passes.memory import Memory
from attnres_compile.passes.plan import plan
from attnres_compile.passes.scan import Scanner
from attnres_compile.passes.streams import Step, Term
from tests import networks as networks_of
from tests.evaluate import Captured, by_dynamo, by_symbolic_trace, evaluate, float_adds
from tests.helpers import random_state, randomize, randomize_queries, relative_error
from tests.networks import Network, Spec, inputs, networks

# A larger search by hand: ATTNRES_EXAMPLES=5000 pytest tests/test_properties.py. Then examples are random too.
SEARCH = int(os.environ.get("ATTNRES_EXAMPLES", "0"))


def profile(examples: int) -> settings:
    return settings(
        max_examples=SEARCH or examples,
        derandomize=not SEARCH,
        database=None,
        deadline=None,
        # Shrinking takes minutes; the larger search does it.
        phases=[Phase.generate, Phase.shrink] if SEARCH else [Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


layouts = st.sampled_from(
    (
        {"num_blocks": None},
        {"num_blocks": 1},
        {"num_blocks": 2},
        {"num_blocks": 3},
        {"block_size": 1},
        {"block_size": 2},
    )
)
configs = st.builds(
    lambda layout, **options: ac.AttnResConfig(**layout, min_sublayers=2, **options),
    layouts,
    queries=st.sampled_from(("state", "reader")),
    depth_loops=st.booleans(),
)


def tolerance(spec: Spec) -> float:
    """float64 unless some tensor was made narrower on the way."""
    return 2e-5 if "float" in repr(spec) else 1e-11


def check(captured: Captured, config: ac.AttnResConfig, allowed: float) -> list[int]:
    """Number of sublayers of each converted stream; raises where anything is wrong."""
    captured = Captured(graphs.with_shapes(captured.module, captured.args), captured.args)
    before = str(captured.module.graph)
    try:
        module, report = ac.rewrite_graph(captured.module, captured.args, config)
    except ac.NoStreamError as error:
        module, report = None, error.report
    assert str(captured.module.graph) == before, "the user's graph was changed"
    accounted(captured, report)
    if module is None:
        return []
    grad = differentiable(captured)
    wanted = captured.run(grad=grad)
    found = captured.run(module, grad=grad)
    assert [o.dtype for o in found[0]] == [o.dtype for o in wanted[0]], "dtypes"
    assert relative_error(found[0], wanted[0]) <= allowed, "outputs"
    size = max((float(g.abs().max()) for g in wanted[1]), default=0.0)
    for got, want in zip(found[1], wanted[1], strict=True):
        assert float((got - want).abs().max()) <= allowed * size, "gradients"
    equations(captured, config, allowed)
    return [len(stream.sublayers) for stream in report.streams]


def differentiable(captured: Captured) -> bool:
    """Whether the original has gradients: some networks overwrite what their own backward needs."""
    try:
        captured.run()
    except RuntimeError as error:
        return "modified by an inplace operation" not in str(error)
    return True


def accounted(captured: Captured, report: ac.TransformReport) -> None:
    """Every float add is in exactly one place of the report."""
    converted = [add for stream in report.streams for sublayer in stream.sublayers for add in sublayer.adds]
    rejected = [rejection.node for rejection in report.rejections]
    assert len(set(converted)) == len(converted) and len(set(rejected)) == len(rejected), "twice"
    assert not set(converted) & set(rejected), f"both: {set(converted) & set(rejected)}"
    missing = float_adds(captured.module.graph) - set(converted) - set(rejected)
    assert not missing, f"silent: {missing}"


def equations(captured: Captured, config: ac.AttnResConfig, allowed: float) -> None:
    """Random queries and ``gain="mean"`` against the paper's equations on the original graph."""
    config = replace(config, gain="mean")
    plans = plan(detect(captured.module.graph, config).streams, config)
    module, _ = ac.rewrite_graph(captured.module, captured.args, config)
    queries = module.attnres.queries()
    randomize_queries(queries)
    wanted = evaluate(captured, plans, queries, config)
    assert relative_error(captured.run(module, grad=False)[0], wanted) <= 100 * allowed, "equations"


def network(spec: Spec) -> Network:
    model = Network(spec)
    randomize(model)
    return model


def check_any(spec: Spec, config: ac.AttnResConfig) -> None:
    check(by_symbolic_trace(network(spec), *inputs()), config, tolerance(spec))


def check_plain(spec: Spec, config: ac.AttnResConfig) -> None:
    """Networks of which nothing may be left alone."""
    found = check(by_symbolic_trace(network(spec), *inputs()), config, tolerance(spec))
    assert found == [sum(isinstance(item, networks_of.Step) for item in spec.program)], "sublayers"


@profile(150)
@given(networks(), configs)
def test_graphs_of_symbolic_trace(spec: Spec, config: ac.AttnResConfig) -> None:
    check_any(spec, config)


@profile(50)
@given(networks_of.plain_networks(), configs)
def test_plain_networks_are_converted_whole(spec: Spec, config: ac.AttnResConfig) -> None:
    check_plain(spec, config)


@profile(80)
@given(networks_of.cut_networks(), configs)
def test_what_cuts_a_stream_is_left_alone(spec: Spec, config: ac.AttnResConfig) -> None:
    check_any(spec, config)


@profile(15)
@given(networks(), configs)
def test_graphs_of_dynamo(spec: Spec, config: ac.AttnResConfig) -> None:
    check(by_dynamo(network(spec), *inputs()), config, tolerance(spec))


@profile(5)
@given(networks(), configs)
def test_transform_and_revert(spec: Spec, config: ac.AttnResConfig) -> None:
    model = network(spec)
    keys = list(model.state_dict())
    plain = run(model)
    torch._dynamo.reset()
    try:
        ac.transform(model, tuple(inputs()), replace(config, lowering="eager"))
    except ac.NoStreamError:
        assert list(model.state_dict()) == keys
    else:
        assert ac.pseudo_queries(model)
        # A module that writes into what it is given may not be rewritten on its own: that is said, never passed over.
        with contextlib.suppress(PlanMismatchError):
            assert relative_error(run(model), plain) <= tolerance(spec)
        ac.revert(model)
    assert list(model.state_dict()) == keys
    assert all(torch.equal(a, b) for a, b in zip(run(model), plain, strict=True)), "revert is exact to the bit"


def run(model: Network) -> list[Tensor]:
    with random_state(5), torch.no_grad():
        return [out.clone() for out in model(*inputs())]


# ------------------------------------------------------------------ a test of the test


def _swapped(choose: Any) -> Any:
    return lambda self, left, right: choose(self, left, right)[::-1]


def _one_term(**fields: Any) -> Step:
    return Step(**{**fields, "terms": fields["terms"][:1]})


def _without_factor(node: fx.Node, factor: float = 1.0, product: Any = None) -> Term:
    return Term(node, 1.0, product)


# What is broken, and the property that sees it.
BREAKS: dict[str, tuple[object, str, object, str]] = {
    "writes are not seen": (Memory, "write_after", lambda *_: None, "cut"),
    "in-place adds are always taken for functional": (Memory, "is_functional", lambda *_: True, "any"),
    "the skip is taken for the branch": (Scanner, "_choose", _swapped(Scanner._choose), "plain"),
    "a term is dropped": (detect_pass, "Step", _one_term, "plain"),
    "alpha and minus are dropped": (spellings, "Term", _without_factor, "any"),
    "what the stream goes through is ignored": (detect_pass, "_passes", lambda *_: (), "plain"),
    "casts are left out": (rewrite_pass._Surgery, "_cast", lambda self, node, dtype, origin: node, "cut"),
    "dropout is taken for nothing": (ops, "dropout_is_identity", lambda node: True, "cut"),
    "a scale may depend on the stream": (Scanner, "_scaled_operand", lambda self, node, name: node.args[0], "any"),
    "a rejection is forgotten": (Scanner, "_reject", lambda *_: None, "any"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_broken_detection_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, name, broken, by = BREAKS[what]
    monkeypatch.setattr(holder, name, broken)
    drawn, prove = {
        "any": (networks(), check_any),
        "cut": (networks_of.cut_networks(), check_any),
        "plain": (networks_of.plain_networks(), check_plain),
    }[by]

    @settings(profile(200), phases=[Phase.generate], derandomize=True, max_examples=200, report_multiple_bugs=False)
    @given(drawn, configs)
    def search(spec: Spec, config: ac.AttnResConfig) -> None:
        prove(spec, config)

    with pytest.raises((AssertionError, RuntimeError, ac.AttnResError, TypeError, ValueError, KeyError)):
        search()
