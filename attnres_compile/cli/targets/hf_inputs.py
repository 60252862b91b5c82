"""What a model of the transformers library is called with, as its configuration says."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from attnres_compile.cli.targets.hf_model import compares_text_and_image
from attnres_compile.cli.targets.inputs import no_inputs
from attnres_compile.inputs import DEFAULT_BOUND, Inputs, as_inputs

BATCH, LENGTH = 2, 16
IMAGE_SIZE, CHANNELS, FRAMES = 224, 3, 8
# Samples of sound: one second.
SAMPLES = 16000


def inputs_of(model: nn.Module, config: Any) -> Inputs:
    """Inputs on the CPU, the same for equal configurations.

    Text is ``int64[2, 16]`` of ids below ``vocab_size``, for an encoder-decoder also as ``decoder_input_ids``; an
    image is ``float32[2, num_channels, image_size, image_size]``; sound is a spectrogram or samples. Where a model
    is of another kind, its class's own ``dummy_inputs`` are taken.

    Raises:
        TargetError: the configuration does not say.
    """
    takes = inspect.signature(model.forward).parameters
    make = _Maker(config)
    main = str(getattr(model, "main_input_name", ""))
    found: dict[str, Tensor] = {}
    if main in takes:
        value = make.named(main)
        if value is not None:
            found[main] = value
    if not found:
        return _dummies(model)
    if main == "input_ids" and "pixel_values" in takes and compares_text_and_image(config):
        found["pixel_values"] = make.image(config)
    if main == "pixel_values" and "input_ids" in takes and hasattr(config, "text_config"):
        found["input_ids"] = make.ids(config.get_text_config())
    if config.is_encoder_decoder and "decoder_input_ids" in takes:
        found["decoder_input_ids"] = make.ids(config)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return Inputs((), {name: each.to(dtype) if each.is_floating_point() else each for name, each in found.items()})


def _dummies(model: nn.Module) -> Inputs:
    from transformers import PreTrainedModel

    # The base class has ids for every model, images included.
    if getattr(type(model), "dummy_inputs", None) in (None, PreTrainedModel.dummy_inputs):
        raise no_inputs(model)
    return as_inputs(model.dummy_inputs)


class _Maker:
    """Makes tensors by what fields of a configuration say."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.generator = torch.Generator().manual_seed(0)

    def named(self, name: str) -> Tensor | None:
        """The input of this name, or ``None`` where the configuration does not say."""
        if name == "input_ids":
            return self.ids(self.config.get_text_config())
        if name == "pixel_values":
            return self.image(self.config)
        if name in ("input_features", "input_values"):
            return self._sound(name)
        return None

    def ids(self, config: Any) -> Tensor:
        """Token ids ``int64[2, 16]``, or as long as there are positions."""
        bound = _number(config, "vocab_size") or DEFAULT_BOUND
        positions = [_number(config, name) for name in ("max_position_embeddings", "max_target_positions")]
        length = min([LENGTH, *(each for each in positions if each)])
        return torch.randint(0, bound, (BATCH, length), generator=self.generator)

    def image(self, config: Any) -> Tensor:
        """Noise ``[2, channels, height, width]``; a film is ``[2, frames, channels, height, width]``."""
        if not hasattr(config, "image_size"):
            config = getattr(config, "vision_config", config)
        size = getattr(config, "image_size", None) or IMAGE_SIZE
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        frames = _number(config, "num_frames")
        film = (frames,) if frames else ()
        return self._noise(BATCH, *film, _number(config, "num_channels") or CHANNELS, height, width)

    def _sound(self, name: str) -> Tensor | None:
        config = self.config
        bins, per_channel = _number(config, "num_mel_bins"), _number(config, "input_feat_per_channel")
        sources = _number(config, "max_source_positions")
        if per_channel:
            return self._noise(BATCH, 8 * LENGTH, per_channel)
        if bins and sources:
            # Two frames per position: Whisper's convolutions have a stride of two.
            return self._noise(BATCH, bins, 2 * sources)
        if bins and _number(config, "max_length"):
            return self._noise(BATCH, config.max_length, bins)
        if name == "input_values" and hasattr(config, "conv_stride"):
            return self._noise(BATCH, SAMPLES)
        width = _number(config, "feature_projection_input_dim")
        return self._noise(BATCH, 4 * LENGTH, width) if width else None

    def _noise(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.generator)


def _number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None
