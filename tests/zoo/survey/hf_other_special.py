"""How transformers' models of images, sound and several modalities are named and called, type by type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Types for which the class of their first task is not the one to take.
CLASSES: dict[str, tuple[str, str]] = {
    "sapiens2": ("vision", "Sapiens2Model"),
    "shieldgemma2": ("vision", "ShieldGemma2ForImageClassification"),
}

# Words in the names of types that are only base models.
NAMED: dict[str, tuple[str, ...]] = {
    "audio": (
        "audio",
        "speech",
        "asr",
        "parakeet",
        "voxtral",
        "mimi",
        "dac",
        "encodec",
        "univnet",
        "codec",
        "vibevoice",
        "wavtokenizer",
        "lasr",
        "clvp",
        "diarization",
        "nemotron3_5_transcribe_word_timestamp",
        "clap",
    ),
    "vision": ("vision", "video", "sam", "pixtral", "radio", "seggpt", "uvdoc", "glm_image_vqmodel", "mgp-str"),
}

# What is special about a model or its call.
DESIGNS: dict[str, str] = {"omdet-turbo": "without its memory of earlier calls' texts"}

NO_FORWARD = "the class has no forward of its own; it only generates, through the models that it holds"

SESSION = "its forward takes a session object that holds frames and state, not tensors"

# Types that cannot be built here, and why; of what they hold, what is an entry of its own.
NOT_HERE: dict[str, str] = {
    "bark": NO_FORWARD,
    "qwen2_5_omni": f"{NO_FORWARD}; of these the thinker is the entry qwen2_5_omni_thinker",
    "qwen3_omni_moe": f"{NO_FORWARD}; of these the thinker is the entry qwen3_omni_moe_thinker",
    "glm_image_vqmodel": "the class has no forward; it is a part that others call by other methods",
    "sam3_tracker_video": f"{SESSION}; the model for single images is the entry sam3_tracker",
    "sam3_video": f"{SESSION}; the model for single images is the entry sam3",
}

# Types whose other attention does not run on the CPU.
EAGER: frozenset[str] = frozenset()

# What codebooks are kept in, which are zero until a checkpoint or training fills them.
CODEBOOKS = ("embed", "embed_sum")


@torch.no_grad()
def filled(model: nn.Module) -> None:
    """Gives codebooks of zeros random entries, in place: all that is looked up there would be zero."""
    for module in model.modules():
        for name in CODEBOOKS:
            buffer = module._buffers.get(name)
            if buffer is not None and not buffer.any():
                buffer.normal_()


def _forgetful(model: Any) -> None:
    """Makes every call compute the embeddings of its texts, as the first one does; later ones have no gradients."""
    for memory in (model.language_cache_class, model.language_cache_prompt):
        memory.put = _nothing


def _nothing(key: Any, value: Any) -> None:
    pass


# What is changed in a model after it was built.
CHANGED: dict[str, Callable[[Any], None]] = {"omdet-turbo": _forgetful}

# Sides of images in pixels, where the configuration says none that is right.
SIDES: dict[str, int | tuple[int, int]] = {
    "depth_pro": 128,
    "edgetam": 128,
    "edgetam_video": 128,
    "edgetam_vision_model": 128,
    "pe_audio_video": 32,
    "pe_audio_video_encoder": 32,
    "pe_video": 32,
    "pe_video_encoder": 32,
    "perception_lm": 32,
    "omdet-turbo": 224,
    "pp_ocrv5_mobile_rec": (96, 192),
    "pp_ocrv5_server_rec": (48, 96),
    "pp_ocrv6_small_rec": (48, 96),
    "pp_ocrv6_tiny_rec": (48, 96),
    "sam2": 128,
    "sam2_video": 128,
    "sam2_vision_model": 128,
    "seggpt": 32,
    "tvp": 64,
    "textnet": 64,
}

# Types that take several images, or cuts of one, in each row: how many.
SEVERAL: dict[str, int] = {
    "colmodernvbert": 1,
    "granite4_vision": 5,
    "granite_docling": 1,
    "idefics2": 1,
    "idefics3": 1,
    "llava_next": 5,
    "llava_next_video": 5,
    "llava_onevision": 5,
    "perception_lm": 1,
    "smolvlm": 1,
}

# Types that want to know the size of each image.
SIZED: frozenset[str] = frozenset({"lighton_ocr", "mistral3", "mistral_large4"})

# Height and width that an image had before it was cut.
SIZE: dict[str, tuple[int, int]] = {
    "granite4_vision": (64, 64),
    "llava_next": (64, 64),
    "llava_next_video": (64, 64),
    "llava_onevision": (64, 64),
}

# Types that take each patch as a small image.
SQUARES: frozenset[str] = frozenset({"kimi_k25", "kimi_k25_vision"})

# Types for several modalities that are called with text alone.
TEXT_ONLY: frozenset[str] = frozenset(
    {
        "apertus1p5",
        "chameleon",
        "deepseek_ocr2",
        "embedding_gemma2",
        "fun_asr_nano",
        "glm_image",
        "granite4_vision",
        "granite_docling",
        "inkling2",
        "inkling2_loop",
        "inkling_mm_model",
        "molmo2",
        "nemotron_h_omni",
        "qwen2_5_omni_thinker",
        "qwen3_omni_moe_thinker",
        "unlimited_ocr",
        "vibevoice",
    }
)

# Types whose features are [batch, time, mel bins] and not [batch, mel bins, time].
TIME_FIRST: tuple[str, ...] = (
    "canary",
    "cohere_asr",
    "fun_asr_nano",
    "gemma4_audio",
    "granite_speech5",
    "lasr",
    "nemotron",
    "parakeet",
    "speech_to_text",
    "univnet",
    "wav2vec2-bert",
)

# Types that take waveforms as [batch, 1, samples].
CHANNEL: tuple[str, ...] = (
    "dac",
    "encodec",
    "mimi",
    "neucodec",
    "omniasr",
    "pe_audio",
    "pocket_tts",
    "vibevoice",
    "wavtokenizer",
    "xcodec",
)


def design(model_type: str) -> str:
    """What is special about a model or its call, in words."""
    if model_type in TEXT_ONLY:
        return "text only"
    return DESIGNS.get(model_type, "")
