"""Small text and speech models of Hugging Face transformers, built from configs with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf
from torch import nn

VOCAB = 101
# No end token: greedy decoding then always makes as many tokens as it is asked for.
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def _build(model_class: Any, config: Any, attention: str = "sdpa") -> nn.Module:
    # use_cache off: a forward for training has no use for one; ``generate`` is told explicitly.
    config.use_cache = False
    return model_class._from_config(config, attn_implementation=attention).eval()


def _decoder(**more: Any) -> dict[str, Any]:
    """What most decoder configs call by the same names."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 68,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        **_TOKENS,
        **more,
    }


def llama() -> nn.Module:
    return _build(tf.LlamaForCausalLM, tf.LlamaConfig(**_decoder()))


def gpt2() -> nn.Module:
    config = tf.GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=40, n_layer=4, n_head=5, n_inner=72,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, **_TOKENS,
    )  # fmt: skip
    return _build(tf.GPT2LMHeadModel, config)


def opt() -> nn.Module:
    config = tf.OPTConfig(
        vocab_size=VOCAB, hidden_size=36, ffn_dim=60, num_hidden_layers=4, num_attention_heads=3,
        max_position_embeddings=64, word_embed_proj_dim=36, dropout=0.1, attention_dropout=0.1, **_TOKENS,
    )  # fmt: skip
    return _build(tf.OPTForCausalLM, config)


def bloom() -> nn.Module:
    config = tf.BloomConfig(
        vocab_size=VOCAB, hidden_size=40, n_layer=4, n_head=5, hidden_dropout=0.1, attention_dropout=0.1,
        **_TOKENS,
    )  # fmt: skip
    return _build(tf.BloomForCausalLM, config, "eager")


def qwen3() -> nn.Module:
    return _build(tf.Qwen3ForCausalLM, tf.Qwen3Config(**_decoder(hidden_size=44, head_dim=14)))


def gemma2() -> nn.Module:
    config = tf.Gemma2Config(**_decoder(hidden_size=52, head_dim=14, query_pre_attn_scalar=14, sliding_window=6))
    return _build(tf.Gemma2ForCausalLM, config, "eager")


def gemma3() -> nn.Module:
    config = tf.Gemma3TextConfig(
        **_decoder(hidden_size=52, head_dim=14, query_pre_attn_scalar=14, sliding_window=6),
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return _build(tf.Gemma3ForCausalLM, config)


def olmo2() -> nn.Module:
    return _build(tf.Olmo2ForCausalLM, tf.Olmo2Config(**_decoder()))


def granite() -> nn.Module:
    config = tf.GraniteConfig(
        **_decoder(),
        embedding_multiplier=3.0,
        residual_multiplier=0.22,
        attention_multiplier=0.125,
        logits_scaling=2.0,
    )
    return _build(tf.GraniteForCausalLM, config)


def mixtral() -> nn.Module:
    config = tf.MixtralConfig(**_decoder(intermediate_size=28), num_local_experts=3, num_experts_per_tok=2)
    return _build(tf.MixtralForCausalLM, config)


def qwen3_moe() -> nn.Module:
    config = tf.Qwen3MoeConfig(
        **_decoder(hidden_size=40, head_dim=14),
        moe_intermediate_size=24,
        num_experts=5,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    )
    return _build(tf.Qwen3MoeForCausalLM, config)


def _gpt_neox(parallel: bool) -> nn.Module:
    values = _decoder(use_parallel_residual=parallel)
    del values["num_key_value_heads"]
    return _build(tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig(**values))


def gptj() -> nn.Module:
    config = tf.GPTJConfig(
        vocab_size=VOCAB, n_positions=64, n_embd=48, n_layer=4, n_head=4, n_inner=68, rotary_dim=6,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, **_TOKENS,
    )  # fmt: skip
    return _build(tf.GPTJForCausalLM, config, "eager")


def phi() -> nn.Module:
    config = tf.PhiConfig(**_decoder(), resid_pdrop=0.1, embd_pdrop=0.1, attention_dropout=0.1)
    return _build(tf.PhiForCausalLM, config)


def _falcon(dropout: float = 0.0, **more: Any) -> nn.Module:
    config = tf.FalconConfig(
        vocab_size=VOCAB, hidden_size=48, num_hidden_layers=4, num_attention_heads=4, ffn_hidden_size=68,
        max_position_embeddings=64, hidden_dropout=dropout, attention_dropout=dropout, bias=True,
        **_TOKENS, **more,
    )  # fmt: skip
    return _build(tf.FalconForCausalLM, config)


def _falcon_new(norms: int) -> nn.Module:
    return _falcon(new_decoder_architecture=True, num_kv_heads=2, multi_query=False, num_ln_in_parallel_attn=norms)


def cohere() -> nn.Module:
    return _build(tf.CohereForCausalLM, tf.CohereConfig(**_decoder(use_qk_norm=True, logit_scale=0.25)))


def t5() -> nn.Module:
    config = tf.T5Config(
        vocab_size=VOCAB, d_model=40, d_kv=6, d_ff=56, num_layers=3, num_decoder_layers=3, num_heads=5,
        relative_attention_num_buckets=8, dropout_rate=0.1, feed_forward_proj="gated-gelu",
        pad_token_id=0, eos_token_id=None, decoder_start_token_id=0,
    )  # fmt: skip
    return _build(tf.T5ForConditionalGeneration, config)


def whisper() -> nn.Module:
    config = tf.WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=10, d_model=40, encoder_layers=3, decoder_layers=3,
        encoder_attention_heads=5, decoder_attention_heads=5, encoder_ffn_dim=56, decoder_ffn_dim=60,
        max_source_positions=13, max_target_positions=32, dropout=0.1, attention_dropout=0.1,
        activation_dropout=0.1, decoder_start_token_id=1, begin_suppress_tokens=None, **_TOKENS,
    )  # fmt: skip
    return _build(tf.WhisperForConditionalGeneration, config)


def bert() -> nn.Module:
    config = tf.BertConfig(
        vocab_size=VOCAB, hidden_size=36, num_hidden_layers=4, num_attention_heads=3, intermediate_size=60,
        max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return tf.BertModel._from_config(config, attn_implementation="sdpa").eval()


TEXT_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "opt": opt,
    "bloom": bloom,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "olmo2": olmo2,
    "granite": granite,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "gpt_neox_parallel": lambda: _gpt_neox(True),
    "gpt_neox_serial": lambda: _gpt_neox(False),
    "gptj": gptj,
    "phi": phi,
    "falcon_parallel": lambda: _falcon(parallel_attn=True, multi_query=True),
    "falcon_new_two_norms": lambda: _falcon_new(2),
    "falcon_new_one_norm": lambda: _falcon_new(1),
    "falcon_serial": lambda: _falcon(dropout=0.1, parallel_attn=False, multi_query=False, alibi=True),
    "cohere": cohere,
    "t5": t5,
    "whisper": whisper,
    "bert": bert,
}
