"""Runs the tests of ``interpreted/``: generated kernels in Triton's interpreter, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@pytest.mark.parametrize("name", FILES)
def test_kernels_in_the_interpreter(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER / name)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=FOLDER.parents[2])
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    # Collecting nothing, or skipping, would look like success.
    assert re.search(r"(?<!\d)[1-9]\d* passed", ran.stdout), ran.stdout
    assert "skipped" not in ran.stdout, ran.stdout


def test_there_are_such_tests() -> None:
    assert FILES
