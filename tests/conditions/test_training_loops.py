"""Training loops as people write them: a converted model gets the gradients and the steps that the original gets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import attnres_compile as ac
from tests.helpers import gradient_error, randomize_queries, relative_error
from tests.models import build, example

STEPS, PARTS = 3, 4


def target(seed: int) -> Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed))


def loss(model: nn.Module, seed: int) -> Tensor:
    return (model(example(seed=seed)) - target(seed)).square().mean()


def converted(dropout: float = 0.0) -> nn.Module:
    model = build(dropout=dropout)
    return ac.transform(model, example(), config=ac.AttnResConfig(num_blocks=2, lowering="eager"))


def gradients(model: nn.Module, queries: bool = False) -> dict[str, Tensor]:
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad for name, grad in named.items() if grad is not None and (queries or "attnres" not in name)}


def train(model: nn.Module, step: Callable[[nn.Module, torch.optim.Optimizer, int], None]) -> dict[str, Tensor]:
    """The original parameters after some steps; the queries stay at zero, where the two models are one."""
    trained = [parameter for name, parameter in model.named_parameters() if "attnres" not in name]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    for turn in range(STEPS):
        step(model, optimizer, turn)
    return {name: value.detach() for name, value in model.named_parameters() if "attnres" not in name}


def accumulating(set_to_none: bool) -> Callable[[nn.Module, torch.optim.Optimizer, int], None]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, turn: int) -> None:
        model.zero_grad(set_to_none=set_to_none)
        for part in range(PARTS):
            (loss(model, PARTS * turn + part) / PARTS).backward()
        # One norm over the parameters that both models have.
        clip_grad_norm_([p for name, p in model.named_parameters() if "attnres" not in name], 0.5)
        optimizer.step()

    return step


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_zero_grad_and_clipping(set_to_none: bool) -> None:
    want = train(build(), accumulating(set_to_none))
    model = converted()
    got = train(model, accumulating(set_to_none))
    start = dict(build().named_parameters())
    assert max(relative_error(want[name], start[name]) for name in want) > 1e-3, "nothing was trained"
    assert max(relative_error(got[name], want[name]) for name in want) < 1e-4
    queries = ac.pseudo_queries(model)
    assert all(query.grad is not None and bool(query.grad.any()) for query in queries.values())
    model.zero_grad(set_to_none=set_to_none)
    assert all((query.grad is None) == set_to_none for query in queries.values())


def test_accumulated_gradients_are_the_sum() -> None:
    """With queries that count: micro-batches against one batch, and against twice the same backward."""
    model = converted()
    randomize_queries(ac.pseudo_queries(model))
    sum((loss(model, seed) for seed in range(PARTS)), torch.zeros(())).backward()
    want = gradients(model, queries=True)
    assert len(want) == len(list(model.parameters()))
    model.zero_grad()
    for seed in range(PARTS):
        loss(model, seed).backward()
    assert gradient_error(gradients(model, queries=True), want) < 1e-5
    model.zero_grad()
    once = loss(model, 0)
    once.backward(retain_graph=True)
    one = {name: value.clone() for name, value in gradients(model, queries=True).items()}
    once.backward()
    assert gradient_error(gradients(model, queries=True), {name: 2 * value for name, value in one.items()}) < 1e-6


def test_clipping_counts_the_queries() -> None:
    model = converted()
    randomize_queries(ac.pseudo_queries(model))
    loss(model, 0).backward()
    squares = sum(float(value.double().square().sum()) for value in gradients(model, queries=True).values())
    norm = clip_grad_norm_(model.parameters(), 0.1)
    assert abs(float(norm) - squares**0.5) < 1e-5 * squares**0.5
    after = sum(float(value.double().square().sum()) for value in gradients(model, queries=True).values())
    assert abs(after**0.5 - 0.1) < 1e-4


def test_frozen_parts() -> None:
    """Only the queries are trained, or all but some layers: no other gradient is made, and those are the same ones."""
    model = converted()
    randomize_queries(ac.pseudo_queries(model))
    loss(model, 0).backward()
    want = gradients(model, queries=True)
    frozen_sets = (
        [name for name in want if "attnres" not in name],
        [name for name in want if "layers.1." in name or "embed" in name],
        [name for name in want if "attnres" in name],
    )
    for frozen in frozen_sets:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
            parameter.grad = None
        loss(model, 0).backward()
        got = gradients(model, queries=True)
        assert sorted(got) == sorted(set(want) - set(frozen))
        assert gradient_error(got, {name: want[name] for name in got}) < 1e-6


def test_dropout_draws_the_original_s_masks() -> None:
    runs = []
    for model in (build(dropout=0.4), converted(dropout=0.4)):
        model.train()
        torch.manual_seed(5)
        for seed in range(PARTS):
            loss(model, seed).backward()
        runs.append(gradients(model))
    assert gradient_error(runs[1], runs[0]) < 1e-5
