"""A target's converted copy: the same function at zero queries, and a target that stays what it was."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.cli.targets import Target, load_target
from attnres_compile.errors import AttnResError, TargetError

CONFIG = ac.AttnResConfig(num_blocks=2, lowering="eager")


def test_the_copy_is_converted_and_the_model_is_not(script: str) -> None:
    target = load_target(script)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    copy = target.converted(CONFIG)
    queries = ac.pseudo_queries(copy)
    assert len(queries) == 6 and all(not query.any() for query in queries.values())
    plain, mixed = target.model(*target.inputs.args), copy(*target.inputs.args)
    torch.testing.assert_close(mixed, plain, rtol=1e-5, atol=1e-6)
    with pytest.raises(ac.NotTransformedError):
        ac.pseudo_queries(target.model)
    # Nothing is shared: what is done to the copy does not reach the model.
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.fill_(7.0)
    after = target.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_the_copy_is_what_explain_said(script: str) -> None:
    target = load_target(script)
    assert ac.report(target.converted(CONFIG)) == target.explain(CONFIG)


def test_a_model_that_cannot_be_copied(script: str) -> None:
    target = load_target(script)
    target.model.lock = threading.Lock()
    with pytest.raises(AttnResError, match="model cannot be copied: TypeError: cannot pickle"):
        target.converted(CONFIG)


def test_inputs_that_the_model_rejects(script: str) -> None:
    target = load_target(script, ["float32[2,5]"])
    for action in (target.converted, target.explain):
        with pytest.raises(TargetError) as caught:
            action(CONFIG)
        message = str(caught.value)
        assert "script.py:model called with its inputs failed: RuntimeError: Expected tensor" in message
        assert "(script.py:21, raised at torch/" in message
        assert message.endswith("The inputs came from --input; forward takes (ids)")


def test_no_stream_is_no_fault_of_the_target(script: str) -> None:
    target = load_target(f"{script}:NoStream")
    with pytest.raises(ac.NoStreamError):
        target.converted(CONFIG)
    assert target.explain(CONFIG).streams == ()


def test_a_target_of_ones_own() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("odd")

    target = Target("odd", Odd(), ac.Inputs((torch.ones(2),)), "here")
    with pytest.raises(TargetError, match="odd called with its inputs failed: KeyError: 'odd'"):
        target.explain(CONFIG)
