"""What reads each site, against what the architectures' own papers say their sublayers are."""

from __future__ import annotations

import pytest

import attnres_compile as ac
from tests.zoo.families import BY_NAME
from tests.zoo.support import eager_config, example, prepare

A, M, O, END = "attention", "mlp", "other", "output"
# Per stream, one layer's readers; None: convolutional stages, all of them token mixers.
LAYERS: dict[str, list[list[str]]] = {
    "llama": [[A, M]],
    "gpt2": [[A, M]],
    "bloom": [[A, M]],
    "mixtral": [[A, M]],
    "qwen3_moe": [[A, M]],
    "gpt_neox_parallel": [[A]],  # attention and MLP side by side: one sublayer, which attends
    "t5": [[A, M], [A, A, M]],
    "whisper": [[A, M], [A, A, M]],
    "vit": [[A, M]],
    "swin": [[A, M]] * 3,
    "dinov2": [[A, M]],
    "torch_encoder_norm_first": [[A, M]],
    "nanogpt": [[A, M]],
    "gemma2": [[A, M]],
    "falcon_new_two_norms": [[A]],
    "cohere": [[A]],
}


@pytest.mark.parametrize("name", list(LAYERS))
def test_attention_and_mlp_readers(name: str) -> None:
    family = BY_NAME[name]
    report = ac.explain(prepare(family), example(family), eager_config())
    assert len(report.streams) == len(LAYERS[name])
    for stream, layer in zip(report.streams, LAYERS[name], strict=True):
        kinds = [site.kind for site in stream.sites if site.index < len(stream.sublayers)]
        assert kinds == layer * (len(stream.sublayers) // len(layer)), stream.name
        assert [site.kind for site in stream.sites[len(kinds) :]] == [END]
        assert [site.index for site in stream.sites] == list(range(len(stream.sites)))


def test_convolutions_over_tokens_are_neither() -> None:
    family = BY_NAME["convnext"]
    report = ac.explain(prepare(family), example(family), eager_config())
    kinds = {site.kind for stream in report.streams for site in stream.sites}
    assert kinds == {O, END}
