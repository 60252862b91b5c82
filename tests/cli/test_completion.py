"""Shell completion, asked for as the shells ask for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.processes import attnres


def complete(words: str) -> list[str]:
    """What bash is offered for the last of ``words``."""
    count = str(len(words.split(" ")) - 1)
    done = attnres(_ATTNRES_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=count)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_commands_and_options() -> None:
    assert {"inspect", "verify", "kernels"} <= set(complete("attnres "))
    assert complete("attnres insp") == ["inspect"]
    assert "--num-blocks" in complete("attnres inspect --num")


def test_choices() -> None:
    assert complete("attnres inspect x.py --gain ") == ["sum", "mean"]
    assert complete("attnres inspect x.py --two-phase o") == ["on", "off"]


def test_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    (tmp_path / "saved.pt2").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "some").mkdir()
    assert complete("attnres inspect s") == ["saved.pt2", "script.py", "some/"]
    assert complete("attnres inspect h") == ["hf:"]
    assert {"hf:llama", "hf:llama4"} <= set(complete("attnres inspect hf:llam"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell(shell: str) -> None:
    done = attnres("--show-completion", shell)
    assert done.returncode == 0
    assert "_ATTNRES_COMPLETE" in done.stdout
