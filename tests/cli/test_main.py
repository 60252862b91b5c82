"""The commands: what goes to which stream, and exit codes. The core is faked here; test_end_to_end.py is not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attnres_compile import api
from attnres_compile.cli.main import app
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import AttnResError, CaptureError, GraphBreakError, NoStreamError
from attnres_compile.inputs import Inputs
from attnres_compile.report import TransformReport

Explain = Callable[..., TransformReport]


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def explain(monkeypatch: pytest.MonkeyPatch, report: TransformReport) -> dict[str, Any]:
    """A faked ``explain``: records its arguments, does what ``result`` says."""
    calls: dict[str, Any] = {"result": report}

    def fake(model: Any, inputs: Inputs, config: AttnResConfig) -> TransformReport:
        calls.update(model=model, inputs=inputs, config=config)
        print("noise of the core")
        os.write(1, b"noise below Python")
        if isinstance(calls["result"], Exception):
            raise calls["result"]
        return calls["result"]

    monkeypatch.setattr(api, "explain", fake)
    return calls


def test_version_and_help() -> None:
    import torch

    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("attnres ")
    assert out.strip().endswith(torch.__version__)
    for arguments in (["--help"], ["inspect", "--help"], ["verify", "--help"]):
        code, out, _ = run(*arguments)
        assert code == 0
        assert "Usage: " in out
    assert "Exit code 3 when no residual stream can be converted, or" in " ".join(run("inspect", "--help")[1].split())


def test_inspect(script: str, explain: dict[str, Any], report: TransformReport, capfd: Any) -> None:
    code, out, err = run("inspect", script)
    assert code == 0
    assert out.splitlines()[0].startswith("script.py:model: 1 residual stream, 48 sublayers")
    assert "noise" not in out
    assert "noise of the script" in err
    assert "noise of the core" in err
    assert explain["inputs"].args[0].shape == (2, 5)
    assert type(explain["model"]).__name__ == "Net"
    written = capfd.readouterr()
    assert "noise below Python" in written.err
    assert "noise" not in written.out


def test_inspect_json_is_the_report_and_nothing_else(
    script: str, explain: dict[str, Any], report: TransformReport
) -> None:
    code, out, err = run("inspect", script, "--json")
    assert code == 0
    assert json.loads(out) == report.to_dict()
    assert TransformReport.from_dict(json.loads(out)) == report
    assert "noise of the script" in err


def test_all_is_longer(script: str, explain: dict[str, Any]) -> None:
    short, long = run("inspect", script)[1], run("inspect", script, "--all")[1]
    assert "model.site_30" not in short
    assert "model.site_30" in long
    assert run("inspect", script, "-a")[1] == long


@pytest.mark.parametrize("suffix", [".dot", ".graphml"])
def test_inspect_writes_the_depth_graph(script: str, explain: dict[str, Any], suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"depth{suffix}"
    code, out, _ = run("inspect", script, "--json", "--graph", str(file))
    assert code == 0
    json.loads(out)
    assert "model.site_30" in file.read_text()


@pytest.mark.parametrize(
    ("name", "message"), [("depth.png", ".dot or .graphml, not '.png'"), ("no/depth.dot", "cannot be written")]
)
def test_inspect_with_a_wrong_graph_file(
    script: str, explain: dict[str, Any], name: str, message: str, tmp_path: Path
) -> None:
    code, out, err = run("inspect", script, "--graph", str(tmp_path / name))
    assert code == 2
    assert out == ""
    assert message in err


def test_inspect_says_where_blocks_are_not_as_asked(script: str, explain: dict[str, Any]) -> None:
    assert "note: " not in run("inspect", script)[1]
    text = " ".join(run("inspect", script, "--num-blocks", "99")[1].split())
    assert "note: the stream has 48 sublayers, fewer than the 99 blocks asked for" in text


@pytest.mark.parametrize("raised", [True, False])
def test_inspect_without_a_stream(script: str, explain: dict[str, Any], report: TransformReport, raised: bool) -> None:
    nothing = TransformReport((), report.rejections, (), 0)
    explain["result"] = NoStreamError("no stream", report=nothing) if raised else nothing
    code, out, _ = run("inspect", script)
    assert code == 3
    assert "no residual stream can be converted" in out
    assert "no_contraction (24)" in out
    code, out, _ = run("inspect", script, "--json")
    assert code == 3
    assert (json.loads(out)["report"] if raised else json.loads(out)) == nothing.to_dict()


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        ([], {}),
        (["--num-blocks", "3"], {"num_blocks": 3}),
        (["--block-size", "2"], {"block_size": 2}),
        (["--full"], {"num_blocks": None}),
        (["--gain", "mean"], {"gain": "mean"}),
        (["--eps", "1e-3"], {"eps": 1e-3}),
        (["--key-norm-weight"], {"key_norm_weight": True}),
        (["--value", "normalized"], {"value": "normalized"}),
        (["--logit-scale", "0.5"], {"logit_scale": 0.5}),
        (["--logit-scale", "rsqrt_dim"], {"logit_scale": "rsqrt_dim"}),
        (["--queries", "reader"], {"queries": "reader"}),
        (["--min-sublayers", "1"], {"min_sublayers": 1}),
        (["--depth-loops"], {"depth_loops": True}),
        (["--strict"], {"strict": True}),
        (["--lowering", "inductor"], {"lowering": "inductor"}),
    ],
)
def test_options_are_the_configuration(
    script: str, explain: dict[str, Any], arguments: list[str], config: dict[str, Any]
) -> None:
    run("inspect", script, *arguments)
    assert explain["config"] == AttnResConfig(**{"lowering": "eager", **config})


@pytest.mark.parametrize("command", ["inspect", "transform", "verify", "diff", "weights", "bench", "run"])
def test_every_field_has_an_option(command: str) -> None:
    import dataclasses

    text = run(command, "--help")[1]
    for field in dataclasses.fields(AttnResConfig):
        assert f"--{field.name.replace('_', '-')} " in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-blocks", "0"], "num_blocks must be a whole number of at least 1, not 0"),
        (["--num-blocks", "2", "--block-size", "2"], "num_blocks=2 and block_size=2 contradict each other"),
        (["--full", "--block-size", "2"], "--full and --block-size contradict each other"),
        (["--gain", "max"], "gain must be one of 'sum', 'mean', not 'max'"),
        (["--logit-scale", "big"], "logit_scale must be a number or 'rsqrt_dim', not 'big'"),
        (["--logit-scale", "nan"], "logit_scale must be a finite number"),
        (["--input", "int65[2]"], "'int65' is no dtype"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_wrong_options(script: str, command: str, arguments: list[str], message: str) -> None:
    code, out, err = run(command, script, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


@pytest.mark.parametrize("arguments", [["--nope"], ["--num-blocks", "many"], ["another.py"]])
def test_usage_errors(script: str, arguments: list[str]) -> None:
    code, out, err = run("inspect", script, *arguments)
    assert code == 2
    assert out == ""
    assert "Usage: " in err
    assert run("inspect")[0] == 2
    assert run("nope")[0] == 2


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("missing.py", "missing.py does not exist. The current folder holds script.py"),
        ("script.py:nothing", "script.py has no 'nothing'"),
        ("script.py:Block", ""),
        ("no_module_of_this_name:x", "there is no module 'no_module_of_this_name'"),
    ],
)
def test_wrong_targets(script: str, command: str, target: str, message: str) -> None:
    code, out, err = run(command, target, "--json")
    assert code == 2
    assert json.loads(out)["error"]["kind"] == "TargetError"
    assert message in json.loads(out)["error"]["message"]
    assert message in err
    assert run(command, target)[:2] == (2, "")
    assert "Traceback" not in err


@pytest.mark.parametrize("error", [RuntimeError("of ours"), CaptureError("cannot trace")])
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("f32[2,5]", "script.py:model called with its inputs failed: RuntimeError: Expected tensor for argument"),
        ("int64[2,5]<99", "IndexError: index out of range in self"),
        ("wrong=int64[2,5]", "TypeError: Net.forward() got an unexpected keyword argument 'wrong'"),
    ],
)
def test_a_model_that_rejects_its_inputs_speaks_for_itself(
    script: str, explain: dict[str, Any], error: Exception, spec: str, message: str
) -> None:
    explain["result"] = error
    code, out, err = run("inspect", script, "--input", spec)
    assert code == 2
    assert out == ""
    assert message in err
    assert "script.py:" in err
    assert "The inputs came from --input; forward takes (ids)" in err
    assert "of ours" not in err


def test_errors_of_the_core(script: str, explain: dict[str, Any]) -> None:
    explain["result"] = GraphBreakError("a break", module="model.layers.1", where="a.py:3", remedy="Mend it")
    assert run("inspect", script)[::2] == (
        3,
        "noise of the script\nnoise of the core\nerror: a break (module model.layers.1, a.py:3). Mend it\n",
    )
    explain["result"] = CaptureError("cannot trace this")
    code, _, err = run("inspect", script)
    assert code == 2
    assert "error: cannot trace this" in err
    # A bug must not pass for the user's mistake.
    explain["result"] = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        run("inspect", script)


def test_long_messages_are_one_line(script: str) -> None:
    code, _, err = run("inspect", "x" * 300 + ".py")
    assert code == 2
    assert len(err.splitlines()) == 1


def test_standard_output_is_given_back(script: str, explain: dict[str, Any]) -> None:
    before = sys.stdout
    run("inspect", script)
    run("inspect", "missing.py")
    assert sys.stdout is before


def test_verify_a_model_without_tensors(script: str) -> None:
    with open("script.py", "a") as file:
        file.write("Net.forward = lambda self, ids: 'text'\n")
    code, _, err = run("verify", script, "--no-inductor")
    assert code == 2
    assert "error: the model returns no tensors to compare, but str" in err


def test_the_error_base_is_caught(script: str, explain: dict[str, Any]) -> None:
    explain["result"] = AttnResError("plain")
    assert run("inspect", script)[0] == 2
