"""Converted models against models written by hand from the paper's equations, with random queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import (
    TOLERANCE,
    Run,
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
    got, want = ours_and_handwritten(name, variant, torch.float64)
    assert relative_error(got.outputs, want.outputs) <= 1e-10
    assert gradient_error(got.gradients, want.gradients) <= 1e-10


@pytest.mark.parametrize(("name", "variant"), [("llama", "remainder"), ("gptj", "sum"), ("t5", "remainder")])
def test_equals_the_handwritten_model_in_float32(name: str, variant: str) -> None:
    """As near to the exact values as float32 allows.

    Random queries make sharp choices, and T5's unscaled attention makes more: no other order of the same sums can be
    held to less than what rounding does to the handwritten model itself, which is what its float32 run is off by, or
    what its float64 run moves by where each weight is moved by one rounding of float32.
    """
    exact = handwritten(name, variant, torch.float64)
    moved = handwritten(name, variant, torch.float64, moved=True)
    got, want = ours_and_handwritten(name, variant, torch.float32)
    own = max(relative_error(run.outputs, exact.outputs) for run in (want, moved))
    assert relative_error(got.outputs, exact.outputs) <= max(TOLERANCE[torch.float32], 3 * own) < 1e-4
    own = max(gradient_error(run.gradients, exact.gradients) for run in (want, moved))
    assert gradient_error(got.gradients, exact.gradients) <= max(TOLERANCE[torch.float32], 3 * own) < 2e-4


def ours_and_handwritten(name: str, variant: str, dtype: torch.dtype) -> tuple[Run, Run]:
    """Outputs and all gradients, of weights and queries alike, of both models."""
    family = BY_NAME[name]
    model, queries = convert(family, dtype, **{"gain": "mean", **VARIANTS[variant][1]})
    before = {key for key, _ in family.build().named_parameters()}
    key_weights = [
        parameter
        for key, parameter in model.named_parameters()
        if key not in before and not any(parameter is query for query in queries.values())
    ]
    assert len(key_weights) == (len(queries) if variant == "key_norm" else 0)
    assert all(torch.equal(weight, torch.ones_like(weight)) for weight in key_weights), "a key norm starts with ones"
    randomize_added(queries, key_weights)
    originals = {key: value for key, value in original_parameters(model, queries).items() if key in before}
    got = outputs_and_gradients(
        lambda **kw: main_output(model(**kw)),
        named(originals, list(queries.values()), key_weights),
        example(family, dtype),
    )
    return got, handwritten(name, variant, dtype)


def handwritten(name: str, variant: str, dtype: torch.dtype, moved: bool = False) -> Run:
    """The same of the handwritten model, on weights that no conversion has touched.

    Args:
        moved: each weight is moved by up to one rounding of float32.
    """
    family = BY_NAME[name]
    depth, _ = VARIANTS[variant]
    twin = prepare(family, dtype)
    if moved:
        generator = seeded(6)
        with torch.no_grad():
            for parameter in twin.parameters():
                steps = torch.randint(-1, 2, parameter.shape, generator=generator)
                parameter.mul_(1 + torch.finfo(torch.float32).eps * steps.to(dtype))
    # A value that two modules read through a norm each is two sites where each reader has a query of its own.
    readers = 2 if depth.per_reader and name == "gpt_neox_parallel" else 1
    widths = []
    for sublayers, width in zip(family.sublayers, family.feature_dims, strict=True):
        widths += [width] * (readers * (sublayers - 1) + 1)
    values = [torch.zeros(width, dtype=dtype, requires_grad=True) for width in widths]
    key_weights = [torch.ones(width, dtype=dtype, requires_grad=True) for width in widths]
    key_weights = key_weights if variant == "key_norm" else []
    randomize_added(dict(enumerate(values)), key_weights)

    def forward(**inputs: Tensor) -> Tensor:
        queries = Queries(values, key_weights or None)
        result = FORWARDS[name](twin, inputs, depth, queries)
        queries.check_all_used()
        return result

    return outputs_and_gradients(
        forward, named(dict(twin.named_parameters()), values, key_weights), example(family, dtype)
    )


def randomize_added(queries: Mapping[Any, Tensor], key_weights: Sequence[Tensor]) -> None:
    """The same values for the same numbers of queries and key norm weights."""
    randomize_queries(queries)
    generator = seeded(5)
    with torch.no_grad():
        for weight in key_weights:
            weight.copy_(0.5 + torch.rand(weight.shape, generator=generator, dtype=torch.float64))


def named(parameters: dict[str, Tensor], queries: list[Tensor], key_weights: list[Tensor]) -> dict[str, Tensor]:
    """Parameters with the added ones under names that do not depend on the package's."""
    return {
        **parameters,
        **{f"query {i}": query for i, query in enumerate(queries)},
        **{f"key weight {i}": weight for i, weight in enumerate(key_weights)},
    }
