"""The model that a configuration of the transformers library describes: its class, and how it gets its numbers."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attnres_compile.cli.targets.unpickling import nothing_unpickled
from attnres_compile.cli.targets.user_code import own_words
from attnres_compile.errors import TargetError

# Parts of names in transformers.models.auto.modeling_auto, in the order in which a configuration is looked up. Masked
# comes before causal: encoders are in both, and no model that is meant to be causal is in the first.
_ENCODER_DECODERS = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
_TASKS = (
    *("MASKED_LM", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT"),
    *("SPEECH_SEQ_2_SEQ", "CTC", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION"),
)
_SAFE_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class HfModel:
    """What a model is made from.

    Attributes:
        name: for messages.
        config: a configuration of transformers.
        folder: where its checkpoint may be, or ``None``.
    """

    name: str
    config: Any
    folder: str | None

    def on_meta(self) -> nn.Module | None:
        """The model without numbers, or ``None`` where its code computes with numbers while it is built.

        Raises:
            TargetError: transformers has no class for the configuration, or it refuses it.
        """
        return self._first()[1]

    def with_numbers(self) -> nn.Module:
        """The model on the CPU with the folder's weights, or random ones where there are none.

        Raises:
            TargetError: as :meth:`on_meta`; or the weights do not fit into memory, or not this configuration.
        """
        kind, shape = self._first()
        if self._has(*_SAFE_WEIGHTS, *_PICKLED_WEIGHTS):
            return self._loaded(kind)
        if shape is not None:
            _refuse_too_large(shape, self.name)
        return self._random(kind)

    def random(self) -> nn.Module:
        """The model on the default device with whatever numbers its class begins with."""
        return self._random(self._first()[0])

    def _random(self, kind: Any) -> nn.Module:
        try:
            model: nn.Module = kind._from_config(self.config)
            return model
        except Exception as error:
            raise self._refused(error) from error

    def _first(self) -> tuple[Any, nn.Module | None]:
        """The first class that can be built of the configuration, and its model on the meta device."""
        refused: Exception | None = None
        for kind in _classes(self.config):
            try:
                with torch.device("meta"):
                    return kind, kind._from_config(self.config)
            except Exception as error:
                if isinstance(error, RuntimeError) and "meta" in str(error).lower():
                    return kind, None
                refused = refused or error
        if refused is not None:
            raise self._refused(refused) from refused
        raise TargetError(
            f"transformers has no model for {self.name} ({type(self.config).__name__})",
            remedy="Build the model in a script and name that",
        )

    def _loaded(self, kind: Any) -> nn.Module:
        try:
            with nothing_unpickled():
                model: nn.Module = kind.from_pretrained(
                    self.folder,
                    config=self.config,
                    local_files_only=True,
                    use_safetensors=self._has(*_SAFE_WEIGHTS),
                    weights_only=True,
                )
            return model
        except Exception as error:
            raise TargetError(
                f"the weights of {self.name} cannot be loaded: {_words(error)}",
                remedy="They must fit the configuration: with --set, no shape may change",
            ) from error

    def _has(self, *files: str) -> bool:
        return self.folder is not None and any(os.path.exists(os.path.join(self.folder, file)) for file in files)

    def _refused(self, error: Exception) -> TargetError:
        return TargetError(
            f"transformers cannot build {self.name}: {_words(error)}",
            remedy="Set the fields that it needs with --set NAME=VALUE",
        )


def _words(error: Exception) -> str:
    """Its words as one line."""
    return " ".join(own_words(error).split())


def _classes(config: Any) -> list[Any]:
    """The class that the configuration names, or else all that transformers has for it, the likeliest first."""
    import transformers
    from transformers.models.auto import modeling_auto

    for architecture in config.architectures or ():
        kind = getattr(transformers, str(architecture), None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return [kind]
    tasks: tuple[str, ...] = _TASKS
    if getattr(config, "is_decoder", False):
        tasks = ("CAUSAL_LM", *tasks)
    if config.is_encoder_decoder:
        tasks = (*_ENCODER_DECODERS, *tasks)
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING", {}) for task in tasks]
    mappings.insert(0 if compares_text_and_image(config) else len(mappings), modeling_auto.MODEL_MAPPING)
    found: list[Any] = []
    for mapping in mappings:
        with contextlib.suppress(KeyError):
            kind = mapping[type(config)]
            found.append(kind[0] if isinstance(kind, (list, tuple)) else kind)
    return list(dict.fromkeys(found))


def compares_text_and_image(config: Any) -> bool:
    """Whether this is CLIP or of its kin: two towers side by side, not a language model that can also see."""
    said = vars(config)
    return {"text_config", "vision_config", "projection_dim"} <= said.keys() and "image_token_id" not in said


def _refuse_too_large(model: nn.Module, name: str) -> None:
    """Before the system ends the process for it."""
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    there = _free_memory()
    if there is not None and needed > there:
        raise TargetError(
            f"{name} has {needed / 2**30:.1f} GiB of weights, and {there / 2**30:.1f} GiB of memory are free",
            remedy="Make it smaller, as with --set num_hidden_layers=2",
        )


def _free_memory() -> int | None:
    """In bytes, or ``None`` where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
