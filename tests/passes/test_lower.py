"""Lowering: what runs at each site, and that the lowered graph computes the same, gradients included."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import attnres_compile as ac
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import LoweringError
from attnres_compile.kernels import cpu, through
from attnres_compile.passes import sites
from attnres_compile.passes.fuse_norm import fuse_norm
from attnres_compile.passes.lower import LoweringReport, lower
from attnres_compile.passes.two_phase import two_phase
from tests.evaluate import by_dynamo
from tests.helpers import randomize, randomize_queries, relative_error
from tests.passes.lowering import (
    Gemma,
    Net,
    check_facts,
    counts,
    inputs,
    kernels_everywhere,
    lowered,
    numbers,
    on_cuda,
    true_facts,
)

assert kernels_everywhere  # a fixture

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


# ------------------------------------------------------------------ generated kernels


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Over one source each site reads by itself; over two the three of a block share a pass.
        ({}, {"inter_through": 1, "site_through": 5}),
        ({"fuse": "off"}, {"inter_through": 1, "site_through": 5}),
        ({"two_phase": "off"}, {"site_through": 6}),
        ({"two_phase": "on"}, {"inter_through": 2, "site_through": 5}),
        ({"two_phase": "on", "fuse": "off"}, {"inter_through": 2, "site_through": 5}),
        ({"two_phase": "on", "key_norm_weight": True}, {"inter_through": 2, "site_through": 5}),
        ({"two_phase": "on", "gain": "mean"}, {"inter_through": 2, "site_through": 5}),
    ],
    ids=str,
)
def test_on_a_gpu_only_kernels_are_left(
    options: dict[str, Any], expected: dict[str, int], kernels_everywhere: list[Any]
) -> None:
    """The graph that a GPU would get, run here: its calls compute on the CPU what the kernels compute there."""
    model = randomize(Net(Gemma))
    module, choices, captured = lowered(model, inputs(), num_blocks=2, **options)
    assert counts(module) == expected
    assert {device for _, _, device in kernels_everywhere} == {"cuda"}
    assert {f.norm for f in choices.fusions} == ({""} if options.get("fuse") == "off" else {"rmsnorm"})
    true_facts(module, captured.args)
    layout = {name: value for name, value in options.items() if name in ("key_norm_weight", "gain")}
    plain, _ = ac.rewrite_graph(captured.module, captured.args, AttnResConfig(num_blocks=2, **layout))
    randomize_queries(plain.attnres.queries())
    got, want = numbers(captured, module), numbers(captured, plain)
    assert relative_error(got[0], want[0]) <= 1e-5
    size = max(float(gradient.abs().max()) for gradient in want[1])
    assert all(float((a - b).abs().max()) <= 1e-5 * size for a, b in zip(got[1], want[1], strict=True))


def test_report_of_kernels(kernels_everywhere: list[Any]) -> None:
    captured = by_dynamo(randomize(Net(Gemma)), inputs())
    module, _ = ac.rewrite_graph(captured.module, captured.args, AttnResConfig(num_blocks=2, two_phase="on"))
    on_cuda(module)
    config = AttnResConfig()
    fuse_norm(module, config)
    # One site has phase 1's value; five have calls, of which four are merges and all have their norms with them.
    assert lower(module, config) == LoweringReport(kernels=5, phase1=1, fused=5, merge=4, inter=2)
    assert LoweringReport(kernels=5, phase1=1, fused=5, merge=4, inter=2).sites == 6


def test_every_source_is_handed_on_by_its_last_reader(kernels_everywhere: list[Any]) -> None:
    module, _, _ = lowered(randomize(Net(Gemma)), inputs(), num_blocks=2, two_phase="on")
    calls = {through.site_through, through.inter_through}
    handed: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        for source in node.all_input_nodes:
            # What a call was given is read nowhere afterwards.
            assert source not in handed, (node, source)
        if node.target in calls:
            sources, branch = node.args[1], node.target is through.site_through and node.args[4] is not None
            handed.update(dict.fromkeys(sources[:-1] if branch else sources, node))
            assert node.meta["is_wrapped"] and node.meta["user_cache_hash"] == through.fingerprint()
    merges = [n for n in module.graph.nodes if n.target is through.site_through and n.args[2] is not None]
    assert len(merges) == 4
    assert sum(node.args[4] is not None for node in merges) == 2


def test_a_backward_of_kernels_has_no_separate_additions(kernels_everywhere: list[Any]) -> None:
    """All that reads a source of this network is a site, but for the first norm, which reads the root."""
    from functorch.compile import aot_module_simplified, make_boxed_func

    backwards: list[fx.GraphModule] = []

    def backward(traced: fx.GraphModule, _: Sequence[Any]) -> Any:
        backwards.append(traced)
        return make_boxed_func(traced.forward)

    for two, expected in (("off", (6, 0)), ("on", (5, 2))):
        module, _, captured = lowered(randomize(Net()), inputs(), num_blocks=2, two_phase=two)
        queries = [*module.parameters()]
        compiled = aot_module_simplified(
            module, captured.args, fw_compiler=lambda traced, _: make_boxed_func(traced.forward), bw_compiler=backward
        )
        out = compiled(*captured.args)
        leaves = [*captured.leaves(), *queries]
        got = torch.autograd.grad(out[0].square().sum(), leaves)
        want = torch.autograd.grad(captured.run_raw(module)[0].square().sum(), leaves)
        assert relative_error(list(got), list(want)) <= 1e-5
        steps = targets(backwards[-1])
        found = [steps.count(getattr(torch.ops.attnres, name).default) for name in ("site_backward", "inter_backward")]
        assert tuple(found) == expected
        added = [n.meta["val"].dim() for n in backwards[-1].graph.nodes if n.target is torch.ops.aten.add.Tensor]
        # A query of a merge is in phase 1 too: four additions of vectors.
        assert Counter(added) == ({3: 1} if two == "off" else {3: 1, 1: 4})


def test_the_old_sum_stays_what_it_was(kernels_everywhere: list[Any]) -> None:
    """What a fused add adds to may be read afterwards; only the new sum is handed on in its place."""
    from tests.passes.test_fuse_norm import add, one_site

    module, args = one_site(add)
    a, output = next(n for n in module.graph.nodes if n.name == "a"), module.graph.output_node()
    with module.graph.inserting_before(output):
        later = module.graph.call_function(torch.sin, (a,))
    output.args = ((*output.args[0], later),)
    module.recompile()
    want = module(*args)
    for node in module.graph.nodes:
        if sites.operator_name(node) == "attnres::mix":
            node.meta[sites.SITE] = sites.Mark("s", fuse="on")
    on_cuda(module)
    fuse_norm(module, AttnResConfig())
    lower(module, AttnResConfig())
    module.recompile()
    assert counts(module) == {"site_through": 1}
    assert relative_error(module(*args), want) <= 1e-5


@pytest.mark.parametrize("two", ["off", "on"])
def test_what_no_kernel_serves_on_a_gpu(two: str, kernels_everywhere: list[Any]) -> None:
    """float64 has no kernels; neither has NCHW: both are opened up by Inductor, and named."""
    module, _, _ = lowered(randomize(Net()).double(), inputs(torch.float64), num_blocks=2, two_phase=two)
    assert counts(module) == ({"mix": 6} if two == "off" else {"mix": 1, "inter": 2, "merge": 4})
    on = captured_graph(Blocks(dim=1), torch.randn(2, WIDTH, 3, 4))
    report = lower(on_cuda(on), AttnResConfig())
    assert (report.decomposed, report.kernels) == (7, 0)
    assert {left.partition(", ")[2] for left in report.unlowered} == {"the features are not last in memory"}
    assert (torch.float64, 32, "cuda") in kernels_everywhere


def test_without_a_launcher_a_gpus_sites_are_opened_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "attnres_compile.kernels.launch", None)
    monkeypatch.delattr(ac.kernels, "launch", raising=False)
    module, choices, _ = lowered(randomize(Net()), inputs(), num_blocks=2)
    assert counts(module) == {"mix": 6}
    assert {fusion.norm_reason for fusion in choices.fusions} == {"no generated kernel runs this site"}


def test_forced_forms_on_the_cpu_are_opened_up() -> None:
    from torch._inductor.decomposition import decompositions

    module, _, captured = lowered(randomize(Net()), inputs(), cuda=False, num_blocks=2, two_phase="on", fuse="on")
    assert counts(module) == {"inter": 2, "site": 5}
    assert torch.ops.attnres.site.default in decompositions and torch.ops.attnres.inter.default in decompositions
    module, _ = ac.rewrite_graph(captured.module, captured.args, AttnResConfig(num_blocks=2, two_phase="on"))
    report = lower(module, AttnResConfig())
    # The site that stays a mix has the native kernel.
    assert (report.native, report.decomposed, report.phase1, report.inter, report.sites) == (1, 4, 1, 2, 6)
    assert len(report.unlowered) == 6


def test_a_site_counts_once_in_any_form(kernels_everywhere: list[Any]) -> None:
    captured = by_dynamo(randomize(Net()), inputs())
    for lowering in ("inductor", "eager"):
        for two in ("on", "off"):
            for fuse in ("on", "off"):
                for cuda in (True, False):
                    module, _ = ac.rewrite_graph(captured.module, captured.args, AttnResConfig(num_blocks=2))
                    for node in module.graph.nodes:
                        if sites.SITE in node.meta:
                            given = {**sites.mark(node).__dict__, "two_phase": two, "fuse": fuse}
                            node.meta[sites.SITE] = sites.Mark(**given)
                    config = AttnResConfig(lowering=lowering)
                    if cuda:
                        on_cuda(module)
                    two_phase(module, config)
                    fuse_norm(module, config)
                    check_facts(module)
                    report = lower(module, config)
                    assert report.sites == 6, report
                    check_facts(module)


@pytest.mark.inductor
@pytest.mark.parametrize("kernels", [False, True], ids=["opened up", "handed on"])
def test_inductor_compiles_every_new_operator(kernels: bool, request: pytest.FixtureRequest) -> None:
    """Two phases and fused neighbours, trained, as plain code on the CPU: from operators and from kernels' calls."""
    from torch._inductor.compile_fx import compile_fx

    if kernels:
        request.getfixturevalue("kernels_everywhere")
    module, _, captured = lowered(
        randomize(Net(count=4)), inputs(), cuda=kernels, num_blocks=2, two_phase="on", fuse="on"
    )
    assert counts(module) == ({"inter_through": 1, "site_through": 3} if kernels else {"inter": 1, "site": 3})
    leaves = [*captured.leaves(), *module.parameters()]
    want = torch.autograd.grad(captured.run_raw(module)[0].square().sum(), leaves)
    compiled: Any = compile_fx(module, list(captured.args))
    for _ in range(2):
        (out,) = compiled(*captured.args)
        got = torch.autograd.grad(out.square().sum(), leaves)
        assert relative_error(list(got), list(want)) <= 2e-5
