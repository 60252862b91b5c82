"""The survey's catalogue of transformers' text models: tiny configurations, consistent ones, and no type left out."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
import torch
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.zoo.survey import hf, hf_special
from tests.zoo.survey.hf_shrink import FIRST_TOKEN, VOCAB, layers, shrink, without_cache

# One for each thing that rules keep consistent.
TYPES = {
    "llama": "LlamaForCausalLM",  # plain
    "gpt2": "GPT2LMHeadModel",  # other names of fields
    "gemma3_text": "Gemma3ForCausalLM",  # kinds of layers; heads wider than the model
    "deepseek_v3": "DeepseekV3ForCausalLM",  # latent attention; groups of experts; dense layers first
    "qwen3_next": "Qwen3NextForCausalLM",  # linear attention with heads of its own
    "jamba": "JambaForCausalLM",  # state space layers; experts every other layer
    "bamba": "BambaForCausalLM",  # a list of the numbers of its attention layers
    "gemma4_text": "Gemma4ForCausalLM",  # fields that single layers have their own values of
    "phi3": "Phi3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",  # a field that is kept under another name
    "mamba2": "Mamba2ForCausalLM",
    "mpt": "MptForCausalLM",  # a configuration within the configuration
}


def _entries(kind: str) -> dict[str, Any]:
    return {entry.name: entry for entry in hf.entries() if entry.kind == kind}


@pytest.mark.parametrize(
    ("kind", "mapping"),
    [
        ("causal-lm", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("masked-lm", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        ("seq2seq", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    ],
)
def test_every_type_of_a_mapping_has_its_entry(kind: str, mapping: dict[str, str]) -> None:
    assert set(_entries(kind)) == {f"transformers/{kind}/{model_type}" for model_type in mapping}


def test_no_name_is_given_twice() -> None:
    names = [entry.name for entry in hf.entries()]
    assert len(names) == len(set(names))


def test_special_fields_are_of_types_that_exist() -> None:
    """A type that the library renames would lose its fields without a word."""
    known = {name.split("/")[-1] for kind in hf.MAPPINGS for name in _entries(kind)}
    assert set(hf_special.FIELDS) | set(hf_special.MADE_WITH) | set(hf.CALLS) <= known


@pytest.mark.parametrize("model_type", TYPES)
def test_the_small_model_is_small_and_runs(model_type: str) -> None:
    entry = _entries("causal-lm")[f"transformers/causal-lm/{model_type}"]
    torch.manual_seed(0)
    model = entry.build()
    assert type(model).__name__ == TYPES[model_type]
    assert not model.training
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    inputs = entry.inputs(model, 0)
    again = entry.inputs(model, 0)
    assert all(torch.equal(inputs[name], again[name]) for name in inputs)
    with torch.no_grad():
        output = model(**inputs)
    assert output.logits.shape == (hf.BATCH, hf.LENGTH, model.config.vocab_size)
    assert bool(output.logits.isfinite().all())
    assert output.get("past_key_values") is None


@pytest.mark.parametrize("model_type", TYPES)
def test_the_small_configuration_is_consistent(model_type: str) -> None:
    config = hf.config_for("causal-lm", model_type, TYPES[model_type])
    assert 4 <= config.num_hidden_layers <= 6
    assert config.vocab_size == VOCAB
    for name, value in vars(config).items():
        if name.endswith("token_id") and isinstance(value, int):
            assert 0 <= value < FIRST_TOKEN, name
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        assert len(getattr(config, name, None) or range(config.num_hidden_layers)) == config.num_hidden_layers, name
    full = CONFIG_MAPPING[model_type]()
    # Shared keys and values stay shared, and every kind of layer is still there.
    kinds = set(getattr(full, "layer_types", None) or ())
    assert set(getattr(config, "layer_types", None) or ()) == kinds
    heads, shared = getattr(full, "num_attention_heads", None), getattr(full, "num_key_value_heads", None)
    if heads and shared and shared < heads:
        assert config.num_attention_heads % config.num_key_value_heads == 0
        assert config.num_key_value_heads < config.num_attention_heads


def test_a_layer_of_each_kind_is_chosen() -> None:
    kinds = ["a", "a", "a", "a", "a", "b", "a", "b"]
    assert layers({"num_hidden_layers": 8, "layer_types": kinds}) == [0, 1, 2, 5]
    assert layers({"num_hidden_layers": 8}) == [0, 1, 2, 3]
    # Two lists at once: one layer of each pair that occurs.
    mlp = ["dense", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse", "dense"]
    assert layers({"num_hidden_layers": 8, "layer_types": kinds, "mlp_layer_types": mlp}) == [0, 1, 5, 7]
    # Numbers of layers say the same as one value per layer.
    assert layers({"num_hidden_layers": 8, "mlp_only_layers": [6]}) == [0, 1, 2, 6]


def test_numbers_of_layers_follow_the_choice() -> None:
    small = shrink(CONFIG_MAPPING["qwen3_moe"](num_hidden_layers=12, mlp_only_layers=[9]))
    assert (small.num_hidden_layers, small.mlp_only_layers) == (4, [3])


def test_fields_of_single_layers_follow_the_choice() -> None:
    full = CONFIG_MAPPING["gemma4_text"]()
    small = shrink(full)
    own = [small.per_layer_config[layer].head_dim for layer in range(small.num_hidden_layers)]
    wide = [kind == "full_attention" for kind in small.layer_types]
    assert any(wide)
    assert len({head_dim for head_dim, is_wide in zip(own, wide, strict=True) if is_wide}) == 1
    assert all((head_dim > min(own)) is is_wide for head_dim, is_wide in zip(own, wide, strict=True))


def test_special_fields_win_also_within() -> None:
    small = shrink(CONFIG_MAPPING["gemma3"](), {"text_config": {"hidden_size": 40}, "mm_tokens_per_image": 3})
    assert (small.text_config.hidden_size, small.mm_tokens_per_image) == (40, 3)
    assert small.text_config.num_hidden_layers == 4


def test_no_configuration_within_keeps_a_cache() -> None:
    full = CONFIG_MAPPING["gemma3"]()
    assert full.text_config.use_cache
    without_cache(full)
    assert not full.text_config.use_cache
    assert not shrink(CONFIG_MAPPING["gemma3"]()).text_config.use_cache


def test_entries_can_be_picked_by_pattern() -> None:
    names = fnmatch.filter(_entries("causal-lm"), "transformers/causal-lm/llama*")
    assert "transformers/causal-lm/llama" in names
