"""Models that are one thing eagerly and another one under ``torch.compile``."""

from __future__ import annotations

import torch
from torch import Tensor

import attnres_compile as ac
from tests import models
from tests.limits.condition import Condition, Holds, Limit


def _hurried(x: Tensor) -> Tensor:
    return x if torch.compiler.is_compiling() else x.tril()


def _program() -> None:
    model = models.build(between=_hurried)
    ac.transform(model, models.example(), ac.AttnResConfig(lowering="eager"), verify=True)


CONDITION = Condition(
    order=25,
    title="Models that torch.compile changes",
    holds=(
        Holds(
            "What a model computes under `torch.compile` without this package is what the converted one computes",
            ("tests/test_self_check.py::test_a_model_that_tracing_changes_is_told_from_a_wrong_conversion",),
        ),
    ),
    limits=(
        Limit(
            what="`transform(..., verify=True)` of a model whose code asks `torch.compiler.is_compiling()` and "
            "computes something else there",
            program=_program,
            error=ac.InexactError,
            why="A converted model is compiled, so it computes what the original computes when it is compiled, and the "
            "promise is what the original computes eagerly. The message says that this is so before any conversion.",
            instead="Make the two ways of the model agree, or transform without `verify` where the compiled one is "
            "right.",
        ),
    ),
    notes=(
        "Without `verify`, `transform` runs no numbers and cannot see this: such a model is converted into what "
        "`torch.compile` makes of it. docs/zoo.md names those that were found, with status `traced`.",
    ),
)
