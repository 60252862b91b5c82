"""Hugging Face transformers: every class of the library's text mappings, and what hf_other.py lists."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.survey import hf_special
from tests.zoo.survey.entry import Entry, NotBuilt
from tests.zoo.survey.hf_shrink import FIRST_TOKEN, VOCAB, shrink, without_cache

BATCH, LENGTH, SOURCE, BLOCKS = 2, 13, 11, 8
MAPPINGS = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}


def entries() -> list[Entry]:
    """One entry for every model type of every mapping."""
    found = [_entry(kind, model_type, name) for kind in MAPPINGS for model_type, name in _mapping(kind).items()]
    if importlib.util.find_spec("tests.zoo.survey.hf_other") is not None:
        found += importlib.import_module("tests.zoo.survey.hf_other").entries()
    return found


def _mapping(kind: str) -> Mapping[str, str]:
    from transformers.models.auto import modeling_auto

    return dict(getattr(modeling_auto, MAPPINGS[kind]))


def _entry(kind: str, model_type: str, class_name: str) -> Entry:
    return Entry(
        name=f"transformers/{kind}/{model_type}",
        library="transformers",
        kind=kind,
        build=partial(build, kind, model_type, class_name),
        inputs=partial(inputs, model_type),
    )


def config_for(kind: str, model_type: str, class_name: str) -> Any:
    """The tiny configuration that a class is built from."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    special = dict(hf_special.FIELDS.get(model_type, {}))
    full = CONFIG_MAPPING[model_type](**hf_special.MADE_WITH.get(model_type, {}))
    general = hf_special.KIND_FIELDS.get(kind, {})
    special = {name: value for name, value in general.items() if hasattr(full, name)} | special
    config = shrink(full, special)
    wanted = getattr(transformers, class_name).config_class
    if wanted is not None and not isinstance(config, wanted):
        # The class of a text model listed under the type of a model for several modalities.
        config = config.get_text_config(decoder=kind == "causal-lm")
    return config


def build(kind: str, model_type: str, class_name: str) -> nn.Module:
    """The model, tiny, with random weights, in eval mode."""
    import transformers

    made = getattr(transformers, class_name)
    config = config_for(kind, model_type, class_name)
    model = _made(made, config)
    for module in model.modules():
        if hasattr(module, "config") and hasattr(module.config, "to_dict"):
            without_cache(module.config)
    return model.eval()


def _made(made: Any, config: Any) -> nn.Module:
    if getattr(made, "_supports_sdpa", False):
        # A tower within may support less than the whole says it does.
        with contextlib.suppress(ValueError):
            return made._from_config(copy.deepcopy(config), attn_implementation="sdpa")
    return made._from_config(config, attn_implementation="eager")


def inputs(model_type: str, model: nn.Module, seed: int) -> Mapping[str, Any]:
    """Token ids ``int64[2, 13]``, none of them special; for an encoder-decoder ``int64[2, 11]`` and those.

    A model that takes something else gets that: see :data:`CALLS`.
    """
    generator = torch.Generator().manual_seed(seed)
    config: Any = model.config
    if model_type in CALLS:
        return CALLS[model_type](config, generator)
    takes = inspect.signature(model.forward).parameters
    if config.is_encoder_decoder and "decoder_input_ids" in takes:
        return {"input_ids": _ids(config, SOURCE, generator), "decoder_input_ids": _ids(config, LENGTH, generator)}
    return {"input_ids": _ids(config, LENGTH, generator)}


def _ids(config: Any, length: int, generator: torch.Generator, batch: int = BATCH) -> torch.Tensor:
    bound = getattr(config.get_text_config(), "vocab_size", None) or VOCAB
    return torch.randint(FIRST_TOKEN, bound, (batch, length), generator=generator)


def _long(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Text of so many blocks that attention over blocks does not turn into attention over all of it."""
    tokens = {"input_ids": _ids(config, BLOCKS * config.block_size, generator)}
    return tokens | ({"decoder_input_ids": _ids(config, LENGTH, generator)} if config.is_encoder_decoder else {})


def _codebooks(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Codes of several codebooks, one after the other for each item of the batch."""
    decoder = getattr(config, "decoder", config)
    return {"input_ids": _ids(decoder, LENGTH, generator, BATCH * decoder.num_codebooks)}


def _draft(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """What a drafting model gets from the model it drafts for: its states, and its keys and values."""
    text = config.get_text_config()

    def noise(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator)

    shared = {}
    for layer, kind in enumerate(text.layer_types):
        own = text.per_layer_config[layer]
        sizes = (BATCH, own.num_key_value_heads, SOURCE, own.head_dim)
        shared.setdefault(kind, (noise(*sizes), noise(*sizes)))
    positions = torch.full((BATCH, 1), SOURCE)
    embeddings = noise(BATCH, 1, 2 * config.backbone_hidden_size)
    return {"inputs_embeds": embeddings, "position_ids": positions, "shared_kv_states": shared}


def _pictured(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Text, and the features of a picture that its cross-attention layers read."""
    states = torch.randn((BATCH, SOURCE, config.get_text_config().hidden_size), generator=generator)
    return {"input_ids": _ids(config, LENGTH, generator), "cross_attention_states": states}


def _heard(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Text and as much sound: a frame's features are added to each token's."""
    frames = LENGTH * config.audio_length_per_tok
    sound = torch.randn((BATCH, config.audio_config.num_mel_bins, frames), generator=generator)
    return {"input_ids": _ids(config, LENGTH, generator), "input_features": sound}


CALLS: dict[str, Callable[[Any, torch.Generator], dict[str, Any]]] = {
    "big_bird": _long,
    "bigbird_pegasus": _long,
    "gemma4_assistant": _draft,
    "gemma4_unified_assistant": _draft,
    "mllama": _pictured,
    "musicgen": _codebooks,
    "musicgen_melody": _codebooks,
    "voxtral_realtime": _heard,
}
__all__ = ["NotBuilt", "build", "config_for", "entries", "inputs"]
