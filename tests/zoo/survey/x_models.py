"""x-transformers: one entry per block design that its options make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.survey.entry import Entry, NotBuilt
from tests.zoo.survey.x_designs import AROUND, BRANCHES, RESIDUALS, Design

WIDTH, HEADS, LAYERS, VOCAB, LENGTH = 40, 4, 4, 61, 11
SIZES: dict[str, Any] = {"dim": WIDTH, "depth": LAYERS, "heads": HEADS, "attn_dim_head": 10, "verbose": False}


def entries() -> list[Entry]:
    return list(_entries())


def _entries() -> Iterator[Entry]:
    for designs in (RESIDUALS, BRANCHES, AROUND):
        for name, design in designs.items():
            yield _entry(name, partial(_language, design), partial(_tokens, design), design.text)
    for name, (build, inputs, text) in OTHERS.items():
        yield _entry(name, build, inputs, text)


def _entry(
    name: str, build: Callable[[], nn.Module], inputs: Callable[[nn.Module, int], Mapping[str, Any]], text: str
) -> Entry:
    return Entry(
        name=f"x-transformers/configurations/{name}",
        library="x-transformers",
        kind="configurations",
        build=build,
        inputs=inputs,
        layers={"depth": LAYERS},
        design=text,
    )


def _language(design: Design) -> nn.Module:
    import x_transformers as x

    options = {key: value for key, value in {**SIZES, **design.options}.items() if value is not None}
    layers = x.Encoder if design.encoder else x.Decoder
    try:
        model = x.TransformerWrapper(num_tokens=VOCAB, max_seq_len=32, attn_layers=layers(**options), **design.wrapper)
    except AssertionError as error:
        raise NotBuilt(str(error) or "the library refuses these options") from error
    return model.eval()


def _tokens(design: Design, model: nn.Module, seed: int) -> Mapping[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    extras: dict[str, tuple[str, Callable[[], Any]]] = {
        "condition": ("condition", lambda: torch.randn(2, 12, generator=generator)),
        "context": ("context", lambda: torch.randn(2, 5, WIDTH, generator=generator)),
        "mask": ("mask", lambda: torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 3]])),
        "repeat_blocks": ("repeat_blocks", lambda: ((1, 2), 3)),
        "looped_steps": ("looped_steps", lambda: 2),
        "recycle_steps": ("recycle_steps", lambda: 2),
        "return_hiddens": ("return_intermediates", lambda: True),
    }
    made: dict[str, Any] = {"x": torch.randint(0, VOCAB, (2, LENGTH), generator=generator)}
    return made | {extras[name][0]: extras[name][1]() for name in design.extra}


# --- other wrappers


class EncoderDecoder(nn.Module):
    """The library's encoder and decoder, joined as its XTransformer does, with logits as output and not a loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        import x_transformers as x

        self.encoder = x.TransformerWrapper(
            num_tokens=VOCAB, max_seq_len=32, attn_layers=x.Encoder(**SIZES, **options), return_only_embed=True
        )
        self.decoder = x.TransformerWrapper(
            num_tokens=VOCAB, max_seq_len=32, attn_layers=x.Decoder(**SIZES, cross_attend=True, **options)
        )

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return self.decoder(tgt, context=self.encoder(src))


def _x_transformer() -> nn.Module:
    from x_transformers import XTransformer

    sides = {
        f"{side}_{name}": value
        for side in ("enc", "dec")
        for name, value in {**SIZES, "num_tokens": VOCAB, "max_seq_len": 32}.items()
        if name != "dim"
    }
    return XTransformer(dim=WIDTH, tie_token_emb=True, **sides).eval()


def _image(**options: Any) -> nn.Module:
    from x_transformers import Encoder, ViTransformerWrapper

    return ViTransformerWrapper(
        image_size=16, patch_size=4, num_classes=7, attn_layers=Encoder(**{**SIZES, **options}), num_register_tokens=2
    ).eval()


def _continuous(**options: Any) -> nn.Module:
    from x_transformers import ContinuousTransformerWrapper, Decoder

    layers = Decoder(**{**SIZES, **options})
    return ContinuousTransformerWrapper(dim_in=9, dim_out=8, max_seq_len=32, attn_layers=layers).eval()


def _several_inputs() -> nn.Module:
    from x_transformers import Decoder, MultiInputTransformerWrapper

    tokens = {"note": 31, "pitch": 17}
    return MultiInputTransformerWrapper(num_tokens=tokens, max_seq_len=32, attn_layers=Decoder(**SIZES)).eval()


def _numbers() -> nn.Module:
    from x_transformers import Decoder, XValTransformerWrapper

    return XValTransformerWrapper(
        num_tokens=VOCAB, numerical_token_id=3, max_seq_len=32, attn_layers=Decoder(**SIZES)
    ).eval()


def _nested_mlp() -> nn.Module:
    from x_transformers import NeoMLP

    return NeoMLP(dim_in=5, dim_hidden=7, dim_out=6, depth=LAYERS, dim_model=WIDTH).eval()


def _blocks() -> nn.Module:
    from x_transformers import TransformerBlock

    return nn.Sequential(*(TransformerBlock(WIDTH, heads=HEADS, attn_dim_head=10) for _ in range(LAYERS))).eval()


def _pooler() -> nn.Module:
    from x_transformers import AttentionPool

    return AttentionPool(WIDTH, num_pooled_tokens=3, depth=LAYERS, heads=HEADS, dim_head=10).eval()


def _ids(name: str, model: nn.Module, seed: int) -> Mapping[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = {
        "src": torch.randint(1, VOCAB, (2, LENGTH), generator=generator),
        "tgt": torch.randint(1, VOCAB, (2, LENGTH - 4), generator=generator),
    }
    return ids if name == "both" else {name: ids["src"]}


def _floats(name: str, shape: tuple[int, ...], model: nn.Module, seed: int) -> Mapping[str, Any]:
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(seed))}


def _notes(model: nn.Module, seed: int) -> Mapping[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"note": 31, "pitch": 17}
    return {"x": {name: torch.randint(0, size, (2, LENGTH), generator=generator) for name, size in sizes.items()}}


def _ids_and_numbers(model: nn.Module, seed: int) -> Mapping[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
    ids[:, ::3] = 3
    return {"x": ids, "x_num": torch.randn(2, LENGTH, generator=generator)}


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Mapping[str, Any]], str]] = {
    "encoder-decoder": (lambda: EncoderDecoder().eval(), partial(_ids, "both"), "encoder and decoder"),
    "encoder-decoder-scaled": (
        lambda: EncoderDecoder(scale_residual=True, use_rmsnorm=True).eval(),
        partial(_ids, "both"),
        "encoder and decoder with a learned scale on the stream",
    ),
    "encoder-decoder-loss": (_x_transformer, partial(_ids, "both"), "encoder and decoder with a loss as output"),
    "image": (_image, partial(_floats, "img", (2, 3, 16, 16)), "an encoder over patches"),
    "image-sandwich-norm": (
        partial(_image, sandwich_norm=True, use_layerscale=True),
        partial(_floats, "img", (2, 3, 16, 16)),
        "an encoder over patches, a norm and a scale behind each branch",
    ),
    "continuous": (_continuous, partial(_floats, "x", (2, LENGTH, 9)), "a decoder over vectors"),
    "continuous-macaron": (
        partial(_continuous, macaron=True, use_rmsnorm=True),
        partial(_floats, "x", (2, LENGTH, 9)),
        "two halved feed-forwards around the attention, RMSNorm",
    ),
    "several-inputs": (_several_inputs, _notes, "a decoder over the sum of embeddings"),
    "numbers": (_numbers, _ids_and_numbers, "a decoder over tokens scaled by numbers"),
    "neo-mlp": (_nested_mlp, partial(_floats, "x", (3, 5)), "attention over features"),
    "blocks": (_blocks, partial(_floats, "input", (2, LENGTH, WIDTH)), "blocks called one by one"),
    "attention-pool-blocks": (
        _pooler,
        partial(_floats, "context", (2, LENGTH, WIDTH)),
        "learned queries, cross-attention",
    ),
}
