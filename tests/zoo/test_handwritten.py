"""Converted models against models written by hand from the paper's equations, with random queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import (
    TOLERANCE,
    gradient_error,
    main_output,
    outputs_and_gradients,
    randomize_queries,
    relative_error,
    seeded,
)
from tests.zoo.families import BY_NAME
from tests.zoo.handwritten import FORWARDS, Depth, Queries
from tests.zoo.support import convert, example, original_parameters, prepare

# Random queries make softmax weights of every size; float64 leaves room for nothing but rounding.
HAND_TOLERANCE = {torch.float32: TOLERANCE[torch.float32], torch.float64: 1e-10}


@pytest.mark.parametrize("name", FORWARDS)
def test_without_depth_the_handwritten_model_is_the_library_s(name: str) -> None:
    """The test of the test: with the mix replaced by the plain sum it computes the library's own function."""
    model = prepare(BY_NAME[name])
    parameters = dict(model.named_parameters())
    inputs = example(BY_NAME[name])
    want = outputs_and_gradients(lambda **kw: main_output(model(**kw)), parameters, inputs)
    got = outputs_and_gradients(lambda **kw: FORWARDS[name](model, kw, None, Queries([])), parameters, inputs)
    assert relative_error(got.outputs, want.outputs) <= TOLERANCE[torch.float32]
    assert gradient_error(got.gradients, want.gradients) <= TOLERANCE[torch.float32]


def test_block_sizes_follow_the_paper() -> None:
    assert Depth().block_sizes(4) == [1, 1, 1, 1]
    assert Depth(num_blocks=1).block_sizes(8) == [8]
    assert Depth(num_blocks=3).block_sizes(8) == [2, 2, 4]
    assert Depth(num_blocks=9).block_sizes(4) == [1, 1, 1, 1]
    assert Depth(block_size=4).block_sizes(8) == [4, 4]


# Depth of our own words beside the package's options for the same choice.
VARIANTS: dict[str, tuple[Depth, dict[str, Any]]] = {
    "full": (Depth(), {"num_blocks": None}),
    "one_block": (Depth(num_blocks=1), {"num_blocks": 1}),
    "remainder": (Depth(num_blocks=3), {"num_blocks": 3}),
    "even": (Depth(num_blocks=4), {"num_blocks": 4}),
    "more_blocks_than_sublayers": (Depth(num_blocks=50), {"num_blocks": 50}),
    "block_size": (Depth(block_size=2), {"block_size": 2}),
    "block_size_remainder": (Depth(block_size=3), {"block_size": 3}),
    "sum": (Depth(num_blocks=3, gain="sum"), {"num_blocks": 3, "gain": "sum"}),
    "normalized": (Depth(num_blocks=3, value="normalized"), {"num_blocks": 3, "value": "normalized"}),
    "rsqrt_dim": (Depth(num_blocks=3, scale="rsqrt_dim"), {"num_blocks": 3, "logit_scale": "rsqrt_dim"}),
    "scaled": (Depth(num_blocks=3, scale=0.3), {"num_blocks": 3, "logit_scale": 0.3}),
    "large_eps": (Depth(num_blocks=3, eps=0.5), {"num_blocks": 3, "eps": 0.5}),
    "key_norm": (Depth(num_blocks=3), {"num_blocks": 3, "key_norm_weight": True}),
    "per_reader": (Depth(num_blocks=3, per_reader=True), {"num_blocks": 3, "queries": "reader"}),
}


def cases() -> list[Any]:
    """Every variant on Llama, and on the other architectures those that their shape could break."""
    pairs = [("llama", variant) for variant in VARIANTS]
    pairs += [(name, "remainder") for name in FORWARDS if name != "llama"]
    pairs += [
        ("gptj", "full"),
        ("gpt_neox_parallel", "per_reader"),
        ("cohere", "sum"),
        ("t5", "full"),
        ("t5", "sum"),
        ("t5", "one_block"),
        ("vit", "key_norm"),
        ("convnext", "one_block"),
        ("convnext", "normalized"),
        ("convnext", "key_norm"),
    ]
    return [pytest.param(*pair, id="-".join(pair)) for pair in pairs]


@pytest.mark.parametrize(("name", "variant"), cases())
def test_equals_the_handwritten_model(name: str, variant: str) -> None:
    compare(name, variant, torch.float64)


@pytest.mark.parametrize(("name", "variant"), [("llama", "remainder"), ("gptj", "sum"), ("t5", "remainder")])
def test_equals_the_handwritten_model_in_float32(name: str, variant: str) -> None:
    compare(name, variant, torch.float32)


def compare(name: str, variant: str, dtype: torch.dtype) -> None:
    """Outputs and all gradients, of weights and queries alike."""
    family = BY_NAME[name]
    depth, options = VARIANTS[variant]
    inputs = example(family, dtype)
    model, queries = convert(family, dtype, **{"gain": "mean", **options})
    randomize_queries(queries)
    key_weights = randomize_key_weights(model, family_names(name), queries)

    # A twin of its own: nothing that conversion did to the first model can reach it.
    twin = prepare(family, dtype)
    hand = Queries(
        [copy_of(query) for query in queries.values()],
        [copy_of(weight) for weight in key_weights] if key_weights else None,
    )
    want = outputs_and_gradients(
        lambda **kw: FORWARDS[name](twin, kw, depth, fresh(hand)),
        named(dict(twin.named_parameters()), hand.values, hand.key_weights or []),
        inputs,
    )
    before = family_names(name)
    originals = {key: value for key, value in original_parameters(model, queries).items() if key in before}
    got = outputs_and_gradients(
        lambda **kw: main_output(model(**kw)), named(originals, list(queries.values()), key_weights), inputs
    )
    assert relative_error(got.outputs, want.outputs) <= HAND_TOLERANCE[dtype]
    assert gradient_error(got.gradients, want.gradients) <= HAND_TOLERANCE[dtype]


def family_names(name: str) -> set[str]:
    """Parameter names of the unconverted model."""
    return {key for key, _ in BY_NAME[name].build().named_parameters()}


def randomize_key_weights(model: Any, before: set[str], queries: dict[str, Any]) -> list[Tensor]:
    """The weights of key norms, in the order of their queries: what conversion added besides those."""
    known = {id(query) for query in queries.values()}
    added = [
        parameter for key, parameter in model.named_parameters() if key not in before and id(parameter) not in known
    ]
    generator = seeded(5)
    with torch.no_grad():
        for weight in added:
            assert torch.equal(weight, torch.ones_like(weight)), "a key norm starts with ones"
            weight.copy_(0.5 + torch.rand(weight.shape, generator=generator, dtype=torch.float64))
    assert len(added) in (0, len(queries))
    return added


def copy_of(parameter: Tensor) -> Tensor:
    return parameter.detach().clone().requires_grad_()


def fresh(queries: Queries) -> Queries:
    queries.used = 0
    return queries


def named(parameters: dict[str, Tensor], queries: list[Tensor], key_weights: list[Tensor]) -> dict[str, Tensor]:
    """Parameters with the added ones under names that do not depend on the package's."""
    return {
        **parameters,
        **{f"query {i}": query for i, query in enumerate(queries)},
        **{f"key weight {i}": weight for i, weight in enumerate(key_weights)},
    }
