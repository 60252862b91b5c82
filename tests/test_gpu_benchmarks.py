"""The GPU benchmarks run from end to end without a GPU, so that they work where there is one."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "benchmarks"
TINY = ["--smoke", "--sources", "2", "--dims", "16", "--tokens", "6", "--batched-sources", "2"]
NAMES = ("gpu_cases", "gpu_checks", "gpu_kernels", "gpu_models", "gpu_peers", "gpu_timing", "gpu_variants")
OURS = ("attnres op", "attnres depth_attention", "plain, compiled", "stacked, eager")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import the programs' files as they import one another when they are run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


def module(name: str) -> Any:
    return importlib.import_module(name)


def run(name: str, *arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(command, env={**inherited, **(environment or {})}, capture_output=True, text=True)


# ------------------------------------------------------------------ kernels


def assert_complete(content: dict[str, Any], cases: int) -> None:
    """Every case has checks and times of all that can do it, and a reason for all that cannot."""
    assert len(content["results"]) == cases
    for row in content["results"]:
        single = () if row["case"]["kind"] == "mix" else ("attnres single reads",)
        assert not row["wrong"]
        assert set(row["checks"]) == {*OURS, *single}
        assert all(set(found["errors"]) == {"results", "queries", "values"} for found in row["checks"].values())
        assert set(row["times"]) == {"forward", "forward + backward"}
        for times in row["times"].values():
            assert set(times) == {"copy", *OURS, *single}
            assert all(one["median"] > 0 for one in times.values())
        assert len(row["gaps"]) == 5 + (not single)
        assert all(row["gaps"].values())


def test_kernels_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kernels.json"
    assert module("gpu_kernels").main([*TINY, "--dims", "16", "24", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    content = json.loads(file.read_text())
    assert_complete(content, cases=6)
    assert [row["case"]["kind"] for row in content["results"]] == ["mix", "mix", "inter", "inter", "block", "block"]
    assert "Against float64" in printed and printed.index("Against float64") < printed.index("milliseconds")
    assert "PASS" not in printed and "FAIL" not in printed
    assert "not measured  forward, N >= 5: share of the copy's rate, required at least 95%" in printed
    assert "not measured  forward + backward: times its floor at the copy's rate, required at most 1.15x" in printed
    assert printed.count("not measured  ") == 2 + 2 * 5
    # d = 24 is a gap of flash-attn-res wherever it is installed.
    assert "d is not a power of two" in printed


def test_cases_of_several_sizes() -> None:
    options = argparse.Namespace(
        sources=[2, 5], batched_sources=[3], dims=[16, 24], tokens=6, dtype="float32", queries=4
    )
    found = [(case.kind, case.sources, case.dim) for case in module("gpu_kernels").cases(options)]
    assert found == [
        *(("mix", 2, 16), ("mix", 2, 24), ("mix", 5, 16), ("mix", 5, 24)),
        *(("inter", 3, 16), ("inter", 3, 24), ("block", 3, 16), ("block", 3, 24)),
    ]


@pytest.mark.long
def test_kernels_in_helpers_and_interpreted(tmp_path: Path) -> None:
    """As on a GPU: helpers check and measure, and the operators run the generated kernels."""
    file, folder = tmp_path / "kernels.json", tmp_path / "kernels"
    environment = {"TRITON_INTERPRET": "1", "ATTNRES_CACHE_DIR": str(folder)}
    done = run("gpu_kernels", *TINY, "--helpers", "1", "--json", str(file), environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "generated kernels interpreted" in done.stdout
    assert_complete(json.loads(file.read_text()), cases=3)
    text = "".join(path.read_text() for path in folder.rglob("*.py"))
    for kind in ("mix", "inter", "merge"):
        for direction in ("forward", "backward"):
            assert f"def attnres_{kind}_{direction}(" in text


def test_a_wrong_implementation_is_named_and_has_no_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, cases = module("gpu_kernels"), module("gpu_cases")
    right = cases._site
    monkeypatch.setattr(cases, "_site", lambda *arguments: 1.02 * right(*arguments))
    file = tmp_path / "kernels.json"
    assert kernels.main([*TINY, "--batched-sources", "--json", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "WRONG  attnres op, mix N=2, D=16: results off by 2.0e-02, allowed 5e-03" in printed
    (row,) = json.loads(file.read_text())["results"]
    assert "gradients" not in row["wrong"]["attnres op"]
    assert "attnres op" not in row["times"]["forward"]
    assert "plain, compiled" in row["times"]["forward"]


@pytest.mark.parametrize("what", ["queries", "values"])
def test_a_wrong_gradient_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checks, cases = module("gpu_checks"), module("gpu_cases")
    case = cases.Case("mix", 3, 16, 6)
    problem = cases.Problem(case, CPU)
    bound = cases._operators(problem)
    right = checks.expected(problem)
    both = bound.both

    def off() -> tuple[list[Tensor], list[Tensor]]:
        found, grads = both()
        grads = list(grads)
        at = 0 if what == "queries" else -1
        grads[at] = grads[at] * 1.05
        return found, grads

    assert max(checks.errors(bound, case, right).values()) < 5e-3
    bound.both = off
    assert checks.errors(bound, case, right)[what] > 4e-2


def test_not_a_number_is_wrong() -> None:
    checks = module("gpu_checks")
    assert checks._worst([torch.tensor([1.0, float("nan")])], [torch.tensor([1.0, 1.0])]) == float("inf")


def test_an_implementation_of_ours_that_raises_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = module("gpu_kernels")

    def broken(*_: object) -> Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(module("gpu_cases"), "_site", broken)
    assert kernels.main([*TINY, "--batched-sources"]) == 1
    assert "WRONG  attnres op, mix N=2, D=16: RuntimeError: no such kernel" in capsys.readouterr().out


def test_floors() -> None:
    """docs/method.md: N + 1 and 2N + 2 tensors; two phases as added up in the architecture."""
    case = module("gpu_cases").Case
    assert case("mix", 9, 64, 10).floor(False) == 10 * 10 * 64 * 2
    assert case("mix", 9, 64, 10).floor(True) == 30 * 10 * 64 * 2
    assert case("mix", 9, 64, 10, "float32").floor(False) == 10 * 10 * 64 * 4
    assert case("inter", 9, 64, 10, queries=8).floor(True) == (9 + 8 + 18 + 16) * 10 * 64 * 2
    assert case("block", 9, 64, 10, queries=8).floor(False) == (9 + 8 + 24) * 10 * 64 * 2


def figures(ours: float, copy: float = 1.0, **others: float) -> dict[str, Any]:
    times = {"attnres op": ours, "copy": copy, **others}
    one = {name: {"median": value, "low": value, "high": value, "host": 0.0} for name, value in times.items()}
    checks = {name: {} for name in times if name != "copy"}
    return {"gaps": {}, "wrong": {}, "late": [], "checks": checks, "times": {"forward": one, "forward + backward": one}}


def verdicts(results: dict[Any, Any], peers: list[str]) -> dict[str, str]:
    kernels = module("gpu_kernels")
    names = {name: types.SimpleNamespace(name=name, peer=True) for name in peers}
    return {text.split(",")[0]: verdict for verdict, text in kernels.requirements(results, names)}


def test_requirements() -> None:
    case = module("gpu_cases").Case
    nine, two = case("mix", 9, 64, 10), case("mix", 2, 64, 10)
    share, cost = "forward", "forward + backward: times its floor at the copy's rate"
    assert verdicts({nine: figures(1.05)}, []) == {share: "PASS", cost: "PASS"}
    assert verdicts({nine: figures(1.06)}, []) == {share: "FAIL", cost: "PASS"}
    # Fewer than five sources need not come near the copy, but may not cost more than 1.15x with the backward.
    assert verdicts({nine: figures(1.0), two: figures(1.16)}, []) == {share: "PASS", cost: "FAIL"}
    # What was not measured does not hold.
    lost = {**figures(1.0), "times": {}}
    assert set(verdicts({nine: figures(1.0), case("mix", 5, 64, 10): lost}, []).values()) == {"FAIL"}
    ahead, both = "forward: faster than peer", "forward + backward: faster than peer"
    assert verdicts({nine: figures(1.0, peer=1.01)}, ["peer"])[ahead] == "PASS"
    assert verdicts({nine: figures(1.0, peer=0.99)}, ["peer"])[both] == "FAIL"
    assert verdicts({nine: figures(1.0), two: figures(1.0, peer=0.99)}, ["peer"])[ahead] == "FAIL"
    assert verdicts({nine: figures(1.0)}, ["peer"])[ahead] == "not measured"
    late = {**figures(1.0), "late": ["peer"]}
    assert verdicts({nine: figures(1.0, peer=1.01), two: late}, ["peer"])[ahead] == "FAIL"
    unclocked = figures(1.0, peer=2.0)
    del unclocked["times"]["forward"]["peer"]
    assert verdicts({nine: unclocked}, ["peer"])[ahead] == "FAIL"


# ------------------------------------------------------------------ models


def test_models_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "models.json"
    assert module("gpu_models").main(["--smoke", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    content = json.loads(file.read_text())
    variants = {"original", "unfused", "fused"}
    assert set(content["times"]) == {"inference", "training"}
    assert all(set(times) == variants for times in content["times"].values())
    assert all(set(content["prepared"][name]) == {"inference", "training"} for name in variants)
    assert len(content["checks"]) == 6
    assert printed.count("right  ") == 7 and "WRONG" not in printed
    assert printed.rindex("right  ") < printed.index("step ms")
    assert "PASS" not in printed and "FAIL" not in printed
    assert "not measured  inference: fused takes at most 1.01x the original's time" in printed
    assert "not measured  training: fused takes at most 1.03x the original's time" in printed


def test_a_wrong_model_has_no_speed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    models = module("gpu_models")
    right = models.logits_of
    calls: list[str] = []

    def off(call: Any, variant: str, tokens: Tensor) -> Tensor:
        calls.append(variant)
        # The second time in bfloat16 has random queries.
        logits: Tensor = right(call, variant, tokens)
        return 1.1 * logits if variant == "fused" and logits.dtype == torch.bfloat16 else logits

    monkeypatch.setattr(models, "logits_of", off)
    monkeypatch.setattr(models, "_prepare", lambda options: prepared(models))
    assert models.main(["--smoke"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG  zero queries, bfloat16: logits against float32, fused" in printed
    assert "WRONG  random queries, bfloat16: logits against float32, fused" in printed
    assert "right  zero queries, bfloat16: logits against float32, unfused" in printed
    assert "step ms" not in printed


def prepared(models: Any) -> dict[str, Any]:
    done = {mode: {"seconds": 1.0, "peak": 2**30} for mode in models.MODES}
    small = {"outputs": 1e-7, "gradients": 1e-7, "compared": 3, "holds": True}
    return {**dict.fromkeys(models.VARIANTS, done), "verify": {"verify": small}}


def test_a_model_that_does_not_compile_ends_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = module("gpu_models")
    lost = prepared(models)
    lost["fused"] = {"inference": {"raised": "RuntimeError: no"}}
    lost["verify"] = {"verify": {"raised": "RuntimeError: no"}}
    monkeypatch.setattr(models, "_prepare", lambda options: lost)
    assert models.main(["--smoke"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG  a small float32 model, converted against original: RuntimeError: no" in printed
    assert "not compiled  fused, inference: RuntimeError: no" in printed
    assert "not compiled  fused, training: no result" in printed


def test_model_requirements() -> None:
    models = module("gpu_models")

    def lines(inference: float, training: float) -> list[str]:
        figures = {"inference": inference, "training": training}
        times = {
            mode: {"original": {"median": 1.0}, "fused": {"median": figure}, "unfused": {"median": 1.0}}
            for mode, figure in figures.items()
        }
        return [verdict for verdict, _ in models.requirements(times, False)]

    assert lines(1.009, 1.029) == ["PASS", "PASS"]
    assert lines(1.011, 1.031) == ["FAIL", "FAIL"]
    assert [verdict for verdict, _ in models.requirements({}, False)] == ["FAIL", "FAIL"]


def test_variants_share_weights_and_differ_in_kernels() -> None:
    from attnres_compile.kernels import launch

    models, variants = module("gpu_models"), module("gpu_variants")
    options = argparse.Namespace(smoke=True, quick=False, json=None, helper=None)
    for name in ("layers", "width", "vocabulary", "tokens", "blocks", "rounds", "steps", "helpers"):
        setattr(options, name, None)
    models._settle(options)
    base = models.build(options, torch.bfloat16)
    fused = models.variant_of(base, "fused", options)
    own = {id(parameter) for parameter in base.parameters()}
    assert own < {id(parameter) for parameter in fused.parameters()}
    assert not any("attnres" in name for name, _ in base.named_parameters())
    assert (
        variants.configuration("unfused", options).two_phase == variants.configuration("unfused", options).fuse == "off"
    )
    assert variants.configuration("fused", options).two_phase == variants.configuration("fused", options).fuse == "auto"
    cuda = torch.device("cuda")
    assert launch.served(torch.bfloat16, 64, cuda)
    with models.kernels("fused"):
        assert launch.served(torch.bfloat16, 64, cuda)
    with models.kernels("unfused"):
        assert not launch.served(torch.bfloat16, 64, cuda)


# ------------------------------------------------------------------ without a GPU


@pytest.mark.parametrize("name", ["gpu_kernels", "gpu_models"])
def test_without_a_gpu(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert module(name).main([]) == 2
    printed = capsys.readouterr()
    assert "no CUDA or ROCm device is available" in printed.err
    assert not printed.out
