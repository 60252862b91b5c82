"""A model of the survey at random queries, against the oracle; and its streams' features against its own width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import attnres_compile as ac
from attnres_compile.exactness import Convert
from attnres_compile.inputs import Inputs
from attnres_compile.oracle import DISAGREES, NOT_JUDGED, Verdict
from attnres_compile.random_queries import against_oracle
from attnres_compile.report import TransformReport
from tests.zoo.survey.wording import kind_and_place

# What libraries call the sizes of what a model computes with, on the model or in its configuration.
_WIDTHS = (
    *("num_features", "embed_dim", "hidden_size", "d_model", "dim", "n_embd", "emb_dim", "model_dim", "hidden_dim"),
    *("width", "hidden_sizes", "embed_dims", "num_channels", "widths", "dims", "encoder_hidden_size", "d_embed"),
)


def at_random_queries(
    model: nn.Module, inputs: Inputs, config: ac.AttnResConfig, report: TransformReport, convert: Convert | None
) -> Verdict:
    """What the oracle says of a conversion, in float64, or in the model's own dtype where that does not run."""
    found = _judged(model, inputs, config, convert)
    strange = [stream.feature_dim for stream in report.streams if not _is_width(model, stream.feature_dim)]
    if strange and found.status != DISAGREES:
        note = f"features of size {', '.join(map(str, strange))} which is no width of the model"
        return Verdict(DISAGREES, note=note)
    return found


def _judged(model: nn.Module, inputs: Inputs, config: ac.AttnResConfig, convert: Convert | None) -> Verdict:
    errors: list[str] = []
    for dtype in (torch.float64, None):
        torch._dynamo.reset()
        try:
            return against_oracle(model, inputs, config, dtype=dtype, convert=convert)
        except Exception as error:
            errors.append(kind_and_place(error))
    return Verdict(NOT_JUDGED, note="; ".join(dict.fromkeys(errors)))


def widths(model: nn.Module) -> set[int]:
    """The sizes that the model, its modules and its configurations call its width."""
    return {size for source in _sources(model) for name in _WIDTHS for size in _sizes(getattr(source, name, None))}


def _sources(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield module
        if (config := getattr(module, "config", None)) is not None:
            yield config


def _sizes(value: Any) -> Iterator[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _sizes(item)


def _is_width(model: nn.Module, size: int) -> bool:
    """Whether a size is a width of the model, or that of a vector of its parameters; who names no width, agrees."""
    known = widths(model)
    vectors = {parameter.numel() for parameter in model.parameters() if sum(n > 1 for n in parameter.shape) <= 1}
    return not known or size in known or size in vectors
