"""torch.nn's own Transformer layers: encoder, decoder and both, norm first or last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.survey.entry import Entry

# Sizes that differ, so that a mixed-up axis shows.
WIDTH, HEADS, HIDDEN, LAYERS = 36, 3, 60, 4
BATCH, LENGTH, MEMORY = 2, 7, 5
ACTIVATIONS: dict[str, Any] = {"relu": "relu", "gelu": "gelu", "silu": nn.functional.silu}


def entries() -> list[Entry]:
    return list(_entries())


def _entries() -> Iterator[Entry]:
    for first, batch_first, activation in product((True, False), (True, False), ACTIVATIONS):
        options = {"norm_first": first, "batch_first": batch_first, "activation": ACTIVATIONS[activation]}
        norm, order = ("pre-norm" if first else "post-norm"), ("batch" if batch_first else "sequence")
        for name, (build, inputs) in KINDS.items():
            # Activation and order of axes cross with the encoder alone; they are the same code in the others.
            if name != "encoder" and activation != ("gelu" if batch_first else "relu"):
                continue
            yield Entry(
                name=f"torch/layers/{name}-{norm}-{order}-first-{activation}",
                library="torch",
                kind="layers",
                build=partial(_eval, build, options),
                inputs=partial(_seeded, inputs, batch_first),
                layers={"num_layers": LAYERS},
                design=f"{name}, {norm}",
            )
    for first in (True, False):
        options = {"norm_first": first, "batch_first": True, "bias": False, "layer_norm_eps": 1e-3}
        norm = "pre-norm" if first else "post-norm"
        yield Entry(
            name=f"torch/layers/encoder-{norm}-no-bias",
            library="torch",
            kind="layers",
            build=partial(_eval, _encoder, options),
            inputs=partial(_seeded, _source, True),
            layers={"num_layers": LAYERS},
            design=f"encoder, {norm}",
        )


def _eval(build: Callable[..., nn.Module], options: dict[str, Any]) -> nn.Module:
    return build(**options).eval()


def _seeded(
    make: Callable[..., dict[str, Tensor]], batch_first: bool, model: nn.Module, seed: int
) -> Mapping[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def noise(length: int) -> Tensor:
        made = torch.randn(BATCH, length, WIDTH, generator=generator)
        return made if batch_first else made.transpose(0, 1).contiguous()

    return make(noise)


# --- the models, each with a final norm


def _encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, **options)
    # Nested tensors belong to an inference fast path; the constructor warns where they do not fit.
    return nn.TransformerEncoder(layer, LAYERS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)


def _decoder(**options: Any) -> nn.Module:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, **options)
    return nn.TransformerDecoder(layer, LAYERS, norm=nn.LayerNorm(WIDTH))


def _both(**options: Any) -> nn.Module:
    return nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, HIDDEN, **options)


class CausalEncoder(nn.Module):
    """An encoder under a causal mask: what torch.nn has of a decoder-only model."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.encoder = _encoder(**options)
        self.time = 0 if not options["batch_first"] else 1

    def forward(self, src: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(src.shape[self.time])
        return self.encoder(src, mask=mask, is_causal=True)


# --- their inputs


def _source(noise: Callable[[int], Tensor]) -> dict[str, Tensor]:
    return {"src": noise(LENGTH)}


def _target_and_memory(noise: Callable[[int], Tensor]) -> dict[str, Tensor]:
    return {"tgt": noise(LENGTH), "memory": noise(MEMORY)}


def _source_and_target(noise: Callable[[int], Tensor]) -> dict[str, Tensor]:
    return {"src": noise(MEMORY), "tgt": noise(LENGTH)}


KINDS: dict[str, tuple[Callable[..., nn.Module], Callable[..., dict[str, Tensor]]]] = {
    "encoder": (_encoder, _source),
    "causal-encoder": (CausalEncoder, _source),
    "decoder": (_decoder, _target_and_memory),
    "encoder-decoder": (_both, _source_and_target),
}
