"""The table of numbers: a right conversion passes every row, by hand and in every mode; the caller is left alone."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile import agreement, api, definition, verification
from attnres_compile.agreement import VARIANTS, Variant, apart, run_variant, spread_queries
from attnres_compile.comparison import Run
from attnres_compile.config import AttnResConfig
from attnres_compile.exactness import convert_copy
from attnres_compile.inputs import Inputs, as_inputs
from attnres_compile.kernels import reference as by_definition
from attnres_compile.verification import Check, Verification
from tests import models
from tests.verifying import EAGER_ROWS, SITE_COUNT, SITES, rows, verified


def test_a_right_conversion_holds_in_every_row() -> None:
    found = verified()
    table = rows(found)
    assert set(table) == EAGER_ROWS
    assert found.holds
    assert found.queries == SITE_COUNT
    assert (found.dtype, found.device, found.mode, found.randomised) == ("float32", "cpu", "eval", True)
    assert found.reference == "eager, one-phase, float64"
    assert found.notes == ("Inductor was not asked for: what it compiles was not compared",)
    for (name, _, dtype), row in table.items():
        assert row.error_output is not None and row.error_gradient is not None
        in_double = {"exactness": 1e-12, "agreement": 1e-10, "definition": 1e-10, "oracle": 1e-10}
        limit = in_double.get(name) if dtype == "float64" else 1e-5
        assert max(row.error_output, row.error_gradient) < (1e-12 if dtype == "float64" else 1e-5)
        if name == "rounding":
            assert row.holds is None and row.tolerance is None
            assert 1e-9 < row.error_output < 1e-5
        else:
            assert row.holds is True
            assert row.tolerance == pytest.approx(limit)


def test_what_is_saved_is_json() -> None:
    values = verified().to_dict()
    again = json.loads(json.dumps(values, allow_nan=False))
    assert again["holds"] is True
    assert len(again["checks"]) == len(EAGER_ROWS)
    assert set(again["checks"][0]) == {
        *("name", "what", "dtype", "error_output", "error_gradient", "tolerance", "holds", "note"),
        *("worst_output", "worst_gradient"),
    }
    infinite = Check("agreement", "x", "float64", float("inf"), None, 1e-10, False)
    found = Verification((infinite,), 1, 1, "float64", "cpu", "eval", True, "r")
    json.dumps(found.to_dict(), allow_nan=False)


def test_what_counts_as_holding() -> None:
    def holds(*checks: tuple[str, bool | None]) -> bool:
        made = tuple(Check(name, "", "float64", holds=value) for name, value in checks)
        return Verification(made, 1, 1, "float64", "cpu", "eval", True, "").holds

    assert holds(("exactness", True), ("agreement", True))
    assert holds(("exactness", True), ("agreement", True), ("agreement", None), ("rounding", None))
    assert not holds(("exactness", True), ("agreement", True), ("agreement", False))
    assert not holds(("exactness", True))
    assert not holds(("exactness", True), ("agreement", None))
    assert not holds(("exactness", None), ("agreement", True))
    assert not holds()


# --- the numbers, by hand


class Stream(nn.Module):
    """Three linear sublayers on one stream, without norms: a conversion that a few lines can do by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_the_reference_is_the_definition_computed_by_hand() -> None:
    model, x = Stream().double(), torch.randn(4, 6, dtype=torch.float64)
    config = AttnResConfig(num_blocks=None, lowering="eager")
    queries: dict[str, Tensor] = {}

    def convert(made: nn.Module, inputs: Inputs, config: AttnResConfig) -> nn.Module:
        converted = convert_copy(made, inputs, config)
        queries.update(api.pseudo_queries(converted))
        return converted

    found = run_variant(VARIANTS[0], copy.deepcopy(model), as_inputs(x), config, 0, convert)
    # The full form: every read but the first attends over all that came before it.
    sources, read = [x], x
    for layer, query in zip(model.layers, queries.values(), strict=True):
        sources.append(layer(read))
        read = by_definition.mix(query.detach(), sources)
    assert len(queries) == 3
    torch.testing.assert_close(found.run.outputs["output"], read.detach(), rtol=1e-13, atol=1e-13)
    assert found.queries == {f"attnres.{name}" for name in _keys(model, x, config)}
    # Random queries are no uniform mix: the result is far from the plain sum.
    assert (read - model(x)).abs().max() > 0.1


def _keys(model: nn.Module, x: Tensor, config: AttnResConfig) -> list[str]:
    converted = ac.transform(copy.deepcopy(model), x, config)
    return [name.removeprefix("attnres.") for name, _ in converted.named_parameters() if name.startswith("attnres.")]


@pytest.mark.parametrize("scale", [1.0, 0.25, "rsqrt_dim"])
def test_random_queries_give_logits_of_deviation_one(scale: Any) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    config = AttnResConfig(lowering="eager", logit_scale=scale, key_norm_weight=True)
    model = ac.transform(Wide(), torch.randn(2, 256), config)
    names = spread_queries(model, config, 0)
    assert len(names) == 16  # a query and a weight for each of 8 sites
    keys = nn.functional.rms_norm(torch.randn(4000, 256), (256,))
    logits = torch.stack([config.scale_for(256) * keys @ q.detach() for q in ac.pseudo_queries(model).values()])
    assert logits.std() == pytest.approx(1.0, rel=0.1)
    weights = [p for name, p in model.named_parameters() if name.endswith("_key_norm")]
    assert torch.stack(weights).std().item() == pytest.approx(0.2, rel=0.15)
    assert torch.stack(weights).mean().item() == pytest.approx(1.0, abs=0.02)


def test_distance_of_two_runs_by_hand() -> None:
    def result(output: list[float], gradients: dict[str, list[float]], dtype: torch.dtype) -> agreement.Result:
        made = {name: torch.tensor(values, dtype=dtype) for name, values in gradients.items()}
        return agreement.Result(
            Run({"y": torch.tensor(output, dtype=dtype)}, made, frozenset(made), ()), frozenset("q")
        )

    one = result([1.0, 4.0], {"w": [10.0, 0.0], "b": [0.5], "q": [0.25]}, torch.float64)
    other = result([1.0, 4.5], {"w": [10.0, 1.0], "b": [0.75], "q": [0.375]}, torch.float32)
    found = apart(one, other)
    assert found.output == 0.5 / 4
    # w: 1 / 10; b: 0.25 / (a tenth of 10); q among the queries alone: 0.125 / 0.25.
    assert found.gradient == 0.5
    assert (found.worst_output, found.worst_gradient) == ("y", "q")
    assert found.equal
    only_weights = apart(
        one, replace(other, run=replace(other.run, gradients={**other.run.gradients, **_of(one, "q")}))
    )
    assert (only_weights.gradient, only_weights.worst_gradient) == (0.25, "b")
    missing = apart(one, replace(other, run=replace(other.run, gradients=_of(other, "w", "b"))))
    assert not missing.equal
    assert missing.notes == ("q exists in only one of the two",)


def _of(result: agreement.Result, *names: str) -> dict[str, Tensor]:
    return {name: result.run.gradients[name] for name in names}


# --- modes, variants and the caller


def test_what_cannot_be_run_two_phase_is_said() -> None:
    found = verified(config=AttnResConfig(num_blocks=None, lowering="eager"))
    table = rows(found)
    for what, dtype in (("eager, two-phase", "float64"), ("eager, two-phase, fused", "float64"),
                        ("eager, two-phase", "float32")):  # fmt: skip
        row = table["agreement", what, dtype]
        assert row.holds is None
        assert row.note.startswith("not run: no two sites read the same finished blocks")
    assert found.holds


def test_training_mode_drops_the_same_values() -> None:
    found = verified(models.Model(2, dropout=0.5), train=True)
    assert found.mode == "train"
    assert found.holds
    own = rows(found)["rounding", "the original vs float64", "float32"]
    assert own.error_output is not None and own.error_output < 1e-5


def test_dropout_that_depends_on_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_same_draws", lambda *arguments: False)
    found = verified(models.Model(2, dropout=0.5), train=True)
    row = rows(found)["agreement", "eager, two-phase", "float32"]
    assert row.note.startswith("against eager, one-phase in float32")
    assert row.holds
    assert ("agreement", "eager, one-phase", "float32") not in rows(found)


def test_an_exported_program() -> None:
    model = models.build(layers=2)
    program = torch.export.export(model, (models.example(),)).module()
    found = verified(program)
    assert found.holds
    assert set(rows(found)) == EAGER_ROWS
    assert found.queries == SITE_COUNT


def test_nothing_of_the_caller_changes() -> None:
    model, x = models.Model(2, dropout=0.5).double().train(), models.example().double()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before, given = {name: tensor.clone() for name, tensor in model.state_dict().items()}, x.clone()
    states = torch.get_rng_state(), random.getstate()
    said: list[str] = []
    verified(model, x, progress=said.append)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert torch.equal(x, given)
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert said[0] == "running the original in float64"
    assert "running eager, two-phase in float32" in said


def test_errors_of_the_caller_are_the_callers() -> None:
    class NoStream(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2.0

    with pytest.raises(ac.NoStreamError):
        verified(NoStream())
    with pytest.raises(ac.AttnResError, match="meta device"):
        verified(models.build(layers=2).to("meta"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        verified(models.build(layers=2), torch.randn(2, 3, 4))


def test_a_site_that_does_not_run_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "_MIX", None)
    found = verified()
    row = rows(found)["definition", SITES, "float64"]
    assert (row.holds, row.note) == (False, "no site was seen to run")


def test_ways_to_run() -> None:
    config = AttnResConfig(num_blocks=3, two_phase="on", fuse="off", lowering="eager")
    assert Variant("eager").of(config) == replace(config, two_phase="off", fuse="off")
    assert Variant("eager", True, True).of(config) == replace(config, two_phase="on", fuse="on")
    # On a GPU Inductor's lowering fuses as it does for users.
    assert Variant("inductor").of(config) == replace(config, lowering="inductor", two_phase="off", fuse="auto")


@pytest.mark.inductor
def test_inductor_agrees() -> None:
    # The full form, in which there is no second phase to compile.
    options = {"config": AttnResConfig(num_blocks=None, lowering="eager"), "lowerings": ("eager", "inductor")}
    found = verified(models.Model(2, dropout=0.5), train=True, **options)
    table = rows(found)
    row = table["agreement", "Inductor, one-phase", "float32"]
    assert row.holds
    # Other code, with a rounding of its own, and the same values dropped.
    assert row.error_gradient != table["agreement", "eager, one-phase", "float32"].error_gradient
    assert table["agreement", "Inductor, two-phase", "float32"].holds is None
    assert found.holds
