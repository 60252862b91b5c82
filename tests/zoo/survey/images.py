"""Random images for models of vision."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def images(model: nn.Module, seed: int, *, key: str, batch: int, side: int, channels: int = 3) -> Mapping[str, Tensor]:
    """One keyword argument with ``batch`` square images of ``side`` pixels, float32 ``[batch, channels, side, side]``.

    The model is not looked at; it is an argument because :class:`tests.zoo.survey.entry.Entry` gives it.
    """
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(batch, channels, side, side, generator=generator)}
