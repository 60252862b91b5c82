"""Every model family that conversion must handle, built small from its library's own classes.

The numbers in the table are the architecture's own: how many branches each residual stream adds up, and how
many features it carries. They are written down here by hand, never computed from what the package found.
Sizes are small, mostly different from each other and often no powers of two, so that a mixed-up axis shows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zoo import plain, vision
from tests.zoo.text import TEXT_BUILDERS, VOCAB

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: unique, used as the test's id.
        build: makes the model in eval mode with whatever weights its library initialises.
        inputs: ``(batch, length, seed)`` to keyword arguments; models of fixed input size ignore ``length``.
        sublayers: branches of each stream, in the order in which the streams run.
        feature_dims: features of each stream, in the same order.
        refused: the reason why it must not be converted, or ``""``.
        kind: what the model can be asked to do: ``"causal"``, ``"seq2seq"``, ``"audio"`` or ``"plain"``.
        dropout: whether training mode draws random numbers.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int, int], Inputs]
    sublayers: tuple[int, ...]
    feature_dims: tuple[int, ...]
    refused: str = ""
    kind: str = "plain"
    dropout: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def generates(self) -> bool:
        return self.kind != "plain"


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def token_inputs(batch: int, length: int, seed: int) -> Inputs:
    return {"input_ids": torch.randint(3, VOCAB, (batch, length), generator=seeded(seed))}


def seq2seq_inputs(batch: int, length: int, seed: int) -> Inputs:
    generator = seeded(seed)
    return {
        "input_ids": torch.randint(3, VOCAB, (batch, length), generator=generator),
        "decoder_input_ids": torch.randint(3, VOCAB, (batch, length - 4), generator=generator),
    }


def audio_inputs(batch: int, length: int, seed: int) -> Inputs:
    # Whisper takes spectrograms of one length only: twice its number of source positions.
    generator = seeded(seed)
    return {
        "input_features": torch.randn(batch, 10, 26, generator=generator),
        "decoder_input_ids": torch.randint(3, VOCAB, (batch, length - 4), generator=generator),
    }


def image_inputs(name: str, channels: int, size: int) -> Callable[[int, int, int], Inputs]:
    def make(batch: int, length: int, seed: int) -> Inputs:
        return {name: torch.randn(batch, channels, size, size, generator=seeded(seed))}

    return make


def feature_inputs(name: str, width: int) -> Callable[[int, int, int], Inputs]:
    def make(batch: int, length: int, seed: int) -> Inputs:
        return {name: torch.randn(batch, length, width, generator=seeded(seed))}

    return make


def _text(name: str, sublayers: int, width: int, **more: Any) -> Family:
    return Family(name, TEXT_BUILDERS[name], token_inputs, (sublayers,), (width,), kind="causal", **more)


CONVERTED: tuple[Family, ...] = (
    _text("llama", 8, 48),
    _text("gpt2", 8, 40, dropout=True),
    _text("opt", 8, 36, dropout=True),
    _text("bloom", 8, 40, dropout=True),
    _text("qwen3", 8, 44),
    _text("gemma2", 8, 52),
    _text("gemma3", 8, 52),
    _text("olmo2", 8, 48),
    _text("granite", 8, 48),
    _text("mixtral", 8, 48),
    _text("qwen3_moe", 8, 40),
    # Parallel attention and MLP: one step per layer, whatever the order in which the three are added.
    _text("gpt_neox_parallel", 4, 48),
    _text("gpt_neox_serial", 8, 48),
    _text("gptj", 4, 48, dropout=True),
    _text("phi", 4, 48, dropout=True),
    _text("falcon_parallel", 4, 48),
    _text("falcon_new_two_norms", 4, 48),
    _text("falcon_new_one_norm", 4, 48),
    _text("falcon_serial", 8, 48, dropout=True),
    _text("cohere", 4, 48),
    # The encoder adds attention and MLP, the decoder cross-attention as well.
    Family("t5", TEXT_BUILDERS["t5"], seq2seq_inputs, (6, 9), (40, 40), kind="seq2seq", dropout=True),
    Family("whisper", TEXT_BUILDERS["whisper"], audio_inputs, (6, 9), (40, 40), kind="audio", dropout=True),
    Family("vit", vision.vit, image_inputs("pixel_values", 3, 20), (8,), (36,), dropout=True),
    Family("dinov2", vision.dinov2, image_inputs("pixel_values", 3, 20), (8,), (36,)),
    # A stage is a stream of its own: the patch merging between two of them changes width and length.
    Family("swin", vision.swin, image_inputs("pixel_values", 3, 32), (4, 4, 4), (12, 24, 48), dropout=True),
    # One branch per ConvNeXt layer; features are dimension 1 of NCHW.
    Family("convnext", vision.convnext, image_inputs("pixel_values", 3, 32), (3, 4, 3), (10, 14, 22), dropout=True),
    Family("torch_encoder_norm_first", plain.encoder_norm_first, feature_inputs("src", 36), (8,), (36,)),
    Family("nanogpt", plain.nanogpt, token_inputs, (8,), (40,), dropout=True),
)

REFUSED: tuple[Family, ...] = (
    Family("bert", TEXT_BUILDERS["bert"], token_inputs, (), (), refused="post_norm"),
    Family("torch_encoder_norm_last", plain.encoder_norm_last, feature_inputs("src", 36), (), (), "post_norm"),
    Family("resnet", vision.resnet, image_inputs("x", 3, 24), (), (), refused="post_activation"),
)

BY_NAME: dict[str, Family] = {family.name: family for family in (*CONVERTED, *REFUSED)}


# One per design of block and of cache; what is run on these alone by default, ``pytest -m long`` runs on the others.
DISTINCT = frozenset(
    {
        *("llama", "gpt2", "bloom", "gemma3", "granite", "qwen3_moe", "gptj", "falcon_new_two_norms", "t5", "whisper"),
        *("vit", "swin", "convnext", "torch_encoder_norm_first", "nanogpt"),
    }
)


def each(families: Sequence[Family], first: Container[str] = DISTINCT) -> list[Any]:
    """Parameters for a test of these families, marked as long but for those of ``first``."""
    return [pytest.param(f, marks=() if f.name in first else pytest.mark.long) for f in families]


def named(*names: str) -> list[Family]:
    """The families of these names, in this order."""
    return [BY_NAME[name] for name in names]
