"""A transformed model is run in another way than ``model(x)``: it computes its depth attention, or it raises."""

from __future__ import annotations

import copy
import pickle
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.helpers import randomize, randomize_queries, relative_error, seeded

CONFIG = ac.AttnResConfig(num_blocks=None, lowering="eager")
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self.norm(x))


class InBlocks(nn.Module):
    """Adds in blocks that ``forward`` calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks: Any = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class InSequential(InBlocks):
    """Blocks in an ``nn.Sequential``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x))))


class InForward(InBlocks):
    """Adds in the model's own ``forward``."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block.branch(block.norm(x))
        return self.head(self.norm(x))


class InFeatures(InBlocks):
    """Adds in blocks that another method calls, as in timm."""

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


class InOwnMethod(InFeatures):
    """Adds in another method itself."""

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block.branch(block.norm(x))
        return self.norm(x)


class Inherited(InFeatures):
    """A method that calls the one of its base."""

    def forward_features(self, x: Tensor) -> Tensor:
        return super().forward_features(x)


class OfBackbone(nn.Module):
    """Another module's method, called as such."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = InFeatures()

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone.head(self.backbone.forward_features(x))


class AroundInstance(InFeatures):
    """A method that is reached around the instance: only ``forward`` can be converted."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(InFeatures.forward_features(self, x))


class CalledTwice(InFeatures):
    """A method that one ``forward`` calls twice from one line."""

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.head(self.forward_features(each)) for each in (x, 2 * x))  # type: ignore[return-value]


class ReadOutside(InFeatures):
    """The method's last state is read outside of it alone."""

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class ReadTwiceOutside(ReadOutside):
    """By two modules, which have queries of their own where ``forward`` is the owner."""

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)) + self.embed(x)[..., :3]


BY_METHOD = (InFeatures, InOwnMethod, Inherited, OfBackbone)
BY_FORWARD = (InBlocks, InSequential, InForward, AroundInstance)


def inputs() -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=seeded(3), dtype=torch.float64)


def original(kind: type[nn.Module]) -> nn.Module:
    return randomize(kind()).double()


def converted(kind: type[nn.Module]) -> Any:
    model = original(kind)
    ac.transform(model, inputs(), CONFIG)
    randomize_queries(ac.pseudo_queries(model))
    return model


def by_hand(model: Any, x: Tensor) -> Tensor:
    """The output with depth attention at every read, by its equations."""
    queries = [query.detach() for query in ac.pseudo_queries(model).values()]
    net = getattr(model, "backbone", model)

    def read() -> Tensor:
        if len(sources) == 1:
            return sources[0]
        rows = torch.stack(sources)
        keys = rows / (rows.square().mean(-1, keepdim=True) + CONFIG.eps).sqrt()
        weights = torch.softmax(torch.einsum("nbtd,d->nbt", keys, queries.pop(0)), 0)
        return len(sources) * torch.einsum("nbt,nbtd->btd", weights, rows)

    def plain(module: nn.Module, value: Tensor) -> Tensor:
        return nn.functional.linear(value, module.weight, module.bias)  # type: ignore[arg-type]

    def norm(module: nn.Module, value: Tensor) -> Tensor:
        return nn.functional.layer_norm(value, (WIDTH,), module.weight, module.bias)  # type: ignore[arg-type]

    sources = [plain(net.embed, x)]
    for block in net.blocks:
        sources.append(plain(block.branch, norm(block.norm, read())))
    out = plain(net.head, norm(net.norm, read()))
    assert not queries
    return out


def near(got: Tensor, want: Tensor) -> bool:
    return relative_error(got, want) < 1e-12


@pytest.fixture(params=(*BY_METHOD, *BY_FORWARD), ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


# ------------------------------------------------------------------ what is the owner


def test_the_output_is_the_one_by_hand(kind: Any) -> None:
    model, x = converted(kind), inputs()
    want = by_hand(model, x)
    assert relative_error(want, original(kind)(x)) > 1e-2
    assert near(model(x), want)
    compiled = torch.compile(model, backend="attnres", options={"lowering": "eager"}, fullgraph=True)
    assert near(compiled(x), want)


@pytest.mark.parametrize("kind", BY_METHOD)
def test_a_method_that_forward_calls_agrees_with_it(kind: Any) -> None:
    model, x = converted(kind), inputs()
    net = getattr(model, "backbone", model)
    want = by_hand(model, x)
    assert near(net.head(net.forward_features(x)), want)
    assert near(net(x), want)
    assert near(type(model).forward(model, x), want)
    assert near(torch.compile(lambda x: net.head(net.forward_features(x)), backend="attnres", fullgraph=True)(x), want)
    with pytest.raises(ac.PlainExecutionError):
        torch.compile(net.forward_features, backend="aot_eager")(x)
    if net is model:
        model.forward = types.MethodType(lambda self, x: self.head(self.forward_features(x)), model)
        assert near(model(x), want)


@pytest.mark.parametrize("queries", ["state", "reader"])
@pytest.mark.parametrize("kind", [ReadOutside, ReadTwiceOutside])
def test_what_reads_a_method_s_state_outside_of_it_is_its_output(kind: Any, queries: Any) -> None:
    model, x = original(kind), inputs()
    ac.transform(model, x, replace(CONFIG, queries=queries))
    assert "forward_features" in vars(model)
    randomize_queries(ac.pseudo_queries(model))
    assert list(ac.pseudo_queries(model))[-1] == "output"
    if kind is ReadOutside:
        assert near(model(x), by_hand(model, x))
    # Of the method by itself, of the whole, and of the whole as one graph.
    apart = model.forward_head(model.forward_features(x))
    whole = torch.compile(model, backend="attnres", options={"lowering": "eager"}, fullgraph=True)
    gradients = []
    for run in (lambda: apart, lambda: model(x), lambda: whole(x)):
        out = run()
        assert near(out, apart)
        gradients.append(torch.autograd.grad(out.square().sum(), list(ac.pseudo_queries(model).values())))
    for group in gradients:
        assert all(bool(got.any()) and near(got, want) for got, want in zip(group, gradients[0], strict=True))


def test_copies_run_by_the_method_too() -> None:
    model, x = converted(InFeatures), inputs()
    want = by_hand(model, x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert near(twin.head(twin.forward_features(x)), want)
        with pytest.raises(ac.PlainExecutionError):
            twin.blocks[0](x)


def test_gradients_of_a_method_are_those_of_forward() -> None:
    model, x = converted(InFeatures), inputs()
    want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    got = torch.autograd.grad(model.head(model.forward_features(x)).square().sum(), list(model.parameters()))
    assert all(near(a, b) for a, b in zip(got, want, strict=True))


def test_a_method_that_runs_twice_in_one_call_is_converted_where_its_calls_share_queries() -> None:
    model, x = converted(CalledTwice), inputs()
    assert "forward_features" in vars(model)
    each = [by_hand(model, value) for value in (x, 2 * x)]
    assert near(model(x), each[0] + each[1])
    assert near(model.head(model.forward_features(x)), each[0])


def test_a_method_whose_calls_have_queries_of_their_own_is_not_converted_by_itself() -> None:
    model, x = original(CalledTwice), inputs()
    ac.transform(model, x, replace(CONFIG, calls="separate"))
    assert "forward" in vars(model)
    assert "forward_features" not in vars(model)
    assert near(model(x), original(CalledTwice)(x))
    with pytest.raises(ac.PlainExecutionError):
        model.forward_features(x)


# ------------------------------------------------------------------ around the owner


def ways(model: Any) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    """Ways around what is converted by its ``forward``."""
    yield "the class's forward", lambda x: type(model).forward(model, x)
    yield "the same, compiled", torch.compile(lambda x: type(model).forward(model, x), backend="eager")
    yield (
        "the same, by our backend",
        torch.compile(lambda x: type(model).forward(model, x), backend="attnres", options={"lowering": "eager"}),
    )
    replaced = copy.deepcopy(model)
    replaced.forward = types.MethodType(type(model).forward, replaced)
    yield "forward replaced", replaced


@pytest.mark.parametrize("kind", BY_FORWARD)
def test_forward_around_the_conversion_raises(kind: Any) -> None:
    model = converted(kind)
    for name, call in ways(model):
        with pytest.raises(ac.PlainExecutionError, match="plain sum"):
            pytest.fail(f"{name} ran: {call(inputs())}")


def one_block(block: Any) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    yield "called", block
    yield "forward", block.forward
    yield "the class's forward", lambda x: type(block).forward(block, x)
    yield "a copy", copy.deepcopy(block)
    yield "compiled", torch.compile(block, backend="eager")
    yield "in a compiled function", torch.compile(lambda x: 2 * block(x), backend="aot_eager", fullgraph=True)
    yield "by our backend", torch.compile(lambda x: 2 * block(x), backend="attnres", options={"lowering": "eager"})
    yield "vmap", torch.func.vmap(block)
    yield "functional_call", lambda x: torch.func.functional_call(block, dict(block.named_parameters()), (x,))
    yield "exported", lambda x: torch.export.export(block, (x,))
    yield "checkpointed", lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


@pytest.mark.parametrize("kind", [InBlocks, InSequential, InFeatures, Inherited])
def test_a_layer_by_itself_raises(kind: Any) -> None:
    model = converted(kind)
    model(inputs())
    for name, call in one_block(model.blocks[1]):
        with pytest.raises(ac.PlainExecutionError, match=r"blocks\.1|plain sum"):
            pytest.fail(f"{name} ran: {call(inputs())}")


@pytest.mark.filterwarnings("ignore")
def test_layers_traced_sliced_and_called_in_a_loop_raise() -> None:
    model = converted(InSequential)

    def loop(x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block(x)
        return x

    for call in (model.blocks[:2], model.blocks, loop, lambda x: torch.jit.trace(model.blocks[0], (x,))):
        with pytest.raises(ac.PlainExecutionError, match=r"test_ways_to_run\.py:\d+"):
            call(inputs())


def test_a_branch_by_itself_is_no_step() -> None:
    model, plain = converted(InForward), original(InForward)
    x = inputs()
    for ours, theirs in zip(model.blocks, plain.blocks, strict=True):  # type: ignore[call-overload]
        assert torch.equal(ours.branch(ours.norm(x)), theirs.branch(theirs.norm(x)))


def test_a_module_that_is_called_outside_as_well_may_be() -> None:
    class Add(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    class Layer(nn.Module):
        def __init__(self, add: Add) -> None:
            super().__init__()
            self.add, self.norm, self.branch = add, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.add(x, self.branch(self.norm(x)))

    class Encoder(nn.Module):
        def __init__(self, add: Add) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(add) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add = Add()
            self.position = nn.Parameter(torch.zeros(5, WIDTH))
            self.encoder = Encoder(self.add)
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(self.add(x, self.position)))

    model = converted(Shares)
    assert torch.isfinite(model(inputs())).all()
    with pytest.raises(ac.PlainExecutionError):
        model.encoder.layers[0](inputs())


# ------------------------------------------------------------------ torch.fx


@pytest.mark.parametrize("around", [lambda model: model, nn.Sequential], ids=["itself", "in a wrapper"])
def test_symbolic_tracing_raises(kind: Any, around: Callable[[nn.Module], nn.Module]) -> None:
    model = around(converted(kind))
    with pytest.raises(ac.PlainExecutionError, match="symbolically trace"):
        torch.fx.symbolic_trace(model)
    with pytest.raises(ac.PlainExecutionError, match="rewrite_graph"):
        torch.fx.Tracer().trace(model)
    ac.revert(model)
    assert torch.equal(torch.fx.symbolic_trace(model)(inputs()), around(original(kind))(inputs()))


def test_feature_extractors_of_torchvision_raise() -> None:
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    model = converted(InBlocks)
    with pytest.raises(ac.PlainExecutionError):
        extraction.create_feature_extractor(model, return_nodes=["norm"])


# ------------------------------------------------------------------ the original, for those who want it


def test_plain_runs_the_original_in_this_thread_alone(kind: Any) -> None:
    model, plain, x = converted(kind), original(kind), inputs()
    want = by_hand(model, x)
    seen: list[Tensor] = []
    with ac.plain(model):
        assert torch.equal(model(x), plain(x))
        assert torch.equal(type(model).forward(model, x), plain(x))
        assert torch.equal(torch.fx.symbolic_trace(model)(x), plain(x))
        if hasattr(model, "blocks"):
            assert torch.equal(model.blocks[0](x), plain.blocks[0](x))  # type: ignore[index, operator]
        with pytest.raises((ac.PlainExecutionError, RuntimeError)):
            torch.compile(lambda x: model(x), backend="attnres", options={"lowering": "eager"})(x)
        thread = threading.Thread(target=lambda: seen.append(model(x)))
        thread.start()
        thread.join()
    assert near(seen[0], want)
    assert near(model(x), want)
    with pytest.raises(ac.NotTransformedError), ac.plain(plain):
        pass


# ------------------------------------------------------------------ undoing it


def test_revert_leaves_nothing(kind: Any) -> None:
    model = original(kind)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    signatures = {name: module.forward for name, module in model.named_modules()}
    ac.transform(model, inputs(), CONFIG)
    randomize_queries(ac.pseudo_queries(model))
    model(inputs())
    ac.revert(model)
    after = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert values.keys() == after[name].keys()
        assert all(after[name][key] is value for key, value in values.items())
    assert {name: module.forward for name, module in model.named_modules()} == signatures
    assert torch.equal(model(inputs()), original(kind)(inputs()))


def test_revert_sets_a_guard_free_that_something_wrapped() -> None:
    model, x = converted(InBlocks), inputs()
    block = model.blocks[0]
    block._old_forward, block.forward = block.forward, lambda x: block._old_forward(x)
    assert near(model(x), by_hand(model, x))
    ac.revert(model)
    assert torch.equal(model(x), original(InBlocks)(x))
