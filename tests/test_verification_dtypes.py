"""The table of numbers in dtypes that a model may be in, and of models that rounding hurts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnres_compile.kernels import plain_phases
from tests import models
from tests.verifying import QUERIES_AT_ZERO, SITE_COUNT, SITES, failed, rows, verified, wrapped


class Casts(models.Model):
    """Computes in a dtype of its own on the way."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(layers=2)
        self.dtype = dtype

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x.to(self.dtype), scale)


def test_a_model_that_does_not_run_in_float64() -> None:
    found = verified(Casts(torch.float32))
    table = rows(found)
    for name, what in (("exactness", QUERIES_AT_ZERO), ("agreement", "all lowerings")):
        row = table[name, what, "float64"]
        assert row.holds is None
        assert row.note.startswith("not run: the model itself fails in float64: RuntimeError: ")
        assert "\n" not in row.note
    assert found.reference == "eager, one-phase, float32"
    assert table["definition", SITES, "float32"].holds
    assert table["agreement", "eager, two-phase", "float32"].tolerance == 1e-5
    assert table["agreement", "eager, two-phase, fused", "float32"].holds
    assert found.holds


def test_a_break_is_seen_without_float64_too(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped(monkeypatch, plain_phases, "_merged", lambda merged, q, o, lse, *rest: merged(q, o, lse + 1e-2, *rest))
    assert ("eager, two-phase", "float32") in failed(verified(Casts(torch.float32)))


def test_a_model_that_only_its_own_dtype_runs() -> None:
    found = verified(Casts(torch.bfloat16).bfloat16(), models.example().bfloat16())
    assert found.dtype == "bfloat16"
    assert [row.dtype for row in found.checks if row.note.startswith("not run: the model itself")] == [
        *("float64", "float32"),
        *("float64", "float32"),
    ]
    assert found.reference == "eager, one-phase, bfloat16"
    assert found.holds


def test_a_half_precision_model_has_rows_of_its_own() -> None:
    found = verified(models.build(layers=2).bfloat16(), models.example().bfloat16())
    table = rows(found)
    row = table["exactness", QUERIES_AT_ZERO, "bfloat16"]
    assert row.holds
    assert row.tolerance == pytest.approx(3 * 2**-7 * SITE_COUNT**0.5)
    assert table["agreement", "eager, one-phase", "bfloat16"].holds
    own = table["rounding", "the original vs float64", "bfloat16"]
    assert own.error_output is not None and own.error_gradient is not None
    assert table["agreement", "eager, two-phase", "bfloat16"].tolerance == pytest.approx(
        max(3 * 2**-7 * SITE_COUNT**0.5, 10 * max(own.error_output, own.error_gradient))
    )
    assert table["agreement", "eager, one-phase", "float32"].holds


def test_a_float64_model_is_compared_with_its_own_numbers_in_float32() -> None:
    found = verified(models.build(layers=2).double(), models.example().double())
    assert (found.dtype, found.holds) == ("float64", True)
    own = rows(found)["rounding", "the original vs float64", "float32"]
    assert own.error_output is not None and own.error_output < 1e-6


def test_float32_in_places_of_a_float64_run() -> None:
    class Norms(models.Model):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(x.float().to(x.dtype), scale)

    found = verified(Norms(layers=2))
    row = rows(found)["exactness", QUERIES_AT_ZERO, "float64"]
    assert row.tolerance == 1e-5
    assert "computes in float32 in places" in row.note
    assert rows(found)["agreement", "eager, two-phase", "float64"].tolerance == pytest.approx(1e-5)


class Chaotic(models.Model):
    """What goes in differs by a rounding error, what comes out by as much as one likes."""

    def __init__(self, amplified: float) -> None:
        super().__init__(layers=2)
        self.amplified = amplified

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return (super().forward(x) * self.amplified).sin()


def test_an_ill_conditioned_model_is_measured_by_itself() -> None:
    found = verified(Chaotic(100.0))
    table = rows(found)
    own, row = (
        table["rounding", "the original vs float64", "float32"],
        table["agreement", "eager, one-phase", "float32"],
    )
    assert own.error_output is not None and own.error_gradient is not None
    assert row.tolerance == 10 * max(own.error_output, own.error_gradient) > 1e-5
    assert row.holds
    assert row.note == ""


def test_a_model_that_is_too_coarse_to_tell_is_not_counted() -> None:
    found = verified(Chaotic(1e4))
    row = rows(found)["agreement", "eager, one-phase", "float32"]
    assert row.holds is None
    assert row.tolerance is not None and row.tolerance > 1e-2
    assert "too coarse to tell" in row.note
