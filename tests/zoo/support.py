"""How the zoo's tests make a model, convert it and run it."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.helpers import Run, outputs_and_gradients, randomize
from tests.zoo.families import Family, Inputs

# Three blocks leave a remainder in most of the zoo's streams, so partial sums and whole blocks mix.
BLOCKS = 3


def prepare(family: Family, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """The family's model with random weights, the same ones for one seed in every dtype."""
    return randomize(family.build().to(dtype), seed)


def example(
    family: Family,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    length: int = 11,
    seed: int = 0,
) -> Inputs:
    """The family's inputs; floating-point ones in ``dtype``."""
    inputs = family.inputs(batch, length, seed)
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def eager_config(**options: Any) -> ac.AttnResConfig:
    """A config that runs the converted graph op by op, which is what the zoo checks."""
    if "block_size" not in options:
        options.setdefault("num_blocks", BLOCKS)
    return ac.AttnResConfig(**{"lowering": "eager", **options})


def convert(
    family: Family, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any
) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """The family's model converted, and its pseudo-queries in depth order.

    One conversion serves all tests that want the same: each gets a copy, with the weights of ``seed``.
    """
    model = copy.deepcopy(_converted(family, dtype, tuple(sorted(options.items()))))
    queries = ac.pseudo_queries(model)
    if seed:
        randomize(model, seed)
        with torch.no_grad():
            for query in queries.values():
                query.zero_()
    return model, queries


@functools.cache
def _converted(family: Family, dtype: torch.dtype, options: tuple[tuple[str, Any], ...]) -> nn.Module:
    model = prepare(family, dtype)
    converted = ac.transform(model, example(family, dtype), config=eager_config(**dict(options)))
    assert converted is model
    return model


def original_parameters(model: nn.Module, queries: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The parameters that the model had before its conversion."""
    added = {id(query) for query in queries.values()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in added}


def run_original(family: Family, dtype: torch.dtype = torch.float32, training: bool = False) -> Run:
    """Outputs and gradients of the unconverted model."""
    model = prepare(family, dtype).train(training)
    return outputs_and_gradients(model, dict(model.named_parameters()), example(family, dtype))
