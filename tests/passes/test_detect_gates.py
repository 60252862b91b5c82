"""Branches that hold the stream itself, or a mean of it, and branches that only look like that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnres_compile as ac
from tests.passes.support import WIDTH, Bag, StepFunction, Stream, converted, refused

Mean = Callable[[Tensor], Tensor]


def vectors(i: int) -> Bag:
    return Bag(a=torch.ones(WIDTH), b=torch.ones(WIDTH), mean=torch.ones(WIDTH))


@pytest.mark.parametrize(
    "mean",
    [
        lambda x: x.mean(1, keepdim=True),
        lambda x: x.sum(1, keepdim=True) / x.shape[1],
        lambda x: x.masked_fill(torch.arange(x.shape[1])[:, None] > 2, 0.0).sum(-2, keepdim=True) / 3,
    ],
    ids=["mean", "sum", "masked"],
)
@pytest.mark.parametrize("form", ["learned", "whole", "faded"])
def test_the_mean_over_tokens_is_interpolated(mean: Mean, form: str) -> None:
    """What varies between tokens is added; of their mean the old one is faded out."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        f, a, b = net.f(i, x), net.parts[i].a, net.parts[i].b
        if form == "faded":
            return x + f - 0.1 * mean(x)
        return x + (f - mean(f)) * b + ((mean(f) - mean(x)) * a if form == "learned" else mean(f) - mean(x))

    assert refused(Stream(step, parts=vectors))["gated"] >= 4


def test_a_centred_branch_is_no_gate() -> None:
    """``x + (f - mean(f))``, and a branch that reads the stream's mean with weights of its own."""
    converted(Stream(lambda net, i, x: x + (net.f(i, x) - net.f(i, x).mean(1, keepdim=True)) * 0.5))
    converted(Stream(lambda net, i, x: x + (net.f(i, x) - net.f(i, x.mean(1, keepdim=True)))))


def test_a_mean_that_is_added_is_a_branch() -> None:
    """Nothing fades where the mean of all tokens is told to each of them."""
    converted(Stream(lambda net, i, x: x + net.f(i, x) + x.mean(1, keepdim=True)))


def test_a_branch_without_its_part_along_the_stream() -> None:
    """``x + f - (f . u) u`` with ``u = x / |x|``: where f is zero the stream goes on as it is."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        f, unit = net.f(i, x), F.normalize(x, dim=-1)
        return x + (f - (f * unit).sum(-1, keepdim=True) * unit)

    converted(Stream(step))


# ------------------------------------------------------------------ norms with fixed statistics


@pytest.mark.parametrize("form", ["x * w + b", "w * x + b", "b + x * w", "x / w - b", "fixed statistics"])
def test_scale_and_shift_of_the_sum_are_a_norm(form: str) -> None:
    """A batch norm with its statistics folded in, or left out altogether, is refused like one that has them."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        x, w, b = x + net.branches[i](x), net.parts[i].a, net.parts[i].b
        if form == "fixed statistics":
            return (x - net.parts[i].mean) * w + b
        return {"x * w + b": x * w + b, "w * x + b": w * x + b, "b + x * w": b + x * w, "x / w - b": x / w - b}[form]

    reasons = refused(Stream(step, parts=vectors))
    assert reasons["post_norm"] >= 4 and set(reasons) <= {"post_norm", "no_learned_branch"}


def test_a_scale_alone_and_a_table_are_no_norm() -> None:
    """A table of positions is no shift per feature, even beside a scale; and a norm has a scale per feature."""

    def table(i: int) -> nn.Module:
        return Bag(a=torch.ones(WIDTH), table=torch.ones(4, WIDTH), one=torch.ones(()), b=torch.zeros(WIDTH))

    def step(scale: str, shift: str) -> StepFunction:
        return lambda net, i, x: (x + net.f(i, x)) * getattr(net.parts[i], scale) + getattr(net.parts[i], shift)

    converted(Stream(lambda net, i, x: (x + net.f(i, x)) * net.parts[i].a, parts=table))
    # What is added makes a source of its own, in all but the last layer.
    converted(Stream(step("a", "table"), parts=table), sublayers=7)
    converted(Stream(step("one", "b"), parts=table), sublayers=7)


def test_one_scale_and_shift_in_a_long_stream_is_no_post_norm() -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        x = x + net.f(i, x)
        return x * net.parts[i].a + net.parts[i].b if i == 1 else x

    converted(Stream(step, count=5, parts=vectors), sublayers=6)


class Quantiser(nn.Module):
    """Takes the nearest entry of each codebook off what is left, and hands on what was taken off in all."""

    def __init__(self, straight: bool) -> None:
        super().__init__()
        self.books = nn.ParameterList(torch.randn(7, WIDTH) for _ in range(4))
        self.straight = straight

    def forward(self, x: Tensor) -> Tensor:
        rest = x
        for book in self.books:
            chosen = (rest @ book.t()).argmax(-1)
            near = rest @ book.t() @ book if self.straight else nn.functional.embedding(chosen, book)
            rest = rest - near
        return x - rest


@pytest.mark.parametrize(("straight", "found"), [(True, 4), (False, 0)])
def test_what_only_an_index_is_read_for_is_no_branch(straight: bool, found: int) -> None:
    """No gradient would ever reach a query there, and what is taken off is not computed from the state."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Quantiser(straight), nn.Linear(WIDTH, WIDTH))
    streams = ac.explain(model, torch.randn(2, 3, WIDTH)).streams
    assert sum(len(stream.sublayers) for stream in streams) == found
