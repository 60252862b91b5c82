"""Steps that are spelt in ways that are no add: each is named, and no stream is cut by one in silence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnres_compile as ac
from tests.passes.support import TOKENS, WIDTH, Stream, check_exact, converted, study

Put = Callable[[Stream, int, Tensor], Tensor]
ROWS = torch.tensor([0, 2])
EAGER = ac.AttnResConfig(min_sublayers=2)


@torch.library.custom_op("attnres_tests::put_together", mutates_args=())
def put_together(x: Tensor, f: Tensor) -> Tensor:
    return x + f


@put_together.register_fake
def _(x: Tensor, f: Tensor) -> Tensor:
    return torch.empty_like(x)


put_together.register_autograd(lambda ctx, gradient: (gradient, gradient))


def mask(x: Tensor) -> Tensor:
    return (torch.arange(TOKENS) % 2 == 0).unsqueeze(-1).expand(x.shape)


PARTIAL: dict[str, Put] = {
    "index_add": lambda net, i, x: torch.index_add(x, 1, ROWS, net.f(i, x[:, ROWS]), alpha=2.0),
    "index_add method": lambda net, i, x: x.index_add(1, ROWS, net.f(i, x[:, ROWS])),
    "index_copy": lambda net, i, x: x.index_copy(1, ROWS, net.f(i, x[:, ROWS])),
    "index_put": lambda net, i, x: x.index_put((torch.tensor([0]),), net.f(i, x)[0], accumulate=True),
    "scatter_add": lambda net, i, x: x.scatter_add(1, torch.zeros_like(x).long(), net.f(i, x)),
    "slice_scatter": lambda net, i, x: torch.slice_scatter(x, net.f(i, x[:, :2]), 1, 0, 2),
    "select_scatter": lambda net, i, x: torch.select_scatter(x, net.f(i, x)[:, 0], 1, 0),
    "masked_scatter": lambda net, i, x: x.masked_scatter(mask(x), net.f(i, x)),
    "where": lambda net, i, x: torch.where(mask(x), net.f(i, x), x),
    "where method": lambda net, i, x: x.where(mask(x), net.f(i, x)),
}
WHOLE: dict[str, Put] = {
    "maximum": lambda net, i, x: torch.maximum(x, net.f(i, x)),
    "logaddexp": lambda net, i, x: torch.logaddexp(net.f(i, x), x),
    "hypot": lambda net, i, x: torch.hypot(x, net.f(i, x)),
    "foreach_add": lambda net, i, x: torch._foreach_add([x], [net.f(i, x)])[0],
    "einsum": lambda net, i, x: torch.einsum("sbtd,s->btd", torch.stack([x, net.f(i, x)]), torch.ones(2).double()),
    "mean of a stack": lambda net, i, x: torch.stack([net.f(i, x), x]).mean(0),
    "custom": lambda net, i, x: torch.ops.attnres_tests.put_together(x, net.f(i, x)),
    "cond": lambda net, i, x: torch.cond(x.sum() > 0, lambda x: x + net.f(i, x), lambda x: x.sin(), (x,)),
}
ALL = {**dict.fromkeys(PARTIAL, "partial_update"), **dict.fromkeys(WHOLE, "opaque_step")}


@pytest.mark.parametrize("how", ALL)
def test_a_model_of_nothing_else_names_them(how: str) -> None:
    outcome = study(Stream({**PARTIAL, **WHOLE}[how]), config=EAGER)
    assert outcome.module is None
    assert outcome.reasons[ALL[how]] == 4, outcome.report


@pytest.mark.parametrize("how", ALL)
def test_a_stream_is_cut_where_one_stands_and_names_it(how: str) -> None:
    put = {**PARTIAL, **WHOLE}[how]
    outcome = study(Stream(lambda net, i, x: put(net, i, x) if i == 3 else x + net.f(i, x), count=7), config=EAGER)
    assert outcome.sublayers == [3, 3]
    assert outcome.reasons[ALL[how]] == 1, outcome.report
    check_exact(outcome)


@pytest.mark.parametrize("how", [each for each in ALL if each != "cond" and "stack" not in each and each != "einsum"])
def test_one_that_ends_a_stream_is_named(how: str) -> None:
    put = {**PARTIAL, **WHOLE}[how]
    outcome = study(Stream(lambda net, i, x: put(net, i, x) if i == 3 else x + net.f(i, x)), config=EAGER)
    assert outcome.sublayers == [3] and outcome.reasons[ALL[how]] == 1, outcome.report


BRANCHES: dict[str, Put] = {
    "maxout": lambda net, i, x: torch.maximum(x, net.f(i, x)),
    "maxout of the normed": lambda net, i, x: torch.maximum(h := net.norms[i](x), net.branches[i](h)),
    "where": lambda net, i, x: torch.where(mask(x), net.f(i, x), x),
    "index_add": lambda net, i, x: (h := net.norms[i](x)).index_add(1, ROWS, net.branches[i](h[:, ROWS])),
    "custom": lambda net, i, x: torch.ops.attnres_tests.put_together(x, net.f(i, x)),
    "cond": lambda net, i, x: torch.cond(x.sum() > 0, lambda x: net.f(i, x), lambda x: x.sin(), (x,)),
    "gate": lambda net, i, x: (h := net.norms[i](x)) * torch.sigmoid(net.branches[i](h)),
    "attention": lambda net, i, x: F.scaled_dot_product_attention(net.f(i, x), x, x),
}


@pytest.mark.parametrize("how", BRANCHES)
def test_in_a_branch_it_is_a_branch(how: str) -> None:
    outcome = converted(Stream(lambda net, i, x: x + BRANCHES[how](net, i, x)), config=EAGER)
    assert not outcome.reasons.keys() & {"partial_update", "opaque_step"}


def test_a_mask_on_the_stream_is_no_clamp() -> None:
    reasons = study(Stream(lambda net, i, x: torch.where(mask(x), x + net.f(i, x), 0.0))).reasons
    assert "clamp_on_stream" not in reasons and reasons["partial_update"] >= 1, reasons


def test_a_guard_by_where_is_one() -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        x = x + net.f(i, x)
        return torch.where(torch.isinf(x), 60000.0, x)

    assert study(Stream(step)).reasons["clamp_on_stream"] >= 4


def test_no_stream_claims_no_more_than_was_seen() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ac.NoStreamError, match="no residual stream was found"):
        ac.transform(net, torch.zeros(2, WIDTH))
    with pytest.raises(ac.NoStreamError, match="4 partial_update"):
        ac.transform(Stream(PARTIAL["index_add"]), torch.zeros(2, TOKENS, WIDTH).double(), EAGER)
