"""What was asked for on the command line, or what a model's sites are, as kernel specs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnres_compile.config import AttnResConfig
from attnres_compile.errors import NoStreamError, TargetError
from attnres_compile.kernels.spec import ACCUMULATE, FRESH, KINDS, KernelSpec
from attnres_compile.report import Stream

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
FUSIONS = ("add", "rmsnorm", "layernorm")


@dataclass(frozen=True)
class Wanted:
    """What the options say of every kernel.

    Attributes:
        kind: see :class:`~attnres_compile.kernels.spec.KernelSpec`.
        fuse: of :data:`FUSIONS`.
        directions: of ``"forward"`` and ``"backward"``.
        keep: the forward stores what the backward needs.
        accumulate: the backward adds to gradients that are there.
        gain: ``"mean"`` or ``"sum"``.
        eps, scale: see the spec.
        value: ``"raw"`` or ``"normalized"``.
        strided: see the spec.

    Raises:
        TargetError: an unknown word, or a contradiction.
    """

    kind: str = "mix"
    fuse: tuple[str, ...] = ()
    directions: tuple[str, ...] = ("forward",)
    keep: bool = False
    accumulate: bool = False
    gain: str = "mean"
    eps: float = 1e-6
    scale: float = 1.0
    value: str = "raw"
    strided: bool = False

    def __post_init__(self) -> None:
        kinds = tuple(kind for kind in KINDS if kind != "norm")
        _among("--kind", self.kind, kinds)
        _among("--gain", self.gain, ("mean", "sum"))
        _among("--value", self.value, ("raw", "normalized"))
        for part in self.fuse:
            _among("--fuse", part, FUSIONS)
        if len(self.norms) > 1:
            raise TargetError("--fuse rmsnorm and --fuse layernorm contradict each other", remedy="Give one")
        if self.fuse and self.kind == "inter":
            raise TargetError("--kind inter has no neighbours to fuse", remedy="Leave --fuse out")
        if "add" in self.fuse and self.directions == ("backward",):
            raise TargetError(
                "the backward of a fused add is the same kernel as without it",
                remedy="Leave add out of --fuse, or say --train for both directions",
            )
        if self.accumulate and "backward" not in self.directions:
            raise TargetError("--accumulate is for gradients", remedy="Say --backward or --train too")

    @property
    def norms(self) -> list[str]:
        """The norms to fuse; at most one."""
        return [part for part in dict.fromkeys(self.fuse) if part != "add"]

    def specs(self, sources: int, queries: int, dim: int, dtype: str) -> list[KernelSpec]:
        """One spec per direction, for a site with that many sources in all.

        Raises:
            KernelError: no kernel computes it.
        """
        norm = "".join(self.norms)
        common: dict[str, Any] = {
            "kind": self.kind,
            "sources": 1 if self.kind == "merge" else sources,
            "dim": dim,
            "dtype": dtype,
            "queries": queries,
            "gain": float(sources) if self.gain == "sum" and self.kind != "inter" else 1.0,
            "eps": self.eps,
            "scale": self.scale,
            "normalized": self.value == "normalized",
            "norm": norm,
            "norm_weight": dtype if norm else None,
            "norm_bias": dtype if norm == "layernorm" else None,
            "strided": self.strided,
        }
        letter = ACCUMULATE if self.accumulate else FRESH
        own: dict[str, dict[str, Any]] = {
            "forward": {"branch_dtype": dtype if "add" in self.fuse else None, "keep": self.keep},
            "backward": {"backward": True, "gradients": letter * common["sources"]},
        }
        return [KernelSpec(**common, **own[direction]) for direction in self.directions]


def of_site(wanted: Wanted, sources: int | None, dim: int | None, dtype: str, queries: int | None) -> list[KernelSpec]:
    """The specs of one site given by its numbers.

    Raises:
        TargetError: a number is missing, not positive, or of no use for the kind.
        KernelError: no kernel computes it.
    """
    if dim is None or (sources is None and wanted.kind != "merge"):
        missing = "--dim" if dim is None and sources is not None else "--sources and --dim, or TARGET"
        raise TargetError(f"say {missing}", remedy="For example: attnres kernels --sources 9 --dim 2048")
    if queries is not None and wanted.kind != "inter":
        raise TargetError("--queries is for --kind inter", remedy="The other kinds have one query")
    numbers = {"--sources": sources or 1, "--dim": dim, "--queries": queries or 1}
    numbers |= {"--sources": sources} if sources is not None else {}
    numbers |= {"--queries": queries} if queries is not None else {}
    for name, number in numbers.items():
        if number < 1:
            raise TargetError(f"{name} must be at least 1, not {number}")
    return wanted.specs(numbers["--sources"], numbers["--queries"], dim, dtype_of(dtype))


def of_model(
    target: str,
    inputs: Sequence[str],
    settings: Sequence[str],
    wanted: Wanted,
    dtype: str | None,
    num_blocks: int | None,
    block_size: int | None,
) -> list[KernelSpec]:
    """The specs of a model's sites, each once, in the order in which they are met.

    Raises:
        NoStreamError: the model has no residual stream that can be converted.
        AttnResError: as ``attnres inspect``.
    """
    from attnres_compile.cli.targets import load_target

    given: dict[str, Any] = {
        name: value for name, value in (("num_blocks", num_blocks), ("block_size", block_size)) if value
    }
    config = AttnResConfig(**given)
    chosen = dtype_of(dtype) if dtype is not None else None
    loaded = load_target(target, inputs, settings, weights=False)
    report = loaded.explain(config)
    if not report.streams:
        raise NoStreamError(f"no residual stream of {loaded.name} can be converted", report=report)
    name = chosen or _model_dtype(loaded.model)
    specs = [
        spec
        for stream in report.streams
        for sources, queries in _sites(stream, wanted.kind)
        for spec in wanted.specs(sources, queries, stream.feature_dim, name)
    ]
    return list(dict.fromkeys(specs))


def _sites(stream: Stream, kind: str) -> Iterator[tuple[int, int]]:
    """Numbers of sources and queries of the kernels of a stream's sites; a bypass needs none."""
    sites = [site for site in stream.sites if site.query is not None]
    finished = [tuple(name for name in site.sources if not name.startswith("partial")) for site in sites]
    for site, blocks in zip(sites, finished, strict=True):
        if kind == "inter":
            yield len(blocks), finished.count(blocks)
        elif kind == "mix" or len(site.sources) > len(blocks):
            yield len(site.sources), 1


def dtype_of(text: str) -> str:
    """``bf16`` or ``bfloat16`` as the spec names it.

    Raises:
        TargetError: another word.
    """
    found = DTYPES.get(text, text)
    _among("--dtype", found, tuple(DTYPES.values()), f"{', '.join(DTYPES)}")
    return found


def _model_dtype(model: torch.nn.Module) -> str:
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        if name in DTYPES.values():
            return name
    raise TargetError("the model has no parameter of a type that kernels compute with", remedy="Say --dtype")


def _among(option: str, given: str, known: Sequence[str], shown: str = "") -> None:
    if given not in known:
        raise TargetError(f"{option} {given!r} is none of {shown or ', '.join(known)}")
