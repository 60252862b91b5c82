"""Lowering to generated kernels: which are launched, and that nothing else of ours is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

import attnres_compile as ac
from attnres_compile.config import AttnResConfig
from attnres_compile.kernels import through
from attnres_compile.passes import sites
from attnres_compile.passes.fuse_norm import fuse_norm
from attnres_compile.passes.lower import LoweringReport, lower
from attnres_compile.passes.two_phase import two_phase
from tests.evaluate import by_dynamo
from tests.helpers import randomize, randomize_queries, relative_error
from tests.passes.blocks import WIDTH, Blocks, captured_graph, targets
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
    from tests.passes.test_fuse_adds import add, one_site

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
