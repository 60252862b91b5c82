"""Modules that show other streams by themselves than inside their model: what is converted is what was reported."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile import exactness
from tests.helpers import randomize
from tests.models import WIDTH, Block

CONFIG = ac.AttnResConfig(lowering="eager", num_blocks=2)


class Stage(nn.Module):
    """Layers, then another number of tokens: a stream of its own."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x[:, ::2]


class Grouped(nn.Module):
    """A stage inside the module that owns the stream behind it, which is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage(2)
        self.last = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage(x)
        for layer in self.last:
            y = layer.mixer(layer.norm1(x))
            y += x
            x = y + layer.mlp(layer.norm2(y))
        return x


class Decoder(nn.Module):
    """Blocks whose second sublayer reads a context."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer.mixer(layer.norm1(x))
            x = x + layer.mlp(layer.norm2(x) * context)
        return x


class StartsFromConstants(nn.Module):
    """The first state of a decoder is made of a table by its caller: a constant there, and any tensor here."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH)
        self.decoder = Decoder()

    def forward(self, x: Tensor) -> Tensor:
        queries = self.table.weight[None] * 0.5
        return self.decoder(queries.expand(x.shape[0], -1, -1), x.mean(1, keepdim=True))


class PostNormOutside(nn.Module):
    """What a module ends with is normed, and another stream begins from that: the caller's post-norm stream."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoStreams()
        self.after = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for layer in self.after:
            x = layer(x)
        return x


class TwoStreams(nn.Module):
    """A stream that stays one, and a second one that ends in a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Block() for _ in range(3))
        self.between = nn.Linear(WIDTH, WIDTH)
        self.second = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.first:
            x = layer(x)
        x = self.between(x)
        for layer in self.second:
            x = layer(x)
        return self.norm(x)


class Around(nn.Module):
    """Something before and behind it, so that no module tested here is the whole model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Linear(5, WIDTH), inner, nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(x)).tanh())


@pytest.mark.parametrize(
    ("inner", "sizes"),
    [
        pytest.param(Grouped, [4, 4], id="an owner inside another"),
        pytest.param(StartsFromConstants, [6], id="a constant that the caller makes"),
        pytest.param(PostNormOutside, [6], id="post-norm by what the caller does next"),
    ],
)
def test_exact_and_as_reported(inner: type[nn.Module], sizes: list[int]) -> None:
    model = randomize(Around(inner())).eval()
    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    found = exactness.verify(model, x, CONFIG, keep_weights=True, dtype=torch.float64)
    assert found.holds, found
    explained = ac.explain(model, x, CONFIG)
    ac.transform(model, x, CONFIG)
    for report in (explained, ac.report(model)):
        assert sorted(len(stream.sublayers) for stream in report.streams) == sizes
    model.train()(x).sum().backward()
    assert all(query.grad is not None and query.grad.any() for query in ac.pseudo_queries(model).values())


def test_what_is_left_alone_by_itself_stays_so_in_every_way_to_run() -> None:
    model = randomize(Around(PostNormOutside())).eval()
    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    want = model(x)
    ac.transform(model, x, CONFIG)
    outer = torch.compile(model, backend="attnres", options={"lowering": "eager"})
    for run in (model, outer, ac.export_program(model, (x,)).module()):
        torch.testing.assert_close(run(x), want, rtol=1e-5, atol=1e-6)


class Recurring(nn.Module):
    """One stack, called on what it made: only its first call begins with what was not normed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Cycles(nn.Module):
    """Adds the input in before each call of the stack but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Recurring()

    def forward(self, x: Tensor) -> Tensor:
        state = self.stack(x.sin())
        for _ in range(2):
            state = self.stack(state + x)
        return state


def test_a_module_is_not_converted_for_one_of_its_calls() -> None:
    """All calls run one forward: where some are left alone, the others cannot be converted."""
    model = randomize(Around(Cycles())).eval()
    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ac.NoStreamError) as caught:
        ac.transform(model, x, CONFIG)
    left = caught.value.report.rejections
    adds = [each for each in left if each.module.startswith("inner.stack.layers.")]
    assert len(adds) == 3 * 2 * 2, "three calls of two layers of two adds"
    assert {each.reason for each in adds} <= {"post_norm", "shared_weights"}
