"""docs/cli.md says what the commands say, and the examples of their help work as printed."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnres_compile.cli.main import app
from attnres_compile.cli.reference import reference
from tests.cli.processes import attnres

FILE = Path(__file__).parents[2] / "docs" / "cli.md"
COMMANDS = ("inspect", "transform", "verify", "diff", "weights", "bench", "run", "kernels")


def shown(command: str, columns: int = 80) -> str:
    """The help of a command, as a person sees it."""
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [command, "--help"]).stdout


def example(command: str) -> str:
    (line,) = re.findall(r"^ *Example: (attnres .*?) *$", shown(command), re.MULTILINE)
    return line


def test_the_reference_is_the_one_on_file() -> None:
    if os.environ.get("ATTNRES_ACCEPT"):
        FILE.write_text(reference(), encoding="utf-8")
    assert reference() == FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_the_help_is_in_the_reference(command: str) -> None:
    text = reference()
    # The example of run has options of the script's own.
    help_text = shown(command, columns=300).replace(example(command), "")
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", help_text)) - {"--help"}
    assert {"--json", "--debug", "--quiet", "--verbose"} <= options
    for option in options:
        assert f"`{option}" in text, option
    assert example(command) in text


def test_all_commands_are_known_here() -> None:
    listed = re.findall(r"^## `attnres (\w+)", reference(), re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)


# The other commands' own tests run their examples.
@pytest.mark.parametrize("command", ["inspect", "transform", "kernels"])
def test_examples_work_as_printed(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *arguments = shlex.split(example(command))
    assert name == "attnres"
    assert arguments[0] == command
    monkeypatch.chdir(tmp_path)
    done = attnres(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
