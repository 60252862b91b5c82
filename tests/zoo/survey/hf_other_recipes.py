"""Calls that signatures do not tell: transformers' other models, type by type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.survey.hf_other_inputs import (
    BATCH,
    LENGTH,
    TARGETS,
    Maker,
    Recipe,
    by_signature,
    length,
    naflex,
    patches,
    row_of_patches,
    square_patches,
    with_tokens,
)
from tests.zoo.survey.hf_other_sound import SOUND


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
    size = make.config.vision_config.patch_embed_hidden_size
    return {**found, "flattened_patches": torch.cat([_places(), make.noise(BATCH, 16, size)], dim=-1)}


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


def _pixels_per_token(make: Maker) -> dict[str, Any]:
    """Two images of 2 x 2 tokens, each of which is a square of pixels with its channels last."""
    side = make.says("patch_size") * make.says("spatial_merge_size")
    return {"pixel_values": make.noise(BATCH * 4, side, side, 3), "image_grid_thw": torch.tensor([[1, 2, 2]] * BATCH)}


def _one_video(make: Maker) -> dict[str, Any]:
    """One video with one text: the model adds positions in a way that does not allow for more."""
    return {name: each[:1] for name, each in by_signature(make).items()}


def _two_images(make: Maker) -> dict[str, Any]:
    return {"pixel_values": make.images(BATCH, 2)}


RECIPES: dict[str, Recipe] = {
    **SOUND,
    "inkling2_vision": _pixels_per_token,
    "tvp": _one_video,
    "pi0": _robot,
    "jev": _questions,
    "paddleocr_vl": _one_row_of_squares,
    "muse_glimmer_assistant": _assistant,
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
    "time_series_transformer": _series,
    "timesfm": _timesfm,
    "timesfm2_5": _timesfm,
    "udop": _documents,
    "vision-encoder-decoder": _image_and_text,
    "visual_bert": _visual_bert,
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
