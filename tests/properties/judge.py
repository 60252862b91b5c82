"""What must hold of every conversion.

Outputs and gradients with zero queries are the original's; outputs with random queries are those of the paper's
equations, evaluated on the original graph; and every add is accounted for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import attnres_compile as ac
from attnres_compile import graphs
from attnres_compile.study import study_graph
from tests.evaluate import Captured, by_symbolic_trace, evaluate, flat, float_adds, interpret
from tests.helpers import random_state, randomize_queries, relative_error, seeded
from tests.properties.machine import WIDTH
from tests.properties.network import Network, inputs
from tests.properties.spec import Spec, steps

SEED = 5


def tolerance(spec: Spec) -> float:
    """float64 unless some tensor was made narrower on the way."""
    return 2e-5 if "float" in repr(spec) else 1e-11


def judge_any(spec: Spec, config: ac.AttnResConfig) -> None:
    """A network of which some may be left alone."""
    judge(traced(spec), config, tolerance(spec))


def judge_plain(spec: Spec, config: ac.AttnResConfig) -> None:
    """A network of which nothing may be left alone, but what is a loop over shared modules."""
    report = judge(traced(spec), config, tolerance(spec))
    found = [len(stream.sublayers) for stream in report.streams]
    repeated = [shared for _, shared in steps(spec.program)]
    loops = not config.depth_loops and 2 * sum(repeated) > len(repeated)
    whole = len(repeated) >= config.min_sublayers and not loops
    assert found == ([len(repeated)] if whole else []), "sublayers"


def judge(captured: Captured, config: ac.AttnResConfig, allowed: float) -> ac.TransformReport:
    """The report on a conversion; raises where anything is wrong."""
    with uncompiled():
        wanted = run(captured.module, captured.args, captured.leaves(), keep=True)
        before = picture(captured.module.graph)
        item, report, _ = study_graph(captured.module, None, config)
        assert picture(captured.module.graph) == before, "the user's graph was changed"
        accounted(captured.module.graph, report)
        if not item.plans:
            return report
        copied = Captured(item.graph, captured.args)
        queries = {n: torch.zeros(WIDTH, dtype=torch.float64) for plan in item.plans for n in plan.queries}
        randomize_queries(queries)
        equations = evaluate(copied, item.plans, queries, config, SEED)
        module = graphs.rewritten(item.graph, item.plans, config, report)
        found = run(module, captured.args, captured.leaves() if wanted[1] else [])
        if config.gain == "sum":
            compare(found, wanted, allowed)
        with torch.no_grad():
            for name, parameter in module.attnres.queries().items():
                parameter.copy_(queries[name])
        mixed, _ = run(module, captured.args, [])
        assert relative_error(mixed, equations) <= 100 * allowed, "equations"
    return report


def compare(
    found: tuple[list[Tensor], list[Tensor]], wanted: tuple[list[Tensor], list[Tensor]], allowed: float
) -> None:
    """Outputs and gradients of a converted network against the original's."""
    assert [o.dtype for o in found[0]] == [o.dtype for o in wanted[0]], "dtypes"
    assert relative_error(found[0], wanted[0]) <= allowed, "outputs"
    size = max((float(g.abs().max()) for g in wanted[1]), default=0.0)
    for got, want in zip(found[1], wanted[1], strict=True):
        assert float((got - want).abs().max()) <= allowed * size, "gradients"


def run(
    module: fx.GraphModule, args: Sequence[Any], leaves: list[Tensor], keep: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Floating outputs, and gradients by ``leaves``: none where the graph overwrites what its backward needs."""
    with random_state(SEED), torch.set_grad_enabled(bool(leaves)):
        outputs = [o for o in flat(interpret(module, args, keep)) if o.is_floating_point()]
    loss = project(outputs)
    gradients: Sequence[Tensor | None] = []
    if leaves and isinstance(loss, Tensor):
        try:
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        except RuntimeError as error:
            # Some networks overwrite what their own backward needs; a converted one has no such excuse.
            if not keep or not overwrites_what_its_backward_needs(error):
                raise
    found = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(gradients, leaves, strict=False)]
    return [o.detach().clone() for o in outputs], found


def overwrites_what_its_backward_needs(error: RuntimeError) -> bool:
    """Whether autograd says so."""
    return "modified by an inplace operation" in str(error)


def project(outputs: list[Tensor]) -> Tensor | int:
    """A loss that every element of every output is in."""
    generator = seeded(SEED)
    parts = [
        (o.double() * torch.randn(o.shape, generator=generator, dtype=torch.float64)).sum()
        for o in outputs
        if o.requires_grad
    ]
    return sum(parts)


def accounted(graph: fx.Graph, report: ac.TransformReport) -> None:
    """Every float add is in exactly one place of the report."""
    converted = [add for stream in report.streams for sublayer in stream.sublayers for add in sublayer.adds]
    rejected = [rejection.node for rejection in report.rejections]
    assert len(set(converted)) == len(converted) and len(set(rejected)) == len(rejected), "twice"
    assert not set(converted) & set(rejected), f"both: {set(converted) & set(rejected)}"
    missing = float_adds(graph) - set(converted) - set(rejected)
    assert not missing, f"silent: {missing}"


def picture(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """All that a rewriting could change."""
    return [(node, node.op, node.target, node.args, node.kwargs) for node in graph.nodes]


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Graph modules write no code: that is half of the time, and :func:`interpret` does without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fx.GraphModule, "recompile", lambda self: None)
        yield


def traced(spec: Spec) -> Captured:
    """A network as ``symbolic_trace`` sees it."""
    with uncompiled():
        return by_symbolic_trace(Network(spec), *inputs())
