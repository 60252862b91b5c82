"""``attnres kernels``: which kernels a site or a model's sites become, their text, and what they compile to."""

from __future__ import annotations

import contextlib
import json as json_
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from attnres_compile.cli import output
from attnres_compile.cli.kernels import tables
from attnres_compile.cli.kernels.matrix import MATRICES, run_matrix
from attnres_compile.cli.kernels.specs import DTYPES, Wanted, of_model, of_site
from attnres_compile.cli.options import takes_output
from attnres_compile.cli.output import Output
from attnres_compile.errors import AttnResError, TargetError
from attnres_compile.kernels.inspection.kernel import ARCHITECTURES, OTHERS
from attnres_compile.kernels.inspection.site import SiteFacts, inspect_site, label, site_texts, warp_size
from attnres_compile.kernels.spec import KernelSpec

_SITE, _RESULT, _MODEL = "The site", "The result", "With TARGET"


def _option(*flags: str, text: str, panel: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(*flags, help=text, metavar=metavar, rich_help_panel=panel, show_default=False, **more)


@takes_output
def kernels(
    out: Output,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET]",
            show_default=False,
            help="script.py, script.py:NAME or package.module:NAME, as for inspect: the kernels of a model's sites.",
        ),
    ] = None,
    sources: Annotated[int | None, _option("--sources", text="Number of sources.", panel=_SITE, metavar="N")] = None,
    dim: Annotated[int | None, _option("--dim", text="Number of features.", panel=_SITE, metavar="D")] = None,
    dtype: Annotated[
        str | None,
        _option("--dtype", text="bf16 (default), fp16 or fp32; a model's own with TARGET.", panel=_SITE, metavar="T"),
    ] = None,
    kind: Annotated[
        str,
        _option(
            "--kind",
            text="mix (default): one read over all sources; inter: several queries in one pass, phase 1 of two; "
            "merge: phase 2, the running sum joins.",
            panel=_SITE,
            metavar="KIND",
        ),
    ] = "mix",
    fuse: Annotated[
        str | None,
        _option(
            "--fuse",
            text="Neighbours in the same kernel, with commas: add (the residual add before), rmsnorm or layernorm "
            "(the norm after).",
            panel=_SITE,
            metavar="LIST",
        ),
    ] = None,
    queries: Annotated[
        int | None, _option("--queries", text="Number of queries of inter.", panel=_SITE, metavar="S")
    ] = None,
    backward: Annotated[bool, _option("--backward", text="The gradients' kernel.", panel=_SITE)] = False,
    train: Annotated[
        bool, _option("--train", text="Both directions; the forward keeps what the other needs.", panel=_SITE)
    ] = False,
    accumulate: Annotated[
        bool, _option("--accumulate", text="Gradients are added to ones that are there.", panel=_SITE)
    ] = False,
    gain: Annotated[
        str, _option("--gain", text="mean (default): convex; sum: times the number of sources.", panel=_SITE)
    ] = "mean",
    eps: Annotated[float, _option("--eps", text="In the key norm; 1e-6 if unsaid.", panel=_SITE, metavar="X")] = 1e-6,
    logit_scale: Annotated[
        float, _option("--logit-scale", text="Factor on the logits; 1 if unsaid.", panel=_SITE, metavar="X")
    ] = 1.0,
    value: Annotated[str, _option("--value", text="raw (default) or normalized.", panel=_SITE)] = "raw",
    strided: Annotated[bool, _option("--strided", text="Rows with a stride of their own.", panel=_SITE)] = False,
    num_blocks: Annotated[
        int | None, _option("--num-blocks", text="Blocks per stream.", panel=_MODEL, metavar="N")
    ] = None,
    block_size: Annotated[
        int | None, _option("--block-size", text="Sublayers per block.", panel=_MODEL, metavar="S")
    ] = None,
    input: Annotated[
        list[str] | None,
        _option("--input", text="As for inspect; once per input.", panel=_MODEL, metavar="SPEC"),
    ] = None,
    set_: Annotated[
        list[str] | None,
        _option("--set", text="As for inspect; once per field.", panel=_MODEL, metavar="NAME=VALUE"),
    ] = None,
    arch: Annotated[
        list[str] | None,
        _option(
            "--arch",
            text=f"Compile for it, here: {', '.join(ARCHITECTURES)}, or all for these four; also {', '.join(OTHERS)}. "
            "May be given more than once. No GPU is needed.",
            panel=_RESULT,
            metavar="ARCH",
        ),
    ] = None,
    table: Annotated[bool, _option("--table", text="Leave the source out.", panel=_RESULT)] = False,
    markdown: Annotated[bool, _option("--markdown", text="Print the table as Markdown.", panel=_RESULT)] = False,
    folder: Annotated[
        Path | None,
        _option(
            "--out",
            text="Also write sources, PTX or AMD GPU assembly, table.json and table.md into this folder.",
            panel=_RESULT,
            metavar="DIR",
        ),
    ] = None,
    matrix: Annotated[
        str | None,
        _option(
            "--matrix",
            text="Compile a set of kernels instead: sampled (some dozens) or full (hours). With --out it goes on where "
            "it was stopped.",
            panel=_RESULT,
            metavar="|".join(MATRICES),
        ),
    ] = None,
    jobs: Annotated[
        int, _option("--jobs", text="Processes that --matrix compiles in; 2 if unsaid.", panel=_RESULT, metavar="N")
    ] = 2,
) -> None:
    """Print the generated Triton kernels of a site or of a model, and compile them without a GPU.

    Example: attnres kernels --sources 9 --dim 2048 --fuse rmsnorm --arch sm_90
    """
    site = {"--sources": sources, "--dim": dim, "--queries": queries}
    said = [name for name, given in site.items() if given is not None]
    architectures = _architectures(arch or ())
    if out.json and markdown:
        raise TargetError("--json and --markdown contradict each other", remedy="Give one")
    if matrix is not None:
        if target is not None or said:
            raise TargetError(f"--matrix and {target or said[0]} contradict each other", remedy="Give one")
        rows = run_matrix(matrix, architectures or list(ARCHITECTURES), jobs, folder)
        _finish(rows, out, markdown, folder, matrix=matrix)
        return
    wanted = Wanted(
        kind=kind,
        fuse=tuple(part.strip() for part in (fuse or "").split(",") if part.strip()),
        directions=("forward", "backward") if train else ("backward",) if backward else ("forward",),
        keep=train,
        accumulate=accumulate,
        gain=gain,
        eps=eps,
        scale=logit_scale,
        value=value,
        strided=strided,
    )
    if target is not None:
        if said:
            raise TargetError(f"TARGET and {said[0]} contradict each other", remedy="A model says it itself")
        with out.working("tracing the model"):
            specs = of_model(target, input or (), set_ or (), wanted, dtype, num_blocks, block_size)
    else:
        extra = [
            name
            for name, given in (
                ("--num-blocks", num_blocks),
                ("--block-size", block_size),
                ("--input", input),
                ("--set", set_),
            )
            if given
        ]
        if extra:
            raise TargetError(f"{extra[0]} needs TARGET", remedy="Without one, say --sources and --dim")
        specs = of_site(wanted, sources, dim, dtype or next(iter(DTYPES)), queries)
    with out.working("compiling kernels"):
        found = _compile(specs, architectures)
    rows = [facts.to_dict() for facts in found]
    if not architectures and (out.json or markdown or table):
        if not out.json:
            raise TargetError("a table needs --arch", remedy=f"Say --arch {ARCHITECTURES[1]}")
        rows = [_text_row(spec) for spec in specs]
    elif not (out.json or markdown or table):
        for spec in specs:
            # AMD's warps are wider, so its kernels may be laid out in another way.
            size = 64 if architectures and all(warp_size(name) == 64 for name in architectures) else 32
            for text in dict.fromkeys(text for _, _, text in site_texts(spec, size)):
                output.show_source(text)
    _finish(rows, out, markdown, folder, specs, found)


def _architectures(given: Sequence[str]) -> list[str]:
    """The architectures asked for, each once."""
    listed = [name for part in given for name in (ARCHITECTURES if part == "all" else (part,))]
    for name in listed:
        if name not in ARCHITECTURES + OTHERS:
            known = f"Known are {', '.join(ARCHITECTURES)}, all for these four; {', '.join(OTHERS)}"
            raise TargetError(f"unknown architecture {name!r}", remedy=known)
    return list(dict.fromkeys(listed))


def _compile(specs: Iterable[KernelSpec], architectures: Sequence[str]) -> list[SiteFacts]:
    return [inspect_site(spec, name) for spec in specs for name in architectures]


def _text_row(spec: KernelSpec) -> dict[str, Any]:
    texts = site_texts(spec)
    return {"kernel": label(spec), "launches": len(texts), "sources": [text for _, _, text in texts]}


def _finish(
    rows: list[dict[str, Any]],
    out: Output,
    markdown: bool,
    folder: Path | None,
    specs: Sequence[KernelSpec] = (),
    found: Sequence[SiteFacts] = (),
    matrix: str | None = None,
) -> None:
    if folder is not None:
        with _writing(folder):
            _write(folder, specs, found)
            if rows and "arch" in rows[0]:
                (folder / "table.json").write_text(json_.dumps(rows, indent=2) + "\n")
                (folder / "table.md").write_text(tables.document(rows, matrix))
    if out.json:
        output.show_json(rows)
    elif markdown:
        sys.stdout.write(tables.document(rows, matrix))
    elif rows:
        output.show(tables.rich_tables(rows))


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise AttnResError(f"the kernels cannot be written to {out}: {error}") from error


def _write(out: Path, specs: Sequence[KernelSpec], found: Sequence[SiteFacts]) -> None:
    """Sources as they are for NVIDIA's warps, others beside the assembly that they gave."""
    texts = {spec: list(dict.fromkeys(text for _, _, text in site_texts(spec))) for spec in specs}
    for spec, listed in texts.items():
        for number, text in enumerate(listed):
            (out / _file(label(spec), number, ".py")).write_text(text)
    for facts in found:
        name = f"{label(facts.spec)}-{facts.arch}"
        for number, kernel in enumerate(dict.fromkeys(facts.launches)):
            suffix = ".amdgcn" if warp_size(facts.arch) == 64 else ".ptx"
            (out / _file(name, number, suffix)).write_text(kernel.assembly)
            if kernel.source not in texts[facts.spec]:
                (out / _file(name, number, ".py")).write_text(kernel.source)


def _file(name: str, number: int, suffix: str) -> str:
    return f"{name}{f'_{number + 1}' if number else ''}{suffix}"
