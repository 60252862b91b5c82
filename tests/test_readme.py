"""The README is run: its Python prints what it shows, its commands exist, and CI tests as it says."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from attnres_compile.cli.main import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [(m[1], m[2]) for m in re.finditer(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)]
COMMANDS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]


def command(word: str) -> str:
    (found,) = [line for line in COMMANDS if word in line]
    return found


def shown_after(start: str) -> str:
    """The output block behind the block that begins with ``start``."""
    (at,) = [i for i, (_, text) in enumerate(BLOCKS) if text.startswith(start)]
    assert BLOCKS[at + 1][0] == "text"
    return BLOCKS[at + 1][1]


def run_blocks() -> list[tuple[str, str]]:
    """Every Python block's shown and real output, run one after another in one namespace."""
    names: dict[str, Any] = {"__name__": "readme"}
    outputs: list[tuple[str, str]] = []
    for number, (kind, text) in enumerate(BLOCKS):
        if kind != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(text, f"README.md, block {number}", "exec"), names)
        shown = BLOCKS[number + 1][1] if BLOCKS[number + 1][0] == "text" else ""
        outputs.append((shown, printed.getvalue()))
    return outputs


@pytest.mark.filterwarnings("ignore:pseudo-queries were made while compiling")
def test_python_blocks_print_what_is_shown() -> None:
    with torch.random.fork_rng():
        outputs = run_blocks()
    assert len(outputs) >= 7
    for shown, real in outputs:
        assert shown == real


def test_the_example_prints_what_is_shown() -> None:
    """tests/cli runs the example; here its headings are compared with the ones shown."""
    source = (ROOT / "examples" / "llama.py").read_text(encoding="utf-8")
    headings = re.findall(r"^(\d\. \w+)", shown_after(command("'.[test]'")), re.MULTILINE)
    assert headings
    assert headings == re.findall(r'["n](\d\. \w+)', source)


def test_set_up_commands() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in (command("'.[examples]'"), command("'.[test]'")):
        venv, install, *rest = (shlex.split(part) for part in line.split(" && "))
        assert venv == ["python3", "-m", "venv", ".venv"]
        assert install[:2] == [".venv/bin/pip", "install"]
        (extra,) = re.findall(r"\[(\w+)\]", install[2])
        assert extra in extras
        (words,) = rest
        script = words[-1] if words[-1].endswith(".py") else "tests"
        assert (ROOT / script).exists()


def test_ci_runs_the_readmes_commands_and_installs_nothing_else() -> None:
    """As they stand, where they put things: a step that is missing there must be missing in CI, too."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    (pattern,) = re.findall(r"grep '(.*)'\"\$1\" README\.md", script)
    words = re.findall(r"\$\(readme ([\w./]+)\)", script)
    wanted = {"examples/llama.py": command("'.[examples]'"), "pytest": command("'.[test]'")}
    assert words == list(wanted)
    for word, line in wanted.items():
        assert [each for each in README.splitlines() if re.search(pattern + word, each)] == [line]
    assert not re.search(r"pip\W+install", script)
    assert "torch==" not in script + README


@pytest.mark.parametrize("start", ["attnres inspect examples", "attnres verify examples"])
def test_command_line_prints_what_is_shown(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = [line for line in COMMANDS if line.startswith(start)]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0

    def steady(text: str) -> list[str]:
        # Rounding errors, where they are largest, and the lines of a library's files are no promise.
        text = re.sub(r"\d\.\de[-+]\d\d", "ERROR", text)
        # So is what a model's own rounding allows; what exactness allows is one.
        text = re.sub(r"^(?!converted)(.*) \de-\d\d ", r"\1 ALLOWED ", text, flags=re.MULTILINE)
        text = re.sub(r"(\.py):\d+", r"\1:LINE", text)
        return [" ".join(row.split()) for row in text.splitlines()]

    shown, real = steady(shown_after(start)), steady(result.stdout)
    if "Left alone: 12 adds" in real:
        # Where long paths break depends on where a library stands.
        shown, real = (rows[: rows.index("Left alone: 12 adds") + 2] for rows in (shown, real))
    assert [row for row in shown if row] == [row for row in real if row]


def test_options_of_the_synopsis_exist() -> None:
    for line in COMMANDS:
        if "TARGET" in line:
            text = CliRunner(env={"COLUMNS": "200"}).invoke(app, [line.split()[1], "--help"]).stdout
            options = re.findall(r"--[a-z-]+", line)
            assert options
            assert all(option in text for option in options)


def test_links_lead_somewhere() -> None:
    for file in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)", file.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (file.parent / link).exists(), f"{file.name}: {link}"
