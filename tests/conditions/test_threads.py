"""Several threads, and several models of one class: nothing that one does is seen by another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.helpers import randomize, randomize_queries, relative_error
from tests.models import build, example

CALLS = 6


def converted(num_blocks: int | None = 2, seed: int = 0) -> nn.Module:
    model = randomize(build(), seed)
    ac.transform(model, example(), config=ac.AttnResConfig(num_blocks=num_blocks, lowering="eager"))
    randomize_queries(ac.pseudo_queries(model), seed)
    return model


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of one backward pass of its own."""
    out = model(x)
    gradients = torch.autograd.grad(out.square().sum(), list(model.parameters()))
    return [out.detach(), *gradients]


def together(work: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of all, run in threads that start at once; an error of any is raised."""
    start = threading.Barrier(len(work))
    results: list[Any] = [None] * len(work)
    errors: list[BaseException] = []

    def run(at: int) -> None:
        try:
            start.wait(60)
            results[at] = work[at]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("warm", [True, False])
def test_two_threads_call_one_model(warm: bool) -> None:
    """Whether it is compiled already, or both come to the first call at once; sizes differ between the threads."""
    inputs = [[example(2 + at, 3 + turn % 2, seed=10 * at + turn) for turn in range(CALLS)] for at in range(2)]
    twin = converted()
    want = [[step(twin, x) for x in mine] for mine in inputs]
    model = converted()
    if warm:
        model(example())
    got = together([lambda mine=mine: [step(model, x) for x in mine] for mine in inputs])
    for ours, theirs in zip(got, want, strict=True):
        assert max(relative_error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-5


def test_two_threads_with_a_model_each_and_other_configurations() -> None:
    """Converted, trained and called in a thread of its own, each model does what it does alone."""

    def life(num_blocks: int | None, seed: int) -> list[Tensor]:
        model = converted(num_blocks, seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for turn in range(3):
            optimizer.zero_grad()
            model(example(seed=turn)).square().mean().backward()
            optimizer.step()
        return [value.detach() for value in (model(example()), *model.parameters())]

    ways: list[tuple[int | None, int]] = [(2, 0), (None, 1)]
    want = [life(*way) for way in ways]
    torch._dynamo.reset()
    got = together([lambda way=way: life(*way) for way in ways])
    for ours, theirs in zip(got, want, strict=True):
        assert relative_error(ours, theirs) < 1e-5


def test_models_of_one_class_converted_differently() -> None:
    """One class, one code: three models with blocks of their own, and a fourth that is not converted at all."""
    models = [converted(2), converted(3), converted(None)]
    plain = randomize(build(), 0)
    x = example(3, 4)
    alone = []
    for num_blocks in (2, 3, None):
        torch._dynamo.reset()
        alone.append(converted(num_blocks)(x))
    torch._dynamo.reset()
    for _ in range(2):
        for model, want in zip(models, alone, strict=True):
            assert relative_error(model(x), want) < 1e-6
    assert relative_error(alone[0], alone[1]) > 1e-3
    assert relative_error(alone[0], alone[2]) > 1e-3
    assert torch.equal(plain(x), randomize(build(), 0)(x))
    counts = [[len(site.sources) for site in ac.report(model).streams[0].sites] for model in models]
    assert counts[0] != counts[1] != counts[2]
    ac.revert(models[0])
    assert torch.equal(models[0](x), plain(x))
    assert relative_error(models[1](x), alone[1]) < 1e-6


def test_training_and_evaluation_side_by_side() -> None:
    """One thread without gradients beside one with them."""
    model = converted()
    x = example()
    want = step(model, x)

    def look() -> list[Tensor]:
        with torch.no_grad():
            return [model(x) for _ in range(CALLS)]

    trained, seen = together([lambda: [step(model, x) for _ in range(CALLS)], look])
    assert all(relative_error(values, want) < 1e-6 for values in trained)
    assert all(relative_error(value, want[0]) < 1e-6 and not value.requires_grad for value in seen)
