"""Work that takes long says so, on a terminal and there alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pexpect
import pytest

from tests.cli.processes import RUN, attnres, environment

SLOW = "import time\ntime.sleep(2.5)\n"


@pytest.fixture
def slow(script: str) -> str:
    source = Path(script).read_text()
    Path("slow.py").write_text(SLOW + source)
    return "slow.py"


def on_a_terminal(*arguments: str) -> tuple[str, int | None]:
    """All that a terminal of 80 columns gets to see, and the exit code."""
    child = pexpect.spawn(
        sys.executable,
        ["-c", RUN, *arguments],
        env=environment(TERM="xterm-256color"),  # type: ignore[arg-type]
        dimensions=(40, 80),
        encoding="utf-8",
        timeout=120,
    )
    child.expect(pexpect.EOF)
    child.close()
    return child.before or "", child.exitstatus


def test_a_terminal_sees_what_takes_so_long(slow: str) -> None:
    seen, code = on_a_terminal("inspect", slow)
    assert code == 0
    assert "loading the model ..." in seen
    assert seen.index("loading the model ...") < seen.index("1 residual stream")
    # The spinner's line is wiped before the result comes.
    assert "\x1b[2K" in seen[seen.rindex("loading the model ...") :]


def test_quiet_is_quiet(slow: str) -> None:
    seen, code = on_a_terminal("inspect", slow, "-q")
    assert code == 0
    assert "loading" not in seen
    assert len([line for line in seen.splitlines() if line.strip() and "noise" not in line]) <= 2


def test_a_pipe_sees_none_of_it(slow: str) -> None:
    done = attnres("inspect", slow)
    assert done.returncode == 0
    assert "loading" not in done.stderr + done.stdout
    assert "\x1b" not in done.stderr + done.stdout


def test_quick_work_shows_no_progress(script: str) -> None:
    seen, _ = on_a_terminal("inspect", "missing.py")
    assert "loading" not in seen
    assert "error: missing.py does not exist" in seen.replace("\x1b[1;31m", "").replace("\x1b[0m", "")
