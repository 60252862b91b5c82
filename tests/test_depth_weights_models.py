"""``depth_weights`` of every kind of model: compiled, rewritten, nested, checkpointed, under autocast, with a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.depth_by_hand import Net, build, check, converted, parameters, same, tokens, walk
from tests.helpers import randomize_queries


def test_what_torch_compile_wraps_is_looked_through() -> None:
    x = tokens()
    net = converted(build(), x, num_blocks=2)
    wanted = ac.depth_weights(net, x)
    wrapped = torch.compile(net, backend="attnres", options={"lowering": "eager"})
    assert same(ac.depth_weights(wrapped, x), wanted)
    outer = nn.Sequential(wrapped)
    assert same(ac.depth_weights(outer, x), wanted)
    assert ac.depth_weights(outer, x).streams[0].sites[1] == "0.norms.1"
    net.compile(backend="attnres", options={"lowering": "eager"})
    call = net._compiled_call_impl
    assert same(ac.depth_weights(net, x), wanted) and net._compiled_call_impl is call
    assert torch.equal(net(x), wrapped(x))


def late(net: nn.Module, x: Tensor, **options: Any) -> nn.Module:
    compiled = torch.compile(net, backend="attnres", options={"lowering": "eager", **options})
    compiled(x)
    return compiled


@pytest.mark.filterwarnings("ignore:pseudo-queries were made")
@pytest.mark.parametrize("how", ["wrapped", "in place", "inside", "original"])
def test_a_model_that_was_compiled_late(how: str) -> None:
    x = tokens()
    net = build()
    wanted = ac.depth_weights(converted(build(), x, num_blocks=2), x)
    model: nn.Module = net
    if how == "in place":
        net.compile(backend="attnres", options={"lowering": "eager", "num_blocks": 2})
        net(x)
    else:
        compiled = late(net, x, num_blocks=2)
        model = {"wrapped": compiled, "inside": nn.Sequential(compiled), "original": net}[how]
    randomize_queries(ac.pseudo_queries(net), std=1.5)
    before = model(x)
    for shape in (x, tokens(2, 7)):
        assert same(ac.depth_weights(model, shape), wanted) == (shape is x)
    assert torch.equal(model(x), before)


@pytest.mark.filterwarnings("ignore:pseudo-queries were made")
def test_late_queries_of_one_of_several_configurations() -> None:
    x = tokens()
    net = build()
    for blocks in (2, 3):
        late(net, x, num_blocks=blocks)
    for blocks in (2, 3):
        (found,) = ac.depth_weights(net, x, ac.AttnResConfig(num_blocks=blocks)).streams
        assert len(found.blocks) == blocks
    assert len(ac.depth_weights(net, x).streams[0].blocks) == 3
    with pytest.raises(ac.NotTransformedError, match="of this configuration"):
        ac.depth_weights(net, x, ac.AttnResConfig(num_blocks=5))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("origin", "gain", "options"),
    [
        ("trace", "sum", {}),
        ("trace", "sum", {"two_phase": "on"}),
        ("trace", "mean", {"two_phase": "on"}),
        ("trace", "sum", {"fuse": "on"}),
        ("trace", "mean", {"two_phase": "on", "fuse": "on"}),
        ("export", "sum", {}),
        ("export", "sum", {"two_phase": "on", "fuse": "on"}),
    ],
    ids=str,
)
def test_a_rewritten_graph(origin: str, gain: str, options: dict[str, Any]) -> None:
    x = tokens()
    wanted = ac.depth_weights(converted(build(), x, num_blocks=2, gain=gain), x)
    graph = torch.fx.symbolic_trace(build()) if origin == "trace" else torch.export.export(build(), (x,)).module()
    module, _ = ac.rewrite_graph(graph, [x], ac.AttnResConfig(num_blocks=2, gain=gain, **options))
    assert "attnres::mix" not in str(module.graph) or not options
    randomize_queries(module.attnres.queries(), std=1.5)
    text, before = module.code, module(x)
    assert same(ac.depth_weights(module, x), wanted)
    assert same(ac.depth_weights(nn.Sequential(module), x), wanted)
    assert module.code == text and "forward" not in module.__dict__ and torch.equal(module(x), before)


def test_two_owners_a_shared_one_and_one_inside_another() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Net(4)
            self.second = Net(3)
            self.back = nn.Linear(6, 4)

        def forward(self, x: Tensor, twice: bool = False) -> Tensor:
            x = self.back(self.first(x))
            if twice:
                x = self.back(self.first(x[:, :2]))
            return self.second(x)

    x = tokens()
    model = build(Two)
    ac.transform(model, x, ac.AttnResConfig(num_blocks=2, lowering="eager"))
    randomize_queries(ac.pseudo_queries(model))
    first, second = ac.depth_weights(model, x).streams
    assert {name.split(".")[0] for name in first.sites} == {"first"}
    assert {name.split(".")[0] for name in second.sites} == {"second"}
    assert {name for found in (first, second) for name in found.sites} >= set(ac.pseudo_queries(model))
    assert first.tokens == second.tokens == 15
    alone = ac.depth_weights(model.first, x).streams[0]
    assert np.array_equal(alone.weights, first.weights, equal_nan=True)
    assert alone.name == "stream0" and alone.sites[-1] == "last" and first.sites[-1] == "first.last"
    # Called twice: all tokens of both calls count.
    twice = ac.depth_weights(model, ac.Inputs((x,), {"twice": True})).streams
    again = ac.depth_weights(model.first, model.back(model.first(x))[:, :2]).streams[0]
    assert [stream.tokens for stream in twice] == [15 + 6, 6]
    assert np.allclose(twice[0].weights, (15 * first.weights + 6 * again.weights) / 21, equal_nan=True, atol=1e-12)


def test_a_converted_module_inside_a_converted_one() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.net = nn.Linear(6, 4), Net(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.into(x))

    class Outer(Net):
        def __init__(self) -> None:
            super().__init__(4)
            self.branches[1] = Branch()

    x = tokens()
    model = build(Outer)
    ac.transform(model, x, ac.AttnResConfig(num_blocks=2, lowering="eager"))
    randomize_queries(ac.pseudo_queries(model), std=1.5)
    found = {stream.name: stream for stream in ac.depth_weights(model, x).streams}
    assert len(found) == 2
    outer = next(stream for stream in found.values() if len(stream.sites) == 5)
    inner = next(stream for stream in found.values() if len(stream.sites) == 4)
    queries = [query for name, query in ac.pseudo_queries(model).items() if not name.startswith("branches.1.net.")]
    plain = build(Outer)
    # The inner net must run converted in the walk as well.
    plain.branches[1] = model.branches[1]
    check(outer, walk(plain, x, [2, 2], queries), 1e-12)
    assert np.allclose(np.nansum(inner.weights, 1), 1.0, atol=1e-12)


def test_checkpointed_regions_in_training_mode() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.root(x)
            for norm, branch in zip(self.norms, self.branches, strict=True):
                x = torch.utils.checkpoint.checkpoint(lambda y, n=norm, b=branch: y + b(n(y)), x, use_reentrant=False)
            return self.last(x)

    x = tokens()
    net = converted(build(Checkpointed).train(), x, num_blocks=2)
    (found,) = ac.depth_weights(net, x).streams
    check(found, walk(build(), x, [3, 3], parameters(net)[0]), 1e-12)


def test_under_autocast_weights_are_those_of_what_was_computed() -> None:
    x = tokens(dtype=torch.float32)
    net = converted(build(dtype=torch.float32), x, num_blocks=2)
    exact = ac.depth_weights(net, x).streams[0]
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = ac.depth_weights(net, x).streams
    difference = np.nanmax(np.abs(found.weights - exact.weights))
    assert 0.0 < difference < 0.05
    assert np.allclose(np.nansum(found.weights, 1), 1.0, atol=1e-12)


def test_a_cache_of_keys_and_values_does_not_grow() -> None:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).eval()
    ids = torch.randint(0, 32, (1, 5))
    ac.transform(model, {"input_ids": ids}, ac.AttnResConfig(num_blocks=2, lowering="eager"))
    randomize_queries(ac.pseudo_queries(model), std=3.0)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :3], past_key_values=cache)
    (whole,) = ac.depth_weights(model, {"input_ids": ids}).streams
    (start,) = ac.depth_weights(model, {"input_ids": ids[:, :3]}).streams
    (found,) = ac.depth_weights(model, {"input_ids": ids[:, 3:], "past_key_values": cache}).streams
    assert cache.get_seq_length() == 3
    assert whole.kinds == ("attention", "mlp", "attention", "mlp", "output")
    together = (3 * start.weights + 2 * found.weights) / 5
    assert np.allclose(together, whole.weights, equal_nan=True, atol=1e-5)
