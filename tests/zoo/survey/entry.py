"""One architecture of the survey: what it is called, and how it is built and called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from attnres_compile.errors import AttnResError


class NotBuilt(AttnResError):
    """An architecture cannot be built or called here in eager PyTorch, and why."""


@dataclass(frozen=True)
class Entry:
    """One architecture.

    Attributes:
        name: unique over the whole survey: ``library/kind/model``, as ``transformers/causal-lm/llama``.
        library: the package it comes from: ``transformers``, ``timm``, ``torchvision``, ``torch`` or
            ``x-transformers``.
        kind: the group it is listed under: ``causal-lm``, ``masked-lm``, ``seq2seq``, ``vision``, ``audio``,
            ``multimodal``, ``layers`` (torch.nn), ``configurations`` (x-transformers).
        build: makes the model in eval mode on the CPU in float32, with random weights, small, 4 layers or 2 a stage.
            Raises :class:`NotBuilt` with the true reason where the library refuses or needs what is not there.
        inputs: makes the keyword arguments for one call: no labels, no cache. The same ones for equal seeds.
        layers: what the configuration itself says about depth, for the row, as ``{"num_hidden_layers": 4}``.
        design: a few words on what is special about its blocks; entries of one design are alike to the detector.
    """

    name: str
    library: str
    kind: str
    build: Callable[[], nn.Module]
    inputs: Callable[[nn.Module, int], Mapping[str, Any]]
    layers: Mapping[str, Any] = field(default_factory=dict)
    design: str = ""
