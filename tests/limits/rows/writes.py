"""Writes in place, views and aliases, lists, buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.limits.condition import Condition, Holds, Limit
from tests.limits.small import CONFIG, Steps, tokens


def _unused_result() -> None:
    def step(net: Steps, i: int, x: Tensor) -> Tensor:
        x.add_(net.f(i, x))
        return x

    ac.transform(Steps(step), tokens(), CONFIG)


class _Listing(Steps):
    def forward(self, x: Tensor) -> list[Tensor]:
        x, states = self.embed(x), []
        for i in range(self.count):
            states.append(x)
            x += self.f(i, x)
        return [self.norm(x), *states]


def _in_a_list() -> None:
    ac.transform(_Listing(lambda net, i, x: x), tokens(), CONFIG)


class _OnInput(Steps):
    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.count):
            x += self.f(i, x)
        return self.norm(x)


def _callers_tensor() -> None:
    ac.transform(_OnInput(lambda net, i, x: x), tokens(), CONFIG)


def _out() -> None:
    def step(net: Steps, i: int, x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.add(x, net.f(i, x), out=x)

    model: nn.Module = Steps(step)
    ac.transform(model, tokens(), CONFIG)


_TESTS = "tests/conditions/test_in_place.py::"

CONDITION = Condition(
    order=50,
    title="Writes in place, views, aliases",
    holds=(
        Holds(
            "`x += f(x)` and `f += x` where nobody sees the old value; buffers, attributes and lists that a forward "
            "keeps of its states; roots that are the caller's tensor: outputs, inputs, buffers, attributes, gradients "
            "and shared memory are the original's over two calls",
            (_TESTS + "test_kept", _TESTS + "test_a_list_of_the_callers"),
        ),
        Holds(
            "what is refused is left as it was: the model, its input, and what it computes",
            (_TESTS + "test_refused",),
        ),
    ),
    limits=(
        Limit(
            "`x.add_(f(x))` as a statement, with `x` read afterwards",
            _unused_result,
            ac.NoStreamError,
            "All values of the sum are one tensor in such a graph, and a source may not change.",
            "Write `x = x.add_(f(x))`, `x += f(x)` or `x = x + f(x)`.",
            reason="mutated",
        ),
        Limit(
            "states kept in a list, and written over by `x += f(x)`",
            _in_a_list,
            ac.NoStreamError,
            "All entries of the list are the last state then, which is seldom meant.",
            "Write `x = x + f(x)`, or keep clones.",
            reason="mutated",
        ),
        Limit(
            "`x += f(x)` into the caller's own tensor",
            _callers_tensor,
            ac.NoStreamError,
            "The caller would see a sum that the converted model does not make.",
            "Write `x = x + f(x)` in the first layer.",
            reason="mutated",
        ),
        Limit(
            "`torch.add(x, f(x), out=x)`",
            _out,
            ac.NoStreamError,
            "A spelling that only exists without gradients.",
            "Write `x = x + f(x)`.",
            reason="unsupported_form",
        ),
    ),
)
