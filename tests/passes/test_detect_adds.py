"""Every spelling of an add, and trees of adds in every order and association."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnres_compile as ac
from tests.evaluate import Captured
from tests.passes.support import (
    TOKENS,
    WIDTH,
    Bag,
    Stream,
    by_dynamo,
    by_symbolic_trace,
    converted,
    refused,
    study,
)

aten = torch.ops.aten
Join = Callable[[Tensor, Tensor], Tensor]


def _iadd(f: Tensor, x: Tensor) -> Tensor:
    f += x
    return f


def _isub(f: Tensor, x: Tensor) -> Tensor:
    f -= x
    return f


SPELLINGS: dict[str, Join] = {
    "x + f": lambda x, f: x + f,
    "f + x": lambda x, f: f + x,
    "f += x": lambda x, f: _iadd(f, x),
    "__add__": lambda x, f: x.__add__(f),
    "torch.add": torch.add,
    "torch.add keywords": lambda x, f: torch.add(input=x, other=f),
    "torch.add alpha": lambda x, f: torch.add(x, f, alpha=0.5),
    "Tensor.add": lambda x, f: f.add(x),
    "Tensor.add_": lambda x, f: f.add_(x),
    "aten.add": lambda x, f: aten.add.Tensor(x, f),
    "aten.add alpha": lambda x, f: aten.add.Tensor(x, f, alpha=-2),
    "aten.add_": lambda x, f: aten.add_.Tensor(f, x),
    "x - f": lambda x, f: x - f,
    "torch.sub": torch.sub,
    "torch.subtract alpha": lambda x, f: torch.subtract(x, f, alpha=0.5),
    "Tensor.sub": lambda x, f: x.sub(f),
    "sum": lambda x, f: sum([x, f]),
    "sum of a tuple, reversed": lambda x, f: sum((f, x)),
    "sum with a start": lambda x, f: sum([f], x),
    "stack + sum": lambda x, f: torch.stack([x, f]).sum(0),
    "stack + sum, last dimension": lambda x, f: torch.sum(torch.stack((f, x), dim=-1), dim=-1),
    "x + 0 + f": lambda x, f: x + 0 + f,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling(spelling: str) -> None:
    join = SPELLINGS[spelling]
    converted(Stream(lambda net, i, x: join(x, net.f(i, x))))


def test_add_into_the_stream_where_no_gradient_needs_it() -> None:
    """``x += f`` writes the state itself, which nothing reads afterwards."""
    model = Stream(lambda net, i, x: x.add_(net.f(i, x * 1.0)))
    model.requires_grad_(False)
    outcome = study(model)
    assert outcome.sublayers == [4] and outcome.module is not None
    got, want = (outcome.captured.run(m, grad=False)[0][0] for m in (outcome.module, None))
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)


def test_addcmul_adds_a_product() -> None:
    model = Stream(
        lambda net, i, x: torch.addcmul(x, net.f(i, x), net.parts[i].gate, value=0.5),
        parts=lambda i: Bag(gate=torch.ones(WIDTH)),
    )
    converted(model)


def test_addmm_with_the_stream_first() -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        return torch.addmm(x, net.norms[i](x), net.branches[i].weight)

    def whole(net: Stream, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        for i in range(net.count):
            x = step(net, i, x)
        return net.head(net.norm(x))

    converted(Stream(step, whole=whole))


def test_addmm_whose_data_is_the_second_factor() -> None:
    """The weight stands first: ``x + W @ norm(x)``, tokens last."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        x = x.flatten(0, 1).t()
        for i in range(net.count):
            x = torch.addmm(x, net.branches[i].weight, net.norms[i](x.t()).t(), alpha=0.5)
        return net.head(net.norm(x.t()))

    converted(Stream(lambda net, i, x: x, whole=whole))


def test_addmm_with_beta_is_named() -> None:
    def whole(net: Stream, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        for i in range(net.count):
            x = torch.addmm(x, net.norms[i](x), net.branches[i].weight, beta=0.5)
        return net.head(net.norm(x))

    assert set(refused(Stream(lambda net, i, x: x, whole=whole))) == {"unsupported_form"}


def test_baddbmm_with_the_stream_first() -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        return torch.baddbmm(x, net.norms[i](x), net.branches[i].weight.expand(x.shape[0], -1, -1))

    converted(Stream(step))


def test_lerp_is_gated() -> None:
    assert set(refused(Stream(lambda net, i, x: torch.lerp(x, net.f(i, x), 0.3)))) == {"gated"}


def test_lerp_method_in_place_is_gated() -> None:
    assert set(refused(Stream(lambda net, i, x: net.f(i, x).lerp_(x, 0.3)))) == {"gated"}


@pytest.mark.parametrize("join", [lambda x, f: torch.addcdiv(x, f, torch.full_like(f, 2.0)), torch.logaddexp])
def test_ops_that_only_look_like_adds_are_no_stream(join: Join) -> None:
    outcome = study(Stream(lambda net, i, x: join(x, net.f(i, x))))
    assert outcome.module is None


def test_stream_as_the_subtracted_operand_is_named() -> None:
    assert set(refused(Stream(lambda net, i, x: net.f(i, x) - x))) == {"unsupported_form"}


def _trees(leaves: tuple[int, ...]) -> list[object]:
    if len(leaves) == 1:
        return [leaves[0]]
    cuts = range(1, len(leaves))
    return [(a, b) for cut in cuts for a in _trees(leaves[:cut]) for b in _trees(leaves[cut:])]


ALL_TREES = [tree for order in itertools.permutations(range(3)) for tree in _trees(order)]


class _Parallel(nn.Module):
    """Parallel attention and MLP: each block is one step, whatever the tree."""

    def __init__(self, tree: object, count: int = 3) -> None:
        super().__init__()
        self.tree = tree
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(count))
        self.left = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.right = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, left, right in zip(self.norms, self.left, self.right, strict=True):
            h = norm(x)
            x = self.summed(self.tree, (x, left(h), right(h)))
        return self.head(x)

    def summed(self, tree: object, values: tuple[Tensor, ...]) -> Tensor:
        if isinstance(tree, int):
            return values[tree]
        assert isinstance(tree, tuple)
        return self.summed(tree[0], values) + self.summed(tree[1], values)


@pytest.mark.parametrize("tree", ALL_TREES, ids=str)
def test_tree_of_adds_is_one_step(tree: object) -> None:
    outcome = converted(_Parallel(tree), sublayers=3, trace=by_symbolic_trace)
    stream = outcome.report.streams[0]
    assert all(len(sublayer.adds) == 2 for sublayer in stream.sublayers)


def test_serial_branches_are_steps_of_their_own() -> None:
    """``(x + a) + b``: one step where b reads x (above), two where b reads ``x + a``."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        y = x + net.f(i, x)
        return y + net.parts[i](y)

    converted(Stream(step, parts=lambda i: nn.Linear(WIDTH, WIDTH)), sublayers=8)


def test_shapes_of_every_add_are_kept() -> None:
    """A branch may broadcast into the stream."""
    converted(Stream(lambda net, i, x: x + net.f(i, x).mean(1, keepdim=True)))


def test_the_stream_may_not_broadcast() -> None:
    def whole(net: Stream, x: Tensor) -> Tensor:
        x = x.mean(1, keepdim=True)
        for i in range(net.count):
            x = x + net.f(i, x.expand(-1, TOKENS, -1) * torch.arange(1.0, 1.0 + TOKENS)[:, None])
            x = x.mean(1, keepdim=True)
        return net.head(x)

    assert set(refused(Stream(lambda net, i, x: x, whole=whole))) == {"broadcast_skip"}


@pytest.mark.parametrize("dropout", [lambda x: F.dropout(x, 0.5, False), nn.Dropout(0.5).eval()])
def test_dropout_that_does_nothing_between_unread_sums(dropout: Callable[[Tensor], Tensor]) -> None:
    """Nothing but the next add reads ``x + f``: one step."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        h = net.norms[i](x)
        return net.drop(x + net.branches[i](h)) + net.parts[i](h)

    model = Stream(step, parts=lambda i: nn.Linear(WIDTH, WIDTH))
    model.drop = dropout
    converted(model)


@pytest.mark.parametrize("trace", [by_dynamo, by_symbolic_trace])
def test_a_last_sum_that_nothing_reads(trace: Callable[..., Captured]) -> None:
    """As in residual quantisers, which sum up what they take off: the last difference is never used."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        total = 0
        for i in range(5):
            f = net.f(i, x)
            total = total + net.parts[i](f)
            x = x - f
        return net.head(total)

    model = Stream(lambda net, i, x: x, whole=whole, count=5, parts=lambda i: nn.Linear(WIDTH, 2 * WIDTH))
    model.head = nn.Linear(2 * WIDTH, 2)
    outcome = converted(model.double(), sublayers=4, trace=trace, config=ac.AttnResConfig(queries="reader"))
    stream = outcome.report.streams[0]
    assert len(stream.sublayers[-1].adds) == 2
    assert len(stream.sites) == 5, "what nothing reads reads nothing"


def test_a_last_write_whose_own_result_nothing_reads() -> None:
    """``x.add_(f)`` changes a tensor that is returned: no sum that could go away."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        for i in range(4):
            x = x + net.f(i, x)
        x.add_(net.f(4, x))
        return x

    assert set(refused(Stream(lambda net, i, x: x, whole=whole, count=5))) == {"mutated"}


def test_skip_added_twice_around_an_unread_sum() -> None:
    """``x + (x + f)``, the inner sum moved to where it is: one step, of which the skip is a term."""
    converted(Stream(lambda net, i, x: x + (x + net.f(i, x)).to(x.device)))
    converted(Stream(lambda net, i, x: (x + net.f(i, x)) + x))
