"""What may stand on a stream between its adds: masks, dropout that does nothing, scales of all kinds and spellings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.evaluate import Captured, by_dynamo, by_symbolic_trace
from tests.passes.support import TOKENS, WIDTH, Bag, Stream, between, check_exact, converted, refused, study, tokens

# ------------------------------------------------------------------ masks, scales, dropout


def test_mask_per_token_on_the_stream() -> None:
    mask = (torch.arange(TOKENS) < 3).double()[:, None]
    between(lambda net, i, x: x * mask)


def test_mask_from_an_input() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stream = Stream(lambda net, i, x: x + net.f(i, x))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = self.stream.embed(x)
            for i in range(4):
                x = (x + self.stream.f(i, x)) * mask.unsqueeze(-1)
            return self.stream.head(x)

    converted(Masked(), tokens(), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]))


def test_layer_scale() -> None:
    model = Stream(lambda net, i, x: x + net.parts[i].gamma * net.f(i, x), parts=lambda i: Bag(gamma=torch.ones(WIDTH)))
    converted(model)


@pytest.mark.parametrize("training", [True, False])
def test_drop_path(training: bool) -> None:
    def drop(net: Stream, f: Tensor) -> Tensor:
        if not net.training:
            return f
        keep = f.new_empty((f.shape[0], 1, 1)).bernoulli_(0.7)
        return f * keep.div_(0.7)

    converted(Stream(lambda net, i, x: x + drop(net, net.f(i, x))).train(training))


@pytest.mark.parametrize("training", [True, False])
def test_dropout_in_the_branch(training: bool) -> None:
    converted(Stream(lambda net, i, x: x + F.dropout(net.f(i, x), 0.4, net.training)).train(training))


@pytest.mark.parametrize(
    "dropout", [lambda x: F.dropout(x, 0.4, False), lambda x: F.dropout(x, 0.0, True), nn.Dropout(0.4).eval()]
)
@pytest.mark.parametrize("trace", ["dynamo", "symbolic"])
def test_dropout_that_does_nothing_on_the_stream(dropout: Callable[[Tensor], Tensor], trace: str) -> None:
    options = {"trace": by_symbolic_trace} if trace == "symbolic" else {}
    model = Stream(lambda net, i, x: net.drop(x + net.f(i, x)))
    model.drop = dropout
    model.eval()
    converted(model, **options)


@pytest.mark.parametrize("shape", [(), (1,), (WIDTH,), (1, 1, WIDTH)], ids=str)
@pytest.mark.parametrize("form", ["a*x + f", "(x + f)*a", "a*x + b*x0 + f", "f + x*a", "(x + f)/a"])
def test_learned_scale_on_the_stream(form: str, shape: tuple[int, ...]) -> None:
    def whole(net: Stream, x: Tensor) -> Tensor:
        x0 = x
        for i in range(net.count):
            f, a, b = net.f(i, x), net.parts[i].a, net.parts[i].b
            if form == "a*x + f":
                x = a * x + f
            elif form == "(x + f)*a":
                x = (x + f) * a
            elif form == "f + x*a":
                x = f + x * a
            elif form == "(x + f)/a":
                x = (x + f) / a
            else:
                x = a * x + b * x0 + f
        return net.head(net.norm(x))

    model = Stream(lambda net, i, x: x, whole=whole, parts=lambda i: Bag(a=torch.ones(shape), b=torch.ones(shape)))
    converted(model, trace=by_symbolic_trace)


@pytest.mark.parametrize(
    "step",
    [
        lambda net, i, x: 0.7 * x + net.f(i, x),
        lambda net, i, x: (x + net.f(i, x)) * 0.7,
        lambda net, i, x: (x + net.f(i, x)) / 2**0.5,
        lambda net, i, x: torch.mul(x + net.f(i, x), 1.3),
    ],
)
def test_constant_scale_on_the_stream(step: Callable[[Stream, int, Tensor], Tensor]) -> None:
    converted(Stream(step))


def test_scale_by_a_function_of_a_parameter() -> None:
    model = Stream(
        lambda net, i, x: torch.sigmoid(net.parts[i].a) * x + net.f(i, x), parts=lambda i: Bag(a=torch.ones(WIDTH))
    )
    converted(model)


def test_scale_that_depends_on_the_data_is_no_scale() -> None:
    """``x * g(x)`` between adds is an op of the network: a cut, and nothing is converted across it."""
    outcome = study(Stream(lambda net, i, x: (x + net.f(i, x)) * torch.sigmoid(x.mean(-1, keepdim=True))))
    assert outcome.module is None


# ------------------------------------------------------------------ scales in place


def scaled_in_place(net: Stream, i: int, x: Tensor) -> Tensor:
    x = x + net.f(i, x)
    x *= net.parts[i].a
    return x


SCALE = {"parts": lambda i: Bag(a=torch.ones(1))}


@pytest.mark.parametrize("trace", [by_dynamo, by_symbolic_trace])
def test_scale_in_place_between_adds(trace: Callable[..., Captured]) -> None:
    """The last one stands behind the stream, and is read by the norm."""
    converted(Stream(scaled_in_place, **SCALE), trace=trace)


def test_scale_in_place_by_method_and_by_number() -> None:
    converted(Stream(lambda net, i, x: (x + net.f(i, x)).mul_(0.5).div_(net.parts[i].a), **SCALE))


def test_scale_in_place_behind_adds_in_place() -> None:
    """Without gradients: the original overwrites what its own backward needs."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        x += net.f(i, x)
        x *= 1.5
        return x

    outcome = study(Stream(step))
    assert outcome.sublayers == [4]
    check_exact(outcome, gradients=False)


def test_scale_in_place_that_an_older_reader_sees() -> None:
    """What is returned as the state before is scaled with it: that must stay so, or the stream is left alone."""

    def whole(net: Stream, x: Tensor) -> tuple[Tensor, ...]:
        states = []
        for i in range(4):
            x = x + net.f(i, x)
            states.append(x)
            x *= 0.5
        return (*states, net.head(x))

    assert "mutated" in refused(Stream(lambda net, i, x: x, whole=whole))
