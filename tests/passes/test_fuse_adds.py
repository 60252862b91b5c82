"""The add before a site, in graphs written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import attnres_compile as ac
from attnres_compile import graphs
from attnres_compile.passes import sites
from attnres_compile.passes.fuse_norm import fuse_norm
from tests.helpers import randomize, randomize_queries, relative_error
from tests.passes.lowering import WIDTH, Net, check_facts, inputs, true_facts
from tests.passes.norms import SITE
from tests.passes.support import BATCH, TOKENS


def one_site(build: Callable[..., fx.Node], *also: Callable[..., fx.Node]) -> tuple[fx.GraphModule, list[Tensor]]:
    """A graph of one site over ``c`` and what ``build`` makes of ``a`` and ``b``; ``also`` reads that before it."""
    graph = fx.Graph()
    q, a, b, c = (graph.placeholder(name) for name in "qabc")
    last = build(graph, a, b)
    seen = [each(graph, last) for each in also]
    mixed = graph.call_function(torch.ops.attnres.mix.default, (q, [c, last], 2, 1e-6, 2.0, 1.0, False))
    normed = graph.call_function(F.layer_norm, (mixed, (WIDTH,)))
    graph.output((normed, graph.call_function(torch.exp, (last,)), *seen))
    args = [torch.randn(WIDTH), *(torch.randn(BATCH, TOKENS, WIDTH) for _ in range(3))]
    return graphs.with_shapes(fx.GraphModule(nn.Module(), graph), args), args


def fused_add(*parts: Callable[..., fx.Node]) -> str:
    module, args = one_site(*parts)
    want = module(*[a.clone() for a in args])
    (site,) = [n for n in module.graph.nodes if sites.operator_name(n) == "attnres::mix"]
    site.meta[sites.SITE] = sites.Mark("s", fuse="on")
    (found,) = fuse_norm(module, ac.AttnResConfig())
    check_facts(module)
    true_facts(module, [a.clone() for a in args])
    assert relative_error(module(*[a.clone() for a in args]), want) <= 1e-5
    assert found.norm == "layernorm" and found.add == (not found.add_reason)
    return found.add_reason


def add(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    return graph.call_function(torch.ops.aten.add.Tensor, (a, b))


def test_later_readers_take_the_sites_sum() -> None:
    assert fused_add(add) == ""
    module, _ = one_site(add)
    next(n for n in module.graph.nodes if sites.operator_name(n) == "attnres::mix").meta[sites.SITE] = sites.Mark(
        "s", fuse="on"
    )
    fuse_norm(module, ac.AttnResConfig())
    (exp,) = [n for n in module.graph.nodes if n.target is torch.exp]
    assert exp.args[0].args[0].target is SITE and exp.args[0].args[1] == 1
    assert not [n for n in module.graph.nodes if n.target is torch.ops.aten.add.Tensor]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((add, lambda g, p: g.call_function(torch.tanh, (p,))), "something reads the sum before the site does"),
        ((lambda g, a, b: g.call_function(torch.add, (a, b), {"alpha": 2}),), "its last source is no sum"),
        ((lambda g, a, b: g.call_function(torch.add, (a, 1.0)),), "its last source is no sum of two tensors"),
        ((lambda g, a, b: add(g, a, a),), "its last source is no sum of two tensors"),
        (
            (lambda g, a, b: add(g, a, g.call_function(torch.narrow, (b, 0, 0, 1))),),
            "the sum broadcasts",
        ),
        (
            (lambda g, a, b: add(g, a, g.call_method("expand_as", (g.call_function(torch.narrow, (b, 0, 0, 1)), a))),),
            "the sum broadcasts",
        ),
        (
            (lambda g, a, b: add(g, a, g.call_method("half", (b,))),),
            "the sum changes the dtype",
        ),
        ((lambda g, a, b: g.call_function(torch.mul, (a, b)),), "its last source is no sum"),
    ],
    ids=["read before", "alpha", "a number", "twice the same", "narrow", "expanded", "two dtypes", "a product"],
)
def test_sums_that_are_left_alone(parts: Any, reason: str) -> None:
    assert fused_add(*parts) == reason


def test_an_operand_written_between() -> None:
    def write(graph: fx.Graph, p: fx.Node) -> fx.Node:
        return graph.call_method("mul_", (p.args[1], 2.0))

    assert fused_add(add, write) == "mul_ writes into what the sum reads"


def test_a_cast_is_absorbed_where_nothing_else_reads_it() -> None:
    def cast(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
        half = graph.call_method("bfloat16", (b,))
        return add(graph, a, graph.call_function(torch.ops.aten.to.dtype, (half, torch.float32)))

    assert fused_add(cast) == ""


def test_a_cast_that_something_else_reads_stays() -> None:
    def cast(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
        half = graph.call_method("bfloat16", (b,))
        return add(graph, a, graph.call_function(torch.ops.aten.to.dtype, (half, torch.float32)))

    def read(graph: fx.Graph, p: fx.Node) -> fx.Node:
        return graph.call_function(torch.tanh, (p.args[1],))

    assert fused_add(cast, read) == ""


def test_a_cast_that_loses_more_than_the_sum_does_stays() -> None:
    """float64 to float32 before the add: the kernel's own precision is float32, and it takes no float64."""

    def cast(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
        wide = graph.call_method("double", (b,))
        return add(graph, a, graph.call_function(torch.ops.aten.to.dtype, (wide, torch.float32)))

    assert fused_add(cast) == ""
    module, _ = one_site(cast)
    next(n for n in module.graph.nodes if "mix" in n.name).meta[sites.SITE] = sites.Mark("s", fuse="on")
    fuse_norm(module, ac.AttnResConfig())
    (site,) = [n for n in module.graph.nodes if n.target is SITE]
    assert sites.arguments(site)["branch"].target is torch.ops.aten.to.dtype


def test_checkpointed_regions_keep_their_adds() -> None:
    """A sum is made in one region and read in the next: the site is recomputed with the reader, the sum is not."""
    from torch.utils.checkpoint import checkpoint

    class Regions(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for norm, branch in zip(self.norms, self.branches, strict=True):
                x = checkpoint(lambda y, n=norm, b=branch: y + b(n(y)).tanh(), x, use_reentrant=False)
            return self.norm(x)

    x = inputs(torch.float64)
    results = []
    for kind in (Net, Regions):
        model = randomize(kind().double()).train()
        ac.transform(model, x, ac.AttnResConfig(num_blocks=2, lowering="eager", two_phase="on", fuse="on"))
        randomize_queries(ac.pseudo_queries(model))
        for _ in range(2):  # once more: nothing is left of the first time
            out = model(x)
            grads = torch.autograd.grad(out.square().sum(), list(model.parameters()))
        results.append((out, grads, ac.report(model).fusions))
    assert relative_error(results[1][0], results[0][0]) <= 1e-12
    assert relative_error(list(results[1][1]), list(results[0][1])) <= 1e-11
    # The sums that end the blocks: one is read by phase 1, one by the last site.
    assert sum(fusion.add for fusion in results[0][2]) == 3
    assert [fusion.norm for fusion in results[1][2]] == ["layernorm"] * 6
    # Only what is made where it is read is fused: here nothing but the sums that the root graph makes.
    assert sum(fusion.add for fusion in results[1][2]) == 0
