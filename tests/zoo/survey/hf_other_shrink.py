"""Rules for small configurations of models with stages, backbones and towers, on top of those for text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.zoo.survey.hf_shrink import shrink

# Windows that fit into the last of four stages of the small images.
WINDOWS: dict[str, Any] = {"image_size": 64, "window_size": 2}

# Lists of layers per stage, and of widths per stage.
DEPTHS = ("depths", "num_blocks", "layers", "stage_numb_of_modules")


def smaller(config: Any, fields: Mapping[str, Any]) -> Any:
    """A tiny configuration, with at most four layers in each stage of models that have stages."""
    return shrink(config, staged(config, fields))


def staged(config: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, and what stages in the configuration and those within come to."""
    found = {name: value() if callable(value) else value for name, value in fields.items()}
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            own = found.get(name, {})
            if isinstance(own, Mapping):
                inner = staged(value, own)
                if inner:
                    found[name] = inner
        elif name in DEPTHS and name not in found and _numbers(value):
            found[name] = [min(each, 4) for each in value]
    return {**_heads(config), **_outputs(config), **_queries(config), **found}


def _widths(config: Any) -> dict[str, Any]:
    """Of a tower the width of the text that it is made for, and of a quantiser that of what it quantises."""
    found = {"out_hidden_size": 64} if isinstance(getattr(config, "out_hidden_size", None), int) else {}
    for name in ("text_hidden_size", "audio_hidden_size", "condition_dim"):
        if isinstance(getattr(config, name, None), int):
            found[name] = 64
    if getattr(config, "codebook_dim", None) == getattr(config, "hidden_size", ""):
        found["codebook_dim"] = 64
    return found


def _queries(config: Any) -> dict[str, Any]:
    """Fewer objects to look for than there are places in a small image."""
    names = ("num_queries", "two_stage_num_proposals", "max_num_proposals")
    return {name: min(getattr(config, name), 10) for name in names if isinstance(getattr(config, name, None), int)}


def _numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(each, int) for each in value)


def _outputs(config: Any) -> dict[str, Any]:
    """Of a backbone that hands out several states as many, at layers or stages that the small one has."""
    outputs = getattr(config, "_out_indices", None) or []
    if not outputs or min(outputs) < 0:
        return _widths(config)
    layers = getattr(config, "num_hidden_layers", None)
    if layers is None:
        return {"out_indices": list(outputs)}
    return {"out_indices": [4] if len(outputs) == 1 else [1, 2, 3, 4][-len(outputs) :]}


def _heads(config: Any) -> dict[str, Any]:
    """Heads per stage that divide a small first width."""
    heads = getattr(config, "num_heads", None)
    if isinstance(heads, (list, tuple)) and len(heads) > 1 and isinstance(getattr(config, "embed_dim", None), int):
        return {"embed_dim": 16, "num_heads": [2, 2, 4, 4][: len(heads)], **WINDOWS}
    return {}
