"""Hugging Face transformers: one class for every model type that is in none of the library's three text mappings.

A type is called with what its model is made for: images, sound, or text with them. The configuration is made small by
:mod:`tests.zoo.survey.hf_other_shrink`; what its rules cannot know stands in :mod:`tests.zoo.survey.hf_other_fields`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from tests.zoo.survey import hf_other_fields as fields
from tests.zoo.survey import hf_other_special as special
from tests.zoo.survey.entry import Entry, NotBuilt
from tests.zoo.survey.hf_other_recipes import inputs
from tests.zoo.survey.hf_other_shrink import smaller
from tests.zoo.survey.hf_shrink import without_cache

TEXT = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
# Kind of the first of these tasks that a type has, and its class there.
TASKS: tuple[tuple[str, str], ...] = (
    ("audio", "SPEECH_SEQ_2_SEQ"),
    ("audio", "CTC"),
    ("audio", "RNNT"),
    ("audio", "TDT"),
    ("audio", "AUDIO_CLASSIFICATION"),
    ("audio", "AUDIO_FRAME_CLASSIFICATION"),
    ("audio", "TEXT_TO_SPECTROGRAM"),
    ("audio", "TEXT_TO_WAVEFORM"),
    ("multimodal", "IMAGE_TEXT_TO_TEXT"),
    ("multimodal", "MULTIMODAL_LM"),
    ("multimodal", "ZERO_SHOT_IMAGE_CLASSIFICATION"),
    ("multimodal", "VISUAL_QUESTION_ANSWERING"),
    ("multimodal", "DOCUMENT_QUESTION_ANSWERING"),
    ("multimodal", "RETRIEVAL"),
    ("vision", "IMAGE_CLASSIFICATION"),
    ("vision", "VIDEO_CLASSIFICATION"),
    ("vision", "OBJECT_DETECTION"),
    ("vision", "ZERO_SHOT_OBJECT_DETECTION"),
    ("vision", "DEPTH_ESTIMATION"),
    ("vision", "SEMANTIC_SEGMENTATION"),
    ("vision", "UNIVERSAL_SEGMENTATION"),
    ("vision", "INSTANCE_SEGMENTATION"),
    ("vision", "IMAGE_SEGMENTATION"),
    ("vision", "MASK_GENERATION"),
    ("vision", "IMAGE_MATTING"),
    ("vision", "IMAGE_TO_IMAGE"),
    ("vision", "KEYPOINT_DETECTION"),
    ("vision", "KEYPOINT_MATCHING"),
    ("vision", "POSE_ESTIMATION"),
    ("vision", "TABLE_RECOGNITION"),
    ("vision", "TEXT_RECOGNITION"),
    ("vision", "IMAGE"),
    ("vision", "BACKBONE"),
    # A type that has no task of its own: by its name, see kind_of.
    ("", "MODEL"),
    ("", "PRETRAINING"),
    ("", "DECISION"),
)


def entries() -> list[Entry]:
    """One entry per model type, by kind."""
    return [_entry(model_type, *choice) for model_type, choice in chosen().items()]


def chosen() -> dict[str, tuple[str, str]]:
    """Kind and class of every model type that this module has."""
    return dict(_chosen())


def _chosen() -> Iterator[tuple[str, tuple[str, str]]]:
    texts = {model_type for task in TEXT for model_type in _mapping(task)}
    known = {model_type for _, task in TASKS for model_type in _mapping(task)}
    for model_type in sorted(known - texts):
        if model_type in special.CLASSES:
            yield model_type, special.CLASSES[model_type]
            continue
        for kind, task in TASKS:
            if model_type in _mapping(task):
                name = _mapping(task)[model_type]
                yield model_type, (kind or kind_of(model_type), name if isinstance(name, str) else name[0])
                break


def kind_of(model_type: str) -> str:
    """The kind of a type that is only a base model: what its name says, text and tables among the multimodal."""
    for kind, words in special.NAMED.items():
        if any(word in model_type for word in words):
            return kind
    return "multimodal"


def _mapping(task: str) -> Mapping[str, Any]:
    from transformers.models.auto import modeling_auto

    name = "MODEL_MAPPING_NAMES" if task == "MODEL" else f"MODEL_FOR_{task}_MAPPING_NAMES"
    found: Mapping[str, Any] = getattr(modeling_auto, name)
    return found


def _entry(model_type: str, kind: str, class_name: str) -> Entry:
    return Entry(
        name=f"transformers/{kind}/{model_type}",
        library="transformers",
        kind=kind,
        build=partial(build, model_type, class_name),
        inputs=partial(inputs, model_type),
        design=special.design(model_type),
    )


def config_for(model_type: str) -> Any:
    """The tiny configuration of a type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type in special.NOT_HERE:
        raise NotBuilt(special.NOT_HERE[model_type])
    made = fields.MADE_BY.get(model_type)
    if made is not None:
        config = made()
        without_cache(config)
        return config
    needs = {name: each() if callable(each) else each for name, each in fields.MADE_WITH.get(model_type, {}).items()}
    full = CONFIG_MAPPING[model_type](**needs)
    return smaller(full, {**needs, **fields.FIELDS.get(model_type, {})})


def build(model_type: str, class_name: str) -> nn.Module:
    """The model, tiny, with random weights, in eval mode."""
    config = config_for(model_type)
    made = model_class(config, class_name)
    options = {"attn_implementation": "eager"} if model_type in special.EAGER else {}
    try:
        model: nn.Module = made._from_config(config, **options)
    except ImportError as error:
        raise NotBuilt(" ".join(str(error).split())) from error
    for module in model.modules():
        if hasattr(module, "config") and hasattr(module.config, "to_dict"):
            without_cache(module.config)
    special.filled(model)
    if model_type in special.CHANGED:
        special.CHANGED[model_type](model)
    return model.eval()


def model_class(config: Any, class_name: str) -> Any:
    """The class of that name: a public one, or from the module beside that of the configuration."""
    import transformers

    if hasattr(transformers, class_name):
        return getattr(transformers, class_name)
    beside = type(config).__module__.replace(".configuration_", ".modeling_")
    return getattr(importlib.import_module(beside), class_name)
