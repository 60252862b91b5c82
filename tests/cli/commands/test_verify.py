"""``attnres verify`` on real targets: the table, JSON, one line, exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from attnres_compile.cli.main import app
from attnres_compile.kernels import plain_phases
from attnres_compile.verification import Check, Verification
from attnres_compile.views import verification as view

DEMO = "attnres_compile.demo"


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    result = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def shape(text: str) -> list[str]:
    """The lines of a table with every figure of an error as ``#``."""
    figures = re.sub(r"\d\.\de[+-]\d\d", "#", text)
    return [" ".join(line.split()) for line in figures.splitlines()]


def test_the_example_of_the_help() -> None:
    text = " ".join(run("verify", "--help")[1].replace("|", " ").split())
    example = "attnres verify attnres_compile.demo --num-blocks 4 --no-inductor"
    assert example in re.sub(r"[^\x20-\x7e]", "", text).replace("  ", " ")
    code, out, _ = run(*example.split()[1:])
    assert code == 0
    assert all(len(line) <= 80 for line in out.splitlines())
    assert out.isascii()
    assert shape(out) == [
        "attnres_compile.demo:model: exact, and in agreement (9 checks)",
        "8 queries, float32 on cpu, eval mode, randomised weights, 53 gradients compared",
        "",
        "Exactness: queries at zero, against the original in the same dtype",
        "run in outputs gradients allowed result",
        "converted, queries at zero float64 # # 1e-12 pass",
        "converted, queries at zero float32 # # 1e-05 pass",
        "",
        "Agreement: random queries, against eager, one-phase, float64",
        "run in outputs gradients allowed result",
        "sites, by definition float64 # # 1e-10 pass",
        "original, by the equations float64 # # 1e-10 pass",
        "eager, two-phase float64 # # 1e-10 pass",
        "eager, one-phase, fused float64 # # 1e-10 pass",
        "eager, two-phase, fused float64 # # 1e-10 pass",
        "the original vs float64 float32 # # measure",
        *shape(out)[16:18],  # what is allowed here is as measured
        "",
        "Allowed in float32: rounding of that dtype, or 10 times what the original is off",
        "by itself, if that is more.",
        "note: Inductor was not asked for: what it compiles was not compared",
    ]
    for line, what in zip(shape(out)[16:18], ("eager, one-phase", "eager, two-phase"), strict=True):
        assert re.fullmatch(rf"{what} float32 # # (1e-05|#) pass", line)


def test_a_script_as_json_and_in_one_line(script: str) -> None:
    arguments = ("verify", script, "--num-blocks", "2", "--no-inductor")
    code, out, err = run(*arguments, "--json")
    assert code == 0
    values = json.loads(out)
    assert values["holds"] is True
    assert {row["name"] for row in values["checks"]} == {"exactness", "definition", "oracle", "agreement", "rounding"}
    assert all(row["holds"] for row in values["checks"] if row["name"] != "rounding")
    assert "noise of the script" in err
    assert run(*arguments, "-q")[1] == "script.py:model: exact, and in agreement (9 checks)\n"


def test_what_fails_is_shown_and_ends_with_one(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    merged: Callable[..., object] = plain_phases._merged
    monkeypatch.setattr(plain_phases, "_merged", lambda q, o, lse, *rest: merged(q, o, lse + 0.1, *rest))
    code, out, _ = run("verify", script, "--num-blocks", "2", "--no-inductor")
    assert code == 1
    assert out.startswith("script.py:model: exact, but NOT in agreement (3 of 9 checks failed)\n")
    assert re.search(r"eager, two-phase +float64 .* FAIL \(\d\)\n", out)
    assert "outputs differ most at output; gradients differ most at " in " ".join(out.split())
    assert all(len(line) <= 80 for line in out.splitlines())


def test_what_torch_compile_alone_changes_is_named(tmp_path: Path) -> None:
    file = tmp_path / "hurried.py"
    file.write_text(
        """
import torch
from tests import models
def between(x):
    return x if torch.compiler.is_compiling() else x.tril()
model = models.build(between=between)
example_inputs = models.example()
"""
    )
    code, out, _ = run("verify", str(file), "--no-inductor")
    text = " ".join(out.split())
    assert code == 1 and "NOT exact" in text
    assert "the original itself computes something else when torch.compile traces it" in text


def test_what_cannot_be_converted_ends_with_three(script: str) -> None:
    code, out, err = run("verify", f"{script}:NoStream", "--no-inductor")
    assert code == 3
    assert "no residual stream can be converted" in out
    assert err.splitlines()[-1].startswith("error: no residual stream was found: the traced graph adds no two tensors")
    code, out, _ = run("verify", f"{script}:NoStream", "--no-inductor", "--json")
    assert code == 3
    assert json.loads(out)["error"]["kind"] == "NoStreamError"


def test_inputs_that_do_not_fit_end_with_two(script: str) -> None:
    code, out, err = run("verify", script, "--no-inductor", "--input", "int64[2,3]<999")
    assert (code, out) == (2, "")
    assert "called with its inputs failed: IndexError" in err


def test_what_did_not_run_is_in_the_table() -> None:
    where = ("agreement", "Inductor, one-phase", "float32")
    rows = (
        Check("exactness", "converted, queries at zero", "float64", note="not run: [bold]why[/bold]"),
        Check("exactness", "converted, queries at zero", "float32", 1e-7, None, 1e-5, True),
        Check(*where, holds=False, note="not run: no compiler"),
        Check("agreement", "eager, two-phase", "float32", 0.1, 0.2, 0.5, None, "not counted: too coarse"),
    )
    found = Verification(rows, 1, 1, "float32", "cpu", "eval", True, "eager, one-phase, float64")
    console = Console(width=80, no_color=True)
    with console.capture() as captured:
        console.print(view.table(found, "x"))
    lines = shape(captured.get())
    assert lines[0] == "x: NOT verified (1 of 2 checks could not be run)"
    assert "converted, queries at zero float64 - - not run (1)" in lines
    assert "converted, queries at zero float32 # - 1e-05 pass" in lines
    assert "Inductor, one-phase float32 - - FAIL (2)" in lines
    assert "eager, two-phase float32 # # 0.5 unclear (3)" in lines
    assert "(1) not run: [bold]why[/bold]" in lines
    nothing = Verification(rows[:1], 1, 1, "float32", "cpu", "eval", True, "")
    assert str(view.verdict(nothing, "x")) == "x: NOT verified: nothing could be compared"
    wrong = Verification((Check("exactness", "", "float64", 1.0, 1.0, 1e-12, False),), 1, 1, "", "", "", True, "")
    assert str(view.verdict(wrong, "x")) == "x: NOT exact (1 of 1 check failed)"


def test_an_exported_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from attnres_compile import demo

    monkeypatch.chdir(tmp_path)
    torch.export.save(torch.export.export(demo.model(), (demo.example_inputs(),)), "demo.pt2")
    code, out, _ = run("verify", "demo.pt2", "--num-blocks", "4", "--no-inductor")
    assert code == 0
    assert out.startswith("demo.pt2: exact, and in agreement (8 checks)\n")
