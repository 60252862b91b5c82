"""Residual steps that are spelt over several operators, and tensors that are cut up and put together again."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import attnres_compile as ac
from tests.conditions.depth_stream import DepthStream
from tests.conditions.stack import CONFIG, LAYERS, SIZES, WIDTH, example
from tests.helpers import outputs_and_gradients, randomize, randomize_queries, relative_error

LEFT = 2  # tokens of the first part


class Net(nn.Module):
    """How a layer adds is a function of the net, the layer's number and the state."""

    def __init__(self, layer: Callable[[Net, int, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = layer

    def f(self, i: int, x: Tensor) -> Tensor:
        return torch.tanh(self.linears[i](self.norms[i](x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for i in range(LAYERS):
            x = self.layer(self, i, x)
        return self.norm(x)

    def by_hand(self, x: Tensor, queries: list[Tensor], scale: Callable[[int], Tensor | float]) -> Tensor:
        stream = DepthStream(self.embed(x), SIZES, queries)
        for i in range(LAYERS):
            stream.add(scale(i) * self.f(i, stream.read()))
        return self.norm(stream.read())


def check(layer: Callable[[Net, int, Tensor], Tensor], scale: Callable[[int], Tensor | float] = lambda i: 1.0) -> None:
    net = randomize(Net(layer).double())
    assert isinstance(net, Net)
    original, x = copy.deepcopy(net), example()
    weights = dict(original.named_parameters())
    ac.transform(net, example(1), CONFIG)
    (stream,) = ac.report(net).streams
    assert len(stream.sublayers) == LAYERS
    assert not ac.report(net).rejections
    own = {name: value for name, value in net.named_parameters() if name in weights}
    for seed in range(3):
        got, want = outputs_and_gradients(net, own, [x], seed), outputs_and_gradients(original, weights, [x], seed)
        assert relative_error([got.outputs, got.gradients], [want.outputs, want.gradients]) < 1e-12
    queries = ac.pseudo_queries(net)
    randomize_queries(queries)
    hand = [query.detach().clone() for query in queries.values()]
    for seed in range(3):
        got = outputs_and_gradients(net, own, [x], seed)
        want = outputs_and_gradients(lambda x: original.by_hand(x, hand, scale), weights, [x], seed)
        assert relative_error([got.outputs, got.gradients], [want.outputs, want.gradients]) < 1e-11


# ------------------------------------------------------------------ layers that a draw leaves out


def kept() -> Tensor:
    return torch.rand((), dtype=torch.float64) < 0.5


DRAWN: dict[str, Callable[[Net, int, Tensor], Tensor]] = {
    "where": lambda net, i, x: torch.where(kept(), x + net.f(i, x), x),
    "where not": lambda net, i, x: torch.where(~kept(), x, net.f(i, x) + x),
    "a method": lambda net, i, x: (x + net.f(i, x)).where(kept(), x),
    "keywords": lambda net, i, x: torch.where(condition=kept(), input=torch.add(x, net.f(i, x)), other=x),
    "inside": lambda net, i, x: x + torch.where(kept(), net.f(i, x), 0.0),
    "a product": lambda net, i, x: x + kept() * net.f(i, x),
}


@pytest.mark.parametrize("how", DRAWN)
def test_a_layer_that_a_draw_leaves_out_is_a_step(how: str) -> None:
    # The draws of one call come in the order of the layers, whoever makes them.
    check(DRAWN[how], lambda i: kept().to(torch.float64))


def test_a_write_between_the_add_and_the_choice_stays_where_it_is() -> None:
    def layer(net: Net, i: int, x: Tensor) -> Tensor:
        x = x.clone()
        y = x + net.f(i, x)
        x.mul_(2.0)
        return torch.where(x[0, 0, 0] > 0, x, y)

    net = randomize(Net(layer).double())
    want = net(example())
    try:
        ac.transform(net, example(), CONFIG)
    except ac.AttnResError:
        return
    assert relative_error(net(example()), want) < 1e-12


def test_a_choice_per_token() -> None:
    def layer(net: Net, i: int, x: Tensor) -> Tensor:
        return torch.where(torch.arange(5)[:, None] % 2 == 0, x, x + net.f(i, x))

    check(layer, lambda i: (torch.arange(5)[:, None] % 2).double())


def test_a_choice_of_something_else_stays() -> None:
    def layer(net: Net, i: int, x: Tensor) -> Tensor:
        return torch.where(kept(), x + net.f(i, x), x.flip(1))

    with pytest.raises(ac.NoStreamError):
        ac.transform(Net(layer).double(), example(), CONFIG)


# ------------------------------------------------------------------ cut up and joined


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    return torch.cat(parts, 1)


CUTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "slices": lambda x: (x[:, :LEFT], x[:, LEFT:]),
    "slices with an ellipsis": lambda x: (x[..., :LEFT, :], x[..., LEFT:, :]),
    "from the end": lambda x: (x[:, :-3], x[:, -3:]),
    "split": lambda x: x.split([LEFT, 5 - LEFT], 1),
    "torch.split": lambda x: torch.split(x, 2, dim=1),
    "chunk": lambda x: x.chunk(3, dim=1),
    "narrow": lambda x: (x.narrow(1, 0, LEFT), x.narrow(1, LEFT, 5 - LEFT)),
    "tensor_split": lambda x: torch.tensor_split(x, (LEFT,), 1),
}


@pytest.mark.parametrize("how", CUTS)
def test_what_is_cut_up_and_joined_again_is_one_stream(how: str) -> None:
    def layer(net: Net, i: int, x: Tensor) -> Tensor:
        x = _joined(CUTS[how](x))
        return x + net.f(i, x)

    check(layer)


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "other order": lambda x: torch.cat([x[:, LEFT:], x[:, :LEFT]], 1),
    "overlap": lambda x: torch.cat([x[:, :3], x[:, 3:4], x[:, 3:4]], 1),
    "a hole": lambda x: torch.cat([x[:, :2], x[:, 3:], x[:, 4:]], 1),
    "other dimension": lambda x: torch.cat([x[..., :3], x[..., 3:]], 1)[:, :5].repeat(1, 1, 2),
    "steps": lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1),
    "changed": lambda x: torch.cat([x[:, :LEFT], x[:, LEFT:].tanh()], 1),
    "flipped halves": lambda x: torch.cat(x.split([LEFT, 5 - LEFT], 1)[::-1], 1),
}


@pytest.mark.parametrize("how", WRONG)
def test_what_comes_back_otherwise_is_left(how: str) -> None:
    def layer(net: Net, i: int, x: Tensor) -> Tensor:
        return WRONG[how](x + net.f(i, x))

    net = randomize(Net(layer).double())
    try:
        want = net(example())
        ac.transform(net, example(), CONFIG)
    except ac.AttnResError:
        return
    assert relative_error(net(example()), want) < 1e-12


def test_a_write_into_a_piece_keeps_the_copy() -> None:
    def layer(net: Net, i: int, x: Tensor) -> Tensor:
        x = x + net.f(i, x)
        y = torch.cat([x[:, :LEFT], x[:, LEFT:]], 1)
        y.mul_(2.0)
        return x + y.sin() * 0.1

    net = randomize(Net(layer).double())
    want = net(example())
    try:
        ac.transform(net, example(), CONFIG)
    except ac.AttnResError:
        return
    assert relative_error(net(example()), want) < 1e-12


def _unlike(layer: Callable[[Net, int, Tensor], Tensor], last: Callable[[Tensor], Tensor] = torch.clone) -> None:
    """Converted or not: outputs and gradients are the original's, and an output is no one's memory but its own."""

    class Ended(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(layer)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.net(x)
            return x, last(x)

    net = randomize(Ended().double())
    original, x = copy.deepcopy(net), example()
    with contextlib.suppress(ac.NoStreamError):
        ac.transform(net, x, CONFIG)
    weights = {name: p for name, p in net.named_parameters() if name in dict(original.named_parameters())}
    got = outputs_and_gradients(net, weights, [x])
    want = outputs_and_gradients(original, dict(original.named_parameters()), [x])
    assert relative_error([got.outputs, got.gradients], [want.outputs, want.gradients]) < 1e-12
    whole, joined = net(x)
    assert whole.untyped_storage().data_ptr() != joined.untyped_storage().data_ptr()


def test_a_join_that_records_no_gradient_stays() -> None:
    def layer(net: Net, i: int, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = _joined(CUTS["slices"](x))
        return x + net.f(i, y)

    _unlike(layer)


@pytest.mark.parametrize("view", [False, True])
def test_a_join_that_is_returned_stays_memory_of_its_own(view: bool) -> None:
    def last(x: Tensor) -> Tensor:
        joined = _joined(CUTS["slices"](x))
        return joined.unsqueeze(0) if view else joined

    _unlike(lambda net, i, x: x + net.f(i, x), last)


class Single(nn.Module):
    """Text and pictures in two tensors; each block joins them, adds, and takes them apart, as Flux's single blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(lambda net, i, x: x)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def block(self, i: int, text: Tensor, picture: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([text, picture], dim=1)
        skip = x
        x = skip + gate.unsqueeze(1) * self.net.f(i, x)
        return x[:, : text.shape[1]], x[:, text.shape[1] :]

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.embed(x)
        gate = self.gate(x.mean(1))
        text, picture = x[:, :LEFT], x[:, LEFT:] * 2
        for i in range(LAYERS):
            text, picture = self.block(i, text, picture, gate)
        return self.net.norm(picture)

    def by_hand(self, x: Tensor, queries: list[Tensor]) -> Tensor:
        x = self.net.embed(x)
        gate = self.gate(x.mean(1))
        stream = DepthStream(torch.cat([x[:, :LEFT], x[:, LEFT:] * 2], 1), SIZES, queries)
        for i in range(LAYERS):
            stream.add(gate.unsqueeze(1) * self.net.f(i, stream.read()))
        return self.net.norm(stream.read()[:, LEFT:])


def test_blocks_that_join_and_part_two_tensors() -> None:
    net, x = randomize(Single().double()), example()
    assert isinstance(net, Single)
    original = copy.deepcopy(net)
    ac.transform(net, x, CONFIG)
    (stream,) = ac.report(net).streams
    assert len(stream.sublayers) == LAYERS
    assert relative_error(net(x), original(x)) < 1e-12
    queries = ac.pseudo_queries(net)
    randomize_queries(queries)
    assert relative_error(net(x), original.by_hand(x, [query.detach() for query in queries.values()])) < 1e-12


# ------------------------------------------------------------------ other graphs


@pytest.mark.parametrize("how", ["where", "slices"])
def test_aten_graphs(how: str) -> None:
    def layer(net: Net, i: int, x: Tensor) -> Tensor:
        if how == "where":
            return torch.where(x[0, 0, 0] > 0, x + net.f(i, x), x)
        x = _joined(CUTS["slices"](x))
        return x + net.f(i, x)

    net = randomize(Net(layer).double())
    module, report = ac.rewrite_graph(torch.export.export(net, (example(),)), None, CONFIG)
    (stream,) = report.streams
    assert len(stream.sublayers) == LAYERS
    assert not any(node.target is operator.getitem for node in module.graph.nodes if isinstance(node, fx.Node))
