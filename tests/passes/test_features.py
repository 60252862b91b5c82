"""Which dimension holds the features: that over which a stream's readers normalise and contract it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.rewriting import rewritings
from tests.helpers import outputs_and_gradients, randomize, randomize_queries, relative_error, seeded

TOKENS, WIDTH = 5, 6
Mix = Callable[["Mixer", int, Tensor], Tensor]


class Mixer(nn.Module):
    """Branches that mix tokens and branches that mix channels by turns, on ``[batch, tokens, channels]``."""

    def __init__(self, tokens: Mix, norm: Mix, count: int = 4, length: int = TOKENS, last: bool = True) -> None:
        super().__init__()
        self.tokens, self.norm, self.count = tokens, norm, count
        self.into = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(count + 1))
        self.gains = nn.ParameterList(torch.ones(WIDTH) for _ in range(count + 1))
        self.shifts = nn.ParameterList(torch.zeros(WIDTH) for _ in range(count + 1))
        self.over_tokens = nn.ModuleList(nn.Linear(length, length) for _ in range(count))
        self.over_channels = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.convolutions = nn.ModuleList(nn.Conv1d(length, length, 1) for _ in range(count))
        self.last = last
        randomize(self).double().eval()

    def branch(self, i: int, x: Tensor) -> Tensor:
        """The i-th branch of its normalised input."""
        return torch.tanh(self.tokens(self, i, x) if i % 2 == 0 else self.over_channels[i](x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for i in range(self.count):
            x = x + self.branch(i, self.norm(self, i, x))
        return self.norm(self, self.count, x) if self.last else x


def rms(net: Mixer, i: int, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * net.gains[i]


def standard(net: Mixer, i: int, x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()


OVER_TOKENS: dict[str, Mix] = {
    "transposed": lambda net, i, x: net.over_tokens[i](x.transpose(1, 2)).transpose(1, 2),
    "permuted": lambda net, i, x: net.over_tokens[i](x.permute(0, 2, 1)).permute(0, 2, 1),
    "einsum": lambda net, i, x: torch.einsum("btc,st->bsc", x, net.over_tokens[i].weight),
    "einsum with the weight first": lambda net, i, x: torch.einsum("st,btc->bsc", net.over_tokens[i].weight, x),
    "matmul from the left": lambda net, i, x: torch.matmul(net.over_tokens[i].weight, x),
    "a convolution over tokens": lambda net, i, x: net.convolutions[i](x),
    "swapped axes": lambda net, i, x: F.linear(x.swapaxes(-1, -2), net.over_tokens[i].weight).mT,
}
NORMS: dict[str, Mix] = {
    "layer norm": lambda net, i, x: net.norms[i](x),
    "rms by hand": rms,
    "standard by hand": standard,
    "an affine map": lambda net, i, x: x * net.gains[i] + net.shifts[i],
    "an affine map in one": lambda net, i, x: torch.addcmul(net.shifts[i], net.gains[i], x),
    "a norm behind a copy": lambda net, i, x: net.norms[i](x.contiguous().float().double()),
}


def _input(length: int = TOKENS) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=seeded(4), dtype=torch.float64)


def _dim(net: nn.Module, x: Tensor) -> set[int]:
    return {stream.feature_dim for stream in ac.explain(net, x).streams}


@pytest.mark.parametrize("name", OVER_TOKENS)
def test_tokens_are_mixed_in_any_spelling(name: str) -> None:
    assert _dim(Mixer(OVER_TOKENS[name], NORMS["layer norm"]), _input()) == {WIDTH}


@pytest.mark.parametrize("name", NORMS)
def test_norms_in_any_spelling(name: str) -> None:
    assert _dim(Mixer(OVER_TOKENS["transposed"], NORMS[name]), _input()) == {WIDTH}


def test_readers_that_contradict_one_another() -> None:
    net = Mixer(OVER_TOKENS["transposed"], lambda net, i, x: x, last=False)
    with pytest.raises(ac.NoStreamError) as caught:
        ac.transform(net, _input())
    assert {left.reason for left in caught.value.report.rejections} >= {"unknown_features"}


@pytest.mark.parametrize("length", [TOKENS, WIDTH])
@pytest.mark.parametrize("norm", ["layer norm", "rms by hand", "an affine map"])
def test_a_mixer_against_one_by_hand(length: int, norm: str) -> None:
    """At random queries; with as many tokens as channels, too, where a wrong axis has the right size."""
    net = Mixer(OVER_TOKENS["transposed"], NORMS[norm], length=length)
    x = _input(length)
    ac.transform(net, x, ac.AttnResConfig(num_blocks=None, lowering="eager"))
    queries = ac.pseudo_queries(net)
    randomize_queries(queries, std=1.0)
    left = dict(queries)

    def by_hand(x: Tensor) -> Tensor:
        waiting = list(left.values())
        sources = [net.into(x)]

        def read() -> Tensor:
            if len(sources) == 1:
                return sources[0]
            rows = torch.stack(sources)
            keys = rows / (rows.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
            p = (keys @ waiting.pop(0)).softmax(0)
            return len(sources) * (p.unsqueeze(-1) * rows).sum(0)

        for i in range(net.count):
            sources.append(net.branch(i, net.norm(net, i, read())))
        result = net.norm(net, net.count, read())
        assert not waiting
        return result

    parameters = dict(net.named_parameters())
    got, want = (outputs_and_gradients(call, parameters, [x]) for call in (net, by_hand))
    assert relative_error(got.outputs, want.outputs) <= 1e-12
    for name, wanted in want.gradients.items():
        assert float((got.gradients[name] - wanted).abs().max()) <= 1e-10 * max(1.0, float(wanted.abs().max())), name


class Picture(nn.Module):
    """``[batch, channels, height, width]``, as many rows and columns as channels."""

    def __init__(self, norm: Callable[[], nn.Module] | None, relaid: bool = False) -> None:
        super().__init__()
        self.into = nn.Conv2d(3, WIDTH, 1)
        self.norms = nn.ModuleList((norm or nn.Identity)() for _ in range(4))
        self.convolutions = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(4))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.relaid = relaid
        randomize(self).double().eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for i in range(4):
            if self.relaid and i == 2:
                x = x.permute(0, 2, 3, 1).reshape(2, 3, 2, 3, 2, WIDTH)
            if self.relaid and i >= 2:
                x = x + self.linears[i](F.layer_norm(x, (WIDTH,)))
            else:
                x = x + torch.tanh(self.convolutions[i](self.norms[i](x)))
        return x


@pytest.mark.parametrize(
    ("norm", "relaid"),
    [
        (lambda: nn.BatchNorm2d(WIDTH), False),
        (lambda: nn.GroupNorm(2, WIDTH), False),
        (lambda: nn.InstanceNorm2d(WIDTH), False),
        (None, False),
        (lambda: nn.BatchNorm2d(WIDTH), True),
    ],
)
def test_pictures(norm: Callable[[], nn.Module] | None, relaid: bool) -> None:
    x = torch.randn(2, 3, WIDTH, WIDTH, generator=seeded(2), dtype=torch.float64)
    report = ac.explain(Picture(norm, relaid), x)
    assert [stream.feature_dim for stream in report.streams] == [WIDTH]
    net = Picture(norm, relaid)
    ac.transform(net, x, ac.AttnResConfig(num_blocks=None, lowering="eager"))
    graph = rewritings(Picture(norm, relaid), x)[0].after
    axes = [n.args[2] for n in graph.graph.nodes if n.target is torch.ops.attnres.mix.default]
    assert axes == ([1, 1, 5, 5] if relaid else [1, 1, 1, 1])
