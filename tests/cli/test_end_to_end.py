"""The commands with the real core, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attnres_compile.cli.main import app
from tests.cli.processes import attnres

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def shape(out: str) -> dict[str, Any]:
    """Numbers of the only stream in a JSON report."""
    report = json.loads(out)
    (stream,) = report["streams"]
    return {
        "sublayers": len(stream["sublayers"]),
        "blocks": [len(block) for block in stream["blocks"]],
        "sites": len(stream["sites"]),
        "dim": stream["feature_dim"],
        "added": report["parameters_added"],
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"blocks": [1] * 6, "added": 48}),
        (["--full"], {"blocks": [1] * 6, "added": 48}),
        (["--num-blocks", "2"], {"blocks": [3, 3], "added": 48}),
        (["--block-size", "2"], {"blocks": [2, 2, 2], "added": 48}),
    ],
)
def test_inspect(script: str, arguments: list[str], expected: dict[str, Any]) -> None:
    code, out = run("inspect", script, "--json", *arguments)
    assert code == 0
    assert shape(out) == {"sublayers": 6, "sites": 7, "dim": 8, **expected}


def test_inspect_for_people(script: str) -> None:
    code, out = run("inspect", script, "--num-blocks", "2")
    assert code == 0
    assert "6 sublayers, 6 queries, 48 parameters added" in " ".join(out.split())
    assert "blocks.0..2" in out
    assert "script.py:12" in out


def test_inspect_with_a_spec_and_on_the_meta_device(script: str) -> None:
    with open(script, "a") as file:
        file.write("def on_meta():\n    with torch.device('meta'):\n        return Net(depth=4)\n")
    code, out = run("inspect", f"{script}:on_meta", "--input", "int64[3,7]<20", "--json")
    assert code == 0
    assert shape(out)["sublayers"] == 8


def test_no_stream(script: str) -> None:
    for arguments in (["inspect"], ["verify", "--no-inductor"]):
        code, out = run(*arguments, f"{script}:NoStream")
        assert code == 3
        assert "no residual stream can be converted" in out
    code, out = run("inspect", f"{script}:NoStream", "--json")
    assert code == 3
    assert json.loads(out)["streams"] == []
    # Streams that are there, but too short.
    code, out = run("inspect", script, "--min-sublayers", "7")
    assert code == 3
    assert "script.py:" in out


def test_strict_refuses_a_stream_left_alone(script: str) -> None:
    with open(script, "a") as file:
        file.write(
            "class PostNorm(Block):\n"
            "    def forward(self, x):\n"
            "        x = self.norm(x + self.mixer(x))\n"
            "        return self.norm(x + self.mlp(x))\n"
            "class Two(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.pre, self.post = Net(4), Net(4)\n"
            "        self.post.blocks = nn.ModuleList(PostNorm() for _ in range(4))\n"
            "    def forward(self, ids):\n"
            "        return self.pre(ids), self.post(ids)\n"
        )
    assert run("inspect", f"{script}:Two")[0] == 0
    for command in ("inspect", "verify"):
        result = CliRunner().invoke(app, [command, f"{script}:Two", "--strict"])
        assert result.exit_code == 3
        assert "strict: a residual stream would be left alone" in result.stderr
        assert "8 sublayers" in result.stdout
    assert run("inspect", script, "--strict")[0] == 0


def exactness(out: str) -> list[dict[str, Any]]:
    """The rows of ``verify`` that compare with the original."""
    return [row for row in json.loads(out)["checks"] if row["name"] == "exactness"]


@pytest.mark.parametrize("train", [[], ["--train"]])
def test_verify_holds(script: str, train: list[str]) -> None:
    code, out = run("verify", script, "--num-blocks", "2", "--no-inductor", "--json", *train)
    found = json.loads(out)
    assert code == 0
    assert found["holds"] is True
    assert found["queries"] == 6
    assert found["gradients"] == 3 * 8 + 1 + 2
    double, single = exactness(out)
    assert (double["dtype"], single["dtype"]) == ("float64", "float32")
    for row, allowed in ((double, 1e-12), (single, 1e-5)):
        assert row["tolerance"] == allowed
        assert max(row["error_output"], row["error_gradient"]) <= allowed


@pytest.mark.parametrize("option", [["--gain", "mean"], ["--value", "normalized"]])
def test_verify_does_not_hold_for_what_is_not_exact(script: str, option: list[str]) -> None:
    code, out = run("verify", script, "--no-inductor", "--json", *option)
    assert code == 1
    assert json.loads(out)["holds"] is False
    assert all(row["holds"] is False and row["error_output"] > 1e-3 for row in exactness(out))


def test_rejected_inputs(script: str) -> None:
    result = CliRunner().invoke(app, ["inspect", script, "--input", "f32[2,5]"])
    assert result.exit_code == 2
    assert "called with its inputs failed" in result.stderr
    assert "The inputs came from --input" in result.stderr
    assert "Traceback" not in result.stderr


def test_json_of_a_noisy_script_alone_on_standard_output(script: str) -> None:
    noise = "import os, atexit\nos.system('echo noise of the shell')\natexit.register(print, 'noise at the end')\n"
    with open(script, "a") as file:
        file.write(noise)
    done = attnres("inspect", script, "--json", FORCE_COLOR="1")
    assert done.returncode == 0
    assert shape(done.stdout)["sublayers"] == 6
    assert "\x1b" not in done.stdout
    for text in ("noise of the script", "noise of the shell", "noise at the end"):
        assert text in done.stderr


def test_colours_for_terminals_only(script: str) -> None:
    assert "\x1b[" in attnres("inspect", script, FORCE_COLOR="1").stdout
    plain = attnres("inspect", script, PYTHONIOENCODING="ascii")
    assert plain.returncode == 0
    assert "\x1b[" not in plain.stdout
    assert "6 sublayers" in plain.stdout
    forced = {"FORCE_COLOR": "1"}
    assert "\x1b[1;31m" in CliRunner(env=forced).invoke(app, ["inspect", "missing.py"]).stderr
    assert "31m" not in CliRunner(env={**forced, "NO_COLOR": "1"}).invoke(app, ["inspect", "missing.py"]).stderr


def test_a_bug_is_no_mistake_of_the_user(script: str) -> None:
    bug = "from attnres_compile import api\napi.explain = lambda *arguments: 1 / 0"
    done = attnres("inspect", script, "--json", code=bug)
    assert done.returncode == 70
    assert done.stdout == ""
    assert "ZeroDivisionError" in done.stderr
    assert "this is an error of attnres itself" in done.stderr


def test_a_reader_that_leaves_early(script: str) -> None:
    close = "import os\nreading, writing = os.pipe(); os.close(reading); os.dup2(writing, 1)"
    done = attnres("inspect", script, code=close, fresh=True)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_nanogpt_example() -> None:
    code, out = run("inspect", str(EXAMPLES / "nanogpt.py"), "--num-blocks", "4", "--json")
    assert code == 0
    assert shape(out) == {"sublayers": 8, "blocks": [2] * 4, "sites": 9, "dim": 96, "added": 8 * 96}
    code, out = run("verify", str(EXAMPLES / "nanogpt.py"), "--num-blocks", "4", "--no-inductor", "--train", "--json")
    assert code == 0
    assert json.loads(out)["mode"] == "train"


def test_llama_example() -> None:
    code, out = run("inspect", str(EXAMPLES / "llama.py"), "--num-blocks", "4", "--json")
    assert code == 0
    assert shape(out) == {"sublayers": 12, "blocks": [3] * 4, "sites": 13, "dim": 128, "added": 12 * 128}


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("llama.py", ["12 sublayers", "-> exact", "the same tokens without the cache: True", "as before: True"]),
        ("nanogpt.py", ["converted: 8 queries, 768 parameters", "step 40: loss "]),
    ],
)
def test_examples_run(name: str, texts: list[str]) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, str(EXAMPLES / name)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for text in texts:
        assert text in done.stdout
