"""Activation checkpointing where it is hard: nested regions, dropout, Hugging Face's own switch, Inductor.

Single regions of every shape are in tests/passes/test_checkpoint.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attnres_compile as ac
from tests.helpers import (
    gradient_error,
    outputs_and_gradients,
    randomize,
    randomize_queries,
    relative_error,
    saved_bytes,
)
from tests.models import WIDTH, Block
from tests.zoo.families import BY_NAME
from tests.zoo.support import prepare

CONFIG = ac.AttnResConfig(num_blocks=3, lowering="eager")
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
LAYERS = 4


class Nest(nn.Module):
    """Blocks under checkpoints that hold checkpoints."""

    def __init__(self, how: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.how)(x)

    def plain(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def whole(self, x: Tensor) -> Tensor:
        """All of it, and each layer of it: not even the norm is outside."""

        def all_layers(x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.norm(x)

        return checkpoint(all_layers, x, use_reentrant=False)

    def halves(self, x: Tensor) -> Tensor:
        """Pairs of layers, with a branch of the second layer in one of its own: three depths."""

        def branch(layer: Block, x: Tensor) -> Tensor:
            return checkpoint(lambda y: layer.mlp(y), layer.norm2(x), use_reentrant=False)

        def second(layer: Block, x: Tensor) -> Tensor:
            x = x + layer.mixer(layer.norm1(x)).cumsum(1)
            return x + branch(layer, x)

        def pair(first: Block, layer: Block, x: Tensor) -> Tensor:
            return checkpoint(second, layer, first(x), use_reentrant=False)

        for first, layer in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = checkpoint(pair, first, layer, x, use_reentrant=False)
        return self.norm(x)


def build(how: str, dropout: float = 0.0) -> Nest:
    return randomize(Nest(how, dropout).double()).train()  # type: ignore[return-value]


@pytest.mark.parametrize(("how", "fused"), [("whole", "off"), ("halves", "on")])
def test_nested_regions(how: str, fused: str) -> None:
    """Found whole, exact with the same masks, trained alike with random queries, and the memory stays low."""
    config = ac.AttnResConfig(num_blocks=3, lowering="eager", two_phase=fused, fuse=fused)  # type: ignore[arg-type]
    original = build(how, dropout=0.3)
    names = dict(original.named_parameters())
    want = outputs_and_gradients(original, names, (X,))
    runs = []
    kept = {}
    for way in (how, "plain"):
        model = build(way, dropout=0.3)
        names = dict(model.named_parameters())
        ac.transform(model, X, config=config)
        assert [len(stream.sublayers) for stream in ac.report(model).streams] == [2 * LAYERS]
        got = outputs_and_gradients(model, names, (X,))
        assert relative_error(got.outputs, want.outputs) < 1e-12
        assert gradient_error(got.gradients, want.gradients) < 1e-11
        randomize_queries(ac.pseudo_queries(model))
        runs.append(outputs_and_gradients(model, dict(model.named_parameters()), (X,)))
        kept[way] = saved_bytes(lambda model=model: model(X))
    ours, plain = runs
    assert relative_error(ours.outputs, want.outputs) > 1e-2
    assert relative_error(ours.outputs, plain.outputs) < 1e-12
    assert gradient_error(ours.gradients, plain.gradients) < 1e-10
    assert kept[how] <= 0.2 * kept["plain"]


@pytest.mark.parametrize(("name", "reentrant"), [("llama", True), ("gpt2", False)])
def test_gradient_checkpointing_enable(name: str, reentrant: bool) -> None:
    """In training mode, with dropout where the family has it."""
    family = BY_NAME[name]
    inputs = family.inputs(2, 24, 0)

    def made(checkpointed: bool) -> nn.Module:
        model = prepare(family).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        return model

    original = made(not reentrant)
    # Reentrant checkpoints give no gradients to torch.autograd.grad; those of a model without them are the same.
    want = outputs_and_gradients(original, dict(original.named_parameters()), inputs)
    kept = {}
    for checkpointed in (True, False):
        model = made(checkpointed)
        names = dict(model.named_parameters())
        ac.transform(model, inputs, config=CONFIG)
        (stream,) = ac.report(model).streams
        assert len(stream.sublayers) == family.sublayers[0]
        got = outputs_and_gradients(model, names, inputs)
        assert relative_error(got.outputs, want.outputs) < 1e-5
        assert gradient_error(got.gradients, want.gradients) < 1e-5
        kept[checkpointed] = saved_bytes(lambda model=model: model(**inputs, use_cache=False))
    assert kept[True] < 0.5 * kept[False]


@pytest.mark.inductor
def test_under_inductor_the_stream_is_not_lost() -> None:
    """Inductor meets the bodies of regions before the graph around them; it has gradients alone, and says so."""
    runs = []
    x = X.detach().float().requires_grad_()
    for lowering in ("eager", "inductor"):
        model = build("whole").float()
        ac.transform(model, x, config=ac.AttnResConfig(num_blocks=3, lowering=lowering))  # type: ignore[arg-type]
        randomize_queries(ac.pseudo_queries(model))
        runs.append(outputs_and_gradients(model, dict(model.named_parameters()), (x,)))
    eager, compiled = runs
    assert relative_error(compiled.outputs, eager.outputs) < 1e-5
    assert gradient_error(compiled.gradients, eager.gradients) < 1e-4
    queries = [gradient for name, gradient in compiled.gradients.items() if "attnres" in name]
    assert queries and all(bool(gradient.any()) for gradient in queries)
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        slope.square().sum().backward()
