"""Training a converted model, and moving its weights in and out of checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.helpers import (
    TOLERANCE,
    floats,
    main_output,
    random_state,
    randomize_queries,
    relative_error,
    seeded,
)
from tests.zoo.families import Family, named
from tests.zoo.support import convert, example, prepare

STEPS = 10


@pytest.mark.parametrize("family", named("llama", "gptj", "mixtral", "t5", "swin", "convnext", "nanogpt"), ids=str)
def test_ten_steps_lower_the_loss_and_move_the_queries(family: Family) -> None:
    model, queries = convert(family)
    model.train()
    inputs = example(family)
    with torch.no_grad():
        target = torch.randn(main_output(model(**inputs)).shape, generator=seeded(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with random_state(11):
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = (main_output(model(**inputs)) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0], losses
    assert all(query.grad is not None for query in queries.values())
    still = [name for name, query in queries.items() if float(query.detach().abs().min()) == 0.0]
    assert not still, "queries that did not move"


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return floats(model(**inputs))


checkpoint_families = pytest.mark.parametrize("family", named("llama", "t5", "convnext"), ids=str)


@checkpoint_families
def test_state_dict_round_trip(family: Family) -> None:
    inputs = example(family)
    first, queries = convert(family, seed=0)
    randomize_queries(queries)
    want = outputs(first, inputs)
    state = first.state_dict()
    # Conversion adds keys under one prefix and changes none.
    original = list(prepare(family).state_dict())
    added = [key for key in state if key not in original]
    assert [key for key in state if key in original] == original
    assert len(added) == len(queries)

    second, _ = convert(family, seed=1)
    assert relative_error(outputs(second, inputs), want) > 1e-2
    second.load_state_dict(state)  # after its first call, strictly
    assert relative_error(outputs(second, inputs), want) == 0.0


@checkpoint_families
def test_old_checkpoint_lacks_the_queries_alone(family: Family) -> None:
    inputs = example(family)
    original = prepare(family, seed=0)
    want = outputs(original, inputs)
    model, queries = convert(family, seed=1)
    outputs(model, inputs)
    result = model.load_state_dict(original.state_dict(), strict=False)
    assert result.unexpected_keys == []
    assert sorted(result.missing_keys) == sorted(set(model.state_dict()) - set(original.state_dict()))
    assert len(result.missing_keys) == len(queries)
    assert relative_error(outputs(model, inputs), want) <= TOLERANCE[torch.float32]


@checkpoint_families
def test_new_checkpoint_loads_into_the_original_but_for_the_queries(family: Family) -> None:
    model, queries = convert(family, seed=0)
    original = prepare(family, seed=1)
    result = original.load_state_dict(model.state_dict(), strict=False)
    assert result.missing_keys == []
    assert len(result.unexpected_keys) == len(queries)


@checkpoint_families
def test_assigned_weights_and_queries_are_used_after_compilation(family: Family) -> None:
    """``assign=True`` puts new Parameter objects on the model: a graph that holds the old ones is stale."""
    inputs = example(family)
    first, queries = convert(family, seed=0)
    randomize_queries(queries)
    want = outputs(first, inputs)
    state = {key: value.clone() for key, value in first.state_dict().items()}

    second, _ = convert(family, seed=1)
    stale = outputs(second, inputs)
    second.load_state_dict(state, assign=True)
    assert relative_error(outputs(second, inputs), stale) > 1e-2
    assert relative_error(outputs(second, inputs), want) == 0.0
    own = {id(parameter) for parameter in second.parameters()}
    assert all(id(query) in own for query in ac.pseudo_queries(second).values())
    # And they are the ones that count from now on: gradients, and in-place changes.
    loss = sum(out.square().sum() for out in floats(second(**inputs)))
    loss.backward()
    assert all(query.grad is not None and query.grad.any() for query in ac.pseudo_queries(second).values())
    randomize_queries(ac.pseudo_queries(second), seed=9)
    assert relative_error(outputs(second, inputs), want) > 1e-2


def only_queries(state: dict[str, Any], family: Family) -> dict[str, Any]:
    """The part of a state_dict that conversion added."""
    original = set(prepare(family).state_dict())
    return {key: value for key, value in state.items() if key not in original}


def test_queries_alone_can_be_assigned() -> None:
    (family,) = named("llama")
    inputs = example(family)
    first, queries = convert(family)
    randomize_queries(queries)
    state = {key: value.clone() for key, value in only_queries(first.state_dict(), family).items()}
    second, _ = convert(family)
    outputs(second, inputs)
    result = second.load_state_dict(state, strict=False, assign=True)
    assert result.unexpected_keys == []
    assert relative_error(outputs(second, inputs), outputs(first, inputs)) == 0.0
