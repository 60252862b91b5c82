"""``depth_weights`` in numbers: against a walk by hand, and against what it must leave alone."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.observing import Moments
from tests.depth_by_hand import Net, Picture, Site, build, pixels, tokens, walk
from tests.helpers import randomize_queries


def converted(net: nn.Module, x: Any, std: float = 1.5, **options: Any) -> nn.Module:
    """``net`` transformed, its queries (and key norms) random."""
    ac.transform(net, x, ac.AttnResConfig(lowering="eager", **options))
    randomize_queries(ac.pseudo_queries(net), std=std)
    for name, parameter in net.named_parameters():
        if name.endswith("_key_norm"):
            parameter.data.uniform_(0.3, 1.7)
    return net


def parameters(net: nn.Module) -> tuple[list[Tensor], list[Tensor] | None]:
    keys = net.attnres.key_norms()
    return list(net.attnres.queries().values()), list(keys.values()) if keys else None


def check(found: ac.StreamWeights, wanted: list[Site], tolerance: float) -> None:
    """Every number of a stream against the weights of every token."""
    assert len(found.sites) == len(wanted)
    assert found.tokens == wanted[0].weights.shape[1]
    for row, site in enumerate(wanted):
        columns = [found.sources.index(name) for name in site.sources]
        others = [column for column in range(len(found.sources)) if column not in columns]
        assert np.isnan(found.weights[row, others]).all() and np.isnan(found.std[row, others]).all()
        p = site.weights.numpy()
        assert np.abs(found.weights[row, columns] - p.mean(1)).max() <= tolerance
        assert np.abs(found.std[row, columns] - p.std(1)).max() <= tolerance
        assert abs(found.entropy[row] + (p * np.log(p)).sum(0).mean()) <= 10 * tolerance
        assert abs(found.entropy_of_mean[row] + (p.mean(1) * np.log(p.mean(1))).sum()) <= 10 * tolerance
        assert found.uniform_entropy[row] == pytest.approx(math.log(len(columns)), abs=1e-15)
        assert found.weights[row, columns].sum() == pytest.approx(1.0, abs=1e-12)
        assert found.index[row] == row


LAYOUTS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "full": ({"num_blocks": None}, [1] * 6),
    "two blocks": ({"num_blocks": 2}, [3, 3]),
    "a remainder": ({"num_blocks": 4}, [1, 1, 1, 3]),
    "one block": ({"num_blocks": 1}, [6]),
    "blocks of two": ({"block_size": 2}, [2, 2, 2]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_layouts_by_hand(layout: str, dtype: torch.dtype) -> None:
    options, sizes = LAYOUTS[layout]
    x = tokens(dtype=dtype)
    net = converted(build(dtype=dtype), x, **options)
    (found,) = ac.depth_weights(net, x).streams
    queries, keys = parameters(net)
    wanted = walk(build(), x.double(), sizes, [query.double() for query in queries], keys)
    check(found, wanted, 1e-12 if dtype == torch.float64 else 3e-6)
    assert ("partial" in found.sources) == any(size > 1 for size in sizes)
    # The numbers are worth comparing: far from uniform, and different from token to token.
    assert np.nanmin(found.weights) < 0.1 and np.nanmax(found.std) > 0.1


@pytest.mark.parametrize(
    "options",
    [
        {"key_norm_weight": True},
        {"logit_scale": 0.4},
        {"logit_scale": "rsqrt_dim"},
        {"eps": 0.3},
        {"gain": "mean"},
        {"value": "normalized"},
        {"key_norm_weight": True, "logit_scale": -0.7, "eps": 0.05, "gain": "mean", "value": "normalized"},
    ],
    ids=lambda options: ", ".join(options),
)
def test_options_by_hand(options: dict[str, Any]) -> None:
    x = tokens()
    net = converted(build(), x, num_blocks=3, **options)
    (found,) = ac.depth_weights(net, x).streams
    queries, keys = parameters(net)
    by_hand = {
        "eps": options.get("eps", 1e-6),
        "gain": options.get("gain", "sum"),
        "value": options.get("value", "raw"),
    }
    scale = options.get("logit_scale", 1.0)
    scale = 6**-0.5 if scale == "rsqrt_dim" else scale
    assert (keys is not None) == bool(options.get("key_norm_weight"))
    check(found, walk(build(), x, [2, 2, 2], queries, keys, scale=scale, **by_hand), 1e-12)
    assert found.gain == by_hand["gain"]


@pytest.mark.parametrize("channels_last", [False, True])
def test_features_that_are_not_last(channels_last: bool) -> None:
    x = pixels()
    net = converted(build(Picture), x, num_blocks=2)
    given = x.to(memory_format=torch.channels_last) if channels_last else x
    (found,) = ac.depth_weights(net, given).streams
    check(found, walk(build(Picture), x, [2, 3], parameters(net)[0], dim=1), 1e-12)
    assert found.tokens == 2 * 4 * 5


def test_a_query_per_reader() -> None:
    """Two modules read each state: one site each, with the sources of the state and weights of its own query."""

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.ModuleList(nn.LayerNorm(4) for _ in range(4))
            self.b = nn.ModuleList(nn.LayerNorm(4) for _ in range(4))
            self.mix = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for n in range(4):
                x = x + self.mix[2 * n](self.a[n](x)) + self.mix[2 * n + 1](self.b[n](x))
            return x

    x = tokens()
    net = converted(build(Parallel), x, num_blocks=2, queries="reader")
    (found,) = ac.depth_weights(net, x).streams
    assert found.index == (0, 0, 1, 1, 2, 2, 3, 3, 4)
    assert found.readers[2:4] == (("a.1",), ("b.1",))
    assert not np.allclose(found.weights[2], found.weights[3], equal_nan=True)
    assert np.allclose(np.nansum(found.weights, 1), 1.0, atol=1e-12)


def test_zero_queries_are_uniform_and_have_the_entropy_of_it() -> None:
    x = tokens(dtype=torch.float32)
    net = ac.transform(build(dtype=torch.float32), x, ac.AttnResConfig(num_blocks=3, lowering="eager"))
    (found,) = ac.depth_weights(net, x).streams
    counts = np.isfinite(found.weights).sum(1, keepdims=True)
    assert np.nanmax(np.abs(found.weights - 1.0 / counts)) <= 2e-16
    assert np.nanmax(found.std) <= 2e-16
    assert np.abs(found.entropy - np.log(counts[:, 0])).max() <= 1e-14
    assert np.abs(found.mixing("measured") - found.mixing("block")).max() <= 2e-16


def test_a_bypass_has_one_weight() -> None:
    x = tokens()
    (found,) = ac.depth_weights(converted(build(), x, num_blocks=2), x).streams
    assert found.weights[0, 0] == 1.0 and np.isnan(found.weights[0, 1:]).all()
    assert found.std[0, 0] == found.entropy[0] == found.uniform_entropy[0] == 0.0


def test_parts_add_up_to_the_whole() -> None:
    p = torch.softmax(torch.randn(4, 70, dtype=torch.float64), 0)
    whole, parts = Moments(), Moments()
    whole.add(p)
    for part in p.split([1, 30, 39], 1):
        parts.add(part)
    parts.add(p[:, :0])
    assert parts.tokens == whole.tokens == 70
    for name in ("mean", "squares"):
        assert torch.allclose(getattr(parts, name), getattr(whole, name), rtol=1e-13, atol=0)
    assert parts.entropy == pytest.approx(whole.entropy, rel=1e-13)
    assert torch.allclose((whole.squares / 70).sqrt(), p.std(1, correction=0), rtol=1e-13, atol=0)


# ------------------------------------------------------------------ mixing matrices


def test_mixing_matrices_by_hand() -> None:
    nan = math.nan
    stream = ac.StreamWeights(
        name="s",
        sites=("a", "b", "c", "d"),
        kinds=("attention", "mlp", "attention", "output"),
        readers=(("a",), ("b",), ("c",), ("d",)),
        sources=("root", "block 1", "block 2", "partial"),
        weights=np.array([[1, nan, nan, nan], [0.9, nan, nan, 0.1], [0.3, 0.7, nan, nan], [0.2, 0.3, 0.5, nan]]),
        std=np.zeros((4, 4)),
        entropy=np.zeros(4),
        tokens=1,
        gain="sum",
        blocks=((0, 1), (2, 3)),
        index=(0, 1, 2, 4),
    )
    third = 1 / 3
    wanted = {
        "plain": [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
        "full": [[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0], [third] * 3 + [0, 0], [0.2] * 5],
        "block": [[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0], [0.5, 0.5, 0.5, 0, 0], [third] * 5],
        "measured": [[1, 0, 0, 0, 0], [0.9, 0.1, 0, 0, 0], [0.3, 0.7, 0.7, 0, 0], [0.2, 0.3, 0.3, 0.5, 0.5]],
    }
    for form, matrix in wanted.items():
        assert np.array_equal(stream.mixing(form), np.array(matrix, dtype=float)), form
    with pytest.raises(ac.ConfigError, match="form must be one of"):
        stream.mixing("half")


def test_a_partial_sum_of_a_later_block_is_spread_over_its_members_so_far() -> None:
    x = tokens()
    (found,) = ac.depth_weights(converted(build(), x, num_blocks=2), x).streams
    row = found.index.index(5)  # behind 5 sublayers: root, block 1 (0..2), partial sum of 3 and 4
    root, block, partial = found.weights[row, [0, 1, 3]]
    assert np.array_equal(found.mixing("measured")[row], [root, block, block, block, partial, partial, 0.0])


def test_the_measured_matrix_of_the_full_form_is_the_weights() -> None:
    x = tokens()
    (found,) = ac.depth_weights(converted(build(), x, num_blocks=None), x).streams
    assert np.array_equal(found.mixing("measured"), np.nan_to_num(found.weights))


def test_as_json_and_back() -> None:
    x = tokens()
    found = ac.depth_weights(converted(build(), x, num_blocks=2), x)
    values = found.to_dict()
    text = json.dumps(values, allow_nan=False)
    (stream,) = values["streams"]
    assert set(stream) >= {
        *("name", "sites", "kinds", "readers", "sources", "weights", "std", "entropy", "uniform_entropy"),
        *("tokens", "mixing"),
    }
    assert set(stream["mixing"]) == {"plain", "full", "block", "measured"}
    assert stream["weights"][0] == [1.0, None, None, None]
    again = ac.DepthWeights.from_dict(json.loads(text))
    assert again.to_dict() == values
    assert np.array_equal(again.streams[0].weights, found.streams[0].weights, equal_nan=True)
    assert again.streams[0].blocks == found.streams[0].blocks


# ------------------------------------------------------------------ what it must leave alone


class Eventful(nn.Module):
    """Batch norm, dropout, a counter, a list, and Python's and torch's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Picture()
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self.kept: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        self.calls += 1
        self.kept.append(self.calls)
        return self.net(self.drop(x))


def test_nothing_of_the_model_changes() -> None:
    x = pixels()
    model = build(Eventful).train()
    ac.transform(model, x, ac.AttnResConfig(num_blocks=2, lowering="eager"))
    randomize_queries(ac.pseudo_queries(model))
    model(x).square().sum().backward()
    forward = model.net.__dict__["forward"]
    compiled, report, variants = forward._compiled, ac.report(model), len(ac.pseudo_queries(model))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    objects = {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())}
    versions = {name: p._version for name, p in model.named_parameters()}
    random = torch.get_rng_state()
    calls, kept = model.calls, model.kept
    phases = model.net.attnres.report.phases

    found = ac.depth_weights(model, x)

    assert torch.equal(torch.get_rng_state(), random)
    assert model.training and model.calls == calls and model.kept is kept and kept == list(range(1, calls + 1))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {name: id(v) for name, v in (*model.named_parameters(), *model.named_buffers())} == objects
    assert {name: p._version for name, p in model.named_parameters()} == versions
    assert {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}.keys() == grads.keys()
    assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters() if name in grads)
    assert model.net.__dict__["forward"] is forward and forward._compiled is compiled
    assert ac.report(model) == report and model.net.attnres.report.phases is phases and variants
    assert found.streams[0].tokens == 40


def test_the_same_random_numbers_are_drawn_afterwards() -> None:
    x = pixels()
    model = build(Eventful).train()
    ac.transform(model, x, ac.AttnResConfig(num_blocks=2, lowering="eager"))
    torch.manual_seed(4)
    wanted = torch.rand(3)
    torch.manual_seed(4)
    ac.depth_weights(model, x)
    assert torch.equal(torch.rand(3), wanted)


def test_an_open_backward_still_runs() -> None:
    x = tokens()
    net = converted(build(), x, num_blocks=2)
    loss = net(x).square().sum()
    ac.depth_weights(net, x)
    loss.backward()
    assert all(query.grad is not None for query in ac.pseudo_queries(net).values())


class SelfWriting(Net):
    """Normalises a weight of its own whenever it runs in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.branches[0][0].weight.mul_(0.5)
        return super().forward(x)


def test_a_parameter_that_the_model_writes_is_put_back() -> None:
    x = tokens()
    net = converted(build(SelfWriting), x, num_blocks=2).train()
    before = net.branches[0][0].weight.detach().clone()
    (found,) = ac.depth_weights(net, x).streams
    assert torch.equal(net.branches[0][0].weight, before)
    assert found.tokens == 15


def test_a_parameter_that_is_written_where_nobody_sees_it_is_an_error() -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.head = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.head.weight.mul_(0.5)
            return self.head(self.net(x))

    x = tokens()
    model = build(Outside)
    converted(model.net, x, num_blocks=2)
    with pytest.raises(ac.AttnResError, match=r"its own parameter 'head\.weight'.*deepcopy"):
        ac.depth_weights(model, x)


def test_inputs_are_not_written_into() -> None:
    class Caching(Net):
        def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
            cache.append(x)
            return super().forward(x)

    x, cache = tokens(), [torch.zeros(1)]
    net = converted(build(Caching), (x, []), num_blocks=2)
    ac.depth_weights(net, (x, cache))
    assert len(cache) == 1


# ------------------------------------------------------------------ kinds of models


def same(a: ac.DepthWeights, b: ac.DepthWeights, tolerance: float = 1e-12) -> bool:
    return len(a.streams) == len(b.streams) and all(
        one.sources == two.sources
        and np.allclose(one.weights, two.weights, rtol=0, atol=tolerance, equal_nan=True)
        and np.allclose(one.std, two.std, rtol=0, atol=tolerance, equal_nan=True)
        and np.allclose(one.entropy, two.entropy, rtol=0, atol=tolerance)
        for one, two in zip(a.streams, b.streams, strict=True)
    )


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


# ------------------------------------------------------------------ errors


def test_a_model_without_queries() -> None:
    with pytest.raises(ac.NotTransformedError, match=r"holds no pseudo-queries.*transform"):
        ac.depth_weights(build(), tokens())


def test_another_configuration() -> None:
    x = tokens()
    net = converted(build(), x, num_blocks=2)
    assert ac.depth_weights(net, x, ac.AttnResConfig(num_blocks=2)).streams
    with pytest.raises(ac.ConfigError, match="another configuration"):
        ac.depth_weights(net, x, ac.AttnResConfig(num_blocks=3))


def test_a_stream_that_does_not_run() -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Net(3), Net(3)

        def forward(self, x: Tensor, first: bool = True) -> Tensor:
            return self.a(x) if first else self.b(x)

    x = tokens()
    model = build(Choice)
    for net in (model.a, model.b):
        converted(net, x, num_blocks=2)
    with pytest.raises(ac.AttnResError, match=r"site .* did not run on these inputs"):
        ac.depth_weights(model, x)


def test_sites_that_another_path_skips() -> None:
    class Early(Net):
        def forward(self, x: Tensor, stop: bool = False) -> Tensor:
            x = self.root(x)
            for norm, branch in list(zip(self.norms, self.branches, strict=True))[: 4 if stop else None]:
                x = x + branch(norm(x))
            return self.last(x)

    x = tokens()
    net = converted(build(Early), x, num_blocks=2)
    with pytest.raises(ac.PlanMismatchError, match="sites"):
        ac.depth_weights(net, ac.Inputs((x,), {"stop": True}))


def test_numbers_that_are_not_finite() -> None:
    x = tokens()
    net = converted(build(), x, num_blocks=2)
    x[0, 0] = math.nan
    with pytest.raises(ac.AttnResError, match=r"not finite for 1 of 15 tokens"):
        ac.depth_weights(net, x)
    with pytest.raises(ac.AttnResError, match="at least one token"):
        ac.depth_weights(net, tokens(batch=0))


def test_a_model_without_numbers() -> None:
    with torch.device("meta"):
        net = Net()
    x = torch.empty(2, 3, 4, device="meta")
    ac.transform(net, x, ac.AttnResConfig(num_blocks=2, lowering="eager"))
    with pytest.raises(ac.AttnResError, match="meta device"):
        ac.depth_weights(net, x)


def test_the_models_own_error_is_raised_and_nothing_stays() -> None:
    x = tokens()
    net = converted(build(), x, num_blocks=2)
    wanted = net(x)
    with pytest.raises(Exception, match="reduction dim"):
        ac.depth_weights(net, torch.randn(2, 3, 5, dtype=torch.float64))
    with pytest.raises(ac.InputsError):
        ac.depth_weights(net, 3)
    assert torch.equal(net(x), wanted)
