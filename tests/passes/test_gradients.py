"""Streams of which steps record no gradient: gradients stay the original's, and None stays None."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.helpers import randomize, randomize_queries, relative_error, seeded

WIDTH = 6
CONFIG = ac.AttnResConfig(num_blocks=None, lowering="eager")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Net(nn.Module):
    def __init__(self, call: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        self.call = call
        self.into, self.probe = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.lower, self.upper = Stack(), Stack()
        randomize(self).double()

    def forward(self, x: Tensor) -> Any:
        return self.call(self, self.into(x))


@contextlib.contextmanager
def _set(flag: bool) -> Iterator[None]:
    with torch.set_grad_enabled(flag):
        yield


@torch.no_grad()
def _frozen(net: Net, x: Tensor) -> Tensor:
    for layer in net.lower.layers:
        x = layer(x)
    return x


def _lower_half(enter: Callable[[], Any]) -> Callable[[Net, Tensor], Any]:
    def call(net: Net, x: Tensor) -> Tensor:
        with enter():
            for layer in net.lower.layers:
                x = layer(x)
        for layer in net.upper.layers:
            x = layer(x)
        return net.upper.norm(x)

    return call


def _by_function(net: Net, x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    for layer in net.lower.layers:
        x = layer(x)
    torch.set_grad_enabled(True)
    return net.upper(x)


def _in_the_middle(net: Net, x: Tensor) -> Tensor:
    for i, layer in enumerate([*net.lower.layers, *net.upper.layers]):
        with torch.set_grad_enabled(i != 3):
            x = layer(x)
    return net.upper.norm(x)


def _only_the_add(net: Net, x: Tensor) -> Tensor:
    for i, layer in enumerate([*net.lower.layers, *net.upper.layers]):
        f = torch.tanh(layer.linear(layer.norm(x)))
        if i == 2:
            with torch.no_grad():
                x = x + f
        else:
            x = x + f
    return net.upper.norm(x)


def _a_carrier(net: Net, x: Tensor) -> Tensor:
    for i, layer in enumerate([*net.lower.layers, *net.upper.layers]):
        x = layer(x)
        if i == 2:
            with torch.no_grad():
                x = x * 0.5
    return net.upper.norm(x)


def _again_enabled(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        for i, layer in enumerate([*net.lower.layers, *net.upper.layers]):
            with torch.set_grad_enabled(i >= 3):
                x = layer(x)
    return net.upper.norm(x)


SWITCHES: dict[str, Callable[[Net, Tensor], Any]] = {
    "no_grad": _lower_half(torch.no_grad),
    "set_grad_enabled": _lower_half(lambda: torch.set_grad_enabled(False)),
    "a context manager around it": _lower_half(lambda: _set(False)),
    "a decorator": lambda net, x: net.upper(_frozen(net, x)),
    "a function": _by_function,
    "one step": _in_the_middle,
    "only an add": _only_the_add,
    "only a carrier": _a_carrier,
    "enabled again": _again_enabled,
}


def _gradients(net: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    net.zero_grad(set_to_none=True)
    result = net(x)
    (result[0] if isinstance(result, tuple) else result).square().sum().backward()
    return {name: p.grad for name, p in net.named_parameters() if "attnres" not in name}


def _input() -> Tensor:
    return torch.randn(2, 3, WIDTH, generator=seeded(1), dtype=torch.float64)


def _check(net: Net, original: Net) -> None:
    x = _input()
    with torch.no_grad():
        assert relative_error(net(x), original(x)) <= 1e-12
    got, want = _gradients(net, x), _gradients(original, x)
    for name, wanted in want.items():
        found = got[name]
        if wanted is None or found is None:
            assert found is None and wanted is None, name
        else:
            assert float((found - wanted).abs().max()) <= 1e-12 * max(1.0, float(wanted.abs().max())), name


def _check_queries(net: Net) -> None:
    """At random queries every one of them trains, in any mode the model runs, and again afterwards."""
    x = _input()
    randomize_queries(ac.pseudo_queries(net))
    _gradients(net, x)
    assert all(q.grad is not None and float(q.grad.abs().max()) > 0.0 for q in ac.pseudo_queries(net).values())
    with torch.no_grad():
        plain = net(x)
    with torch.inference_mode():
        inferred = net(x)
    _gradients(net, x)
    recorded = net(x)
    for other in (plain, inferred):
        assert relative_error(other, recorded) <= 1e-12


@pytest.mark.parametrize("name", SWITCHES)
def test_steps_in_different_modes(name: str) -> None:
    """Half of the stream is frozen: converted or not, gradients are the original's."""
    net = Net(SWITCHES[name])
    original = copy.deepcopy(net)
    try:
        report = ac.transform(net, _input(), CONFIG)
    except ac.NoStreamError as error:
        report = error.report
        assert {str(left.reason) for left in report.rejections} >= {"gradient_mode"}
        return
    _check(net, original)
    _check_queries(net)


def test_a_frozen_stream_beside_one_that_trains() -> None:
    """The frozen one is left alone by name; the other runs with and without gradients."""

    def call(net: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = net.into(net.lower(x))
        return net.upper(x)

    net = Net(call)
    original = copy.deepcopy(net)
    ac.transform(net, _input(), CONFIG)
    report = ac.report(net)
    assert [len(stream.sublayers) for stream in report.streams] == [3]
    assert {str(left.reason) for left in report.rejections} == {"gradient_mode"}
    _check(net, original)
    _check_queries(net)


def test_a_frozen_stream_in_the_module_of_one_that_trains() -> None:
    """Under a caller's ``no_grad`` the graph does not show which stream is frozen; the declaration does."""

    def call(net: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x
            for layer in net.lower.layers:
                y = layer(y)
            y = net.into(net.lower.norm(y))
        for layer in net.upper.layers:
            y = layer(y)
        return net.upper.norm(y)

    net = Net(call)
    original = copy.deepcopy(net)
    ac.transform(net, _input(), CONFIG)
    assert [len(stream.sublayers) for stream in ac.report(net).streams] == [3]
    _check(net, original)
    _check_queries(net)


@pytest.mark.parametrize("fuse", ["auto", "on"])
def test_a_reader_without_gradients(fuse: str) -> None:
    """What is read under ``no_grad`` may be mixed outside of it; nothing of the reader is drawn out."""

    def call(net: Net, x: Tensor) -> Any:
        kept = []
        for layer in net.lower.layers:
            x = layer(x)
            with torch.no_grad():
                kept.append(net.probe(x).square().mean())
        with torch.no_grad():
            last = net.probe(x)
        return net.lower.norm(x) + last, kept

    net = Net(call)
    original = copy.deepcopy(net)
    ac.transform(net, _input(), ac.AttnResConfig(num_blocks=None, lowering="eager", fuse=fuse))
    _check(net, original)
    assert net.probe.weight.grad is None


def test_one_module_called_with_and_without() -> None:
    """A target that is computed without gradients by the module that is trained: both calls run the same."""

    def call(net: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = net.upper(x.detach() * 0.5)
        return net.upper(x) - target

    net = Net(call)
    original = copy.deepcopy(net)
    ac.transform(net, _input(), CONFIG)
    assert [len(stream.sublayers) for stream in ac.report(net).streams] == [3, 3]
    _check(net, original)


def test_a_frozen_module_by_itself() -> None:
    """Transformed by itself it is as good as any; what calls it may do so without gradients, compiled or not."""
    net = Net(lambda net, x: net.upper.norm(_without(net, x)))
    original = copy.deepcopy(net)
    ac.transform(net.lower, _input(), CONFIG)
    x = _input()
    for call in (net, torch.compile(net, backend="attnres", options={"lowering": "eager"})):
        assert relative_error(call(x), original(x)) <= 1e-12


def _without(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net.lower(x)
