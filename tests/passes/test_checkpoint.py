"""Activation checkpointing: streams through checkpointed regions are converted, and still recomputed."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import attnres_compile as ac
from attnres_compile.passes.checkpoint import close_regions, make_eager, open_regions
from tests.helpers import outputs_and_gradients, randomize, randomize_queries, relative_error, saved_bytes
from tests.models import WIDTH, Block

CONFIG = ac.AttnResConfig(num_blocks=3, lowering="eager")
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
# Reentrant checkpointing gives no gradients unless an input wants one.
X.requires_grad_()


def _keep_matmuls(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


_CONTEXTS = functools.partial(create_selective_checkpoint_contexts, _keep_matmuls)


class Stack(nn.Module):
    """Blocks of which some calls are checkpointed: each layer, pairs of layers, or single branches."""

    def __init__(self, how: str, dropout: float = 0.0, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.how = how

    def call(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.how == "selective":
            return checkpoint(function, x, use_reentrant=False, context_fn=_CONTEXTS)
        return checkpoint(function, x, use_reentrant=self.how == "reentrant")

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "plain":
            for layer in self.layers:
                x = layer(x)
        elif self.how == "pairs":
            for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
                x = self.call(lambda y, a=first, b=second: b(a(y)), x)
        elif self.how == "branches":
            for layer in self.layers:
                x = x + self.call(lambda y, m=layer: m.mixer(m.norm1(y)).cumsum(1), x)
                x = x + self.call(lambda y, m=layer: m.mlp(m.norm2(y)), x)
        elif self.how == "mixed":
            for index, layer in enumerate(self.layers):
                x = self.call(layer, x) if index % 2 else layer(x)
        else:
            for layer in self.layers:
                x = self.call(layer, x)
        return self.norm(x)


WAYS = ["layers", "reentrant", "pairs", "branches", "mixed", "selective"]


def build(how: str, dropout: float = 0.0) -> Stack:
    model = randomize(Stack(how, dropout).double()).train()
    assert isinstance(model, Stack)
    return model


@pytest.mark.parametrize("how", WAYS)
def test_exact_and_found_whole(how: str) -> None:
    # What reentrant checkpoints leave out of torch.autograd.grad, a model without checkpoints has.
    original = build("plain" if how == "reentrant" else how)
    want = outputs_and_gradients(original, dict(original.named_parameters()), (X,))
    model = build(how)
    names = dict(model.named_parameters())
    ac.transform(model, X, config=CONFIG)
    assert [len(stream.sublayers) for stream in ac.report(model).streams] == [8]
    got = outputs_and_gradients(model, names, (X,))
    assert relative_error(got.outputs, want.outputs) < 1e-12
    assert max(relative_error(got.gradients[n], want.gradients[n]) for n in names) < 1e-11


@pytest.mark.parametrize("how", WAYS)
def test_random_queries_give_what_they_give_without_checkpoints(how: str) -> None:
    runs = []
    for way in ("plain", how):
        model = build(way)
        ac.transform(model, X, config=CONFIG)
        randomize_queries(dict(enumerate(ac.pseudo_queries(model).values())))
        runs.append(outputs_and_gradients(model, dict(model.named_parameters()), (X,)))
    plain, ours = runs
    assert relative_error(ours.outputs, plain.outputs) < 1e-12
    gradients = zip(ours.gradients.values(), plain.gradients.values(), strict=True)
    assert max(relative_error(a, b) for a, b in gradients) < 1e-10


def test_dropout_draws_the_same_numbers_when_recomputed() -> None:
    model = build("layers", dropout=0.3)
    names = dict(model.named_parameters())
    want = outputs_and_gradients(model, names, (X,))
    ac.transform(model, X, config=CONFIG)
    got = outputs_and_gradients(model, names, (X,))
    assert relative_error(got.outputs, want.outputs) < 1e-12
    assert max(relative_error(got.gradients[n], want.gradients[n]) for n in names) < 1e-11


def test_memory_stays_low() -> None:
    x = torch.randn(4, 64, WIDTH, dtype=torch.float64)
    sizes = {}
    for how in ("plain", "layers"):
        model = build(how)
        ac.transform(model, x, config=CONFIG)
        sizes[how] = saved_bytes(lambda model=model: model(x))
    assert sizes["layers"] < 0.5 * sizes["plain"]


@pytest.mark.parametrize("backend", ["own", "outer", "late"])
def test_every_way_in(backend: str) -> None:
    model = build("layers")
    want = model(X)
    if backend != "late":
        ac.transform(model, X, config=CONFIG)
    options = {"lowering": "eager"} if backend == "outer" else {"lowering": "eager", "num_blocks": 3}
    run = model if backend == "own" else torch.compile(model, backend="attnres", options=options)
    assert relative_error(run(X), want) < 1e-12
    randomize_queries(ac.pseudo_queries(model))
    assert relative_error(run(X), want) > 1e-3


class _Scaled(nn.Module):
    """A body with a constant of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (x + torch.nn.functional.linear(x * self.scale, weight),)


def test_a_constant_of_a_region_is_handed_in() -> None:
    """By hand: dynamo hands constants in by itself."""
    root = nn.Module()
    root.add_module("body", torch.fx.symbolic_trace(_Scaled()))
    graph = torch.fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    for _ in range(4):
        call = graph.call_function(
            torch.ops.higher_order.tag_activation_checkpoint, (graph.get_attr("body"), x, weight)
        )
        x = graph.call_function(operator.getitem, (call, 0))
    graph.output(x)
    module = torch.fx.GraphModule(root, graph)
    given = X.detach(), torch.randn(WIDTH, WIDTH, dtype=torch.float64)
    want = given[0]
    for _ in range(4):
        (want,) = _Scaled()(want, given[1])
    regions = open_regions(module)
    assert [region.parent for region in regions] == [None] * 4
    assert all(node.target != "body" for node in module.graph.nodes)
    close_regions(module, regions)
    module.graph.lint()
    make_eager(module)
    module.recompile()
    assert torch.equal(module(*given), want)
