"""What the survey lists of vision, audio and multimodal models: complete, by the libraries' own registries."""

from __future__ import annotations

import copy
import importlib
import pkgutil
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.zoo.survey import hf_other, hf_other_recipes, timm_models, torch_models
from tests.zoo.survey import hf_other_fields as fields
from tests.zoo.survey import hf_other_special as special
from tests.zoo.survey.entry import Entry, NotBuilt
from tests.zoo.survey.images import images


def _mapping(name: str) -> dict[str, Any]:
    from transformers.models.auto import modeling_auto

    return dict(getattr(modeling_auto, name))


@pytest.fixture(scope="module")
def hf_entries() -> list[Entry]:
    return hf_other.entries()


# --- timm


def test_every_timm_module_that_registers_models_has_an_entry() -> None:
    timm = pytest.importorskip("timm")
    listed = {name for name in timm.list_modules() if timm.list_models(module=name)}
    assert set(timm_models.FAMILIES) == listed


def test_every_choice_is_a_model_of_its_timm_module() -> None:
    timm = pytest.importorskip("timm")
    for family, choices in timm_models.FAMILIES.items():
        assert choices
        assert {choice.model for choice in choices} <= set(timm.list_models(module=family)), family


def test_timm_entries_have_names_of_their_own() -> None:
    pytest.importorskip("timm")
    counts = Counter(entry.name for entry in timm_models.entries())
    assert max(counts.values()) == 1
    assert all(entry.library == "timm" and entry.kind == "vision" for entry in timm_models.entries())


def test_a_timm_entry_is_as_small_as_it_says_and_repeats() -> None:
    pytest.importorskip("timm")
    entry = next(each for each in timm_models.entries() if each.name.endswith("/vit_tiny_patch16_224"))
    model = entry.build()
    assert not model.training
    assert len(model.blocks) == entry.layers["depth"] == 4  # type: ignore[arg-type]
    one, same, other = (entry.inputs(model, seed)["x"] for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert model(one).shape == (timm_models.BATCH, timm_models.CLASSES)


# --- torchvision


def test_every_torchvision_family_of_classifiers_has_an_entry() -> None:
    models = pytest.importorskip("torchvision.models")
    classifiers = set(models.list_models(module=models))
    families = set()
    for each in pkgutil.iter_modules(models.__path__):
        module = importlib.import_module(f"{models.__name__}.{each.name}")
        own = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
        if own & classifiers:
            families.add(each.name)
    assert set(torch_models.FAMILIES) == families


def test_a_torchvision_entry_runs() -> None:
    pytest.importorskip("torchvision")
    entry = next(each for each in torch_models.entries() if each.name.endswith("/vit_b_16"))
    model = entry.build()
    assert not model.training
    assert model(**entry.inputs(model, 0)).shape == (torch_models.BATCH, torch_models.CLASSES)


# --- transformers


def test_every_base_model_type_that_is_no_text_model_has_an_entry(hf_entries: list[Entry]) -> None:
    texts = {model_type for task in hf_other.TEXT for model_type in _mapping(f"MODEL_FOR_{task}_MAPPING_NAMES")}
    listed = {entry.name.rsplit("/", 1)[1] for entry in hf_entries}
    assert set(_mapping("MODEL_MAPPING_NAMES")) - texts <= listed
    assert not listed & texts


def test_types_of_image_sound_and_multimodal_tasks_have_an_entry(hf_entries: list[Entry]) -> None:
    texts = {model_type for task in hf_other.TEXT for model_type in _mapping(f"MODEL_FOR_{task}_MAPPING_NAMES")}
    listed = {entry.name.rsplit("/", 1)[1] for entry in hf_entries}
    words = (
        "IMAGE",
        "VIDEO",
        "AUDIO",
        "SPEECH",
        "CTC",
        "DETECTION",
        "SEGMENTATION",
        "DEPTH",
        "VISUAL",
        "MULTIMODAL",
        "BACKBONE",
    )
    from transformers.models.auto import modeling_auto

    tasks = [
        name for name in vars(modeling_auto) if name.endswith("_MAPPING_NAMES") and any(word in name for word in words)
    ]
    assert len(tasks) > 20
    for task in tasks:
        assert set(_mapping(task)) - texts <= listed, task


def test_entries_of_transformers_have_one_name_and_a_kind(hf_entries: list[Entry]) -> None:
    assert max(Counter(entry.name for entry in hf_entries).values()) == 1
    assert {entry.kind for entry in hf_entries} == {"vision", "audio", "multimodal"}
    assert all(entry.library == "transformers" for entry in hf_entries)


def test_what_is_said_type_by_type_is_of_types_that_exist() -> None:
    """A type that the library renames would lose its fields, or its call, without a word."""
    said = [fields.FIELDS, fields.MADE_WITH, fields.MADE_BY, hf_other_recipes.RECIPES]
    said += [special.CLASSES, special.DESIGNS, special.NOT_HERE, special.CHANGED]
    said += [special.SIDES, special.SEVERAL, special.SIZE]
    known = set(hf_other.chosen())
    assert [name for each in said for name in each if name not in known] == []
    assert known >= special.EAGER | special.SIZED | special.SQUARES | special.TEXT_ONLY


@pytest.mark.parametrize(
    "model_type",
    [
        *("vit", "hiera", "sapiens2", "inkling2_vision", "pp_ocrv6_small_det"),
        *("wav2vec2", "voxtral_realtime_text"),
        *("clip", "llava", "qwen2_vl", "minicpmv4_7", "pi0", "xclip"),
    ],
)
def test_a_type_is_built_and_called_with_what_it_is_made_for(hf_entries: list[Entry], model_type: str) -> None:
    entry = next(each for each in hf_entries if each.name.endswith(f"/{model_type}"))
    torch.manual_seed(0)
    model = entry.build()
    assert not model.training
    assert sum(parameter.numel() for parameter in model.parameters()) < 6_000_000
    made, same = entry.inputs(model, 0), entry.inputs(model, 0)
    assert made.keys() == same.keys()
    assert all(torch.equal(made[name], same[name]) for name in made)
    if entry.kind == "multimodal":
        assert {"input_ids", "pixel_values"} <= made.keys()
    with torch.no_grad():
        outputs = model(**made)
    tensors = [each for each in outputs.values() if isinstance(each, torch.Tensor)]
    assert tensors and all(bool(each.isfinite().all()) for each in tensors)


def test_the_image_reaches_the_text_of_a_multimodal_model(hf_entries: list[Entry]) -> None:
    entry = next(each for each in hf_entries if each.name.endswith("/llava"))
    torch.manual_seed(0)
    model = entry.build()
    made = dict(entry.inputs(model, 0))
    with torch.no_grad():
        before = model(**made).logits
        after = model(**{**made, "pixel_values": made["pixel_values"] + 1}).logits
    assert not torch.allclose(before, after)


def test_what_cannot_be_built_says_why(hf_entries: list[Entry]) -> None:
    entry = next(each for each in hf_entries if each.name.endswith("/bark"))
    with pytest.raises(NotBuilt, match="no forward"):
        entry.build()


def test_only_codebooks_of_zeros_are_filled() -> None:
    def module(**buffers: torch.Tensor) -> torch.nn.Module:
        made = torch.nn.Module()
        for name, buffer in buffers.items():
            made.register_buffer(name, buffer)
        return made

    kept = torch.arange(6.0).view(3, 2)
    model = torch.nn.Sequential(
        module(embed=torch.zeros(3, 2), cluster_size=torch.zeros(3)), module(embed=kept.clone()), torch.nn.Linear(2, 2)
    )
    special.filled(model)
    assert model[0].embed.all() and not model[0].cluster_size.any()
    assert torch.equal(model[1].embed, kept)


def test_a_memory_of_earlier_calls_is_switched_off() -> None:
    from transformers.models.omdet_turbo.modeling_omdet_turbo import OmDetTurboLRUCache

    memories = [OmDetTurboLRUCache(4), OmDetTurboLRUCache(4)]
    special.CHANGED["omdet-turbo"](SimpleNamespace(language_cache_class=memories[0], language_cache_prompt=memories[1]))
    for each in copy.deepcopy(memories):
        each.put((1, 2), torch.ones(1))
        assert not each.has((1, 2))


# --- images


def test_images_have_the_shape_that_is_asked_for() -> None:
    made = images(torch.nn.Identity(), 0, key="x", batch=3, side=5, channels=4)
    assert made["x"].shape == (3, 4, 5, 5) and made["x"].dtype == torch.float32
