"""Lowering: what runs at each site, and that the lowered graph computes the same, gradients included."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from attnres_compile.config import AttnResConfig
from attnres_compile.errors import LoweringError
from attnres_compile.kernels import cpu
from attnres_compile.passes.lower import LoweringReport, lower

MIX = torch.ops.attnres.mix.default
WIDTH = 32


class Blocks(nn.Module):
    """A block form written by hand: six sublayers in blocks of two, a site before each and one at the end."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.queries = nn.ParameterList(nn.Parameter(torch.randn(WIDTH) / WIDTH**0.5) for _ in range(7))

    def mix(self, query: Tensor, sources: list[Tensor]) -> Tensor:
        mixed: Tensor = MIX(query, sources, self.dim, 1e-6, float(len(sources)), 1.0, False)
        return mixed

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        blocks, partial = [x * 0.5], []
        for index, branch in enumerate(self.branches):
            h = self.mix(self.queries[index], blocks + partial)
            value = branch(h.movedim(self.dim, -1)).tanh().movedim(-1, self.dim)
            partial = [partial[0] + value] if partial else [value]
            if index % 2:
                blocks, partial = blocks + partial, []
        # A reader of a source that is no site.
        return self.mix(self.queries[6], blocks), blocks[1].exp()


def captured(
    model: nn.Module, *inputs: Tensor, run: Callable[[fx.GraphModule, Sequence[Any]], Any] | None = None, **options: Any
) -> tuple[Callable[..., Any], list[fx.GraphModule]]:
    """``model`` compiled with a backend that lowers, and the list that its lowered graphs appear in."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example: Sequence[Any]) -> Any:
        gm = copy.deepcopy(gm)
        gm.report = lower(gm, AttnResConfig())
        gm.graph.lint()
        graphs.append(gm)
        return run(gm, example) if run else gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True, **options)
    return compiled, graphs


def gradients(call: Callable[..., Any], model: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs, and gradients of the input and all parameters that need one."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    outputs = call(x)
    torch.manual_seed(5)
    torch.autograd.backward(outputs, [torch.randn(out.shape, dtype=out.dtype) for out in outputs])
    assert x.grad is not None
    grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return [*(out.detach() for out in outputs), x.grad, *grads]


def assert_equal(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(found) == len(expected)
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=tolerance, atol=tolerance)


def targets(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


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
    ("model", "x"),
    [
        (Blocks(dim=1), torch.randn(2, WIDTH, 3, 4)),
        (Blocks().half(), torch.randn(2, 5, WIDTH).half()),
        (Blocks().to("meta"), torch.randn(2, 5, WIDTH, device="meta")),
    ],
    ids=["features not last", "float16", "not on the CPU"],
)
def test_other_sites_are_left_for_the_decomposition(model: Blocks, x: Tensor) -> None:
    from torch._inductor.decomposition import decompositions

    gm = captured_graph(model, x)
    assert lower(gm, AttnResConfig()) == LoweringReport(decomposed=7)
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


def captured_graph(model: nn.Module, x: Tensor) -> fx.GraphModule:
    """dynamo's graph of ``model``, not lowered."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Any:
        graphs.append(copy.deepcopy(gm))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(x)
    return graphs[0]


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
    assert graphs[0].report == LoweringReport(decomposed=1)
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
