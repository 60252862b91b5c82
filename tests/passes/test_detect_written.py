"""Branches that are put together in a tensor of their own, by writes of every kind."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnres_compile as ac
from tests.passes.by_hand import Branch, agrees
from tests.passes.support import TOKENS, WIDTH, Stream, converted, study

EXPERTS = 3


def experts(i: int) -> nn.Module:
    return nn.ModuleList([nn.Linear(WIDTH, EXPERTS), *(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))])


def routed(net: Stream, i: int, x: Tensor) -> tuple[Tensor, Tensor, list[nn.Module]]:
    """The normed tokens in a row, who serves each, and the experts."""
    router, *each = net.parts[i]
    h = net.norms[i](x).reshape(-1, WIDTH)
    return h, router(h).argmax(-1), list(each)


def by_experts(net: Stream, i: int, x: Tensor) -> Tensor:
    """What all the mixtures below compute."""
    h, pick, each = routed(net, i, x)
    rows = [(pick == e).unsqueeze(-1) * expert(h) for e, expert in enumerate(each)]
    return torch.stack(rows).sum(0).reshape(x.shape)


def _index_add(net: Stream, i: int, x: Tensor) -> Tensor:
    h, pick, each = routed(net, i, x)
    y = torch.zeros_like(h)
    for e, expert in enumerate(each):
        at = torch.where(pick == e)[0]
        y.index_add_(0, at, expert(h[at]))
    return y.view(x.shape)


def _index_plus(net: Stream, i: int, x: Tensor) -> Tensor:
    h, pick, each = routed(net, i, x)
    y = torch.zeros(h.shape, dtype=h.dtype)
    for e, expert in enumerate(each):
        at = torch.where(pick == e)[0]
        y[at] += expert(h[at])
    return y.view(x.shape)


def _index_put(net: Stream, i: int, x: Tensor) -> Tensor:
    h, pick, each = routed(net, i, x)
    y = h.new_zeros(h.shape)
    for e, expert in enumerate(each):
        at = torch.where(pick == e)
        y.index_put_(at, expert(h[at]), accumulate=True)
    return y.view(x.shape)


def _scatter_add(net: Stream, i: int, x: Tensor) -> Tensor:
    h, pick, each = routed(net, i, x)
    y = torch.zeros_like(h)
    for e, expert in enumerate(each):
        at = torch.where(pick == e)[0]
        y.scatter_add_(0, at.unsqueeze(-1).expand(-1, WIDTH), expert(h[at]))
    return y.view(x.shape)


def _masked(net: Stream, i: int, x: Tensor) -> Tensor:
    h, pick, each = routed(net, i, x)
    y = torch.empty_like(h)
    for e, expert in enumerate(each):
        y[pick == e] = expert(h[pick == e])
    return y.view(x.shape)


def _masked_scatter(net: Stream, i: int, x: Tensor) -> Tensor:
    h, pick, each = routed(net, i, x)
    y = torch.empty_like(h)
    for e, expert in enumerate(each):
        y.masked_scatter_((pick == e).unsqueeze(-1), expert(h[pick == e]))
    return y.view(x.shape)


def _where(net: Stream, i: int, x: Tensor) -> Tensor:
    h, pick, each = routed(net, i, x)
    y = torch.zeros_like(h)
    for e, expert in enumerate(each):
        y = y + torch.where((pick == e).unsqueeze(-1), expert(h), 0.0)
    return y.view(x.shape)


def _through_a_view(net: Stream, i: int, x: Tensor) -> Tensor:
    h, pick, each = routed(net, i, x)
    y = torch.zeros_like(x)
    rows = y.view(-1, WIDTH)
    for e, expert in enumerate(each):
        rows += (pick == e).unsqueeze(-1) * expert(h)
    return y


def _expert_sum_in_place(net: Stream, i: int, x: Tensor) -> Tensor:
    h, pick, each = routed(net, i, x)
    y = torch.zeros_like(h)
    for e, expert in enumerate(each):
        y.add_((pick == e).unsqueeze(-1) * expert(h))
    return y.view(x.shape)


MIXTURES = [
    _index_add, _index_plus, _index_put, _scatter_add, _masked, _masked_scatter, _where, _through_a_view,
    _expert_sum_in_place,
]  # fmt: skip


def _chunks(net: Stream, i: int, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    for at in range(0, TOKENS, 2):
        y[:, at : at + 2] = net.f(i, x[:, at : at + 2])
    return y


def _channels(net: Stream, i: int, x: Tensor) -> Tensor:
    y, h = x.new_empty(x.shape), net.f(i, x)
    y[..., :2] = h[..., :2]
    y[..., 2:] = h[..., 2:]
    return y


def _copied(net: Stream, i: int, x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(net.f(i, x))


def _copied_and_named(net: Stream, i: int, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y.copy_(net.f(i, x))
    return y


def _slice_copied(net: Stream, i: int, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y.narrow(1, 0, 3).copy_(net.f(i, x)[:, :3])
    y.select(1, 3).copy_(net.f(i, x)[:, 3])
    return y


def _rows(net: Stream, i: int, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for at in range(TOKENS):
        y[:, at] = net.f(i, x[:, at])
    return y


def _index_copied(net: Stream, i: int, x: Tensor) -> Tensor:
    order = torch.tensor([2, 0, 3, 1])
    return torch.zeros_like(x).index_copy_(1, order, net.f(i, x)[:, order])


def _scattered(net: Stream, i: int, x: Tensor) -> Tensor:
    order = torch.tensor([2, 0, 3, 1]).view(1, -1, 1).expand(*x.shape)
    return torch.zeros_like(x).scatter_(1, order, net.f(i, x).gather(1, order))


PLAIN = [_chunks, _channels, _copied, _copied_and_named, _slice_copied, _rows, _index_copied, _scattered]


def _f(net: Stream, i: int, x: Tensor) -> Tensor:
    return net.f(i, x)


def _step(write: Branch, mixed: bool, net: Stream, i: int, x: Tensor) -> Tensor:
    return x + (net.f(i, x) if mixed and i % 2 == 0 else write(net, i, x))


def _reference(write: Branch, mixed: bool, net: Stream, i: int, x: Tensor) -> Tensor:
    return net.f(i, x) if mixed and i % 2 == 0 else write(net, i, x)


@pytest.mark.parametrize("write", MIXTURES, ids=lambda f: f.__name__)
def test_mixtures_of_experts(write: Branch) -> None:
    """In turn with branches that write nothing: the last one is a sublayer, too."""
    net = Stream(functools.partial(_step, write, True), parts=experts)
    agrees(net, functools.partial(_reference, by_experts, True), train=True)


@pytest.mark.parametrize("write", PLAIN, ids=lambda f: f.__name__)
def test_one_branch_written_in_parts(write: Branch) -> None:
    """Streams of nothing else are found."""
    agrees(Stream(functools.partial(_step, write, False)), _f)


def test_out_without_gradients() -> None:
    """``out=`` writes are no part of training; their numbers are right."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        weight = net.branches[i].weight
        torch.mm(net.norms[i](x).view(-1, WIDTH), weight.t(), out=y.view(-1, WIDTH))
        return x + y

    with torch.no_grad():
        outcome = study(Stream(step))
    assert outcome.sublayers == [4]


def test_no_step_is_lost_at_the_end() -> None:
    """What a write leaves behind is read through the tensor, a view made before, and a view made after."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        before = y.view(-1, WIDTH)
        y.copy_(net.f(i, x))
        return x + (before.view_as(x), y, y[:])[i % 3]

    converted(Stream(step))


# ------------------------------------------------------------------ near misses


def test_a_write_of_nothing_learned_is_no_branch() -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, 1:] = x[:, :-1] * 0.5
        return x + y

    outcome = study(Stream(step))
    assert outcome.module is None
    assert set(outcome.reasons) == {"no_learned_branch"}


def test_a_tensor_that_all_layers_write_is_no_source() -> None:
    """The next layer writes over what the one before added."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for i in range(net.count):
            y.copy_(net.f(i, x))
            x = x + y
        return net.head(x)

    outcome = study(Stream(lambda *_: None, whole=whole))
    assert outcome.module is None
    assert outcome.reasons["mutated"] == 4


def test_what_is_read_before_the_write_holds_nothing_of_it() -> None:
    """``y`` is a learned branch of ``x`` only once it has been written."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        for i in range(net.count):
            y = torch.zeros_like(x)
            early = x + y.clone()
            y.copy_(net.f(i, x))
            x = x + y * 0.1 + early.mean() * 0.0
        return net.head(x)

    outcome = study(Stream(lambda *_: None, whole=whole))
    assert outcome.sublayers == [4]
    assert outcome.reasons["unrelated_operands"] + outcome.reasons["no_learned_branch"] == 4


def test_a_cache_that_is_written_is_no_weight() -> None:
    """A buffer that data is written into holds data: a product with it is no learned one."""

    class Cached(Stream):
        def __init__(self) -> None:
            super().__init__(self.cached)
            self.register_buffer("cache", torch.zeros(4, WIDTH, WIDTH, dtype=torch.float64))

        @staticmethod
        def cached(net: Stream, i: int, x: Tensor) -> Tensor:
            row = net.cache[i]
            row.copy_(x[0, :1].detach().expand(WIDTH, -1))
            return x + x @ row

    outcome = study(Cached())
    assert outcome.module is None
    assert "no_learned_branch" in outcome.reasons


def test_the_report_names_the_written_branch() -> None:
    net = Stream(functools.partial(_step, _index_plus, True), parts=experts)
    report = ac.explain(net, torch.randn(2, TOKENS, WIDTH, dtype=torch.float64), ac.AttnResConfig(lowering="eager"))
    assert [len(stream.sublayers) for stream in report.streams] == [4]
    # Each expert's own sum is an ordinary add, and no write to a stream.
    assert {str(rejection.reason) for rejection in report.rejections} == {"unrelated_operands"}


@torch._dynamo.allow_in_graph
def product_of_somebody(x: Tensor, weight: Tensor) -> Tensor:
    return torch.linalg.multi_dot([x.flatten(0, -2), weight.t()]).view(x.shape)


def test_a_weight_that_is_handed_to_an_unknown_function_is_still_a_weight() -> None:
    """It may be written, for all that can be told; it is no data for that."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        h, weight = net.norms[i](x), net.branches[i].weight
        return x + product_of_somebody(h, weight) + F.linear(h, weight)

    converted(Stream(step))
