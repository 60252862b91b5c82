"""Sites that hand their sources on: values, gradients, what is saved, and what the backward graph holds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from attnres_compile.kernels import ops, reference
from attnres_compile.kernels.through import fingerprint, inter_through, site_through
from tests.kernels.phases import NORMS, OPS, Read, assert_close, generator, gradients, site

READ = Read(eps=1e-4, gain=3.0)
SITES = 3
WIDTH = 8


def leaves(needs: Sequence[int] | None = None) -> list[Tensor]:
    """Per site a query, a branch's factor, a norm's weight and bias; then three sources."""
    normal = generator()
    vectors = [normal(WIDTH) / 2 for _ in range(4 * SITES)]
    found = [*vectors, *(normal(2, 3, WIDTH) for _ in range(3))]
    return [value.requires_grad_(needs is None or at in needs) for at, value in enumerate(found)]


def by_hand(inputs: Sequence[Tensor], two_phase: bool, norm: str) -> list[Tensor]:
    """Sites over two blocks and a growing partial sum, as separate steps of the definition."""
    queries, factors, weights, biases, (*blocks, partial) = split(inputs)
    phases = reference.inter(queries, blocks, **READ.named(gain=False))
    outputs = []
    h = torch.ones_like(partial)
    for at, query in enumerate(queries):
        partial = partial + (h * factors[at]).tanh()
        if two_phase:
            h = reference.merge(query, phases[0][at], phases[1][at], partial, **READ.named())
        else:
            h = reference.mix(query, [*blocks, partial], **READ.named())
        h = normed(h, weights[at], biases[at], norm)
        outputs.append(h)
    return [outputs[-1], partial]


def through(inputs: Sequence[Tensor], two_phase: bool, norm: str) -> list[Tensor]:
    """The same, each site reading what the site before handed on."""
    queries, factors, weights, biases, (*blocks, partial) = split(inputs)
    h = torch.ones_like(partial)
    if two_phase:
        found = inter_through(queries, blocks, *READ.inter)
        mixes, lses, blocks = found[:SITES], found[SITES : 2 * SITES], list(found[2 * SITES :])
    for at, query in enumerate(queries):
        branch = (h * factors[at]).tanh()
        phases = (mixes[at], lses[at]) if two_phase else (None, None)
        parameters = (weights[at] if norm else None, biases[at] if norm == "layernorm" else None)
        sources = [partial] if two_phase else [*blocks, partial]
        options = (norm, 1e-5, *READ.merge)
        h, *sources = site_through(query, sources, *phases, branch, *parameters, *options)
        partial = sources[-1]
        blocks = blocks if two_phase else sources[:-1]
    return [h, partial]


def split(inputs: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    return [*(inputs[at * SITES : (at + 1) * SITES] for at in range(4)), inputs[4 * SITES :]]


def normed(h: Tensor, weight: Tensor, bias: Tensor, norm: str) -> Tensor:
    if norm == "rmsnorm":
        return torch.nn.functional.rms_norm(h, h.shape[-1:], weight, 1e-5)
    return torch.nn.functional.layer_norm(h, h.shape[-1:], weight, bias, 1e-5) if norm else h


def assert_same_gradients(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    present = [at for at, value in enumerate(expected) if value is not None]
    assert [at for at, value in enumerate(found) if value is not None] == present
    assert_close([found[at] for at in present], [expected[at] for at in present])


@pytest.mark.parametrize("two_phase", [False, True])
@pytest.mark.parametrize("norm", ["", "rmsnorm", "layernorm"])
def test_chain_of_sites(two_phase: bool, norm: str) -> None:
    inputs = leaves()
    expected, found = by_hand(inputs, two_phase, norm), through(inputs, two_phase, norm)
    assert_close([value.detach() for value in found], [value.detach() for value in expected], 1e-12)
    assert_same_gradients(gradients(found, inputs), gradients(expected, inputs))


@pytest.mark.parametrize("two_phase", [False, True])
@pytest.mark.parametrize("needs", [[0], [1], [3], [7], [12], [14], [0, 13, 14], [4, 12], [6, 9]])
def test_some_inputs_need_no_gradient(two_phase: bool, needs: list[int]) -> None:
    inputs = leaves(needs)
    chosen = [inputs[at] for at in needs]
    expected, found = by_hand(inputs, two_phase, "layernorm"), through(inputs, two_phase, "layernorm")
    used = [at for at, value in enumerate(expected) if value.requires_grad]
    # The sum of what was handed on needs a gradient exactly where it does by hand.
    assert [at for at, value in enumerate(found) if value.requires_grad] == used
    assert_same_gradients(
        gradients([found[at] for at in used], chosen), gradients([expected[at] for at in used], chosen)
    )


@pytest.mark.parametrize("kind", ["mix", "merge"])
@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize(("norm", "parameters"), NORMS)
def test_one_site(kind: str, branch: bool, norm: str, parameters: str) -> None:
    """Every fusion by itself, with later readers of some of what it hands on."""
    problem = site(kind, branch, norm, parameters)
    expected_out, last = problem.reference()[0], problem.reference()[-1] if branch else problem.sources[-1]
    out, *handed_on = site_through(*problem.arguments)
    assert len(handed_on) == len(problem.sources)
    first = problem.sources[0] if len(problem.sources) > 1 else last
    expected = [expected_out, last.sin(), first.exp()]
    found = [out, handed_on[-1].sin(), handed_on[0].exp()]
    assert_close([value.detach() for value in found], [value.detach() for value in expected], 1e-12)
    assert_same_gradients(gradients(found, problem.tensors), gradients(expected, problem.tensors))


@pytest.mark.parametrize("kind", ["mix", "merge"])
def test_site_whose_result_is_not_used(kind: str) -> None:
    """Later gradients pass, and nothing else has one: the branch's is the new partial sum's."""
    problem = site(kind, branch=True)
    _, *handed_on = site_through(*problem.arguments)
    grads = torch.autograd.grad(handed_on[-1].sum(), problem.tensors, allow_unused=True)
    present = [at for at, value in enumerate(grads) if value is not None]
    tensors = problem.tensors
    assert present == [len(problem.sources), next(i for i, t in enumerate(tensors) if t is problem.branch)]
    assert all(torch.equal(grads[at], torch.ones_like(grads[at])) for at in present)


def test_inter_of_which_nothing_or_little_is_used() -> None:
    normal = generator()
    queries = [normal(WIDTH).requires_grad_() for _ in range(2)]
    sources = [normal(3, WIDTH).requires_grad_() for _ in range(2)]
    inputs = [*queries, *sources]
    *_, last = inter_through(queries, sources, *READ.inter)
    grads = torch.autograd.grad(last.sum(), inputs, allow_unused=True)
    assert [grad is None for grad in grads] == [True, True, True, False]
    mixes, lses = reference.inter(queries, sources, **READ.named(gain=False))
    # A mix alone, and a log-sum-exp alone.
    for at, value in ((1, mixes[1]), (2, lses[0])):
        found = inter_through(queries, sources, *READ.inter)
        expected = [value, sources[0].sin()]
        assert_same_gradients(gradients([found[at], found[4].sin()], inputs), gradients(expected, inputs))


def test_a_source_given_twice() -> None:
    normal = generator()
    query, source, other = (normal(*size).requires_grad_() for size in ((WIDTH,), (3, WIDTH), (3, WIDTH)))
    inputs = [query, source, other]
    sources = [source, other, source]
    options = ("", 0.0, *READ.merge)
    out, *handed_on = site_through(query, sources, None, None, None, None, None, *options)
    found = [out, handed_on[0].sin() + handed_on[2].exp()]
    expected = [reference.mix(query, sources, **READ.named()), source.sin() + source.exp()]
    assert_same_gradients(gradients(found, inputs), gradients(expected, inputs))
    # As its own branch, too.
    out, partial = site_through(query, [source], None, None, source, None, None, *options)
    expected = [reference.mix(query, [source + source], **READ.named()), (source + source).sin()]
    assert_same_gradients(gradients([out, partial.sin()], inputs), gradients(expected, inputs))
    found = inter_through([query, query], sources, *READ.inter)
    mixes, lses = reference.inter([query, query], sources, **READ.named(gain=False))
    expected = [*mixes, *lses, source.sin() + other]
    assert_same_gradients(gradients([*found[:4], found[6].sin() + found[5]], inputs), gradients(expected, inputs))


def test_narrow_branch_beside_a_wide_stream() -> None:
    normal = generator()
    query, stream = normal(WIDTH).float().requires_grad_(), normal(3, WIDTH).float().requires_grad_()
    branch = normal(3, WIDTH).bfloat16().requires_grad_()
    out, partial = site_through(query, [stream], None, None, branch, None, None, "rmsnorm", 1e-5, *READ.merge)
    assert out.dtype == partial.dtype == torch.float32
    first, second = torch.autograd.grad([out, partial], [stream, branch], [torch.ones_like(out)] * 2)
    assert (first.dtype, second.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(first.bfloat16(), second)


@pytest.mark.parametrize("norm", ["", "rmsnorm"])
@pytest.mark.parametrize("kind", ["mix", "merge"])
def test_what_is_saved(kind: str, norm: str) -> None:
    """Inputs, numbers per token, and the site's own result: nothing else of a source's size."""
    problem = site(kind, branch=True, norm=norm, count=5, shape=(6, 4, 32))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out, *handed_on = site_through(*problem.arguments)
    known = {value.untyped_storage().data_ptr() for value in (*problem.tensors, out, *handed_on)}
    extra = [value for value in saved if value.untyped_storage().data_ptr() not in known]
    large = [value for value in extra if value.numel() >= out.numel()]
    assert len(large) == (kind == "mix" and norm != "")
    assert sum(value.numel() for value in extra if value.numel() < out.numel()) <= 24


def test_what_phase_one_saves() -> None:
    """Inputs and its own results, all there already."""
    normal = generator()
    queries = [normal(WIDTH).requires_grad_() for _ in range(2)]
    sources = [normal(3, WIDTH).requires_grad_() for _ in range(2)]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        found = inter_through(queries, sources, *READ.inter)
    known = {value.untyped_storage().data_ptr() for value in (*queries, *sources, *found)}
    assert saved
    assert {value.untyped_storage().data_ptr() for value in saved} <= known


def test_what_is_handed_on_needs_a_gradient_where_the_source_does() -> None:
    normal = generator()
    query = normal(WIDTH).requires_grad_()
    sources = [normal(3, WIDTH).requires_grad_(at == 1) for at in range(3)]
    branch = normal(3, WIDTH)
    options = ("", 0.0, *READ.merge)
    for found in (
        site_through(query, sources, None, None, None, None, None, *options)[1:],
        site_through(query, sources, None, None, branch, None, None, *options)[1:],
        inter_through([query], sources, *READ.inter)[2:],
    ):
        assert [value.requires_grad for value in found] == [False, True, False]
    *_, partial = site_through(query, sources, None, None, branch.requires_grad_(), None, None, *options)
    assert partial.requires_grad


def test_nothing_is_recorded_or_kept_without_gradients() -> None:
    problem = site("mix", norm="rmsnorm", branch=True)
    calls: list[bool] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is OPS.site.default:
                calls.append(args[-1])
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Watch():
        out, *handed_on = site_through(*problem.arguments)
    assert calls == [False]
    assert not out.requires_grad
    assert handed_on[0] is problem.sources[0]
    with torch.no_grad():
        found = inter_through([problem.query], problem.sources, *READ.inter)
    assert found[2] is problem.sources[0]
    assert not found[0].requires_grad
    with Watch():
        site_through(*problem.arguments)
    assert calls == [False, True]


# ------------------------------------------------------------------ under AOTAutograd


def traced(call: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], fx.GraphModule]:
    """Outputs and gradients of ``call`` under AOTAutograd, and its backward graph."""
    from functorch.compile import aot_function, make_boxed_func

    graphs: list[fx.GraphModule] = []

    def compiler(gm: fx.GraphModule, _: Sequence[Any]) -> Any:
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    outputs = aot_function(call, fw_compiler=compiler, bw_compiler=compiler)(*inputs)
    grads = gradients(outputs, inputs)
    return list(outputs), grads, graphs[-1]


@pytest.mark.parametrize("two_phase", [False, True])
def test_backward_graph_has_no_separate_additions(two_phase: bool) -> None:
    inputs = leaves()
    expected = by_hand(inputs, two_phase, "layernorm")
    outputs, grads, backward = traced(lambda *given: through(given, two_phase, "layernorm"), inputs)
    assert_close([value.detach() for value in outputs], [value.detach() for value in expected], 1e-12)
    assert_same_gradients(grads, gradients(expected, inputs))
    steps = [node.target for node in backward.graph.nodes if node.op == "call_function"]
    assert steps.count(OPS.site_backward.default) == SITES
    assert steps.count(OPS.inter_backward.default) == two_phase
    # In two phases a query has two readers; the sum of its gradients is one vector.
    added = [node for node in backward.graph.nodes if node.target is torch.ops.aten.add.Tensor]
    assert [tuple(node.meta["val"].shape) for node in added] == [(WIDTH,)] * (SITES * two_phase)
    assert torch.ops.aten.clone.default not in steps


def graph_of(sites: int) -> fx.GraphModule:
    """A graph that calls the functions as the lowering does."""
    graph = fx.Graph()
    query, block, partial, branch = (graph.placeholder(name) for name in ("query", "block", "partial", "branch"))
    options = ("rmsnorm", 1e-5, *READ.merge)
    call = graph.call_function(inter_through, ([query], [block], *READ.inter))
    mixed, lse = (graph.call_function(operator.getitem, (call, at)) for at in range(2))
    for _ in range(sites):
        call = graph.call_function(site_through, (query, [partial], mixed, lse, branch, None, None, *options))
        out, partial = (graph.call_function(operator.getitem, (call, at)) for at in range(2))
        branch = out
    graph.output((out, partial))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.inductor
def test_under_inductor() -> None:
    from torch._inductor.compile_fx import compile_fx

    ops.register_decompositions()
    normal = generator()
    inputs = [normal(*size).float().requires_grad_() for size in ((16,), (4, 16), (4, 16), (4, 16))]
    gm = graph_of(2)
    expected = gm(*inputs)
    expected_grads = gradients(expected, inputs)
    outputs = compile_fx(gm, [value.detach().requires_grad_() for value in inputs])(*inputs)
    assert_close([value.detach() for value in outputs], [value.detach() for value in expected], 1e-5)
    assert_close(gradients(outputs, inputs), expected_grads, 1e-5)


def test_fingerprint_is_of_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    import shutil
    from pathlib import Path

    from attnres_compile.kernels import through as module

    known = fingerprint()
    copy = tmp_path / "kernels"
    shutil.copytree(Path(module.__file__).parent, copy)
    monkeypatch.setattr(module, "__file__", str(copy / "through.py"))
    fingerprint.cache_clear()
    assert fingerprint() == known
    (copy / "plain.py").write_text((copy / "plain.py").read_text() + "#")
    fingerprint.cache_clear()
    assert fingerprint() != known
    fingerprint.cache_clear()
