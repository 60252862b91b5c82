"""A configuration of transformers made tiny: the same architecture, every kind of its layers, small numbers.

Rules go by the names of fields, which the library uses alike over its models. They are applied to a configuration of
full size, so that relations in it (shared keys and values, heads wider than the model, which layers are sparse) can be
kept. What names do not tell stands in :mod:`tests.zoo.survey.hf_special`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

VOCAB, HIDDEN, HEADS, POSITIONS, LAYERS, MOST_LAYERS = 120, 64, 4, 64, 4, 6
# Token ids from here on are nobody's special token.
FIRST_TOKEN = 24

COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "num_blocks",
    "depth",
)
# Lists of the numbers of layers; other lists as long as the model is deep have one value per layer.
NUMBERS = (
    "attn_layer_indices",
    "cross_attention_layers",
    "full_attn_idxs",
    "hybrid_layer_ids",
    "local_layer_ids",
    "mlp_only_layers",
    "moe_layers",
    "out_indices",
    "ple_layer_ids",
)

# The largest value of a field, by name.
SIZES: dict[str, int] = {
    # widths
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "dim_model", "embed_dim"), HIDDEN),
    **dict.fromkeys(
        ("word_embed_proj_dim", "attention_hidden_size", "hidden_size_global", "backbone_hidden_size", "lru_width"),
        HIDDEN,
    ),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size"), 48),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dim_ff", "dff", "d_ff", "d_inner"), 72
    ),
    **dict.fromkeys(("decoder_ffn_dim", "intermediate_size_mlp", "dense_intermediate_size", "feed_forward_size"), 72),
    "encoder_ffn_dim": 80,
    "prefix_dense_intermediate_size": 76,
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 40),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 56),
    **dict.fromkeys(("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), 56),
    "moe_latent_size": 28,
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "num_encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_decoder_attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("rotary_dim",), 8),
    **dict.fromkeys(("kv_channels", "d_head", "attention_head_size", "d_kv", "dim_head"), 16),
    "query_pre_attn_scalar": 20,
    # latent attention and sparse indexers
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "o_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "qk_head_dim": 20,
    "v_head_dim": 14,
    "index_head_dim": 16,
    "index_n_heads": 3,
    "index_topk": 6,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    # experts
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    "topk_group": 1,
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 2),
    "zero_expert_num": 2,
    "router_hidden_size": 20,
    # recurrent layers
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups", "o_groups"), 2),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 12),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 5),
    "mamba_d_ssm": 128,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 12,
    "linear_num_heads": 4,
    # positions and windows
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "context_length", "max_seq_len"), POSITIONS),
    **dict.fromkeys(("max_target_positions", "max_source_positions", "model_max_length"), POSITIONS),
    "original_max_position_embeddings": 32,
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "local_attention"), 6),
    **dict.fromkeys(("attention_window_size", "attention_chunk_size", "local_attention_window_len"), 6),
    "keep_window_size": 8,
    # layers
    "first_k_dense_replace": 1,
    **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers"), 2),
    **dict.fromkeys(("no_rope_layer_interval", "layer_group_size"), 2),
    # vocabularies
    "type_vocab_size": 3,
    # pictures and sound, for towers that a call with text does not reach
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 10,
    "projection_dim": 32,
    "adapter_rank": 6,
    "laurel_rank": 6,
    "loop_gate_rank": 6,
    "gated_norm_rank": 6,
    "hidden_size_per_layer_input": 12,
}
# Widths of a head where the model says it apart from the width and the number of heads.
OWN_HEAD = 24
HEAD_DIMS = ("head_dim", "swa_head_dim", "attention_head_dim", "global_head_dim")
SHARED_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups")
PER_LAYER = "per_layer_config"
TOKEN = re.compile(r"(_token_ids?|_token_index|^mask_index|^unk_index|^pad_index|^bos_index|^eos_index)$")
TOKENS_FIRST = ("pad_token_id", "bos_token_id", "eos_token_id")

Special = Mapping[str, Any]


def shrink(config: Any, special: Special | None = None) -> Any:
    """A tiny configuration of the class of ``config``.

    Args:
        config: any configuration, usually a class's default.
        special: fields that the rules are not asked for, by name; for a field that holds a configuration a mapping of
            such fields, or a finished configuration.

    Returns:
        A new configuration with at most six layers. It holds ``use_cache`` off, as all in it do.
    """
    special = special or {}
    values = _values(config)
    chosen = layers(values)
    small: dict[str, Any] = {}
    for name, value in values.items():
        if name == PER_LAYER or (name in special and not _is_nested(value, special[name])):
            continue
        if _is_config(value):
            small[name] = shrink(value, special.get(name))
        else:
            changed = _field(name, value, values, chosen)
            if changed is not value or _was_set(config, name, value):
                small[name] = changed
    small |= _tokens(values)
    if PER_LAYER in values:
        small[PER_LAYER] = _per_layer_config(values, small, chosen)
    small |= {name: value for name, value in special.items() if not isinstance(value, Mapping) or name not in small}
    for name in set(special) - set(values):
        small[name] = special[name]
    made = type(config)(**small)
    without_cache(made)
    return made


def without_cache(config: Any) -> None:
    """Turns ``use_cache`` off, in place, in a configuration and all that it holds."""
    if hasattr(config, "use_cache"):
        config.use_cache = False
    for value in _values(config).values():
        if _is_config(value):
            without_cache(value)


def layers(values: Mapping[str, Any]) -> list[int]:
    """Which layers of the model stay: the first four, or more, so that there is one of each kind.

    Args:
        values: the configuration's fields.

    Returns:
        Their numbers in the original, ascending; ``range(4)`` where all layers are of one kind.
    """
    count = _count(values)
    if not count:
        return list(range(LAYERS))
    kinds: list[tuple[Any, ...]] = [() for _ in range(count)]
    for name, value in values.items():
        if name in NUMBERS and value:
            kinds = [(*kind, number in value) for number, kind in enumerate(kinds)]
        elif _per_layer(name, value, count):
            kinds = [(*kind, str(value[number])) for number, kind in enumerate(kinds)]
    first = {kind: kinds.index(kind) for kind in kinds}
    chosen = set(sorted(first.values())[:MOST_LAYERS])
    for number in range(count):
        if len(chosen) >= min(LAYERS, count):
            break
        chosen.add(number)
    return sorted(chosen)


# --- fields


def _fields(config: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(config) if field.init]


def _is_nested(value: Any, special: Any) -> bool:
    return _is_config(value) and isinstance(special, Mapping)


def _was_set(config: Any, name: str, value: Any) -> bool:
    """Whether the field was given to the configuration, rather than left at its default or computed from others."""
    default = next(field.default for field in dataclasses.fields(config) if field.name == name)
    computed = default is None or default is dataclasses.MISSING or default == "auto"
    return not computed and bool(value != default)


def _values(config: Any) -> dict[str, Any]:
    """The fields as they are; a read of a field that some layers have their own value of would raise."""
    held = vars(config)
    # What a field is kept under, where that is not its own name.
    kept = {name: config.attribute_map.get(name, name) for name in _fields(config)}
    values = {name: held[attribute] for name, attribute in kept.items() if attribute in held}
    spec = held.get("_heterogeneity_spec")
    return values if spec is None else {**values, PER_LAYER: spec.per_layer_overrides}


def _is_config(value: Any) -> bool:
    return hasattr(value, "model_type") and hasattr(value, "to_dict")


def _count(values: Mapping[str, Any]) -> int:
    found = [values[name] for name in COUNTS if _number(values.get(name))]
    lengths = [len(values[name]) for name in ("layer_types", "layers_block_type") if values.get(name)]
    return max([*found, *lengths], default=0)


def _per_layer(name: str, value: Any, count: int) -> bool:
    return name not in NUMBERS and isinstance(value, (list, tuple)) and len(value) == count and count > 2


def _number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _field(name: str, value: Any, values: Mapping[str, Any], chosen: list[int]) -> Any:
    count = _count(values)
    if name in COUNTS and _number(value):
        return min(value, len(chosen))
    if name in NUMBERS and isinstance(value, (list, tuple)):
        return [new for new, old in enumerate(chosen) if old in value]
    if _per_layer(name, value, count):
        return [_element(name, value[number], values, chosen) for number in chosen]
    if name == "num_kv_shared_layers" and _number(value):
        return len(chosen) if value == count else min(value, len(chosen) // 2)
    if name.startswith("rope_") and isinstance(value, Mapping):
        return _rope(value, _head_dim(values))
    return _element(name, value, values, chosen)


def _element(name: str, value: Any, values: Mapping[str, Any], chosen: list[int]) -> Any:
    if value is None and name in ("head_dim", "num_key_value_heads") and _number(values.get("num_attention_heads")):
        # Many classes do not work out these two by themselves.
        return HIDDEN // HEADS if name == "head_dim" else 2
    if not _number(value):
        return value
    if name in HEAD_DIMS:
        return min(value, _head_dim(values))
    if name in SHARED_HEADS:
        heads = [values[each] for each in ("num_attention_heads", "n_heads") if _number(values.get(each))]
        return HEADS if heads and value >= heads[0] else min(value, 2)
    if name == "num_attention_heads_per_layer":
        return HEADS if value == min(values[name]) else 2 * HEADS
    if name in SIZES:
        return min(value, SIZES[name])
    if name.endswith("vocab_size") or "vocab_size_" in name:
        return min(value, VOCAB)
    return value


def _head_dim(values: Mapping[str, Any]) -> int:
    """The small width of a head: as in the original, what the width leaves each head, or of its own."""
    own = values.get("head_dim")
    if _number(values.get("qk_rope_head_dim")):
        return SIZES["qk_rope_head_dim"] if own == values["qk_rope_head_dim"] else SIZES["qk_head_dim"]
    width, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if _number(own) and _number(width) and _number(heads) and own * heads != width:
        return OWN_HEAD
    return HIDDEN // HEADS


def _rope(value: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Parameters of a rotary embedding, or one such mapping per kind of layers."""
    small: dict[str, Any] = {}
    for name, each in value.items():
        if isinstance(each, Mapping):
            small[name] = _rope(each, head_dim)
        elif name == "mrope_section":
            pairs = int(head_dim * (value.get("partial_rotary_factor") or 1.0)) // 2
            rest = [max(pairs // len(each), 1)] * (len(each) - 1)
            small[name] = [pairs - sum(rest), *rest]
        elif name in ("short_factor", "long_factor"):
            small[name] = [1.0] * (head_dim // 2)
        elif name == "original_max_position_embeddings":
            small[name] = min(each, 32) if each else each
        else:
            small[name] = each
    return small


def _per_layer_config(
    values: Mapping[str, Any], small: Mapping[str, Any], chosen: list[int]
) -> dict[int, dict[str, Any]]:
    """What single layers have instead of the configuration's own values: sizes are a little larger than those."""
    made: dict[int, dict[str, Any]] = {}
    for new, old in enumerate(chosen):
        own = {}
        for name, value in values[PER_LAYER].get(old, {}).items():
            general = small.get(name, values.get(name))
            grows = _number(value) and _number(general) and not name.startswith("num_")
            own[name] = general + 8 if grows else general if name.startswith("num_") else value
        if "qk_nope_head_dim" in own and "head_dim" in values:
            own["head_dim"] = own["qk_nope_head_dim"] + small.get("qk_rope_head_dim", 0)
        if own:
            made[new] = own
    return made


def _tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    """Small distinct numbers for all special tokens, padding first."""
    names = [name for name in values if TOKEN.search(name)]
    names.sort(key=lambda name: (TOKENS_FIRST.index(name) if name in TOKENS_FIRST else len(TOKENS_FIRST), name))
    small: dict[str, Any] = {}
    for number, name in enumerate(names):
        value = values[name]
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            small[name] = number
        elif isinstance(value, Iterable) and not isinstance(value, (str, Mapping)):
            small[name] = [number] if value else value
    return small
