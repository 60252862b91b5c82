"""What the tests of the table of numbers share: a check of a small model, and its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from attnres_compile.config import AttnResConfig
from attnres_compile.verification import Check, Verification, check
from tests import models

CONFIG = AttnResConfig(num_blocks=2, lowering="eager")
EAGER = ("eager",)
SITE_COUNT = 4  # of two layers: the first read of the root is a bypass, the final norm is a site of its own


def rows(found: Verification) -> dict[tuple[str, str, str], Check]:
    return {(row.name, row.what, row.dtype): row for row in found.checks}


def failed(found: Verification) -> set[tuple[str, str]]:
    return {(row.what, row.dtype) for row in found.checks if row.holds is False}


def verified(model: nn.Module | None = None, inputs: Any = None, **options: Any) -> Verification:
    model = models.build(layers=2) if model is None else model
    inputs = models.example() if inputs is None else inputs
    return check(model, inputs, options.pop("config", CONFIG), lowerings=options.pop("lowerings", EAGER), **options)


QUERIES_AT_ZERO = "converted, queries at zero"
SITES = "sites, by definition"
ORIGINAL = "original, by the equations"
EAGER_ROWS = {
    ("exactness", QUERIES_AT_ZERO, "float64"),
    ("exactness", QUERIES_AT_ZERO, "float32"),
    ("definition", SITES, "float64"),
    ("oracle", ORIGINAL, "float64"),
    ("agreement", "eager, two-phase", "float64"),
    ("agreement", "eager, one-phase, fused", "float64"),
    ("agreement", "eager, two-phase, fused", "float64"),
    ("rounding", "the original vs float64", "float32"),
    ("agreement", "eager, one-phase", "float32"),
    ("agreement", "eager, two-phase", "float32"),
}
ALL_EXACT = {(QUERIES_AT_ZERO, "float64"), (QUERIES_AT_ZERO, "float32")}


def wrapped(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, change: Callable[..., Any]) -> None:
    """Lets ``change(original, *arguments)`` take the place of a function."""
    original = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *args: change(original, *args))
