"""The whole text of ``inspect`` at 80 columns, as a person sees it. ATTNRES_ACCEPT=1 writes what is there now."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnres_compile.cli.main import app

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "inspect_demo": ["inspect", "attnres_compile.demo", "--num-blocks", "4"],
    "inspect_demo_all": ["inspect", "attnres_compile.demo", "--num-blocks", "3", "--all"],
    "inspect_demo_full": ["inspect", "attnres_compile.demo", "--full"],
    "inspect_demo_quiet": ["inspect", "attnres_compile.demo", "-q"],
    "inspect_refused": ["inspect", "attnres_compile.demo", "--min-sublayers", "9"],
}


@pytest.mark.parametrize("name", list(CASES))
def test_golden_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Paths are shown relative to the current folder or to site-packages, wherever the package is.
    monkeypatch.chdir(ROOT)
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, CASES[name])
    assert result.exit_code == (3 if name == "inspect_refused" else 0)
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("ATTNRES_ACCEPT"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(result.stdout)
    assert result.stdout == file.read_text()
    assert all(len(line) <= 80 and line == line.rstrip() for line in result.stdout.splitlines())
    assert result.stdout.isascii()
