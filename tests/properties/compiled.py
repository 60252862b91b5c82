"""The same judgements of graphs that dynamo makes, and of models that are transformed whole."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.errors import GraphBreakError, PlanMismatchError
from tests.evaluate import by_dynamo
from tests.helpers import random_state, randomize_queries, relative_error
from tests.properties.judge import SEED, compare, judge, project, tolerance
from tests.properties.network import Network, inputs
from tests.properties.spec import Spec


def judge_dynamo(spec: Spec, config: ac.AttnResConfig) -> None:
    """A graph of dynamo."""
    judge(by_dynamo(Network(spec), *inputs()), config, tolerance(spec))


def judge_transform(spec: Spec, config: ac.AttnResConfig) -> None:
    """A model that is converted, runs, and is the original again."""
    model = Network(spec)
    keys, plain = list(model.state_dict()), outputs(model)
    torch._dynamo.reset()
    with contextlib.suppress(ac.NoStreamError):
        ac.transform(model, inputs(), replace(config, gain="sum"))
        assert ac.pseudo_queries(model)
        # A module that writes into what it is given may not be rewritten on its own: that is said, never passed over.
        with contextlib.suppress(PlanMismatchError):
            assert relative_error(outputs(model), plain) <= tolerance(spec), "outputs"
        ac.revert(model)
    assert list(model.state_dict()) == keys
    assert all(torch.equal(a, b) for a, b in zip(outputs(model), plain, strict=True)), "revert is exact to the bit"


def judge_regions(spec: Spec, config: ac.AttnResConfig) -> None:
    """A model with checkpointed regions: exact, and with random queries what it is without checkpoints."""
    config = replace(config, gain="sum")
    plain, model = Network(spec), Network(spec, checkpoints=True)
    wanted = outputs_and_gradients(plain)
    torch._dynamo.reset()
    try:
        ac.transform(model, leaves(), config)
    except ac.NoStreamError:
        return
    compare(outputs_and_gradients(model), wanted, tolerance(spec))
    _same_with_queries(plain, model, config, tolerance(spec))


def judge_breaks(spec: Spec, config: ac.AttnResConfig) -> None:
    """A model that breaks dynamo's graphs is refused by name, or computes what it does without breaks."""
    config = replace(config, gain="sum")
    plain, model = Network(spec), Network(spec, breaks=True)
    wanted = outputs_and_gradients(plain)
    torch._dynamo.reset()
    try:
        ac.transform(model, leaves(), config)
        compare(outputs_and_gradients(model), wanted, tolerance(spec))
        _same_with_queries(plain, model, config, tolerance(spec))
    except (ac.NoStreamError, GraphBreakError, PlanMismatchError):
        assert torch.equal(outputs(Network(spec))[0], wanted[0][0])


def _same_with_queries(plain: nn.Module, model: nn.Module, config: ac.AttnResConfig, allowed: float) -> None:
    """Both converted, with equal queries where they have the same sites."""
    torch._dynamo.reset()
    with contextlib.suppress(ac.NoStreamError):
        ac.transform(plain, leaves(), config)
        ours, theirs = ac.pseudo_queries(plain), ac.pseudo_queries(model)
        if list(ours) == list(theirs):
            randomize_queries(ours)
            randomize_queries(theirs)
            with contextlib.suppress(PlanMismatchError):
                assert relative_error(outputs(model), outputs(plain)) <= 100 * allowed, "with random queries"


def leaves() -> tuple[Tensor, Tensor]:
    """Inputs that want gradients, without which a reentrant checkpoint gives none."""
    x, y = inputs()
    return x.requires_grad_(), y.requires_grad_()


def outputs(model: nn.Module) -> list[Tensor]:
    with random_state(SEED), torch.no_grad():
        return [out.clone() for out in model(*inputs())]


def outputs_and_gradients(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients by all that the original has; none where it overwrites what its backward needs."""
    given = leaves()
    wanted = [*given, *(p for name, p in model.named_parameters() if "attnres" not in name)]
    for tensor in wanted:
        tensor.grad = None
    with random_state(SEED):
        made: list[Any] = model(*given)
    loss = project(made)
    if isinstance(loss, Tensor):
        loss.backward()
    found = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in wanted]
    return [o.detach().clone() for o in made], found
