"""Streams that are scaled on their way: sources carry coefficients, and learned ones their gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.conditions.depth_stream import DepthStream
from tests.helpers import outputs_and_gradients, randomize, randomize_queries, relative_error, seeded

WIDTH, LAYERS = 6, 5


class Scaled(nn.Module):
    """Five branches; how they are added up is another method for each form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.a = nn.ParameterList(torch.ones(()) for _ in range(LAYERS))
        self.b = nn.ParameterList(torch.ones(()) for _ in range(LAYERS))
        self.channels = nn.ParameterList(torch.ones(WIDTH) for _ in range(LAYERS))
        self.table = nn.Parameter(torch.ones(LAYERS, 2))
        self.norm = nn.LayerNorm(WIDTH)

    def f(self, i: int, x: Tensor) -> Tensor:
        return self.branches[i](self.norms[i](x))

    def forward(self, x: Tensor) -> Tensor:
        x = x0 = self.embed(x)
        for i in range(LAYERS):
            x = FORMS[self.form][0](self, i, x, x0)
        return self.norm(x)

    def by_hand(self, x: Tensor, sizes: list[int], queries: list[Tensor], gain: str) -> Tensor:
        x0 = self.embed(x)
        stream = DepthStream(x0, sizes, queries, gain)
        behind: Any = 1.0  # what acts on the sum behind its add, and is in the next one
        for i in range(LAYERS):
            behind = FORMS[self.form][1](self, i, stream, x0, behind)
        return self.norm(behind * stream.read())


# How the original adds, and the same for a stream of the paper: it is told what acts on the sum since the last add,
# and returns what acts on it behind this one.
Original = Callable[[Scaled, int, Tensor, Tensor], Tensor]
ByHand = Callable[[Scaled, int, DepthStream, Tensor, Any], Any]


def before(coefficient: Callable[[Scaled, int], Any], x0_by: Callable[[Scaled, int], Any] | None = None) -> ByHand:
    """``c * x + f(x)``, maybe ``+ d * x0``."""

    def step(net: Scaled, i: int, stream: DepthStream, x0: Tensor, behind: Any) -> Any:
        branch = net.f(i, stream.read())
        stream.add(branch if x0_by is None else branch + x0_by(net, i) * x0, coefficient(net, i))
        return 1.0

    return step


def after(coefficient: Callable[[Scaled, int], Any]) -> ByHand:
    """``(x + f(x)) * c``."""

    def step(net: Scaled, i: int, stream: DepthStream, x0: Tensor, behind: Any) -> Any:
        stream.add(net.f(i, behind * stream.read()), behind)
        return coefficient(net, i)

    return step


def mixed_in_first(net: Scaled, i: int, stream: DepthStream, x0: Tensor, behind: Any) -> Any:
    if i > 0:
        stream.add(net.table[i, 1] * x0, net.table[i, 0])
    stream.add(net.f(i, stream.read()))
    return 1.0


def mix_x0_in_first(net: Scaled, i: int, x: Tensor, x0: Tensor) -> Tensor:
    if i > 0:
        x = net.table[i, 0] * x + net.table[i, 1] * x0
    return x + net.f(i, x)


FORMS: dict[str, tuple[Original, ByHand]] = {
    "0.7 * x + f": (lambda net, i, x, x0: 0.7 * x + net.f(i, x), before(lambda net, i: 0.7)),
    "x.mul(-0.5) + f": (lambda net, i, x, x0: x.mul(-0.5) + net.f(i, x), before(lambda net, i: -0.5)),
    "a * x + f": (lambda net, i, x, x0: net.a[i] * x + net.f(i, x), before(lambda net, i: net.a[i])),
    "f + x * channels": (
        lambda net, i, x, x0: net.f(i, x) + x * net.channels[i],
        before(lambda net, i: net.channels[i]),
    ),
    "sigmoid(a) * x + f": (
        lambda net, i, x, x0: torch.sigmoid(net.a[i]) * x + net.f(i, x),
        before(lambda net, i: torch.sigmoid(net.a[i])),
    ),
    "table[i, 0] * x + f": (
        lambda net, i, x, x0: net.table[i, 0] * x + net.f(i, x),
        before(lambda net, i: net.table[i, 0]),
    ),
    "a * x + b * x0 + f": (
        lambda net, i, x, x0: net.a[i] * x + net.b[i] * x0 + net.f(i, x),
        before(lambda net, i: net.a[i], lambda net, i: net.b[i]),
    ),
    "table[i, 0] * x + table[i, 1] * x0, then + f": (mix_x0_in_first, mixed_in_first),
    "(x + f) * a": (lambda net, i, x, x0: (x + net.f(i, x)) * net.a[i], after(lambda net, i: net.a[i])),
    "(x + f) * channels": (
        lambda net, i, x, x0: (x + net.f(i, x)) * net.channels[i],
        after(lambda net, i: net.channels[i]),
    ),
    "(x + f) / 2 ** 0.5": (lambda net, i, x, x0: (x + net.f(i, x)) / 2**0.5, after(lambda net, i: 2**-0.5)),
}


@pytest.mark.parametrize("number", range(len(FORMS)), ids=list(FORMS))
def test_the_papers_equations_with_coefficients(number: int) -> None:
    form = list(FORMS)[number]
    gain = "mean" if number % 2 else "sum"
    count = 2 * LAYERS - 1 if form.endswith("then + f") else LAYERS
    model = randomize(Scaled(form)).double()
    x = torch.randn(2, 3, WIDTH, generator=seeded(1), dtype=torch.float64)
    names = dict(model.named_parameters())
    plain = outputs_and_gradients(model, names, (x,))
    ac.transform(model, x, ac.AttnResConfig(num_blocks=2, gain=gain, lowering="eager"))
    (stream,) = ac.report(model).streams
    assert len(stream.sublayers) == count
    queries = ac.pseudo_queries(model)
    if gain == "sum":  # zero queries are the original
        got = outputs_and_gradients(model, names, (x,))
        assert relative_error(got.outputs, plain.outputs) < 1e-12
        assert gradients_differ_by(got.gradients, plain.gradients) < 1e-12
    randomize_queries(queries, std=1.0)
    sizes = [count // 2, count - count // 2]
    everything = dict(model.named_parameters())
    got = outputs_and_gradients(model, everything, (x,))
    want = outputs_and_gradients(lambda x: model.by_hand(x, sizes, list(queries.values()), gain), everything, (x,))
    assert relative_error(want.outputs, plain.outputs) > 1e-2
    assert relative_error(got.outputs, want.outputs) < 1e-12
    assert gradients_differ_by(got.gradients, want.gradients) < 1e-12
    for name in ("a", "b", "channels", "table"):
        if re.search(rf"\b{name}\b", form):  # the coefficients that the form uses learn
            assert any(float(g.abs().max()) > 0 for key, g in got.gradients.items() if key.split(".")[0] == name)


def gradients_differ_by(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """In units of the largest gradient: those of coefficients that a form does not use are zero in both."""
    assert got.keys() == want.keys()
    size = max(float(value.abs().max()) for value in want.values())
    return max(float((got[name] - want[name]).abs().max()) for name in want) / size
