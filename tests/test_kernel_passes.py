"""The passes behind rewriting on a Hugging Face model, through every way in: op counts, equal numbers, reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounterWithBackend

import attnres_compile as ac
from attnres_compile import backend
from attnres_compile.passes.finish import finish
from attnres_compile.passes.fuse_norm import fuse_norm
from attnres_compile.passes.lower import lower
from attnres_compile.passes.two_phase import two_phase
from tests.evaluate import Captured, by_dynamo
from tests.helpers import outputs_and_gradients, randomize, randomize_queries, relative_error
from tests.models import build, example
from tests.passes.lowering import calls, check_facts, counts, kernels_everywhere, numbers, on_cuda, true_facts

assert kernels_everywhere  # a fixture
ON = {"two_phase": "on", "fuse": "on"}


def llama(layers: int = 8, dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    return randomize(LlamaModel(config)).eval().to(dtype)


def ids(batch: int = 2) -> Tensor:
    return torch.randint(0, 64, (batch, 5), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def captured() -> Captured:
    """A Llama of 8 layers, 16 sublayers: four blocks of four."""
    return by_dynamo(llama(), ids())


def rewritten(captured: Captured, **options: Any) -> fx.GraphModule:
    module, _ = ac.rewrite_graph(captured.module, captured.args, ac.AttnResConfig(num_blocks=4, **options))
    randomize_queries(module.attnres.queries())
    return module


# ------------------------------------------------------------------ operators before and after each pass


def test_operators_before_and_after_each_pass(captured: Captured, kernels_everywhere: list[Any]) -> None:
    """The graph of a GPU, trained: 16 sites in four blocks of four sublayers."""
    module = on_cuda(rewritten(captured))
    config = ac.AttnResConfig()
    assert counts(module) == {"mix": 16}
    before = calls(module)
    phases = two_phase(module, config)
    # Over one finished source it is cheaper to read it at each site; over two and more it is not.
    assert [(p.block, p.sources, len(p.sites), p.chosen) for p in phases] == [
        (1, 1, 3, "direct"),
        (2, 2, 4, "two_phase"),
        (3, 3, 4, "two_phase"),
        (4, 4, 4, "two_phase"),
        (5, 5, 1, "direct"),
    ]
    assert counts(module) == {"mix": 4, "inter": 3, "merge": 9}
    # Three phases 1 more; twelve mixes became nine merges and three products with a gain.
    assert calls(module) == before + 3
    fusions = fuse_norm(module, config)
    assert counts(module) == {"site": 13, "inter": 3}
    assert [fusion.norm for fusion in fusions] == ["rmsnorm"] * 13
    # Each block has three sums. All are sites' own but those that end the first three blocks: phase 1 of the next
    # block reads these first.
    assert sum(fusion.add for fusion in fusions) == 9
    # A norm is eight calls: two casts, power, mean, sum, root and two products.
    assert calls(module) == before + 3 - 13 * 8 - 9
    report = lower(module, config)
    assert counts(module) == {"site_through": 13, "inter_through": 3}
    assert (report.kernels, report.phase1, report.inter, report.merge, report.fused, report.sites) == (
        13,
        3,
        3,
        9,
        13,
        16,
    )
    assert report.unlowered == ()
    check_facts(module)
    true_facts(module, captured.args)


@pytest.mark.parametrize("options", [{}, ON, {"two_phase": "on"}, {"two_phase": "off"}], ids=str)
def test_a_gpus_graph_gives_the_unfused_forms_numbers(
    captured: Captured, options: dict[str, Any], kernels_everywhere: list[Any]
) -> None:
    plain = rewritten(captured)
    module = on_cuda(rewritten(captured))
    for node in module.graph.nodes:
        if "attnres_site" in node.meta:
            node.meta["attnres_site"] = replace(node.meta["attnres_site"], **options)
    finish(module, ac.AttnResConfig())
    got, want = numbers(captured, module), numbers(captured, plain)
    assert relative_error(got[0], want[0]) <= 1e-5
    size = max(float(gradient.abs().max()) for gradient in want[1])
    assert all(float((a - b).abs().max()) <= 1e-5 * size for a, b in zip(got[1], want[1], strict=True))


def test_on_the_cpu_every_site_is_native(captured: Captured) -> None:
    module = rewritten(captured)
    choices = finish(module, ac.AttnResConfig())
    assert counts(module) == {"mix_through": 16}
    assert {fusion.norm_reason for fusion in choices.fusions} == {"no generated kernel runs this site"}


# ------------------------------------------------------------------ through a model


@pytest.mark.parametrize("options", [ON, {"two_phase": "on"}, {"fuse": "on"}], ids=str)
def test_a_converted_model_is_exact_at_zero_queries(options: dict[str, Any]) -> None:
    model = build(layers=6).double()
    names = dict(model.named_parameters())
    x = example().double()
    want = outputs_and_gradients(model, names, (x,))
    ac.transform(model, x, ac.AttnResConfig(num_blocks=3, lowering="eager", **options))
    for _ in range(2):
        got = outputs_and_gradients(model, names, (x,))
        assert relative_error(got.outputs, want.outputs) <= 1e-12
        size = max(float(gradient.abs().max()) for gradient in want.gradients.values())
        assert all(float((got.gradients[n] - want.gradients[n]).abs().max()) <= 1e-12 * size for n in names)


def test_a_converted_llama_is_exact_at_zero_queries() -> None:
    model, x = llama(4), ids()
    want = model(x).last_hidden_state
    ac.transform(model, x, ac.AttnResConfig(num_blocks=2, lowering="eager", **ON))
    assert relative_error(model(x).last_hidden_state, want) <= 1e-5
    assert [fusion.norm for fusion in ac.report(model).fusions] == ["rmsnorm"] * 7


def test_verify_takes_the_options() -> None:
    found = ac.verify(build(layers=6), example(), ac.AttnResConfig(num_blocks=3, lowering="eager", **ON))
    assert found.holds and found.gradient_error is not None


def outputs(run: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    result = run(x)
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize("way", ["own", "backend", "late"])
def test_every_way_in(way: str) -> None:
    torch._dynamo.reset()
    x = example()
    options = {"num_blocks": 3, "gain": "mean", "lowering": "eager"}
    results = []
    for choices in ({"two_phase": "off", "fuse": "off"}, ON):
        model = build(layers=6)
        run: Any = model
        if way != "late":
            # Transformed with other choices about running than it is compiled with.
            own = choices if way == "own" else {}
            ac.transform(model, x, ac.AttnResConfig(**options, **own))
        if way != "own":
            run = torch.compile(model, backend="attnres", options={**options, **choices})
            run(x)
        randomize_queries(ac.pseudo_queries(model))
        results.append((outputs(run, x), ac.report(model)))
    assert relative_error(results[1][0], results[0][0]) <= 1e-5
    assert results[0][1] == results[1][1]
    if way != "backend":
        assert {fusion.norm for fusion in results[1][1].fusions} == {"layernorm"}
        assert [phase.chosen for phase in results[1][1].phases] == ["two_phase"] * 3 + ["direct"]


def test_other_layouts_are_still_refused() -> None:
    model = build(layers=6)
    ac.transform(model, example(), ac.AttnResConfig(num_blocks=3, lowering="eager"))
    for options in ({"num_blocks": 2}, {"num_blocks": 2, **ON}):
        run = torch.compile(model, backend="attnres", options=options)
        with pytest.raises(Exception, match="other values of num_blocks"):
            run(example())


@pytest.mark.filterwarnings("ignore:pseudo-queries were made while compiling")
def test_how_a_model_runs_gives_it_no_other_queries() -> None:
    model, x = build(layers=6), example()
    found = []
    for choices in ({"two_phase": "off", "fuse": "off"}, ON, {"fuse": "on"}):
        torch._dynamo.reset()
        torch.compile(model, backend="attnres", options={"num_blocks": 3, "lowering": "eager", **choices})(x)
        found.append(ac.pseudo_queries(model))
    assert all(a is b for other in found[1:] for a, b in zip(other.values(), found[0].values(), strict=True))


def test_report_after_the_first_call_says_what_was_done() -> None:
    model, x = build(layers=6), example()
    config = ac.AttnResConfig(num_blocks=3, lowering="eager", **ON)
    planned = ac.explain(model, x, config)
    ac.transform(model, x, config)
    assert ac.report(model).phases == planned.phases and ac.report(model).fusions == ()
    model(x)
    done = ac.report(model)
    assert done.phases == planned.phases
    assert done.phases[0].stream == "encoder.stream0"
    assert [fusion.site for fusion in done.fusions][:2] == ["encoder.layers.0.norm2", "encoder.layers.1.norm1"]
    assert all(fusion.norm == "layernorm" for fusion in done.fusions)


def test_training_steps_leave_nothing_behind() -> None:
    """Twice the same steps from the same start give the same weights, in both forms, which agree."""
    ends = []
    for choices in ({"two_phase": "off", "fuse": "off"}, ON, ON):
        model = build(layers=6).train().double()
        x = example().double()
        ac.transform(model, x, ac.AttnResConfig(num_blocks=3, lowering="eager", **choices))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])
        assert all(float(q.detach().abs().max()) > 0 for q in ac.pseudo_queries(model).values())
    assert relative_error(ends[1], ends[0]) <= 1e-10
    assert relative_error(ends[2], ends[1]) == 0.0


def test_another_batch_size_compiles_once_more_at_most() -> None:
    model = build(layers=6)
    ac.transform(model, example(), ac.AttnResConfig(num_blocks=3, lowering="eager", **ON))
    forward = model.encoder.__dict__["forward"]
    forward._compiled = None
    counter = CompileCounterWithBackend("eager")
    ours = backend.ConvertedBackend(model.encoder, "eager")

    def counted(module: fx.GraphModule, inputs: list[Any]) -> Any:
        counter(module, inputs)
        return ours(module, inputs)

    from attnres_compile.conversion import _own_code

    forward._compiled = torch.compile(_own_code(forward), backend=counted)
    plain = build(layers=6)
    for batch in (2, 3, 5, 8):
        x = example(batch)
        assert relative_error(model(x), plain(x)) <= 1e-5
    assert counter.frame_count == 2


def test_plain_torch_compile_takes_the_declared_choices() -> None:
    """The pre-grad pass of Inductor, whose graph goes through the same passes."""
    seen: list[dict[str, int]] = []

    def watched(module: fx.GraphModule, config: ac.AttnResConfig) -> Any:
        choices = finish(module, config)
        seen.append(counts(module))
        return choices

    model, x = build(layers=4), example()
    ac.transform(model, x, ac.AttnResConfig(num_blocks=2, **ON))
    randomize_queries(ac.pseudo_queries(model))
    graphs: list[fx.GraphModule] = []

    def catch(module: fx.GraphModule, inputs: list[Any]) -> Any:
        copied = backend.copy_graph_module(module)
        backend.rewrite_for_inductor(copied.graph)
        copied.recompile()
        graphs.append(copied)
        return copied.forward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "finish", watched)
        torch._dynamo.reset()
        got = torch.compile(model, backend=catch, fullgraph=True)(x)
    assert seen == [{"inter": 2, "site": 7}]
    reference = build(layers=4)
    ac.transform(reference, x, ac.AttnResConfig(num_blocks=2, lowering="eager", two_phase="off", fuse="off"))
    randomize_queries(ac.pseudo_queries(reference))
    assert relative_error(got, reference(x)) <= 1e-5


@pytest.mark.inductor
def test_inductor_trains_a_model_in_two_phases_with_fused_norms() -> None:
    results = []
    for lowering, choices in (("eager", {"two_phase": "off", "fuse": "off"}), ("inductor", ON)):
        model, x = build(layers=3), example()
        ac.transform(model, x, ac.AttnResConfig(num_blocks=2, lowering=lowering, **choices))
        queries = ac.pseudo_queries(model)
        randomize_queries(queries)
        results.append(outputs_and_gradients(model, dict(model.named_parameters()), (x,)))
    plain, ours = results
    assert relative_error(ours.outputs, plain.outputs) <= 1e-5
    size = max(float(gradient.abs().max()) for gradient in plain.gradients.values())
    for name, gradient in plain.gradients.items():
        assert float((ours.gradients[name] - gradient).abs().max()) <= 1e-5 * size
