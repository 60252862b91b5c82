"""``attnres bench`` on real targets, without compiling: what is printed, not how fast anything is."""

from __future__ import annotations

import json
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from attnres_compile.cli.main import app
from attnres_compile.measuring import Measurement, Quantity
from attnres_compile.views import measuring as view


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    result = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_example_of_the_help() -> None:
    example = "attnres bench attnres_compile.demo --eager --rounds 10"
    assert example in " ".join(re.sub(r"[^\x20-\x7e]", " ", run("bench", "--help")[1]).split())
    code, out, _ = run(*example.split()[1:])
    assert code == 0
    assert out.isascii()
    assert all(len(line) <= 80 for line in out.splitlines())
    text = " ".join(out.split())
    assert re.match(
        r"attnres_compile.demo:model: training step [\d.]+x \([\d.]+\.\.[\d.]+(, within the noise)?\), ", text
    )
    assert "not compiled: sites run op by op; cpu" in text
    rows = [line.split("  ")[0] for line in out.splitlines()]
    for name in ("latency", "training step", "inference memory", "training memory", "weights"):
        assert name in rows
    assert "Medians of 10 pairs of turns" in text


def test_json_and_one_line(script: str) -> None:
    arguments = ("bench", script, "--num-blocks", "2", "--eager", "--rounds", "2")
    code, out, err = run(*arguments, "--json")
    assert code == 0
    values = json.loads(out)
    assert [each["name"] for each in values["quantities"]][:2] == ["latency", "training step"]
    assert values["compiled"] is False and values["rounds"] == 2
    weights = values["quantities"][-1]
    # 5 queries of 8 floats... and whatever else: exactly what the model has more.
    assert weights["converted"] - weights["original"] == 4 * 8 * 6 + 4
    assert "noise of the script" in err
    line = run(*arguments, "-q", "--no-training")[1]
    assert re.fullmatch(r"script.py:model: latency [\d.]+x \(.*\), peak memory [\d.]+x\n", line)


def test_exit_codes(script: str) -> None:
    code, out, _ = run("bench", f"{script}:NoStream", "--eager")
    assert code == 3
    assert "no residual stream can be converted" in out
    code, _, err = run("bench", "missing.py", "--eager")
    assert code == 2
    assert "missing.py does not exist" in err
    assert run("bench", script, "--rounds", "0")[0] == 2


def measured(*quantities: Quantity) -> Measurement:
    return Measurement(quantities, "cpu (x)", 1, "2.0", "float32", True, 9, ("a [bold]note[/bold]",))


LATENCY = Quantity("latency", "s", 0.01, 0.0101, 1.007, 0.98, 1.04, 0.0005, 0.0004, 9, 3)
TRAINING = Quantity("training step", "s", 2.0, 2.042, 1.021, 1.015, 1.03, 0.1, 0.1, 9, 1)
MEMORY = Quantity("training memory", "bytes", 3 * 2**20, 3.09 * 2**20, 1.03, 1.03, 1.03, 0.0, 0.0, 1, 1)


def test_the_verdict_claims_no_more_than_was_measured() -> None:
    whole = measured(LATENCY, TRAINING, MEMORY)
    assert str(view.verdict(whole, "x")) == (
        "x: training step 1.021x (1.015..1.030), latency 1.007x (0.980..1.040, within the noise), peak memory 1.03x"
    )
    assert str(view.verdict(measured(LATENCY), "")) == "latency 1.007x (0.980..1.040, within the noise)"


@pytest.mark.parametrize("width", [80, 120])
def test_the_table(width: int) -> None:
    console = Console(width=width, no_color=True)
    with console.capture() as captured:
        console.print(view.table(measured(LATENCY, TRAINING, MEMORY), "x"))
    lines = [" ".join(line.split()) for line in captured.get().splitlines()]
    assert "latency 10 ms 5% 10.1 ms 4% 1.007x 0.980..1.040" in lines
    assert "training step 2 s 5% 2.04 s 5% 1.021x 1.015..1.030" in lines
    assert "training memory 3 MiB 3.09 MiB 1.030x" in lines
    assert "latency: the difference is within the noise" in lines
    assert "training step: the difference is within the noise" not in lines
    assert "note: a [bold]note[/bold]" in lines
