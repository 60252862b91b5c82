"""Arguments of one call, from what a forward takes and a configuration says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.survey import hf_other_special as special
from tests.zoo.survey.hf_shrink import FIRST_TOKEN, VOCAB

BATCH, LENGTH, TARGETS, SAMPLES, FRAMES = 2, 9, 5, 1920, 40


class Maker:
    """Makes the arguments of one call, from what the forward takes and the configuration says."""

    def __init__(self, model_type: str, model: nn.Module, seed: int) -> None:
        self.type, self.model = model_type, model
        self.config: Any = model.config
        self.takes = inspect.signature(model.forward).parameters
        self.generator = torch.Generator().manual_seed(seed)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def ids(self, length: int = LENGTH, batch: int = BATCH) -> Tensor:
        text = self.config.get_text_config()
        bound = getattr(text, "vocab_size", None) or self.says("vocab_size", default=VOCAB)
        return torch.randint(min(FIRST_TOKEN, bound // 2), bound, (batch, length), generator=self.generator)

    def says(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that the configuration has, or one that it holds; text last."""
        waiting = [self.config]
        while waiting:
            config = waiting.pop(0)
            for name in names:
                value = getattr(config, name, None)
                if value is not None:
                    return value
            held = [(name, part) for name, part in vars(config).items() if hasattr(part, "to_dict")]
            waiting += [part for name, part in sorted(held, key=lambda pair: "text" in pair[0])]
        return default

    def images(self, *leading: int) -> Tensor:
        """``[*leading or BATCH, channels, height, width]`` of the configuration's size."""
        size = special.SIDES.get(self.type) or self.says("image_size", "img_size", "input_size", default=64)
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        channels = self.says("num_channels", "in_channels", "in_chans", default=3)
        return self.noise(*(leading or (BATCH,)), channels if isinstance(channels, int) else 3, height, width)


Recipe = Callable[[Maker], Mapping[str, Any]]


def by_signature(make: Maker) -> dict[str, Any]:
    """What the forward's parameters ask for, where the type has no recipe of its own."""
    takes, found = make.takes, dict[str, Any]()
    if "grid_thw" in takes or ("image_grid_thw" in takes and "input_ids" not in takes):
        return patches(make)
    if "input_features" in takes and "pixel_values" not in takes:
        found["input_features"] = features(make)
    elif "input_values" in takes and "pixel_values" not in takes:
        found["input_values"] = waveforms(make)
    elif "pixel_values" in takes:
        found["pixel_values"] = _pixels(make)
    elif "pixel_values_videos" in takes:
        found["pixel_values_videos"] = make.images(BATCH, _frames(make))
    for name in ("input_features_mask", "padding_mask"):
        if name in takes and takes[name].default is inspect.Parameter.empty:
            found[name] = torch.ones(BATCH, FRAMES, dtype=torch.bool)
    if "input_ids" in takes:
        found["input_ids"] = make.ids()
        if make.type in special.TEXT_ONLY:
            found = {"input_ids": found["input_ids"]}
        elif "pixel_values" in found:
            _with_images(make, found)
    if "decoder_input_ids" in takes and make.config.is_encoder_decoder:
        found["decoder_input_ids"] = make.ids(TARGETS)
    return found


def patches(make: Maker) -> dict[str, Any]:
    """Two images of 4 x 4 patches, ``[32, channels * frames * side * side]``, and their grids."""
    side = make.says("patch_size", default=8)
    frames = make.says("temporal_patch_size", "patch_temporal", default=1)
    channels = make.says("in_channels", "num_channels", "in_chans", default=3)
    name = "hidden_states" if "hidden_states" in make.takes else "pixel_values"
    grid = "grid_thw" if "grid_thw" in make.takes else "image_grid_thw"
    return {
        name: make.noise(BATCH * 16, channels * frames * side * side),
        grid: torch.tensor([[1, 4, 4]] * BATCH),
    }


def _frames(make: Maker) -> int:
    frames: int = make.says("num_frames", "frames_per_clip", default=2)
    return frames


def _pixels(make: Maker) -> Tensor:
    if make.says("num_frames", "frames_per_clip") is not None:
        return make.images(BATCH, _frames(make))
    return make.images()


def features(make: Maker, frames: int = FRAMES) -> Tensor:
    """``[BATCH, mel bins, frames]``, or time before mel bins."""
    bins = make.says(
        "feature_projection_input_dim",
        "num_mel_bins",
        "num_mel_features",
        "feature_size",
        "input_feat_per_channel",
        default=128,
    )
    made = make.noise(BATCH, bins, frames)
    return made.mT.contiguous() if make.type.startswith(special.TIME_FIRST) else made


def waveforms(make: Maker) -> Tensor:
    """``[BATCH, SAMPLES]``, or one channel before the samples."""
    made = make.noise(BATCH, SAMPLES)
    return made[:, None] if make.type.startswith(special.CHANNEL) else made


def _with_images(make: Maker, found: dict[str, Any]) -> None:
    """Puts as many image tokens into each row of ids as the model makes of one image, and says where images are."""
    takes = make.takes
    if "image_grid_thw" in takes:
        patched = patches(make)
        found |= {"pixel_values": patched.pop("pixel_values"), "image_grid_thw": patched.popitem()[1]}
        if make.type in special.SQUARES:
            found["pixel_values"] = square_patches(make)["pixel_values"]
    elif "spatial_shapes" in takes:
        found |= naflex(make)
    elif "target_sizes" in takes:
        found |= row_of_patches(make)
    elif make.type in special.SEVERAL:
        found["pixel_values"] = make.images(BATCH, special.SEVERAL[make.type])
    if make.type in special.SIZED or make.type in special.SIZE:
        found["image_sizes"] = torch.tensor([special.SIZE.get(make.type, found["pixel_values"].shape[-2:])] * BATCH)
    if "images_per_sample" in takes:
        found["images_per_sample"] = torch.ones(BATCH, dtype=torch.long)
    if "image_merge_sizes" in takes:
        found["image_merge_sizes"] = torch.tensor([2] * BATCH)
    token = next((make.says(name) for name in TOKENS if make.says(name) is not None), None)
    # A model that hands everything on to one that it holds says nothing of what it takes.
    owners = [each for each in make.model.modules() if hasattr(each, "get_image_features")]
    owner: Any = next((each for each in owners if found.keys() & _asked(each).keys()), None)
    if token is None or owner is None:
        return
    asks = _asked(owner)
    with torch.no_grad():
        features = owner.get_image_features(
            **{
                name: found[name]
                for name in found
                if name != "input_ids" and (name in asks or name == "image_merge_sizes")
            }
        )
    found["input_ids"] = with_tokens(make, found["input_ids"], token, length(features) // BATCH)
    for name in ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids"):
        if name in takes:
            found[name] = (found["input_ids"] == token).long()


def _asked(owner: Any) -> Mapping[str, Any]:
    return inspect.signature(owner.get_image_features).parameters


def length(features: Any) -> int:
    """How many vectors there are in what ``get_image_features`` gives."""
    if hasattr(features, "pooler_output"):
        features = features.pooler_output
    if isinstance(features, (list, tuple)):
        return sum(length(each) for each in features)
    return int(features.numel() // features.shape[-1])


def with_tokens(make: Maker, ids: Tensor, token: int, number: int) -> Tensor:
    """The ids with ``number`` equal tokens after the first of each row."""
    middle = torch.full((ids.shape[0], number), token)
    return torch.cat([ids[:, :1], middle, ids[:, 1:]], dim=1)


TOKENS = ("image_token_id", "image_token_index", "media_token_id", "image_token")


def square_patches(make: Maker) -> dict[str, Any]:
    found = patches(make)
    side = make.says("patch_size")
    return {**found, "pixel_values": make.noise(BATCH * 16, 3, side, side)}


def row_of_patches(make: Maker) -> dict[str, Any]:
    """Patches of two images side by side, ``[1, 3, side, 32 * side]``, and the sizes of their grids."""
    side = make.says("patch_size")
    return {"pixel_values": make.noise(1, 3, side, 32 * side), "target_sizes": torch.tensor([[4, 4]] * BATCH)}


def naflex(make: Maker) -> dict[str, Any]:
    side = make.says("patch_size")
    return {
        "pixel_values": make.noise(BATCH, 16, 3 * side * side),
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
    }
