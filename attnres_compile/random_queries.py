"""A conversion held against the oracle: random queries, outputs and all gradients (:mod:`attnres_compile.oracle`)."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from attnres_compile import api
from attnres_compile.agreement import spread_queries
from attnres_compile.comparison import Run, as_dtype, run, same_randomness, twin
from attnres_compile.config import AttnResConfig
from attnres_compile.exactness import Convert, convert_copy
from attnres_compile.inputs import Inputs
from attnres_compile.oracle import Verdict, judge
from attnres_compile.parameters import converted
from attnres_compile.reporting import join


def against_oracle(
    model: nn.Module,
    inputs: Inputs,
    config: AttnResConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = torch.float64,
    convert: Convert | None = None,
) -> Verdict:
    """Convert a copy of ``model``, give it random queries, and compare it with what the equations give.

    Args:
        model: the original, in the mode that it is to run in. It stays untouched.
        inputs: what to call it with.
        config: how to convert it.
        seed: of the queries, of the loss, and of the model's own random numbers.
        dtype: to compute in; ``None`` is the model's own.
        convert: what converts a copy; default :func:`attnres_compile.exactness.convert_copy`.

    Raises:
        Exception: of the conversion, or of the model.
    """
    inputs = as_dtype(inputs, dtype)
    with same_randomness(), torch.inference_mode(False), torch.enable_grad():
        made = (convert or convert_copy)(as_dtype(twin(model), dtype), inputs, config)
        spread_queries(made, config, seed)
        found, queries, norms = _run(made, inputs, seed)
        report = api.report(made)
        del made

        def make() -> nn.Module:
            return as_dtype(twin(model), dtype)

        return judge(make, inputs, report, config, queries, norms, found, seed)


def _run(made: nn.Module, inputs: Inputs, seed: int) -> tuple[Run, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A converted model's run, its parameters of depth attention under the names of their sites."""
    found = run(made, inputs, seed)
    queries: dict[str, torch.Tensor] = {}
    norms: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    for path, _, child in converted(made):
        for site, query in child.queries().items():
            queries[join(path, site)] = query.detach()
            names[id(query)] = f"query {join(path, site)}"
        for site, weight in child.key_norms().items():
            norms[join(path, site)] = weight.detach()
            names[id(weight)] = f"key norm {join(path, site)}"
    own = {name: id(parameter) for name, parameter in made.named_parameters()}
    gradients = {names.get(own.get(name, 0), name): value for name, value in found.gradients.items()}
    return dataclasses.replace(found, gradients=gradients), queries, norms
