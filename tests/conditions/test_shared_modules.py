"""Weights and modules that stand in several places: the right count, a query per place in depth, exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.conditions.depth_stream import DepthStream
from tests.helpers import gradient_error, outputs_and_gradients, randomize, randomize_queries, relative_error
from tests.models import SUBLAYERS, WIDTH, Block, Model, build, example

LAYERS = 4


class Shared(nn.Module):
    """One block, called again and again (or some blocks, in turn), and an embedding tied to the head."""

    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i in range(LAYERS):
            x = self.blocks[i % len(self.blocks)](x)
        return self.head(self.norm(x))

    def by_hand(self, ids: Tensor, sizes: list[int], queries: list[Tensor]) -> Tensor:
        stream = DepthStream(self.embed(ids), sizes, queries)
        for i in range(LAYERS):
            block = self.blocks[i % len(self.blocks)]
            stream.add(block.mixer(block.norm1(stream.read())).cumsum(1))
            stream.add(block.mlp(block.norm2(stream.read())))
        return self.head(self.norm(stream.read()))


@pytest.mark.parametrize("blocks", [1, 2])
def test_shared_layers_have_a_query_per_place_in_depth(blocks: int) -> None:
    ids = torch.arange(8).reshape(2, 4)
    model = randomize(Shared(blocks)).double().eval()
    with pytest.raises(ac.NoStreamError) as caught:
        ac.transform(model, ids)
    assert {r.reason for r in caught.value.report.rejections} >= {"shared_weights"}
    names = dict(model.named_parameters())
    plain = outputs_and_gradients(model, names, (ids,))
    ac.transform(model, ids, ac.AttnResConfig(num_blocks=3, lowering="eager", depth_loops=True))
    (stream,) = ac.report(model).streams
    queries = ac.pseudo_queries(model)
    assert len(stream.sublayers) == 2 * LAYERS == len(queries) == len({id(query) for query in queries.values()})
    got = outputs_and_gradients(model, names, (ids,))
    assert relative_error(got.outputs, plain.outputs) < 1e-12
    assert gradient_error(got.gradients, plain.gradients) < 1e-12
    randomize_queries(queries)
    everything = dict(model.named_parameters())
    got = outputs_and_gradients(model, everything, (ids,))
    want = outputs_and_gradients(lambda x: model.by_hand(x, [2, 2, 4], list(queries.values())), everything, (ids,))
    assert relative_error(want.outputs, plain.outputs) > 1e-2
    assert relative_error(got.outputs, want.outputs) < 1e-12
    assert gradient_error(got.gradients, want.gradients) < 1e-12


def test_tied_weights_stay_tied() -> None:
    ids = torch.arange(8).reshape(2, 4)
    model = randomize(Shared(LAYERS)).eval()
    names = list(model.state_dict())
    count = len(list(model.parameters()))
    ac.transform(model, ids, ac.AttnResConfig(num_blocks=3, lowering="eager"))
    assert model.head.weight is model.embed.weight
    assert [name for name in model.state_dict() if "attnres." not in name] == names
    assert len(list(model.parameters())) == count + 2 * LAYERS
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.head.weight.detach().clone()
    model(ids).square().mean().backward()
    optimizer.step()
    assert model.head.weight is model.embed.weight and not torch.equal(model.embed.weight, before)
    ac.revert(model)
    assert model.head.weight is model.embed.weight and list(model.state_dict()) == names


def test_one_layer_under_several_names() -> None:
    model, x = build(layers=LAYERS), example()
    for i in range(1, LAYERS):
        model.encoder.layers[i] = model.encoder.layers[0]
    want = model(x)
    ac.transform(model, x, ac.AttnResConfig(num_blocks=2, lowering="eager", depth_loops=True))
    (stream,) = ac.report(model).streams
    assert (stream.owner, len(stream.sublayers)) == ("encoder", 2 * LAYERS)
    assert len(ac.pseudo_queries(model)) == 2 * LAYERS
    assert relative_error(model(x), want) < 1e-5


def test_a_layer_that_comes_back_once() -> None:
    """Most layers are their own, so this is no loop: it is converted as it stands."""
    model, x = build(layers=LAYERS), example()
    model.encoder.layers[2] = model.encoder.layers[0]
    want = model(x)
    ac.transform(model, x, ac.AttnResConfig(num_blocks=2, lowering="eager"))
    names = list(ac.pseudo_queries(model))
    assert names == [
        "encoder.layers.0.norm2", "encoder.layers.1.norm1", "encoder.layers.1.norm2", "encoder.layers.0.norm1:2",
        "encoder.layers.0.norm2:2", "encoder.layers.3.norm1", "encoder.layers.3.norm2", "encoder.norm",
    ]  # fmt: skip
    assert relative_error(model(x), want) < 1e-5
    outputs = []
    for query in ac.pseudo_queries(model).values():  # each counts by itself
        with torch.no_grad():
            query.copy_(torch.linspace(-1, 1, WIDTH))
            outputs.append(model(x))
            query.zero_()
    assert all(relative_error(a, b) > 1e-4 for i, a in enumerate(outputs) for b in outputs[:i])


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.inner(a) - self.inner(b)


def test_a_module_that_is_called_twice() -> None:
    """Each call has its stream, and with ``calls="separate"`` its queries; who makes the calls owns them."""
    model = randomize(Siamese()).eval()
    a, b = example(seed=1), example(seed=2)
    names = dict(model.named_parameters())
    want = outputs_and_gradients(model, names, (a, b))
    config = ac.AttnResConfig(num_blocks=2, lowering="eager", calls="separate")
    ac.transform(model, (a, b), config)
    assert [(stream.owner, len(stream.sublayers)) for stream in ac.report(model).streams] == [("", SUBLAYERS)] * 2
    got = outputs_and_gradients(model, names, (a, b))
    assert relative_error(got.outputs, want.outputs) < 1e-5
    assert gradient_error(got.gradients, want.gradients) < 1e-5
    queries = ac.pseudo_queries(model)
    randomize_queries(queries)
    alone = build()
    alone.load_state_dict({name.removeprefix("inner."): p.detach() for name, p in names.items()})
    ac.transform(alone, a, config)
    own = ac.pseudo_queries(alone)
    assert list(queries) == [*(f"inner.{name}" for name in own), *(f"inner.{name}:2" for name in own)]
    outputs = []
    for x, ending in ((a, ""), (b, ":2")):
        for name, query in own.items():
            query.data.copy_(queries[f"inner.{name}{ending}"])
        outputs.append(alone(x).detach())
    assert relative_error(model(a, b), outputs[0] - outputs[1]) < 1e-5
    assert relative_error(model(a, b), want.outputs) > 1e-2
