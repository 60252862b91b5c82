"""Scripts that are run in this process, and what they left behind."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from attnres_compile.config import AttnResConfig
from attnres_compile.running import Outcome, run_script

TINY = Path(__file__).parent / "scripts" / "tiny.py"


@dataclass(frozen=True)
class Ran:
    """A script that was run: what came of it, what was told, and its names."""

    outcome: Outcome
    told: list[str]
    names: dict[str, Any]

    @property
    def queries(self) -> dict[str, nn.Parameter]:
        assert self.outcome.conversion is not None
        return self.outcome.conversion.queries()


Run = Callable[..., Ran]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """``run(source, *arguments, **options)`` runs a script after ``from tiny import *``; all is put back."""
    calls = (nn.Module.__call__, Optimizer.__init__, nn.Module.load_state_dict, Optimizer.load_state_dict)
    for name in ("argv", "path", "excepthook"):
        value = getattr(sys, name)
        monkeypatch.setattr(sys, name, list(value) if isinstance(value, list) else value)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    shutil.copy(TINY, tmp_path)

    def go(source: str, *arguments: str, **options: Any) -> Ran:
        told: list[str] = []
        script = tmp_path / "script.py"
        script.write_text(f"from tiny import *; torch.manual_seed(0)\n{source}")
        config = options.pop("config", AttnResConfig(lowering="eager"))
        outcome = run_script(str(script), arguments, config, tell=told.append, **options)
        return Ran(outcome, told, vars(sys.modules["__main__"]))

    yield go
    sys.modules.pop("tiny", None)
    # Whatever happened: nothing of ours is left on somebody else's classes.
    assert calls == (nn.Module.__call__, Optimizer.__init__, nn.Module.load_state_dict, Optimizer.load_state_dict)
    assert torch._dynamo.eval_frame._stance.stance == "default"
