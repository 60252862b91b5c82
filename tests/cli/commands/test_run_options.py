"""What ``attnres run`` refuses before anything is run, in this process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnres_compile.cli.main import app

SCRIPT = "import pathlib, sys\npathlib.Path('ran').write_text(' '.join(sys.argv))\nsys.exit(4)\n"


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``script.py`` in the current folder, which leaves a file ``ran`` and ends with 4."""
    for name in ("argv", "path", "excepthook"):
        value = getattr(sys, name)
        monkeypatch.setattr(sys, name, list(value) if isinstance(value, list) else value)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["run", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.py"], "missing.py does not exist"),
        (["--report", "no/page.html", "script.py"], "there is no folder no"),
        (["--report", ".", "script.py"], "it is a folder"),
        (["--save", "no/q.safetensors", "script.py"], "there is no folder no"),
        (["--input", "int64[2,x]", "script.py"], "is no size"),
        (["--num-blocks", "0", "script.py"], "num_blocks must be"),
        (["-m", "no_such_module_anywhere"], "there is no module 'no_such_module_anywhere'"),
        (["--reprot", "x", "script.py"], "No such option"),
        ([], "Missing argument"),
    ],
)
def test_a_wrong_request_runs_nothing(arguments: list[str], words: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert words in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    assert not os.path.exists("ran")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    assert "permission denied" in run("--report", "closed/page.html", "script.py")[2]


def test_options_after_the_script_are_its_own(script: Path) -> None:
    code, out, _ = run("-q", "script.py", "--report", "x.html", "-q", "--", "--json", "--num-blocks", "two")
    assert code == 4
    assert out == ""
    assert Path("ran").read_text() == "script.py --report x.html -q -- --json --num-blocks two"


def test_json_of_errors() -> None:
    code, out, _ = run("--json", "missing.py")
    assert code == 2
    assert json.loads(out)["error"]["kind"] == "TargetError"
