"""Residual stacks of recurrent layers: each LSTM, GRU, RNN or cell of torch is a learned branch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.conditions.stack import CONFIG, LAYERS, WIDTH, build, check_by_hand, example
from tests.helpers import randomize_queries, relative_error


class Recurrent(nn.Module):
    """``out(rnn(norm(x)))``."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, *, time_first: bool = False, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.rnn = kind(WIDTH, batch_first=not time_first, **{"hidden_size": WIDTH, **options})
        wide = self.rnn.proj_size or self.rnn.hidden_size
        wide *= 1 + self.rnn.bidirectional
        self.out = nn.Linear(wide, WIDTH) if wide != WIDTH else nn.Identity()
        self.time_first = time_first

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.time_first:
            return self.out(self.rnn(x.transpose(0, 1))[0].transpose(0, 1))
        return self.out(self.rnn(x)[0])


class Started(nn.Module):
    """A GRU that starts from a learned state, which all layers share, and hands on its last one."""

    def __init__(self, start: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.start = start

    def forward(self, x: Tensor) -> Tensor:
        out, last = self.rnn(self.norm(x), self.start.expand(1, x.shape[0], -1).contiguous())
        return out + last[0][:, None]


class OverTime(nn.Module):
    """A cell, called for one time after the other."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.cell = kind(WIDTH, WIDTH)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        state, rows = None, []
        for row in self.norm(x).unbind(1):
            state = self.cell(row, state)
            rows.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(rows, 1)


def _started() -> Callable[[], nn.Module]:
    start = nn.Parameter(torch.zeros(1, 1, WIDTH))
    return lambda: Started(start)


BRANCHES: dict[str, Callable[[], nn.Module]] = {
    "LSTM": Recurrent,
    "GRU": lambda: Recurrent(nn.GRU),
    "RNN": lambda: Recurrent(nn.RNN),
    "RNN with relu": lambda: Recurrent(nn.RNN, nonlinearity="relu"),
    "time first": lambda: Recurrent(time_first=True),
    "bidirectional": lambda: Recurrent(nn.GRU, bidirectional=True),
    "projected": lambda: Recurrent(proj_size=WIDTH, hidden_size=WIDTH + 3),
    "two layers": lambda: Recurrent(num_layers=2, bias=False),
    "LSTMCell": lambda: OverTime(nn.LSTMCell),
    "GRUCell": lambda: OverTime(nn.GRUCell),
    "RNNCell": lambda: OverTime(nn.RNNCell),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", BRANCHES)
def test_every_kind(kind: str, train: bool) -> None:
    check_by_hand(build(BRANCHES[kind], train))


def test_a_state_to_start_from_that_all_layers_share_is_no_shared_weight() -> None:
    check_by_hand(build(_started()))


def test_dropout_between_the_layers_of_one_draws_once() -> None:
    net = build(lambda: Recurrent(num_layers=2, dropout=0.5), train=True)
    original, x = copy.deepcopy(net), example()
    ac.transform(net, x, CONFIG)
    for seed in range(3):
        torch.manual_seed(seed)
        got = net(x)
        torch.manual_seed(seed)
        assert relative_error(got, original(x)) < 1e-12


def test_inside_an_outer_compiler_and_as_a_copy() -> None:
    net, x = build(Recurrent), example()
    ac.transform(net, x, CONFIG)
    randomize_queries(ac.pseudo_queries(net))
    want = net(x)
    compiled = torch.compile(nn.Sequential(nn.Identity(), net), backend="aot_eager")
    assert relative_error(compiled(x), want) < 1e-12
    assert relative_error(copy.deepcopy(net)(x), want) < 1e-12
    assert not torch._dynamo.config.allow_rnn


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, lambda net: torch.export.export(net, (example(),))])
def test_graphs_that_come_as_they_are(trace: Callable[[nn.Module], Any]) -> None:
    _, report = ac.rewrite_graph(trace(build(Recurrent)), (example(),), CONFIG)
    (stream,) = report.streams
    assert len(stream.sublayers) == LAYERS
