"""The console script in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = "from attnres_compile.cli.main import run\nrun()"


def environment(**more: str) -> dict[str, str]:
    """The environment of such a process: this package to be found, no colours said, one thread."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def attnres(*arguments: str, code: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """Runs ``attnres`` through a pipe; ``code`` runs before it, ``more`` is added to the environment."""
    call = [sys.executable, "-c", f"{code}\n{RUN}", *arguments]
    return subprocess.run(call, env=environment(**more), capture_output=True, text=True, timeout=300)
