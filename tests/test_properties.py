"""Random residual networks: converted ones compute what they must, and every add is accounted for."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import attnres_compile as ac
from attnres_compile import graphs
from attnres_compile.passes.detect import detect
from attnres_compile.passes.plan import plan
from tests.evaluate import Captured, by_dynamo, by_symbolic_trace, evaluate, float_adds
from tests.helpers import randomize, randomize_queries, relative_error
from tests.networks import Network, Spec, inputs, networks

# A larger search by hand: ATTNRES_EXAMPLES=5000 pytest tests/test_properties.py. Then examples are random too.
SEARCH = int(os.environ.get("ATTNRES_EXAMPLES", "0"))


def profile(examples: int) -> settings:
    return settings(
        max_examples=SEARCH or examples,
        derandomize=not SEARCH,
        database=None,
        deadline=None,
        print_blob=True,
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


def check(captured: Captured, config: ac.AttnResConfig, allowed: float) -> bool:
    """Whether the graph was converted; raises where anything about that is wrong."""
    captured = Captured(graphs.with_shapes(captured.module, captured.args), captured.args)
    before = str(captured.module.graph)
    try:
        module, report = ac.rewrite_graph(captured.module, captured.args, config)
    except ac.NoStreamError as error:
        module, report = None, error.report
    assert str(captured.module.graph) == before, "the user's graph was changed"
    accounted(captured, report)
    if module is None:
        return False
    try:
        wanted, grad = captured.run(), True
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        wanted, grad = captured.run(grad=False), False
    found = captured.run(module, grad=grad)
    assert relative_error(found[0], wanted[0]) <= allowed, "outputs"
    size = max((float(g.abs().max()) for g in wanted[1]), default=0.0)
    for got, want in zip(found[1], wanted[1], strict=True):
        assert float((got - want).abs().max()) <= allowed * size, "gradients"
    equations(captured, config, allowed)
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


@profile(300)
@given(networks(), configs)
def test_symbolic_graphs(spec: Spec, config: ac.AttnResConfig) -> None:
    check(by_symbolic_trace(network(spec), *inputs()), config, tolerance(spec))
