"""Whole models at random queries against the oracle: outputs and all gradients, those of the queries included."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import fx, nn

import attnres_compile as ac
from attnres_compile import comparison, graphs
from attnres_compile.inputs import Inputs, as_inputs
from attnres_compile.oracle import DISAGREES, HOLDS
from attnres_compile.random_queries import against_oracle
from attnres_compile.study import study_graph
from tests.properties.judge import SEED, overwrites_what_its_backward_needs, tolerance, uncompiled
from tests.properties.network import Network, inputs
from tests.properties.spec import Spec

LEFT_ALONE = "left alone"
# What became of the networks of one search.
verdicts: Counter[str] = Counter()


def judge_oracle(spec: Spec, config: ac.AttnResConfig) -> None:
    """A network that is converted computes what the equations give, by an interpreter that knows the report alone."""
    try:
        found = against_oracle(Network(spec), as_inputs(inputs()), config, seed=SEED, convert=_by_symbolic_trace)
    except ac.NoStreamError:
        verdicts[LEFT_ALONE] += 1
        return
    except RuntimeError as error:
        # Some networks overwrite what their own backward needs; a converted one has no such excuse.
        if not overwrites_what_its_backward_needs(error):
            raise
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            comparison.run(Network(spec), as_inputs(inputs()), SEED)
        verdicts[LEFT_ALONE] += 1
        return
    verdicts[found.status] += 1
    assert found.status != DISAGREES, found
    assert found.status != HOLDS or (found.error or 0.0) <= 100 * tolerance(spec), found


def _by_symbolic_trace(model: nn.Module, given: Inputs, config: ac.AttnResConfig) -> nn.Module:
    """Ten times as fast as dynamo."""
    tracer = fx.Tracer()
    tracer.record_stack_traces = True
    with uncompiled():
        module = fx.GraphModule(model, tracer.trace(model))
        item, report, _ = study_graph(module, given.args, config)
        if not item.plans:
            raise ac.NoStreamError("nothing is converted", report=report)
        rewritten = graphs.rewritten(item.graph, item.plans, config, report)
    rewritten.recompile()
    return rewritten.train(model.training)
