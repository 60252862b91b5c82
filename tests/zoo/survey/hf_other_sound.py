"""Calls with sound that signatures do not tell: transformers' other models, type by type."""

from __future__ import annotations

from typing import Any

import torch

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
)


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


def _stacked(make: Maker) -> dict[str, Any]:
    """Features of several frames in one, ``[BATCH, FRAMES, bins * frames]``."""
    width = make.says("num_mel_bins") * make.says("num_stacked_frames", default=4)
    found: dict[str, Any] = {"input_features": make.noise(BATCH, FRAMES, width)}
    if "input_features_mask" in make.takes:
        found["input_features_mask"] = torch.ones(BATCH, FRAMES, dtype=torch.bool)
    return found


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


def _windows_of_sound(make: Maker) -> dict[str, Any]:
    frames = 2 * make.config.n_window
    mask = torch.ones(BATCH, frames, dtype=torch.bool)
    return {"input_features": features(make, frames), "input_features_mask": mask}


def _at_a_delay(make: Maker) -> dict[str, Any]:
    """Text, and an embedding of how far it may lag behind the sound, which each layer is scaled by."""
    return {"input_ids": make.ids(), "t_cond": make.noise(1, make.config.hidden_size)}


def _sound_and_video(make: Maker) -> dict[str, Any]:
    return {**by_signature(make), "pixel_values_videos": make.images(BATCH, 2)}


SOUND: dict[str, Recipe] = {
    "pe_audio_video_encoder": _sound_and_video,
    "voxtral_realtime_text": _at_a_delay,
    "audio-spectrogram-transformer": _spectrograms,
    "audioflamingo3_encoder": _whisper,
    "clap": _clap,
    "clvp": _clvp,
    "csm": _codes,
    "dia": _dia,
    "fun_asr_nano_encoder": _stacked,
    "gemma3n_audio": _gemma3n_audio,
    "granite_speech5_ctc": _stacked,
    "granite_speech5_encoder": _stacked,
    "kyutai_speech_to_text": _codes,
    "mimi_decoder": _latents,
    "moss_transcribe_diarize_audio": _whisper,
    "nemotron3_5_transcribe_word_timestamp": _embedded,
    "neucodec": _wave_and_features,
    "pocket_tts_audio_tokenizer_decoder": _latents,
    "pop2piano": _embedded_sound,
    "qwen2_audio_encoder": _whisper,
    "qwen3_asr_encoder": _windows_of_sound,
    "speech-encoder-decoder": _sound_and_text,
    "vibevoice_acoustic_tokenizer": _long_waveforms,
    "vibevoice_acoustic_tokenizer_decoder": _hidden_sound,
    "vibevoice_acoustic_tokenizer_encoder": _long_waveforms,
    "voxtral_encoder": _whisper,
    "xcodec2": _wave_and_features,
}
