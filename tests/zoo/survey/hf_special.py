"""What the rules of :mod:`tests.zoo.survey.hf_shrink` cannot know, model type by model type."""

from __future__ import annotations

from typing import Any

# The last two layers reuse the keys and values of the two before.
_GEMMA3N = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "intermediate_size": 72,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    "altup_num_inputs": 3,
}
_GRANITE_SPEECH = {"encoder_config": {"hidden_dim": 64}, "projector_config": {"encoder_hidden_size": 64}}
_QWEN4 = {
    "hc_count": 3,
    "hc_lowrank": 20,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 24,
    "indexer_budget": 6,
    "indexer_compress_ratio": 2,
}

# Fields of the small configuration; nested mappings are for configurations within.
FIELDS: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 4},
    "big_bird": {"block_size": 2, "num_random_blocks": 1},
    "bigbird_pegasus": {"block_size": 2, "num_random_blocks": 1},
    "blt": {"encoder_hash_byte_group_vocab": 97, "encoder_hash_byte_group_size": [3, 4]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        },
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 6, "n_group": 2, "topk_group": 1},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 6, "n_shared_experts": 1},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "gemma3n": {"text_config": _GEMMA3N, "vision_config": {"architecture": "test_efficientnet"}},
    "gemma3n_text": _GEMMA3N,
    "got_ocr2": {"vision_config": {"output_channels": 24, "mlp_dim": 80}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "hunyuan_v1_moe": {"num_experts": 5, "moe_topk": 2},
    # Block ends of its attention over depth, and loops over layers, within the few layers.
    "inkling2_text": {"n_layers_per_attn_res_block": 2},
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_num_passes": 2,
    },
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "led": {"attention_window": 4},
    "longformer": {"attention_window": [4] * 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "distilbert": {"dim": 64, "hidden_dim": 72},
    "encoder-decoder": {
        "encoder": {"hidden_size": 64, "num_hidden_layers": 2},
        "decoder": {"hidden_size": 64, "num_hidden_layers": 2, "is_decoder": True, "add_cross_attention": True},
    },
    "esm": {"vocab_size": 120, "mask_token_id": 4, "pad_token_id": 1},
    "granite_speech": _GRANITE_SPEECH,
    "granite_speech_plus": _GRANITE_SPEECH,
    "omniasr": {"audio_config": {"conv_dim": [24] * 7, "num_conv_pos_embeddings": 8}},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "nemo_speechlm": {"audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 64}}}},
    "qwen3_asr": {"audio_config": {"downsample_hidden_size": 16, "output_dim": 64}},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {
        "axial_pos_embds_dim": [24, 40],
        "axial_pos_shape": [8, 8],
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "squeezebert": {"embedding_size": 64},
    "xmod": {"default_language": "en_XX"},
    # The shared block has to occur twice, or there is nothing to share.
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
    "perceiver": {
        "num_latents": 9,
        "d_latents": 64,
        "d_model": 48,
        "num_blocks": 1,
        "num_self_attends_per_block": 4,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
        "qk_channels": 32,
        "v_channels": 64,
    },
    "phi4_multimodal": {
        "audio_config": {
            "nemo_conv_channels": 24,
            "ext_pw_out_channel": 64,
            "depthwise_separable_out_channel": 64,
        }
    },
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": {"num_filters": 2},
        "semantic_tokenizer_encoder_config": {"num_filters": 2},
    },
    "mamba2": {"num_heads": 8, "head_dim": 16},
}
# Fields that a kind of model has, where its configuration knows them and the type says nothing else.
KIND_FIELDS: dict[str, dict[str, Any]] = {
    "causal-lm": {"is_decoder": True},
    "seq2seq": dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
}
# What a default configuration needs to be made at all.
MADE_WITH: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
}
