"""Calls that signatures do not tell: transformers' other models, type by type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.survey.hf_other_inputs import (
    BATCH,
    FRAMES,
    LENGTH,
    SAMPLES,
    TARGETS,
    Maker,
    Recipe,
    by_signature,
    features,
    length,
    naflex,
    patches,
    row_of_patches,
    square_patches,
    with_tokens,
)


def inputs(model_type: str, model: nn.Module, seed: int) -> Mapping[str, Any]:
    """The keyword arguments of one call: no labels, no cache."""
    make = Maker(model_type, model, seed)
    return RECIPES.get(model_type, by_signature)(make)


def _gemma4_vision(make: Maker) -> dict[str, Any]:
    side = make.says("patch_size")
    grid = torch.cartesian_prod(torch.arange(6), torch.arange(6))
    return {"pixel_values": make.noise(BATCH, 36, 3 * side * side), "pixel_position_ids": grid.expand(BATCH, -1, -1)}


def _oneformer(make: Maker) -> dict[str, Any]:
    return {"pixel_values": make.images(), "task_inputs": make.ids(make.config.task_seq_len)}


def _seggpt(make: Maker) -> dict[str, Any]:
    return {"pixel_values": make.images(), "prompt_pixel_values": make.images(), "prompt_masks": make.images()}


def _omdet(make: Maker) -> dict[str, Any]:
    classes = make.ids(5, batch=4)
    tasks = make.ids(6)
    return {
        "pixel_values": make.images(),
        "classes_input_ids": classes,
        "classes_attention_mask": torch.ones_like(classes),
        "tasks_input_ids": tasks,
        "tasks_attention_mask": torch.ones_like(tasks),
        "classes_structure": torch.tensor([2, 2]),
    }


def _matte(make: Maker) -> dict[str, Any]:
    return {"pixel_values": make.noise(BATCH, 4, 64, 64)}


def _merged(make: Maker) -> dict[str, Any]:
    return {**patches(make), "merge_sizes": torch.tensor([2] * BATCH)}


def _spectrograms(make: Maker) -> dict[str, Any]:
    return {"input_values": make.noise(BATCH, make.config.max_length, make.config.num_mel_bins)}


def _clap(make: Maker) -> dict[str, Any]:
    audio = make.config.audio_config
    return {"input_ids": make.ids(), "input_features": make.noise(BATCH, 1, 4 * audio.spec_size, audio.num_mel_bins)}


def _clvp(make: Maker) -> dict[str, Any]:
    return {"input_ids": make.ids(), "input_features": make.noise(BATCH, 80, FRAMES)}


def _codes(make: Maker) -> dict[str, Any]:
    """Ids of each codebook at each position."""
    books = make.config.num_codebooks + (make.type == "kyutai_speech_to_text")
    return {"input_ids": torch.randint(2, 24, (BATCH, LENGTH, books), generator=make.generator)}


def _dia(make: Maker) -> dict[str, Any]:
    channels = make.config.decoder_config.num_channels
    targets = torch.randint(4, 40, (BATCH, TARGETS, channels), generator=make.generator)
    return {"input_ids": make.ids(), "decoder_input_ids": targets}


def _whisper(make: Maker) -> dict[str, Any]:
    """Features as long as the encoder's table of positions wants them, and a mask of them."""
    frames = 2 * make.says("max_source_positions", "max_position_embeddings")
    found = {"input_features": features(make, frames)}
    if "input_features_mask" in make.takes:
        found["input_features_mask"] = torch.ones(BATCH, frames, dtype=torch.bool)
    return found


def _gemma3n_audio(make: Maker) -> dict[str, Any]:
    bins = make.config.input_feat_size
    return {
        "audio_mel": make.noise(BATCH, FRAMES, bins),
        "audio_mel_mask": torch.zeros(BATCH, FRAMES, dtype=torch.bool),
    }


def _embedded(make: Maker) -> dict[str, Any]:
    return {"inputs_embeds": make.noise(BATCH, LENGTH, make.config.get_text_config().hidden_size)}


def _latents(make: Maker) -> dict[str, Any]:
    return {"latents": make.noise(BATCH, make.config.hidden_size, LENGTH)}


def _series(make: Maker) -> dict[str, Any]:
    config = make.config
    past = config.context_length + max(config.lags_sequence)
    return {
        "past_values": make.noise(BATCH, past),
        "past_time_features": make.noise(BATCH, past, config.num_time_features),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": make.noise(BATCH, config.prediction_length),
        "future_time_features": make.noise(BATCH, config.prediction_length, config.num_time_features),
    }


def _past(make: Maker) -> dict[str, Any]:
    return {"past_values": make.noise(BATCH, make.config.context_length, make.config.num_input_channels)}


def _timesfm(make: Maker) -> dict[str, Any]:
    found = {"past_values": make.noise(BATCH, 128), "past_values_padding": torch.zeros(BATCH, 128, dtype=torch.long)}
    return {**found, "freq": torch.zeros(BATCH, 1, dtype=torch.long)} if "freq" in make.takes else found


def _decisions(make: Maker) -> dict[str, Any]:
    config = make.config
    return {
        "states": make.noise(BATCH, LENGTH, config.state_dim),
        "actions": make.noise(BATCH, LENGTH, config.act_dim),
        "rewards": make.noise(BATCH, LENGTH, 1),
        "returns_to_go": make.noise(BATCH, LENGTH, 1),
        "timesteps": torch.arange(LENGTH).expand(BATCH, -1),
    }


def _qformer(make: Maker) -> dict[str, Any]:
    return {
        "query_embeds": make.noise(BATCH, 5, make.config.hidden_size),
        "encoder_hidden_states": make.noise(BATCH, 7, make.config.encoder_hidden_size),
    }


def boxes(make: Maker, sides: int = 4) -> Tensor:
    """One box per token, corners in order, ``int64[BATCH, LENGTH, sides]`` in 0..49."""
    return torch.randint(0, 50, (BATCH, LENGTH, sides), generator=make.generator).sort(-1).values


def _documents(make: Maker) -> dict[str, Any]:
    found: dict[str, Any] = {"input_ids": make.ids(), "bbox": boxes(make)}
    if "pixel_values" in make.takes:
        found["pixel_values"] = make.images()
    if "decoder_input_ids" in make.takes:
        found["decoder_input_ids"] = make.ids(TARGETS)
    return found


def _bros(make: Maker) -> dict[str, Any]:
    return {"input_ids": make.ids(), "bbox": make.noise(BATCH, LENGTH, make.config.dim_bbox).sigmoid()}


def _blip(make: Maker) -> dict[str, Any]:
    video = make.type == "instructblipvideo"
    found = {"pixel_values": make.images(BATCH, 4) if video else make.images(), "input_ids": make.ids()}
    if "qformer_input_ids" in make.takes:
        found["qformer_input_ids"] = make.ids(6)
    number = make.config.num_query_tokens * (4 if video else 1)
    token = make.config.video_token_id if video else make.config.image_token_id
    return {**found, "input_ids": with_tokens(make, found["input_ids"], token, number)}


def _idefics(make: Maker) -> dict[str, Any]:
    mask = torch.ones(BATCH, LENGTH, 1, dtype=torch.long)
    return {"input_ids": make.ids(), "pixel_values": make.images(BATCH, 1), "image_attention_mask": mask}


def _kosmos(make: Maker) -> dict[str, Any]:
    number = make.config.latent_query_num
    mask = torch.zeros(BATCH, LENGTH + number, dtype=torch.long)
    mask[:, 1 : 1 + number] = 1
    found = {"input_ids": make.ids(LENGTH + number), "image_embeds_position_mask": mask}
    if "pixel_values" in make.takes:
        return {**found, "pixel_values": make.images()}
    side = make.says("patch_size")
    return {**found, "flattened_patches": torch.cat([_places(), make.noise(BATCH, 16, 3 * side * side)], dim=-1)}


def _places() -> Tensor:
    """Row and column of each of 16 patches, from 1, as the first two features of flattened ones."""
    places = torch.cartesian_prod(torch.arange(1, 5), torch.arange(1, 5)).float()
    return places.expand(BATCH, -1, -1)


def _pix2struct(make: Maker) -> dict[str, Any]:
    size = make.config.vision_config.patch_embed_hidden_size
    return {
        "flattened_patches": torch.cat([_places(), make.noise(BATCH, 16, size)], dim=-1),
        "decoder_input_ids": make.ids(TARGETS),
    }


def _lxmert(make: Maker) -> dict[str, Any]:
    return {
        "input_ids": make.ids(),
        "visual_feats": make.noise(BATCH, 6, make.config.visual_feat_dim),
        "visual_pos": make.noise(BATCH, 6, make.config.visual_pos_dim).sigmoid(),
    }


def _visual_bert(make: Maker) -> dict[str, Any]:
    return {"input_ids": make.ids(), "visual_embeds": make.noise(BATCH, 6, make.config.visual_embedding_dim)}


def _high_and_low(make: Maker) -> dict[str, Any]:
    side = make.config.high_res_vision_config.image_size
    found = {"pixel_values": make.images(), "high_res_pixel_values": make.noise(BATCH, 3, side, side)}
    with torch.no_grad():
        features = make.model.model.get_image_features(**found)
    ids = with_tokens(make, make.ids(), make.config.image_token_id, length(features) // BATCH)
    return {"input_ids": ids, **found}


def _image_and_text(make: Maker) -> dict[str, Any]:
    return {"pixel_values": make.images(), "decoder_input_ids": make.ids(TARGETS)}


def _padded_patches(make: Maker) -> dict[str, Any]:
    """Patches per image, where they are ``[images, patches, features]``."""
    found = by_signature(make)
    return {**found, "pixel_values": found["pixel_values"].view(BATCH, 16, -1)}


def _stacked(make: Maker) -> dict[str, Any]:
    """Features of several frames in one, ``[BATCH, FRAMES, bins * frames]``."""
    width = make.says("num_mel_bins") * make.says("num_stacked_frames", default=4)
    found: dict[str, Any] = {"input_features": make.noise(BATCH, FRAMES, width)}
    if "input_features_mask" in make.takes:
        found["input_features_mask"] = torch.ones(BATCH, FRAMES, dtype=torch.bool)
    return found


def _assistant(make: Maker) -> dict[str, Any]:
    width, layers = make.config.hidden_size, len(make.config.target_layer_ids)
    context = make.noise(BATCH, LENGTH, layers * width)
    return {"noise_embeds": make.noise(BATCH, 4, width), "context_hidden_states": context}


def _questions(make: Maker) -> dict[str, Any]:
    """One prompt with two questions: where each is marked, how many options it has, and of which type it is."""
    ids = make.ids(batch=1)
    numbers = {"marks": [[4, 8]], "num_options": [[2, 3]], "question_type_ids": [[0, 1]]}
    return {"input_ids": ids, **{name: torch.tensor(each) for name, each in numbers.items()}}


def _one_row_of_squares(make: Maker) -> dict[str, Any]:
    grids = patches(make)["image_grid_thw"]
    merged = 16 // make.says("spatial_merge_size", default=2) ** 2
    ids = with_tokens(make, make.ids(), make.config.image_token_id, merged)
    return {
        "input_ids": ids,
        "pixel_values": square_patches(make)["pixel_values"],
        "image_grid_thw": grids,
        "mm_token_type_ids": (ids == make.config.image_token_id).long(),
    }


def _embedded_sound(make: Maker) -> dict[str, Any]:
    """Features as wide as the model, which stand for embeddings."""
    return {"input_features": make.noise(BATCH, LENGTH, make.config.d_model), "decoder_input_ids": make.ids(TARGETS)}


def _sound_and_text(make: Maker) -> dict[str, Any]:
    return {"input_values": make.noise(BATCH, SAMPLES), "decoder_input_ids": make.ids(TARGETS)}


def _wave_and_features(make: Maker) -> dict[str, Any]:
    frames = SAMPLES // 320
    bins = make.says("feature_projection_input_dim", "num_mel_bins", default=160)
    return {"input_values": make.noise(BATCH, 1, SAMPLES), "input_features": make.noise(BATCH, frames, bins)}


def _long_waveforms(make: Maker) -> dict[str, Any]:
    name = "input_values" if "input_values" in make.takes else "hidden_states"
    return {name: make.noise(BATCH, 1, 2 * 3200)}


def _hidden_sound(make: Maker) -> dict[str, Any]:
    return {"hidden_states": make.noise(BATCH, make.config.hidden_size, 3)}


def _robot(make: Maker) -> dict[str, Any]:
    config = make.config
    found = by_signature(make)
    return {
        **found,
        "pixel_values": found["pixel_values"][:, None],
        "pixel_attention_mask": torch.ones(BATCH, 1, dtype=torch.bool),
        "state": make.noise(BATCH, config.max_state_dim),
        "noise": make.noise(BATCH, config.chunk_size, config.max_action_dim),
        "timestep": torch.full((BATCH,), 0.3),
    }


def _pixel_rows(make: Maker) -> dict[str, Any]:
    """All pixels of two images of 4 x 4 patches, one row each."""
    pixels = BATCH * 16 * make.says("patch_size") ** 2
    return {"pixel_values": make.noise(pixels, 3), "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH)}


def _windows_of_sound(make: Maker) -> dict[str, Any]:
    frames = 2 * make.config.n_window
    mask = torch.ones(BATCH, frames, dtype=torch.bool)
    return {"input_features": features(make, frames), "input_features_mask": mask}


def _two_images(make: Maker) -> dict[str, Any]:
    return {"pixel_values": make.images(BATCH, 2)}


RECIPES: dict[str, Recipe] = {
    "inkling2_vision": _pixel_rows,
    "qwen3_asr_encoder": _windows_of_sound,
    "neucodec": _wave_and_features,
    "pi0": _robot,
    "pop2piano": _embedded_sound,
    "speech-encoder-decoder": _sound_and_text,
    "vibevoice_acoustic_tokenizer": _long_waveforms,
    "vibevoice_acoustic_tokenizer_decoder": _hidden_sound,
    "vibevoice_acoustic_tokenizer_encoder": _long_waveforms,
    "xcodec2": _wave_and_features,
    "jev": _questions,
    "paddleocr_vl": _one_row_of_squares,
    "kyutai_speech_to_text": _codes,
    "muse_glimmer_assistant": _assistant,
    "fun_asr_nano_encoder": _stacked,
    "granite_speech5_ctc": _stacked,
    "granite_speech5_encoder": _stacked,
    "colqwen2": _padded_patches,
    "autoformer": _series,
    "blip-2": _blip,
    "blip_2_qformer": _qformer,
    "bros": _bros,
    "decision_transformer": _decisions,
    "deepseek_vl_hybrid": _high_and_low,
    "idefics": _idefics,
    "informer": _series,
    "instructblip": _blip,
    "instructblipvideo": _blip,
    "kosmos-2": _kosmos,
    "kosmos-2.5": _kosmos,
    "layoutlmv3": _documents,
    "lilt": _documents,
    "lxmert": _lxmert,
    "patchtsmixer": _past,
    "patchtst": _past,
    "pix2struct": _pix2struct,
    "qwen2_audio_encoder": _whisper,
    "time_series_transformer": _series,
    "timesfm": _timesfm,
    "timesfm2_5": _timesfm,
    "udop": _documents,
    "vision-encoder-decoder": _image_and_text,
    "visual_bert": _visual_bert,
    "voxtral_encoder": _whisper,
    "audio-spectrogram-transformer": _spectrograms,
    "audioflamingo3_encoder": _whisper,
    "clap": _clap,
    "clvp": _clvp,
    "csm": _codes,
    "dia": _dia,
    "gemma3n_audio": _gemma3n_audio,
    "mimi_decoder": _latents,
    "moss_transcribe_diarize_audio": _whisper,
    "nemotron3_5_transcribe_word_timestamp": _embedded,
    "pocket_tts_audio_tokenizer_decoder": _latents,
    "efficientloftr": _two_images,
    "gemma4_vision": _gemma4_vision,
    "lightglue": _two_images,
    "kimi_k25_vision": square_patches,
    "minicpm_ocr_vision": row_of_patches,
    "minicpmv4_7_vision": row_of_patches,
    "omdet-turbo": _omdet,
    "oneformer": _oneformer,
    "seggpt": _seggpt,
    "siglip2_vision_model": naflex,
    "superglue": _two_images,
    "video_llama_3_vision": _merged,
    "vitmatte": _matte,
}
