"""The matrix of kernels that docs/kernels.md is made of: many specs on many architectures, in several processes."""

from __future__ import annotations

import concurrent.futures
import hashlib
import itertools
import json
import multiprocessing
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from attnres_compile.cli.kernels import tables
from attnres_compile.cli.kernels.specs import DTYPES, Wanted
from attnres_compile.errors import AttnResError, KernelError, TargetError
from attnres_compile.kernels.inspection.site import inspect_site, label, site_texts, warp_size
from attnres_compile.kernels.spec import KernelSpec

MATRICES = ("sampled", "full")
SOURCES = (2, 5, 9, 17, 33)
DIMS = (768, 1024, 2048, 4096, 7168, 8192)
MATRIX_DTYPES = ("bf16", "fp32")
# Queries of a batched first phase.
QUERIES = 8
_NORMS: tuple[tuple[str, ...], ...] = ((), ("rmsnorm",), ("layernorm",))
_FUSIONS = _NORMS + tuple(("add", *norm) for norm in _NORMS)
_SAMPLE = 36
# Lines of progress where there is no terminal.
_LOG_EVERY = 20


def full_matrix() -> list[KernelSpec]:
    """Kind x fusion x N x D x dtype, both directions; the forward keeps what the backward needs."""
    return list(dict.fromkeys(_all()))


def _all() -> Iterator[KernelSpec]:
    for dim, dtype, sources in itertools.product(DIMS, MATRIX_DTYPES, SOURCES):
        for kind in ("mix", "inter", "merge"):
            queries = QUERIES if kind == "inter" else 1
            for fuse in _FUSIONS if kind != "inter" else ((),):
                wanted = Wanted(kind=kind, fuse=fuse, keep=kind == "mix")
                yield from wanted.specs(sources, queries, dim, DTYPES[dtype])
            for fuse, accumulate in itertools.product(_NORMS if kind != "inter" else ((),), (False, True)):
                wanted = Wanted(kind=kind, fuse=fuse, directions=("backward",), accumulate=accumulate)
                yield from wanted.specs(sources, queries, dim, DTYPES[dtype])


def sampled_matrix() -> list[KernelSpec]:
    """A fixed spread over the full matrix, with the corners where registers run out."""
    every = full_matrix()
    corners = [
        spec
        for spec in every
        if spec.dim == DIMS[-1]
        and spec.sources in (1, SOURCES[-1])
        and spec.dtype == "bfloat16"
        and not spec.norm
        and spec.branch_dtype is None
    ]
    spread = random.Random(0).sample(every, _SAMPLE)
    return [spec for spec in every if spec in {*corners, *spread}]


def run_matrix(name: str, architectures: Sequence[str], jobs: int, out: Path | None) -> list[dict[str, Any]]:
    """Compiles a matrix; progress goes to standard error.

    Args:
        name: of :data:`MATRICES`.
        architectures: what to compile for.
        jobs: number of processes.
        out: where ``matrix.jsonl`` keeps finished rows. Those of kernels whose text is the same are not made again.

    Raises:
        TargetError: an unknown matrix, or no process.
        AttnResError: kernels that do not compile, named after all others were.
    """
    if name not in MATRICES:
        raise TargetError(f"--matrix {name!r} is none of {', '.join(MATRICES)}")
    if jobs < 1:
        raise TargetError(f"--jobs must be at least 1, not {jobs}")
    specs = full_matrix() if name == "full" else sampled_matrix()
    wanted = {_key(spec, arch): (spec, arch) for spec in specs for arch in architectures}
    journal = out / "matrix.jsonl" if out is not None else None
    rows = {key: row for key, row in _read(journal) if key in wanted}
    failures = _compile_all({key: item for key, item in wanted.items() if key not in rows}, rows, jobs, journal)
    found = [rows[key] for key in wanted if key in rows]
    console = Console(stderr=True, highlight=False)
    console.print(tables.summary(found), soft_wrap=True)
    if failures:
        raise AttnResError(f"kernels that do not compile: {len(failures)}; the first: {failures[0]}")
    return found


def _compile_all(
    todo: dict[str, tuple[KernelSpec, str]], rows: dict[str, dict[str, Any]], jobs: int, journal: Path | None
) -> list[str]:
    """Compiles and adds to ``rows``, which the journal follows; returns what failed."""
    failures: list[str] = []
    if not todo:
        return failures
    console = Console(stderr=True, highlight=False)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    # Not forked: PyTorch's threads would be missing there.
    context = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(min(jobs, len(todo)), mp_context=context) as pool,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("compiling", total=len(todo))
        running = {pool.submit(_compile_one, spec, arch): key for key, (spec, arch) in todo.items()}
        try:
            for done, future in enumerate(concurrent.futures.as_completed(running), 1):
                key, outcome = running[future], future.result()
                progress.advance(task)
                if not console.is_terminal and (done % _LOG_EVERY == 0 or done == len(todo)):
                    console.print(f"{done} of {len(todo)} compiled")
                if isinstance(outcome, str):
                    failures.append(outcome)
                    continue
                rows[key] = outcome
                _append(journal, {"key": key, "row": outcome})
        except BaseException:
            # Ctrl-C should not wait for the hours that are left.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failures


def _compile_one(spec: KernelSpec, arch: str) -> dict[str, Any] | str:
    """One row, or what went wrong."""
    try:
        return inspect_site(spec, arch).to_dict()
    except KernelError as error:
        return f"{label(spec)} for {arch}: {error}"


def _key(spec: KernelSpec, arch: str) -> str:
    texts = "\n".join(text for _, _, text in site_texts(spec, warp_size(arch)))
    return f"{label(spec)} {arch} {hashlib.sha256(texts.encode()).hexdigest()[:16]}"


def _read(journal: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    if journal is None or not journal.exists():
        return
    for line in journal.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # the line that was being written when the last run was stopped
            continue
        yield entry["key"], entry["row"]


def _append(journal: Path | None, entry: dict[str, Any]) -> None:
    if journal is None:
        return
    journal.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a") as file:
        file.write(json.dumps(entry) + "\n")
