"""A report as a decoder of many layers gives it, written out by hand."""

from __future__ import annotations

from attnres_compile.report import LeftAlone, Site, Stream, Sublayer, TransformReport


def make_report(layers: int = 24, size: int = 6, file: str = "/somewhere/model.py") -> TransformReport:
    """Two sublayers per layer, ``size`` sublayers per block, a final norm; one rejected add per layer and one more."""
    sublayers = tuple(
        Sublayer(f"model.layers.{i // 2}", f"{file}:{21 if i % 2 == 0 else 27}", f"add_{i}") for i in range(2 * layers)
    )
    count = len(sublayers)
    sites = []
    for i in range(count + 1):
        sources = ["root", *(f"block {block}" for block in range(1, i // size + 1))]
        sources += [f"partial {i // size + 1}"] if i % size else []
        norm = ("input_layernorm", "post_attention_layernorm")[i % 2]
        reader = f"model.layers.{i // 2}.{norm}" if i < count else "model.norm"
        name = f"model.site_{i}"
        sites.append(Site(name, (reader,), tuple(sources), name if len(sources) > 1 else None))
    rejections = [
        LeftAlone("no_contraction", "no weight lies between skip and branch", f"model.layers.{i}.rope", f"{file}:9")
        for i in range(layers)
    ]
    rejections.append(LeftAlone("unrelated_operands", "neither operand leads to the other", "", f"{file}:5", "add_99"))
    blocks = tuple(tuple(range(start, min(start + size, count))) for start in range(0, count, size))
    stream = Stream("model", 768, sublayers, blocks, tuple(sites), "model")
    return TransformReport((stream,), tuple(rejections), (), 768 * count)
