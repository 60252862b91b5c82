"""Checkpoints that a script saved under us, loaded by it at the start of the next run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = """
import sys
steps, load, save = int(sys.argv[1]), sys.argv[2], sys.argv[3]
model = Net()
optimizer = torch.optim.AdamW(groups(model), lr=0.1)
if load:
    saved = torch.load(load)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for group in optimizer.param_groups:
        group["lr"] = 0.05
train(model, optimizer, steps=steps)
if save:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, save)
"""


def test_a_run_in_two_parts_is_the_run_in_one(run: Any, tmp_path: Path) -> None:
    file = str(tmp_path / "checkpoint.pt")
    in_two = SCRIPT
    in_one = SCRIPT.replace(
        "train(model, optimizer, steps=steps)",
        "train(model, optimizer, steps=3)\n"
        "for group in optimizer.param_groups:\n    group['lr'] = 0.05\n"
        "train(model, optimizer, steps=2)",
    )
    whole = run(in_one, "5", "", "")
    run(in_two, "3", "", file)
    assert any("attnres" in key for key in torch.load(file)["model"])
    second = run(in_two, "2", file, "")
    assert second.outcome.ending.error is None
    assert "4 of the added parameters come from the checkpoint" in second.outcome.notes[0]
    assert second.names["optimizer"].param_groups[1]["lr"] == 0.05
    for expected, found in zip(whole.names["model"].parameters(), second.names["model"].parameters(), strict=True):
        torch.testing.assert_close(found, expected)
    state = [(o.names["optimizer"].state_dict()["state"]) for o in (whole, second)]
    assert state[0].keys() == state[1].keys()
    for key, values in state[0].items():
        torch.testing.assert_close(state[1][key]["exp_avg_sq"], values["exp_avg_sq"])


def test_a_checkpoint_of_another_depth_says_what_is_left_over(run: Any) -> None:
    ran = run(
        "model = Net()\n"
        "state = {**model.state_dict(), 'attnres.nowhere': torch.ones(8), 'attnres.blocks_0_norm2': torch.ones(8)}\n"
        "model.load_state_dict(state)\nmodel(ids())"
    )
    assert ran.outcome.ending.error is None
    assert ran.outcome.conversion.moved()["blocks.0.norm2"] == pytest.approx(8**0.5)
    assert any("holds 1 queries that this model has no place for" in note for note in ran.outcome.notes)


def test_wrong_checkpoints_fail_as_ever(run: Any) -> None:
    ran = run("Net().load_state_dict({'wrong': torch.ones(1)})")
    assert "Unexpected key(s) in state_dict" in str(ran.outcome.ending.error)
    ran = run(
        "a, b = (torch.optim.AdamW(Net(depth=d).parameters()) for d in (1, 2))\na.load_state_dict(b.state_dict())"
    )
    assert "doesn't match the size" in str(ran.outcome.ending.error)
