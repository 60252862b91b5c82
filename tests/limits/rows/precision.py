"""Dtypes."""

from __future__ import annotations

import torch

import attnres_compile as ac
from tests.limits.condition import Condition, Holds, Limit
from tests.zoo.families import BY_NAME
from tests.zoo.support import convert, example

_FILE = "tests/conditions/test_precision.py"


def _clamp() -> None:
    family = BY_NAME["t5"]
    model, _ = convert(family)
    with torch.no_grad():
        model.half()(**example(family, torch.float16))


def _clamp_first() -> None:
    convert(BY_NAME["t5"], torch.float16)


CONDITION = Condition(
    order=60,
    title="Autocast, narrow and mixed dtypes",
    holds=(
        Holds(
            "Outputs and gradients in float64, float32, bfloat16 and float16, with the original's dtypes, are as near "
            "to the float64 model as the original's are",
            (f"{_FILE}::test_a_model_of_one_dtype",),
        ),
        Holds(
            "The same under `torch.autocast` in bfloat16 and float16, whether the model was converted inside the "
            "context or outside of it; queries stay in the parameters' dtype",
            (f"{_FILE}::test_autocast", f"{_FILE}::test_autocast_of_a_library_s_model"),
        ),
        Holds(
            "Streams and branches of two dtypes: a float32 residual with bfloat16 or float16 branches, a narrow "
            "residual with float32 branches, a float64 one with float32 branches, adds that promote or round, and a "
            "stream that is bfloat16 until its first add",
            (f"{_FILE}::test_streams_and_branches_of_two_dtypes",),
        ),
    ),
    limits=(
        Limit(
            what="a model whose stream changes with its dtype (T5 clamps its stream in float16 alone), converted in "
            "float32 and called in float16",
            program=_clamp,
            error=ac.PlanMismatchError,
            why="A clamp of a sum is no sum of clamps.",
            instead="Use bfloat16 or float32, or autocast, for such a model.",
        ),
        Limit(
            what="the same model converted in float16",
            program=_clamp_first,
            error=ac.NoStreamError,
            reason="clamp_on_stream",
            why="As above.",
            instead="Convert it in another dtype.",
        ),
    ),
)
