"""The table of numbers: each thing broken on purpose fails its own row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnres_compile.config import AttnResConfig
from attnres_compile.exactness import convert_copy
from attnres_compile.inputs import Inputs
from attnres_compile.kernels import plain, plain_phases
from tests import models
from tests.cli.conftest import SCRIPT
from tests.verifying import ALL_EXACT, ORIGINAL, QUERIES_AT_ZERO, SITES, failed, rows, verified, wrapped

TWO_PHASE = {("eager, two-phase", "float64"), ("eager, two-phase", "float32")}


def test_a_source_that_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropped(mix: Callable[..., Tensor], query: Tensor, sources: list[Tensor], *rest: Any) -> Tensor:
        return mix(query, sources[1:], *rest)

    wrapped(monkeypatch, plain, "mix", dropped)
    found = verified()
    assert not found.holds
    assert failed(found) >= {*ALL_EXACT, (SITES, "float64"), (ORIGINAL, "float64"), ("eager, two-phase", "float64")}
    row = rows(found)["exactness", QUERIES_AT_ZERO, "float64"]
    assert row.error_output is not None and row.error_output > 0.01
    assert row.worst_output == "output"


def test_a_wrong_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    def louder(mix: Callable[..., Tensor], query: Tensor, sources: list[Tensor], dim: int, eps: float, gain: float,
               *rest: Any) -> Tensor:  # fmt: skip
        return mix(query, sources, dim, eps, gain * 1.001, *rest)

    wrapped(monkeypatch, plain, "mix", louder)
    found = failed(verified())
    assert found >= {*ALL_EXACT, (SITES, "float64"), (ORIGINAL, "float64"), ("eager, two-phase", "float64")}


def test_what_zero_queries_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    def hotter(reads: Callable[..., Any], queries: list[Tensor], *rest: Any) -> Any:
        return reads([query * 1.01 for query in queries], *rest)

    # Of one site alone and of phase 1: both are off in the same way, so only the definition and the merges tell.
    wrapped(monkeypatch, plain, "reads", hotter)
    wrapped(monkeypatch, plain_phases, "reads", hotter)
    found = verified()
    assert {(SITES, "float64"), (ORIGINAL, "float64")} <= failed(found)
    assert not ALL_EXACT & failed(found)


def test_a_wrong_gradient_of_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(reads_backward: Callable[..., list[Tensor]], *arguments: Any) -> list[Tensor]:
        of_query, *of_sources = reads_backward(*arguments)
        return [of_query * 1.01, *of_sources]

    # Phase 1's backward has it under a name of its own.
    wrapped(monkeypatch, plain, "reads_backward", off)
    found = verified()
    assert (SITES, "float64") in failed(found)
    assert {("eager, two-phase", "float64"), (ORIGINAL, "float64")} <= failed(found)
    row = rows(found)["definition", SITES, "float64"]
    assert row.error_output is not None and row.error_output < 1e-12
    assert row.error_gradient == pytest.approx(0.01, rel=1e-6)
    # At zero queries the queries' gradients have nothing to be compared with.
    assert not ALL_EXACT & failed(found)


def test_a_merge_with_a_wrong_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    def heavier(merged: Callable[..., Tensor], query: Tensor, mixed: Tensor, lse: Tensor, *rest: Any) -> Tensor:
        return merged(query, mixed, lse + 1e-3, *rest)

    wrapped(monkeypatch, plain_phases, "_merged", heavier)
    found = verified()
    assert failed(found) == {*TWO_PHASE, ("eager, two-phase, fused", "float64")}
    row = rows(found)["agreement", "eager, two-phase", "float64"]
    assert row.error_output is not None and 1e-6 < row.error_output < 1e-2


def test_a_fused_site_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped(monkeypatch, plain_phases, "_normed", lambda normed, *arguments: normed(*arguments) * (1 + 1e-6))
    assert failed(verified()) == {("eager, one-phase, fused", "float64"), ("eager, two-phase, fused", "float64")}


def scaled_by(factor: float, on: Callable[[AttnResConfig], bool]) -> Callable[..., nn.Module]:
    """Converts, and scales the head's weight where ``on`` says so: a stand-in for a lowering that is off."""

    def convert(model: nn.Module, inputs: Inputs, config: AttnResConfig) -> nn.Module:
        made = convert_copy(model, inputs, replace(config, lowering="eager"))
        if on(config):
            made.register_forward_hook(lambda module, args, output: output * factor)
        return made

    return convert


def test_an_inductor_lowering_that_is_off() -> None:
    both = ("eager", "inductor")
    inductor = {("Inductor, one-phase", "float32"), ("Inductor, two-phase", "float32")}
    found = verified(lowerings=both, convert=scaled_by(1.0, lambda config: True))
    assert found.holds
    assert {(row.what, row.dtype) for row in found.checks} >= inductor
    assert found.notes == ()
    off = scaled_by(1.001, lambda config: config.lowering == "inductor" and config.two_phase == "on")
    assert failed(verified(lowerings=both, convert=off)) == {("Inductor, two-phase", "float32")}


def test_a_softmax_more_sensitive_than_the_sum_is_measured_by_itself_and_hides_no_mistake() -> None:
    """These weights and queries turn one rounding of each weight into 8e-6, where the original's own error is 7e-7."""
    names: dict[str, Any] = {}
    exec(SCRIPT, names)
    torch.manual_seed(0)
    model = [names["Net"]() for _ in range(2)][1]
    found = verified(model, names["example_inputs"])
    assert found.holds
    row = rows(found)["agreement", "eager, one-phase", "float32"]
    assert row.error_gradient is not None and row.tolerance is not None
    assert 1e-5 < row.error_gradient < row.tolerance < 5e-4
    assert "each weight is moved by one rounding" in row.note
    off = scaled_by(1.001, lambda config: config.two_phase == "on")
    wrong = failed(verified(model, names["example_inputs"], convert=off))
    assert wrong == {*TWO_PHASE, ("eager, two-phase, fused", "float64")}


def test_a_compiler_that_fails_fails_the_check() -> None:
    def convert(model: nn.Module, inputs: Inputs, config: AttnResConfig) -> nn.Module:
        if config.lowering == "inductor":
            raise RuntimeError("No working C++ compiler found\n\nin a long story")
        return convert_copy(model, inputs, config)

    found = verified(lowerings=("eager", "inductor"), convert=convert)
    row = rows(found)["agreement", "Inductor, one-phase", "float32"]
    assert row.holds is False
    assert row.note == "not run: RuntimeError: No working C++ compiler found"
    assert not found.holds


def test_weights_that_hide_errors_are_randomised() -> None:
    model = models.build(layers=2)
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.mlp[2].bias.zero_()

    def convert(made: nn.Module, inputs: Inputs, config: AttnResConfig) -> nn.Module:
        with torch.no_grad():
            made.encoder.layers[0].mlp[2].bias.zero_()
        return convert_copy(made, inputs, config)

    assert verified(model, convert=convert, keep_weights=True).holds
    found = verified(model, convert=convert)
    assert failed(found) == {*ALL_EXACT, (ORIGINAL, "float64")}
