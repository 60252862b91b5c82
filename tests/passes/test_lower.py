"""Lowering: what runs at each site, and that the lowered graph computes the same, gradients included."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from attnres_compile.config import AttnResConfig
from attnres_compile.errors import LoweringError
from attnres_compile.kernels import cpu
from attnres_compile.passes.lower import LoweringReport, lower
from tests.passes.blocks import MIX, WIDTH, Blocks, assert_equal, captured, captured_graph, gradients, targets


@pytest.fixture
def _compiler() -> None:
    if cpu.library() is None:
        pytest.fail("the compiled kernels were not built: these tests need a C++ compiler")


@pytest.mark.usefixtures("_compiler")
def test_native_sites_hand_their_sources_on() -> None:
    torch.manual_seed(0)
    model = Blocks().double()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    compiled, graphs = captured(model, x)
    assert_equal(gradients(compiled, model, x), gradients(model, model, x), 1e-11)
    (gm,) = graphs
    assert gm.report == LoweringReport(native=7)
    assert gm.report.sites == 7
    assert MIX not in targets(gm)
    sites = [node for node in gm.graph.nodes if node.target is cpu.mix_through]
    # From its second site on, the first source comes from the site before.
    for before, site in itertools.pairwise(sites):
        source = site.args[1][0]
        assert source.args == (before, 1)
    # Facts about the new nodes are as right as those about the old ones.
    for site in sites:
        assert [value.shape for value in site.meta["example_value"]] == [x.shape] * (len(site.args[1]) + 1)
        for user in site.users:
            assert user.meta["example_value"].shape == x.shape
            assert "nn_module_stack" in user.meta or "stack_trace" in user.meta


@pytest.mark.usefixtures("_compiler")
def test_lowered_graph_under_aot_autograd_has_no_separate_additions() -> None:
    """In the backward graph each source's gradient is added up by the sites themselves."""
    from functorch.compile import aot_module_simplified, make_boxed_func

    backwards: list[fx.GraphModule] = []

    def run(gm: fx.GraphModule, example: Sequence[Any]) -> Any:
        def backward(traced: fx.GraphModule, _: Sequence[Any]) -> Any:
            backwards.append(traced)
            return make_boxed_func(traced.forward)

        return aot_module_simplified(
            gm, example, fw_compiler=lambda traced, _: make_boxed_func(traced.forward), bw_compiler=backward
        )

    torch.manual_seed(0)
    model = Blocks().double()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    compiled, _ = captured(model, x, run=run)
    assert_equal(gradients(compiled, model, x), gradients(model, model, x), 1e-11)
    (backward,) = backwards
    steps = targets(backward)
    assert steps.count(torch.ops.attnres.mix_cpu_backward.default) == 7
    assert torch.ops.aten.add.Tensor not in steps
    assert torch.ops.aten.clone.default not in steps


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("frozen", ["branches", "queries", "input"])
def test_some_gradients_are_not_wanted(frozen: str) -> None:
    torch.manual_seed(0)
    model = Blocks().double()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    if frozen != "input":
        getattr(model, frozen).requires_grad_(False)
        compiled, _ = captured(model, x)
        assert_equal(gradients(compiled, model, x), gradients(model, model, x), 1e-11)
        return
    compiled, _ = captured(model, x)
    for call in (model, compiled):
        model.zero_grad()
        sum(out.sum() for out in call(x)).backward()
        if call is model:
            expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert_equal([p.grad for p in model.parameters() if p.grad is not None], expected, 1e-11)


@pytest.mark.usefixtures("_compiler")
def test_inference() -> None:
    torch.manual_seed(0)
    model = Blocks()
    x = torch.randn(2, 5, WIDTH)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            compiled, graphs = captured(model, x)
            assert_equal(list(compiled(x)), list(model(x)), 1e-5)
            assert graphs[0].report.native == 7


def test_eager_leaves_sites_alone() -> None:
    model = Blocks()
    gm = captured_graph(model, torch.randn(2, 5, WIDTH))
    before = str(gm.graph)
    assert lower(gm, AttnResConfig(lowering="eager")) == LoweringReport(eager=7)
    assert str(gm.graph) == before


@pytest.mark.parametrize(
    ("model", "x", "why"),
    [
        (Blocks(dim=1), torch.randn(2, WIDTH, 3, 4), "the features are not last in memory"),
        (Blocks().half(), torch.randn(2, 5, WIDTH).half(), "no kernel for torch.float16 on cpu"),
        (Blocks().to("meta"), torch.randn(2, 5, WIDTH, device="meta"), "no kernel for meta"),
    ],
    ids=["features not last", "float16", "not on the CPU"],
)
def test_other_sites_are_left_for_the_decomposition(model: Blocks, x: Tensor, why: str) -> None:
    from torch._inductor.decomposition import decompositions

    gm = captured_graph(model, x)
    report = lower(gm, AttnResConfig())
    assert (report.decomposed, report.sites, len(report.unlowered)) == (7, 7, 7)
    assert all(left.endswith(f"attnres::mix, {why}") for left in report.unlowered)
    assert targets(gm).count(MIX) == 7
    assert MIX in decompositions


def test_nothing_else_of_ours_may_be_left() -> None:
    graph = fx.Graph()
    token, query, x = (graph.placeholder(name) for name in ("token", "query", "x"))
    node = graph.call_function(torch.ops.attnres.declare.default, (token, [query], "{}"))
    node.meta["stack_trace"] = 'File "/somewhere/model.py", line 12, in forward\n    declare()'
    graph.output(x)
    gm = fx.GraphModule(nn.Module(), graph)
    for lowering in ("inductor", "eager"):
        with pytest.raises(LoweringError, match=r"attnres::declare is left.*model\.py:12"):
            lower(gm, AttnResConfig(lowering=lowering))


@pytest.mark.inductor
@pytest.mark.usefixtures("_compiler")
def test_inductor_trains_and_takes_any_number_of_tokens() -> None:
    from torch._inductor.compile_fx import compile_fx

    torch.manual_seed(0)
    model = Blocks()
    compiled, graphs = captured(model, torch.empty(0), run=compile_fx, dynamic=True)
    for tokens in (3, 7, 12):
        x = torch.randn(2, tokens, WIDTH)
        assert_equal(gradients(compiled, model, x), gradients(model, model, x), 2e-5)
    assert all(gm.report.native == 7 for gm in graphs)
    assert len(graphs) <= 2


@pytest.mark.inductor
def test_inductor_opens_up_what_no_kernel_serves() -> None:
    from torch._inductor.compile_fx import compile_fx

    def mix(query: Tensor, first: Tensor, second: Tensor) -> Tensor:
        mixed: Tensor = MIX(query, [first, second], 1, 1e-6, 2.0, 1.0, False)
        return mixed

    class Site(nn.Module):
        def forward(self, *inputs: Tensor) -> tuple[Tensor]:
            return (mix(*inputs),)

    torch.manual_seed(0)
    compiled, graphs = captured(Site(), torch.empty(0), run=compile_fx)
    inputs = [torch.randn(8, requires_grad=True), *(torch.randn(2, 8, 3, 3, requires_grad=True) for _ in range(2))]
    grad = torch.randn(2, 8, 3, 3)
    found = torch.autograd.grad(compiled(*inputs), inputs, grad)
    report = graphs[0].report
    assert report == LoweringReport(decomposed=1, unlowered=report.unlowered)
    assert_equal(list(found), list(torch.autograd.grad(mix(*inputs), inputs, grad)), 1e-5)


@pytest.mark.inductor
@pytest.mark.usefixtures("_compiler")
def test_inductor_with_checkpointed_regions() -> None:
    """The body of a checkpointed region is a graph of its own, with sites of its own."""
    from torch._inductor.compile_fx import compile_fx
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Blocks):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            first = x * 0.5

            def body(first: Tensor) -> tuple[Tensor, Tensor]:
                second = self.branches[0](self.mix(self.queries[0], [first])).tanh()
                return second, self.branches[1](self.mix(self.queries[1], [first, second])).tanh()

            second, third = checkpoint(body, first, use_reentrant=False)
            return (self.mix(self.queries[2], [first, second, third]),)

    torch.manual_seed(0)
    model = Checkpointed()
    x = torch.randn(2, 5, WIDTH)
    compiled, graphs = captured(model, x, run=compile_fx)
    assert_equal(gradients(compiled, model, x), gradients(model, model, x), 2e-5)
    assert graphs[0].report.native == 3
