"""What rules cannot know about the configurations of transformers' other models, type by type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.zoo.survey.hf_other_backbones import det_lcnet, fastvit, pe_tower, repvit, resnet, resnet_3, swin

# Types whose small configuration is made whole.
MADE_BY: dict[str, Callable[[], Any]] = {"edgetam_vision_model": repvit}


SERIES: dict[str, Any] = {"prediction_length": 8, "context_length": 16}

DETR: dict[str, Any] = {"use_timm_backbone": False, "backbone_config": resnet, "backbone": None}

# What a default configuration needs to be made at all; functions are called.
MADE_WITH: dict[str, dict[str, Any]] = {
    "pp_ocrv6_medium_det": {"backbone_config": det_lcnet},
    "pp_ocrv6_small_det": {"backbone_config": det_lcnet},
    "omdet-turbo": {"backbone_config": swin, "backbone": None},
    "wav2vec2-bert": {"vocab_size": 40},
    "wav2vec2-conformer": {"vocab_size": 40},
    "fast_vlm": {"vision_config": fastvit},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "autoformer": SERIES,
    "informer": SERIES,
    "time_series_transformer": SERIES,
    "conditional_detr": DETR,
    "dab-detr": DETR,
    "deformable_detr": {**DETR, "backbone_config": resnet_3},
    "detr": DETR,
    "edgetam": {"vision_config": repvit},
    "table-transformer": DETR,
    "timm_backbone": {"backbone": "resnet18", "use_pretrained_backbone": False},
}

# Kernel size, stride and padding of each convolution of a block that looks along rows, columns and both.
INTRACLASS: dict[str, Any] = {
    "reduce_channel": [1, 1, 0],
    "return_channel": [1, 1, 0],
    **{
        f"{name}_{ratio}ratio": [[size if tall else 1, size if wide else 1], 1, [size // 2 * tall, size // 2 * wide]]
        for name, tall, wide in (
            ("vertical_long_to_small_conv", 1, 0),
            ("horizontal_small_to_long_conv", 0, 1),
            ("symmetric_conv_long", 1, 1),
        )
        for ratio, size in (("long", 7), ("mid", 5), ("short", 3))
    },
}

DETECTED: dict[str, Any] = {
    "neck_out_channels": 64,
    "intraclass_block_config": INTRACLASS,
    "scale_factor_list": [1, 2, 4, 8],
    "kernel_list": [3, 2, 2],
}

# Fields of the small configuration; nested mappings are for configurations within.
MELS: dict[str, Any] = {"num_mel_bins": 16}

CODEC: dict[str, Any] = {
    "upsample_groups": 64,
    "num_filters": 8,
    "codebook_size": 32,
    "codebook_dim": 24,
    "vector_quantization_hidden_dimension": 24,
}


def _mrope(sections: list[int], share: float = 1.0) -> dict[str, Any]:
    """Rotary positions in time, height and width, for heads of 16 features."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, "partial_rotary_factor": share}


PINPOINTS: dict[str, Any] = {"image_grid_pinpoints": [[64, 64]]}

HIERA: dict[str, Any] = {
    "hidden_size": 16,
    "embed_dim_per_stage": [16, 32, 64, 128],
    "blocks_per_stage": [1, 2, 4, 2],
    "global_attention_blocks": [4, 6],
    "window_size_per_stage": [8, 4, 4, 2],
    "image_size": [128, 128],
}

SAM: dict[str, Any] = {
    "vision_config": {
        "output_channels": 64,
        "num_pos_feats": 32,
        "global_attn_indexes": (1, 3),
        "window_size": 2,
        "mlp_dim": 80,
    },
    "mask_decoder_config": {"mlp_dim": 80, "iou_head_hidden_dim": 48},
}

SAM2: dict[str, Any] = {
    "vision_config": {
        "backbone_config": HIERA,
        "backbone_channel_list": [128, 64, 32, 16],
        "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
        "fpn_hidden_size": 64,
    },
    "prompt_encoder_config": {"image_size": 128, "patch_size": 16},
    "mask_decoder_config": {"mlp_dim": 80, "iou_head_hidden_dim": 48},
}

SAM3_VISION: dict[str, Any] = {
    "backbone_config": {"global_attn_indexes": [1, 3], "window_size": 2, "pretrain_image_size": 32},
    "fpn_hidden_size": 64,
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
}

NECK: dict[str, Any] = {"neck_hidden_sizes": (16, 24, 32, 40), "fusion_hidden_size": 32, "head_hidden_size": 16}

FIELDS: dict[str, dict[str, Any]] = {
    "uvdoc": {"backbone_config": {"out_indices": [1, 2, 3, 4, 5, 6]}},
    "vibevoice_acoustic_tokenizer": {"depths": (1, 1, 1, 1, 1, 1, 2), "num_filters": 4},
    "vibevoice_acoustic_tokenizer_decoder": {"depths": (1, 1, 1, 1, 1, 1, 2), "num_filters": 4},
    "vibevoice_acoustic_tokenizer_encoder": {"depths": (1, 1, 1, 1, 1, 1, 2), "num_filters": 4},
    "muse_spark": {"out_hidden_size": 256, "projector_hidden_size": 48},
    "omdet-turbo": {"text_projection_in_dim": 64, "text_projection_out_dim": 64, "class_embed_dim": 64},
    "hiera": {"image_size": (64, 64)},
    "neucodec": {"quantization_dim": 128},
    "xcodec2": {"quantization_dim": 128},
    "xcodec": {
        "acoustic_model_config": {"encoder_hidden_size": 8, "hidden_size": 128, "decoder_hidden_size": 96},
        "codebook_dim": 192,
        "codebook_size": 32,
    },
    "pp_formulanet": {"vision_config": {"decoder_hidden_size": 64}},
    "pp_ocrv5_server_det": DETECTED,
    "pp_ocrv6_medium_det": DETECTED,
    "pp_ocrv6_small_det": {"layer_list_out_channels": [16, 24, 32, 40]},
    "pp_doclayout_v2": {"class_thresholds": [0.5] * 25, "class_order": list(range(25))},
    "qwen2_5_omni_thinker": {"text_config": {"rope_parameters": _mrope([2, 3, 3])}},
    # All heads have keys of their own in the first and last layers.
    "sapiens2": {"num_key_value_heads_per_layer": [4, 2, 2, 4]},
    "shieldgemma2": {"mm_tokens_per_image": 4, "yes_token_index": 30, "no_token_index": 31},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}, "mm_tokens_per_image": 4},
    "tvp": {"max_img_size": 64, "visual_prompt_size": 8},
    "deepseek_ocr2": {
        "text_config": {
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_experts_per_tok": 2,
            "n_routed_experts": 6,
            "moe_intermediate_size": 40,
            "n_shared_experts": 1,
        }
    },
    "apertus1p5": {
        "image_token_offset": 60,
        "audio_token_offset": 92,
        "audio_config": {
            "decoder_hidden_size": 64,
            "decoder_intermediate_size": 96,
            "decoder_num_layers": 4,
            "codebook_dim": 64,
            "codebook_size": 16,
        },
        "vision_config": {"codebook_size": 32, "base_channels": 32, "embed_dim": 16, "latent_channels": 16},
    },
    "blip-2": {"image_token_id": 5, "num_query_tokens": 4},
    "clap": {
        "audio_config": {
            "hidden_size": 128,
            "patch_embeds_hidden_size": 16,
            "num_attention_heads": (2, 2, 4, 4),
            "spec_size": 128,
            "num_mel_bins": 32,
            "window_size": 4,
        }
    },
    "clvp": {"text_config": {"num_attention_heads": 2}, "speech_config": {"num_attention_heads": 2}},
    "cohere_compass": {
        "text_config": {
            "rope_parameters": {"full_attention": _mrope([2, 3, 3]), "sliding_attention": _mrope([2, 3, 3])}
        }
    },
    "colpali": {"vlm_config": {"projection_dim": 64, "vision_config": {"projection_dim": 64}}},
    "colqwen2": {"vlm_config": {"text_config": {"rope_parameters": _mrope([2, 3, 3])}}},
    "fastspeech2_conformer_with_hifigan": {"model_config": {"num_mel_bins": 80}},
    "granite4_vision": {**PINPOINTS, "deepstack_layer_map": [(1, 1), (3, 2)], "downsample_rate": "1/2"},
    "instructblip": {"image_token_id": 5, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_id": 5, "num_query_tokens": 4},
    "janus": {"image_token_id": 5, "vision_config": {"projection_dim": 64}},
    "kimi_k25": {"projection_hidden_size": 64},
    "minicpmv4_7": {
        "image_token_id": 5,
        "image_start_id": 6,
        "image_end_id": 7,
        "slice_start_id": 8,
        "slice_end_id": 9,
        "newline_id": 10,
    },
    "mistral4": {"head_dim": 16, "qk_rope_head_dim": 8},
    "nemotron_h_omni": {"vision_hidden_size": 64, "vision_config": {"video_temporal_patch_size": 2}},
    "paddleocr_vl": {"text_config": {"rope_parameters": _mrope([4, 4, 4])}},
    "vitmatte": {
        "backbone_config": {"num_channels": 4, "patch_size": 16},
        "hidden_size": 64,
        "convstream_hidden_sizes": [16, 24, 32],
        "fusion_hidden_sizes": [32, 24, 16, 8],
    },
    "xclip": {"projection_dim": 64, "vision_config": {"mit_hidden_size": 64, "mit_intermediate_size": 72}},
    "pe_audio_video": {"audio_video_config": {"video_config": {"vision_config": pe_tower}}},
    "pe_audio_video_encoder": {"video_config": {"vision_config": pe_tower}},
    "pe_video": {"video_config": {"vision_config": pe_tower}},
    "pe_video_encoder": {"vision_config": pe_tower},
    "perception_lm": {"vision_config": pe_tower},
    "pi0": {
        "vlm_config": {"projection_dim": 64, "hidden_size": 64, "vision_config": {"projection_dim": 64}},
        "dit_config": {"head_dim": 16},
    },
    "pocket_tts_audio_tokenizer": CODEC,
    "pocket_tts_audio_tokenizer_decoder": CODEC,
    "pocket_tts_audio_tokenizer_encoder": CODEC,
    "vibevoice": {
        "audio_config": {"depths": (1, 1, 1, 1, 1, 1, 2), "num_filters": 8},
        "semantic_model_config": {"depths": (1, 1, 1, 1, 1, 1, 2), "num_filters": 8},
    },
    "wav2vec2-bert": {"vocab_size": 40},
    "wav2vec2-conformer": {"vocab_size": 40},
    "wavtokenizer": {
        "decoder_hidden_size": 64,
        "decoder_intermediate_size": 96,
        "decoder_num_layers": 4,
        "codebook_dim": 64,
    },
    "wavtokenizer_encoder": {
        "decoder_hidden_size": 64,
        "decoder_intermediate_size": 96,
        "decoder_num_layers": 4,
        "codebook_dim": 64,
    },
    "muse_glimmer": {"out_hidden_size": 256, "projector_hidden_size": 48},
    "nemotron3_5_asr": {"encoder_config": MELS},
    "nemotron_asr_streaming": {"encoder_config": MELS},
    "nemotron_asr_streaming_encoder": MELS,
    "parakeet_ctc": {"encoder_config": MELS},
    "parakeet_encoder": MELS,
    "parakeet_rnnt": {"encoder_config": MELS},
    "parakeet_tdt": {"encoder_config": MELS},
    "inkling_mm_model": {"vision_config": {"n_layers": 4}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 1]}},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "dia": {
        "decoder_config": {
            "cross_hidden_size": 64,
            "cross_num_attention_heads": 4,
            "cross_head_dim": 16,
            "cross_num_key_value_heads": 4,
        }
    },
    "diffusion_gemma": {"text_config": {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": _mrope([3, 3, 2])}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "glm5_next": {"text_config": {"index_topk": 8, "index_kpool": 4}},
    "glm5_next_text": {"index_topk": 8, "index_kpool": 4},
    "hunyuan_vl": {"text_config": {"rope_parameters": _mrope([2, 2, 2, 2])}},
    "hunyuan_vl_text": {"rope_parameters": _mrope([2, 2, 2, 2])},
    "align": {"projection_dim": 80, "vision_config": {"width_coefficient": 0.25, "hidden_dim": 640}},
    "dac": {"decoder_hidden_size": 96, "encoder_hidden_size": 8, "hidden_size": 128},
    "deepseek_vl": {"image_token_id": 5},
    "exaone4_5": {"vision_config": {"window_size": 32}},
    "florence2": {"vision_config": {"projection_dim": 64}},
    "glm46v": {"text_config": {"rope_parameters": _mrope([2, 3, 3])}},
    "glm4v": {"text_config": {"rope_parameters": _mrope([2, 3, 3])}},
    "glm4v_moe": {"text_config": {"rope_parameters": _mrope([1, 1, 2], 0.5)}},
    "glm4v_moe_text": {"rope_parameters": _mrope([1, 1, 2], 0.5)},
    "glm4v_text": {"rope_parameters": _mrope([2, 3, 3])},
    "glm_image": {"text_config": {"rope_parameters": _mrope([2, 3, 3])}},
    "glm_image_text": {"rope_parameters": _mrope([2, 3, 3])},
    "glm_ocr": {"text_config": {"rope_parameters": _mrope([2, 3, 3])}},
    "glm_ocr_text": {"rope_parameters": _mrope([2, 3, 3])},
    "glmga": {"text_config": {"rope_parameters": _mrope([2, 3, 3])}},
    "hyperclovax_vision_v2": {"vision_config": {"window_size": 32}},
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "lilt": {"hidden_size": 48},
    "llava_next": PINPOINTS,
    "llava_next_video": PINPOINTS,
    "llava_onevision": PINPOINTS,
    "paligemma": {"projection_dim": 64, "vision_config": {"projection_dim": 64}},
    "qwen2_5_vl": {"text_config": {"rope_parameters": _mrope([2, 3, 3])}, "vision_config": {"window_size": 32}},
    "qwen2_5_vl_text": {"rope_parameters": _mrope([2, 3, 3])},
    "qwen2_vl": {"text_config": {"rope_parameters": _mrope([2, 3, 3])}},
    "qwen2_vl_text": {"rope_parameters": _mrope([2, 3, 3])},
    "seggpt": {"image_size": (64, 32)},
    "step3p7": {"text_config": {"sliding_window": 6}},
    "superglue": {
        "keypoint_detector_config": {"descriptor_decoder_dim": 64},
        "keypoint_encoder_sizes": [16, 32],
        "gnn_layers_types": ["self", "cross", "self", "cross"],
    },
    "vipllava": {"vision_feature_layers": [-2, -3]},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "audio-spectrogram-transformer": {
        "num_mel_bins": 16,
        "max_length": 48,
        "frequency_stride": 8,
        "time_stride": 8,
    },
    "bit": {"num_groups": 8, "hidden_sizes": [32, 48, 64, 80]},
    "canary": {"encoder_config": MELS},
    "cohere_asr": {"encoder_config": MELS},
    "csm": {"codec_config": CODEC, "depth_decoder_config": {"backbone_hidden_size": 64}},
    "chmv2": {
        "backbone_config": {"return_class_token": True},
        "post_process_channels": [16, 24, 32, 40],
        "fusion_hidden_size": 32,
        "head_hidden_size": 16,
        "number_output_channels": 16,
    },
    "depth_anything": {"reassemble_hidden_size": 64, **NECK},
    "depth_pro": {
        "patch_size": 32,
        "intermediate_hook_ids": (3, 1),
        "intermediate_feature_dims": (32, 32),
        "scaled_images_feature_dims": (32, 32, 24),
        "fusion_hidden_size": 32,
    },
    "dpt": {"backbone_out_indices": (0, 1, 2, 3), **NECK},
    "efficientloftr": {
        "hidden_size": 64,
        "out_features": [16, 16, 32, 64],
        "stage_num_blocks": [1, 2, 2, 2],
        "num_attention_heads": 8,
    },
    "edgetam": {"prompt_encoder_config": {"image_size": 128, "patch_size": 16}},
    "edgetam_video": SAM2,
    "exaone4_5_vision": {"window_size": 32},
    "qwen2_5_vl_vision": {"window_size": 32},
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 1.0, "hidden_dim": 640},
    "gemma3n_vision": {"model_args": {"channel_multiplier": 0.25}},
    "gradium_phonon_tts": {"flow_head_config": {"condition_dim": 64, "hidden_size": 32}},
    "granite_speech5_ctc": {"encoder_config": {"context_size": 16}},
    "granite_speech5_encoder": {"context_size": 16},
    "kyutai_speech_to_text": {"codec_config": CODEC},
    "levit": {"image_size": 128, "patch_size": 16},
    "lw_detr": {
        "projector_scale_factors": [1.0],
        "backbone_config": {"image_size": 64, "num_windows": 4, "window_block_indices": [0, 2]},
    },
    "lw_detr_vit": {"image_size": 64, "num_windows": 4, "window_block_indices": [0, 2]},
    "mimi": CODEC,
    "mimi_decoder": CODEC,
    "mimi_encoder": CODEC,
    "mobilevitv2": {"image_size": 128},
    "owlv2": {"projection_dim": 64},
    "owlvit": {"projection_dim": 64},
    "prompt_depth_anything": {"reassemble_hidden_size": 64, **NECK},
    "pvt_v2": {"image_size": 64},
    "rf_detr": {"group_detr": 2},
    "sam": SAM,
    "sam2": SAM2,
    "sam2_hiera_det_model": HIERA,
    "sam2_video": {**SAM2, "memory_attention_num_layers": 2},
    "sam2_vision_model": SAM2["vision_config"],
    "sam3": {"vision_config": SAM3_VISION},
    "sam3_lite_text": {"vision_config": SAM3_VISION},
    "sam3_tracker": {"vision_config": SAM3_VISION},
    "sam3_vision_model": SAM3_VISION,
    "sam3_vit_model": SAM3_VISION["backbone_config"],
    "sam_hq": {**SAM, "mask_decoder_config": {"mlp_dim": 80, "iou_head_hidden_dim": 48, "vit_dim": 64}},
    "sam_hq_vision_model": SAM["vision_config"],
    "sam_vision_model": SAM["vision_config"],
    "slanext": {"max_text_length": 6},
    "slanet": {"max_text_length": 6},
    "swin2sr": {"embed_dim": 24, "depths": (4, 4), "num_heads": (2, 2), "window_size": 4},
    "tipsv2_dpt": NECK,
    "upernet": {"backbone_config": {"hidden_sizes": [16, 24, 32, 40], "layer_type": "basic"}, "hidden_size": 32},
    "vjepa2": {"crop_size": 64, "frames_per_clip": 4},
    "yolos": {"image_size": (64, 96), "num_detection_tokens": 10},
    "zoedepth": {"bottleneck_features": 32, "bin_embedding_dim": 16, **NECK},
}
