"""Streams that run through graph breaks: depth attention goes on behind the break, with the numbers of no break."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.crossing import piece
from tests import broken_models as nets
from tests.helpers import Run, outputs_and_gradients, randomize_queries, relative_error
from tests.models import Block, Model
from tests.models import example as example_

LIMIT = 1e-12


def example(batch: int = 2, length: int = 3, seed: int = 0) -> Tensor:
    return example_(batch, length, seed).double()


def config(**options: Any) -> ac.AttnResConfig:
    return ac.AttnResConfig(**{"num_blocks": 3, "lowering": "eager", "gain": "mean", **options})


def converted(model: Model, random: bool = True, **options: Any) -> Model:
    ac.transform(model, example(), config=config(**options))
    if random:
        randomize_queries(ac.pseudo_queries(model))
    return model


KINDS: dict[str, tuple[Callable[[], Model], type[Block]]] = {
    "a print": (lambda: nets.network(nets.Printing), Block),
    "a print of a value": (lambda: nets.network(nets.PrintingValue), Block),
    "disabled attention": (lambda: nets.network(nets.Disabled), Block),
    "disabled norm and attention": (lambda: nets.network(nets.DisabledWithNorm), Block),
    "a data-dependent branch": (lambda: nets.network(nets.Branching), Block),
    "parallel branches": (lambda: nets.network(nets.Parallel), nets.ParallelPlain),
    "hooks": (lambda: nets.hooked(nets.network(), lambda x: None), Block),
    "hooks that return a view": (lambda: nets.hooked(nets.network(), lambda x: x.view_as(x)), Block),
    "a loop over what data decides": (lambda: nets.network(nets.Routed), nets.RoutedPlain),
    "a break between two layers": (lambda: nets.network(between=_pause), Block),
}


def _pause(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


@functools.cache
def without_breaks(block: type[Block], gain: str) -> tuple[tuple[str, ...], Run]:
    """Names of the queries, outputs and gradients of a converted network whose stream is in one graph."""
    model = converted(nets.network(block), gain=gain)
    return tuple(ac.pseudo_queries(model)), outputs_and_gradients(model, dict(model.named_parameters()), (example(),))


@pytest.mark.parametrize("kind", KINDS)
def test_depth_attention_goes_on_behind_the_break(kind: str) -> None:
    """Zero queries change nothing, and random ones compute what they do in the same model without the break."""
    goes_on(*KINDS[kind])


def test_where_dynamo_fails_by_itself_transform_says_so() -> None:
    """Whether it does is up to the release: where ``torch.compile`` runs the model, depth attention goes on."""
    model = nets.network(nets.PrintingFormatted)
    try:
        torch.compile(model, backend="eager")(example())
    except torch._dynamo.exc.InternalTorchDynamoError:
        keys = list(model.state_dict())
        with pytest.raises(ac.GraphBreakError, match=r"dynamo itself fails .* with or without"):
            ac.transform(model, example(), config=config())
        assert list(model.state_dict()) == keys
    else:
        goes_on(lambda: nets.network(nets.PrintingFormatted), Block)


def goes_on(make: Callable[[], Model], block: type[Block]) -> None:
    plain, model = make(), make()
    names = list(dict(plain.named_parameters()))
    want = outputs_and_gradients(plain, dict(plain.named_parameters()), (example(),))
    converted(model, random=False, gain="sum")
    found, whole = without_breaks(block, "sum")
    assert tuple(ac.pseudo_queries(model)) == found
    assert ac.report(model).graph_breaks
    got = outputs_and_gradients(model, dict(model.named_parameters()), (example(),))
    assert relative_error(got.outputs, want.outputs) < LIMIT
    assert max(relative_error(got.gradients[n], want.gradients[n]) for n in names) < LIMIT
    randomize_queries(ac.pseudo_queries(model))
    got = outputs_and_gradients(model, dict(model.named_parameters()), (example(),))
    assert relative_error(got.outputs, whole.outputs) < LIMIT
    queries = [name for name in whole.gradients if ".attnres." in name]
    assert len(queries) == len(found)
    assert all(whole.gradients[name].abs().sum() > 0 for name in queries)
    assert max(relative_error(got.gradients[n], whole.gradients[n]) for n in whole.gradients) < LIMIT


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": None},
        {"block_size": 4, "num_blocks": None},
        {"value": "normalized", "key_norm_weight": True},
        {"two_phase": "on", "fuse": "on"},
    ],
    ids=str,
)
def test_every_layout(options: dict[str, Any]) -> None:
    model, whole = (converted(nets.network(block), **options) for block in (nets.Disabled, Block))
    got = outputs_and_gradients(model, dict(model.named_parameters()), (example(),))
    want = outputs_and_gradients(whole, dict(whole.named_parameters()), (example(),))
    assert relative_error(got.outputs, want.outputs) < LIMIT
    assert max(relative_error(got.gradients[n], want.gradients[n]) for n in want.gradients) < LIMIT


# ------------------------------------------------------------------ how often dynamo compiles


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Graphs that dynamo made, and variants that were made of them."""
    found = {"graphs": 0, "variants": 0}
    init, make = piece.Piece.__init__, piece.Piece._make

    def counted_init(self: piece.Piece, *args: Any) -> None:
        found["graphs"] += 1
        init(self, *args)

    def counted_make(self: piece.Piece, *args: Any) -> Any:
        found["variants"] += 1
        return make(self, *args)

    monkeypatch.setattr(piece.Piece, "__init__", counted_init)
    monkeypatch.setattr(piece.Piece, "_make", counted_make)
    return found


@pytest.mark.parametrize("layers", [4, 12])
def test_layers_share_graphs_and_variants(layers: int, counts: dict[str, int]) -> None:
    model = converted(nets.network(nets.Disabled, layers=layers), num_blocks=2)
    counts.update(graphs=0, variants=0)
    with torch.no_grad():
        model(example())
    # Two pieces per layer: up to the attention, and from there on.
    assert counts["graphs"] == 2
    # The root, and the first block and the second one, begun in this layer or before.
    assert counts["variants"] == 4
    counts.update(graphs=0, variants=0)
    with torch.no_grad():
        model(example())
    assert counts == {"graphs": 0, "variants": 0}


@torch._dynamo.config.patch(recompile_limit=64)
def test_batch_sizes_modes_and_no_grad() -> None:
    model, whole = (converted(nets.network(block, dropout=0.2)) for block in (nets.Disabled, Block))
    for batch, length in ((2, 3), (4, 5)):
        assert relative_error(model(example(batch, length)), whole(example(batch, length))) < LIMIT
    with torch.no_grad():
        assert relative_error(model(example()), whole(example())) < LIMIT
    with torch.inference_mode():
        assert relative_error(model(example()), whole(example())) < LIMIT
    for each in (model, whole):
        each.train()
    runs = [outputs_and_gradients(each, dict(each.named_parameters()), (example(),)) for each in (model, whole)]
    assert relative_error(runs[0].outputs, runs[1].outputs) < LIMIT
    assert max(relative_error(runs[0].gradients[n], runs[1].gradients[n]) for n in runs[1].gradients) < LIMIT
    for each in (model, whole):
        each.float().eval()
    with torch.autocast("cpu", torch.bfloat16):
        got, want = model(example_()), whole(example_())
    assert got.dtype == want.dtype
    assert relative_error(got, want) < 1e-5


# ------------------------------------------------------------------ copies, other compilers, threads


def test_it_is_reverted_copied_pickled_and_exported() -> None:
    model, x = nets.network(nets.Printing), example()
    before, keys = model(x), list(model.state_dict())
    converted(model)
    want = model(x)
    assert relative_error(want, before) > 1e-2
    assert relative_error(copy.deepcopy(model)(x), want) < LIMIT
    assert relative_error(pickle.loads(pickle.dumps(model))(x), want) < LIMIT
    assert relative_error(ac.export_program(model, x).module()(x), want) < LIMIT
    state = {name: value.clone() for name, value in model.state_dict().items()}
    other = converted(nets.network(nets.Printing), random=False)
    other.load_state_dict(state, assign=True)
    assert relative_error(other(x), want) < LIMIT
    ac.revert(model)
    assert torch.equal(model(x), before)
    assert list(model.state_dict()) == keys


@pytest.mark.filterwarnings("ignore")
def test_inside_an_outer_compiler() -> None:
    model, x = converted(nets.network(nets.Disabled)), example()
    want = model(x)
    for options in ({"backend": "eager"}, {"backend": "attnres", "options": {"lowering": "eager"}}):
        assert relative_error(torch.compile(model, **options)(x), want) < LIMIT
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="eager", fullgraph=True)(x)
    with torch.compiler.set_stance("force_eager"), pytest.raises(ac.PlanMismatchError, match="0 of its 6 sites"):
        model(x)
    with pytest.raises(ac.PlainExecutionError):
        torch.export.export(model, (x,))


def test_threads_and_models_of_one_class_are_independent() -> None:
    models = [converted(nets.network(nets.Disabled), num_blocks=blocks) for blocks in (2, 4)]
    randomize_queries(ac.pseudo_queries(models[1]), seed=5)
    x = example()
    with torch.no_grad():
        want = [model(x) for model in models]
        whole = converted(nets.network(), num_blocks=4)
        randomize_queries(ac.pseudo_queries(whole), seed=5)
        assert relative_error(want[1], whole(x)) < LIMIT
    assert relative_error(want[0], want[1]) > 1e-2
    errors: list[float] = []

    def call(number: int) -> None:
        for _ in range(20):
            with torch.no_grad():
                errors.append(relative_error(models[number](x), want[number]))

    threads = [threading.Thread(target=call, args=(number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 80
    assert max(errors) < LIMIT


# ------------------------------------------------------------------ compiled layer by layer


def _compiled(model: Model, how: str) -> Model:
    for number, layer in enumerate(model.encoder.layers):
        if how == "method":
            layer.compile(backend="eager")
        else:
            model.encoder.layers[number] = torch.compile(layer, backend="eager")  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("how", ["method", "function"])
def test_layers_that_are_compiled_on_their_own(how: str, counts: dict[str, int]) -> None:
    model = converted(_compiled(nets.network(layers=3), how))
    names, want = without_breaks(Block, "mean")
    assert tuple(ac.pseudo_queries(model)) == names
    counts.update(graphs=0, variants=0)
    got = outputs_and_gradients(model, ac.pseudo_queries(model), (example(),))
    assert relative_error(got.outputs, want.outputs) < LIMIT
    for name, gradient in got.gradients.items():
        owner, _, site = name.partition(".")
        key = f"{owner}.attnres.{site.replace('.', '_')}"
        assert relative_error(gradient, want.gradients[key]) < LIMIT
    # One graph for the first layer's input and one for the others', one variant per number of sources.
    assert counts["graphs"] <= 2
    assert counts["variants"] <= 3
    twin = copy.deepcopy(model)
    assert relative_error(twin(example()), got.outputs[0]) < LIMIT
    ac.revert(model)
    assert torch.equal(model(example()), nets.network()(example()))
    layer: Any = model.encoder.layers[0]
    assert layer._compiled_call_impl is not None if how == "method" else isinstance(layer._orig_mod, Block)


def test_a_compiled_owner_or_a_part_of_the_layers_is_refused() -> None:
    some = nets.network()
    some.encoder.layers[1].compile(backend="eager")
    owner = nets.network()
    owner.encoder.compile(backend="eager")
    for model, path in ((some, "encoder.layers.1"), (owner, "encoder")):
        with pytest.raises(ac.AlreadyCompiledError, match="original module first") as caught:
            ac.transform(model, example(), config=config())
        assert caught.value.module == path
        assert "forward" not in vars(model.encoder)
        assert all("attnres" not in name for name, _ in model.named_modules())


# ------------------------------------------------------------------ never wrong in silence


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (lambda: nets.hooked(nets.network(), torch.clone), ac.GraphBreakError),
        (lambda: nets.hooked(nets.network(), lambda x: x + 1), ac.NoStreamError),
        (lambda: nets.hooked(nets.network(), lambda x: x.mul_(1.01)), ac.GraphBreakError),
        (lambda: nets.hooked(nets.network(), lambda x: x.data.mul_(1.01)), ac.GraphBreakError),
        (lambda: nets.network(nets.OutsideAdd), ac.GraphBreakError),
        (lambda: nets.network(nets.InPlace), ac.GraphBreakError),
        (lambda: nets.network(nets.Chaotic), ac.GraphBreakError),
        (lambda: nets.network(nets.Printing).to("meta"), ac.GraphBreakError),
    ],
    ids=["clones", "adds", "writes", "writes unseen", "an add outside", "in-place adds", "chaotic", "meta"],
)
def test_what_cannot_be_followed_is_refused_and_named(model: Callable[[], Model], error: type[ac.AttnResError]) -> None:
    made = model()
    x = example().to(made.head.weight.device)
    keys = list(made.state_dict())
    with pytest.raises(error) as caught:
        ac.transform(made, x, config=config())
    file, line = caught.value.where.rsplit(":", 1)
    assert file.endswith(("broken_models.py", "models.py"))
    assert int(line) > 0
    assert list(made.state_dict()) == keys
    assert "forward" not in vars(made.encoder)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 0.5 * grad


def _hooked_gradient(x: Tensor) -> None:
    x.register_hook(lambda grad: 0.5 * grad)


LATER: dict[str, tuple[Callable[[Tensor], Tensor | None], str]] = {
    "a clone": (torch.clone, "another tensor"),
    "a sum": (lambda x: x + 1, "another tensor"),
    "a part": (lambda x: x[:, :2], "another tensor"),
    "a write": (lambda x: x.mul_(2), "written in place"),
    "detached": (lambda x: x.detach(), "another gradient"),
    "detached in place": (lambda x: x.detach_(), "detached in place"),
    "a function": (Halved.apply, "another gradient"),
    "a hook on the gradient": (_hooked_gradient, "a hook on its gradient"),
}


@pytest.mark.parametrize("kind", LATER)
def test_a_stream_that_changes_behind_our_back_raises(kind: str) -> None:
    function, message = LATER[kind]
    model = converted(nets.network(nets.Disabled))
    model(example())
    nets.hooked(model, function, layer=1)
    with pytest.raises(ac.GraphBreakError, match=message) as caught:
        model(example())
    assert "broken_models.py" in caught.value.where
    assert "4 of 6 steps" in str(caught.value)


def test_a_write_in_inference_mode_raises() -> None:
    model = converted(nets.network(nets.Disabled))
    nets.hooked(model, lambda x: x.mul_(2), layer=1)
    with torch.inference_mode(), pytest.raises(ac.GraphBreakError, match="written in place"):
        model(example())


def test_a_branch_taken_the_other_way_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted(nets.network(nets.Branching))
    model(example())
    monkeypatch.setattr(nets.Branching, "limit", 0.0)
    with pytest.raises((ac.GraphBreakError, ac.PlanMismatchError)) as caught:
        model(example())
    assert "broken_models.py" in caught.value.where


def test_steps_in_another_order_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many steps and sites as before: only the lines tell that the queries would be those of others."""
    model = converted(nets.network(nets.Ordered))
    model(example())
    monkeypatch.setattr(nets.Ordered, "swapped", True)
    with pytest.raises(ac.PlanMismatchError, match="step 1 of the residual stream is another one") as caught:
        model(example())
    assert "broken_models.py" in caught.value.where


def test_other_layers_raise() -> None:
    model = converted(nets.network(nets.Disabled))
    layers = model.encoder.layers
    model.encoder.layers = layers[:2]
    with pytest.raises(ac.PlanMismatchError, match="4 of its 6 sites") as caught:
        model(example())
    assert "broken_models.py" in caught.value.where
    model.encoder.layers = nn.ModuleList([*layers, layers[0]])
    with pytest.raises((ac.GraphBreakError, ac.PlanMismatchError)):
        model(example())
    model.encoder.layers = layers
    model(example())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_outside_of_the_graphs_raises(reentrant: bool) -> None:
    model = converted(nets.network(nets.Disabled)).train()
    for layer in model.encoder.layers:
        forward = layer.forward

        def checkpointed(x: Tensor, forward: Any = forward) -> Tensor:
            return torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=reentrant)

        layer.forward = checkpointed  # type: ignore[method-assign]
    with pytest.raises(ac.AttnResError):
        model(example()).sum().backward()


def test_a_layer_without_gradients_raises() -> None:
    model = converted(nets.network(nets.Printing))
    layer = model.encoder.layers[2]
    model.encoder.layers[2].forward = torch.no_grad()(layer.forward)  # type: ignore[method-assign]
    with pytest.raises(ac.GraphBreakError):
        model(example())


def test_memory_that_attention_uses_again_does_not_reach_the_sources() -> None:
    """Where it does so from the start the recording shows it; later on, sources are in memory of their own."""

    class Buffered(nets.Disabled):
        memory: Tensor | None = None

        @torch.compiler.disable
        def attend(self, normed: Tensor) -> Tensor:
            made = self.mixer(normed).cumsum(1)
            return made if Buffered.memory is None else Buffered.memory.copy_(made)

    # Every sublayer is a source of its own, so that what attention returns is one as it is.
    with torch.no_grad():
        want = converted(nets.network(), num_blocks=None)(example())
        model = converted(nets.network(Buffered), num_blocks=None)
        Buffered.memory = torch.zeros(2, 3, 12, dtype=torch.float64)
        assert relative_error(model(example()), want) < LIMIT
        with pytest.raises(ac.NoStreamError, match="mutated"):
            converted(nets.network(Buffered))


def test_a_sum_that_is_no_state_is_refused() -> None:
    """Both adds are one step where nothing reads what is between them; a break there would take it apart."""

    class Watched(Block):
        def forward(self, x: Tensor) -> Tensor:
            n = self.norm1(x)
            x = x + self.mixer(n)
            print(f"{float(x.sum()):.0f}", end="")
            return x + self.mlp(n)

    with pytest.raises(ac.GraphBreakError) as caught:
        converted(nets.network(Watched))
    assert "test_graph_breaks.py" in caught.value.where
