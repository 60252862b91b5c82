"""Scaled streams, long skips, and states that a model returns."""

from __future__ import annotations

import torch
from torch import Tensor

import attnres_compile as ac
from tests.limits.condition import Condition, Holds, Limit
from tests.limits.small import CONFIG, Steps, tokens


def _scale_of_the_data() -> None:
    def step(net: Steps, i: int, x: Tensor) -> Tensor:
        return (x + net.f(i, x)) * torch.sigmoid(x.mean(-1, keepdim=True))

    ac.transform(Steps(step), tokens(), CONFIG)


def _subtracted() -> None:
    ac.transform(Steps(lambda net, i, x: net.f(i, x) - x), tokens(), CONFIG)


_SCALED = "tests/conditions/test_scaled_streams.py::"
_STATES = "tests/conditions/test_hidden_states.py::"

CONDITION = Condition(
    order=30,
    title="Scaled streams, long skips, returned states",
    holds=(
        Holds(
            "`a * x + f(x)`, `(x + f(x)) * a`, `a * x + b * x0 + f(x)` with numbers, learned scalars, rows of a table "
            "and vectors over the features: each source carries its coefficient, equal to the equations written by "
            "hand at random queries, and coefficients get their gradients",
            (_SCALED + "test_the_papers_equations_with_coefficients",),
        ),
        Holds(
            "old states that are added again, with a branch or between two: what is added is what their reader gets",
            (_STATES + "test_long_skips_by_hand",),
        ),
        Holds(
            "states that are returned, one by one or in a list, are read: by the query of the state, or with "
            '`queries="reader"` by one of their own',
            (_STATES + "test_returned_states_by_hand",),
        ),
        Holds(
            "`output_hidden_states` and `output_attentions` of transformers, asked for before or after the conversion, "
            "with or without gradients",
            (
                _STATES + "test_asked_for_first_after_conversion",
                "tests/zoo/test_modes.py::test_returned_hidden_states_are_one_more_reader",
            ),
        ),
    ),
    limits=(
        Limit(
            "a scale on the stream that is computed from the data",
            _scale_of_the_data,
            ac.NoStreamError,
            "Such a product is an op of the network, and no sum of scaled sources.",
            "Put the gate on the branch.",
        ),
        Limit(
            "the stream as the subtracted operand, `f(x) - x`",
            _subtracted,
            ac.NoStreamError,
            "The sum changes its sign at every step; no network that we know of does so on purpose.",
            "Write it as `-x + f(x)` with `-1 * x`.",
            reason="unsupported_form",
        ),
    ),
)
