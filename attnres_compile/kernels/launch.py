"""The operators on devices that generated kernels serve: pick specs, allocate results, launch.

Functions here have the arguments and results of the operators of the same names (see ``phase_ops.py``). They run the
kernels at once, and on tensors that are being traced they leave the launches in the graph (``wrap_triton``), so that
Inductor compiles them together with all else. In Triton's interpreter they take CPU tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnres_compile.kernels import tuning
from attnres_compile.kernels.rows import Rows, run
from attnres_compile.kernels.spec import (
    ACCUMULATE,
    FRESH,
    UNWANTED,
    KernelSpec,
    Norm,
    norm_statistics,
)

_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
# Values of ``slots`` as the operators have them; what is not negative counts in ``accumulated``.
_UNWANTED_SLOT, _FRESH_SLOT = -2, -1


def served(dtype: torch.dtype, dim_size: int, device: torch.device) -> bool:
    """Whether generated kernels take sources of ``dtype`` with ``dim_size`` features on ``device``."""
    if dtype not in _NAMES or dim_size < 1 or not _has_triton():
        return False
    return device.type == "cuda" or _interpreted()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


# ------------------------------------------------------------------ the operators


def site(
    query: Tensor,
    sources: Sequence[Tensor],
    mixed: Tensor | None,
    lse: Tensor | None,
    branch: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: Norm,
    norm_eps: float,
    dim: int,
    eps: float,
    gain: float,
    scale: float,
    normalized: bool,
    keep: bool,
) -> list[Tensor]:
    """One site: the partial sum's add, the mix or merge, and the norm that reads it, in one kernel."""
    rows = Rows(sources[0], dim)
    spec = dataclasses.replace(
        _spec("mix" if mixed is None else "merge", query, sources, eps, gain, scale, normalized, rows),
        branch_dtype=_dtype_name(branch),
        norm=norm,
        norm_eps=norm_eps,
        norm_weight=_dtype_name(norm_weight),
        norm_bias=_dtype_name(norm_bias),
        keep=keep,
    )
    if branch is not None:
        branch = branch.to(getattr(torch, str(spec.branch_dtype)))
    given = {"query0": query, "mixed": mixed, "branch": branch, "norm_weight": norm_weight, "norm_bias": norm_bias}
    values = {name: value for name, value in given.items() if value is not None}
    values |= {f"source{i}": source for i, source in enumerate(sources)}
    if lse is not None:
        values["lse"] = lse
    made = run(spec, values, rows)
    return [made[name] for name in ("out", "partial", "mix", "total") if name in made]


def site_backward(
    grad: Tensor,
    query: Tensor,
    sources: Sequence[Tensor],
    mixed: Tensor | None,
    lse: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    h: Tensor | None,
    total: Tensor | None,
    accumulated: Sequence[Tensor],
    slots: Sequence[int],
    norm: Norm,
    norm_eps: float,
    dim: int,
    eps: float,
    gain: float,
    scale: float,
    normalized: bool,
) -> list[Tensor]:
    """Gradients of one site; those of sources that later readers left gradients for are added to these."""
    rows = Rows(sources[0], dim)
    spec = dataclasses.replace(
        _spec("mix" if mixed is None else "merge", query, sources, eps, gain, scale, normalized, rows),
        backward=True,
        norm=norm,
        norm_eps=norm_eps,
        norm_weight=_dtype_name(norm_weight),
        norm_bias=_dtype_name(norm_bias),
        gradients=_letters(slots),
    )
    given = {
        "query0": query,
        "grad": grad.to(sources[0].dtype),
        "mixed": mixed,
        "mix": h,
        "lse": lse,
        "total": total,
        "norm_weight": norm_weight,
        "norm_bias": norm_bias,
    }
    values = {name: value for name, value in given.items() if value is not None}
    made: dict[str, Tensor] = {}
    sums: dict[str, list[Tensor]] = {}
    sources_seen = 0
    for part in tuning.plan(spec):
        if not part.backward:
            values["mix"] = run(part, {**values, "source0": sources[0]}, rows)["out"]
            continue
        group = range(sources_seen, sources_seen + part.sources)
        sources_seen += part.sources
        found = run(part, {**values, **_group(sources, accumulated, slots, group)}, rows, sums)
        for index, position in enumerate(group):
            if f"source_grad{index}" in found:
                made[f"source_grad{position}"] = found[f"source_grad{index}"]
        values |= {name: found[name] for name in norm_statistics(spec) if name in found}
        made |= {name: found[name] for name in ("mixed_grad", "lse_grad") if name in found}
    results = [_summed(sums, "query_sum0", query)]
    for name, parameter in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if parameter is not None:
            results.append(_summed(sums, f"{name}_sum", parameter))
    if mixed is not None:
        results += [made["mixed_grad"], made["lse_grad"]]
    return results + [made[f"source_grad{i}"] for i, slot in enumerate(slots) if slot != _UNWANTED_SLOT]


def inter(
    queries: Sequence[Tensor], sources: Sequence[Tensor], dim: int, eps: float, scale: float, normalized: bool
) -> list[Tensor]:
    """Phase 1: the mixes of all queries over the finished blocks, and their log-sum-exps."""
    rows = Rows(sources[0], dim)
    whole = _spec("inter", queries[0], sources, eps, 1.0, scale, normalized, rows)
    whole = dataclasses.replace(whole, queries=len(queries))
    values = {f"source{i}": source for i, source in enumerate(sources)}
    mixes: list[Tensor] = []
    lses: list[Tensor] = []
    for part in tuning.plan(whole):
        group = queries[len(mixes) : len(mixes) + part.queries]
        # Queries of one list may differ in dtype; the kernel takes one.
        same = [query.to(queries[0].dtype) for query in group]
        found = run(part, {**values, **{f"query{s}": query for s, query in enumerate(same)}}, rows)
        mixes += [found[f"mix{s}"] for s in range(part.queries)]
        lses += [found[f"lse{s}"] for s in range(part.queries)]
    return mixes + lses


def inter_backward(
    grads: Sequence[Tensor],
    queries: Sequence[Tensor],
    sources: Sequence[Tensor],
    mixes: Sequence[Tensor],
    lses: Sequence[Tensor],
    accumulated: Sequence[Tensor],
    slots: Sequence[int],
    dim: int,
    eps: float,
    scale: float,
    normalized: bool,
) -> list[Tensor]:
    """Gradients of phase 1: the queries', then each wanted source's."""
    rows = Rows(sources[0], dim)
    count = len(queries)
    whole = dataclasses.replace(
        _spec("inter", queries[0], sources, eps, 1.0, scale, normalized, rows),
        queries=count,
        backward=True,
        gradients=_letters(slots),
    )
    there: dict[int, Tensor] = {i: accumulated[slot] for i, slot in enumerate(slots) if slot >= 0}
    query_grads: list[Tensor] = []
    source_at = 0
    sums: dict[str, list[Tensor]] = {}
    for part in tuning.plan(whole):
        first = len(query_grads)
        values: dict[str, Tensor] = {}
        for s in range(part.queries):
            index = first + s
            values[f"query{s}"] = queries[index].to(queries[0].dtype)
            values[f"grad{s}"] = grads[index].to(sources[0].dtype)
            values[f"mix{s}"] = mixes[index]
            values[f"lse{s}"] = lses[index]
            values[f"lse_grad{s}"] = grads[count + index]
        for i in range(part.sources):
            values[f"source{i}"] = sources[source_at + i]
            if part.gradients[i] == ACCUMULATE:
                values[f"accumulated{i}"] = there[source_at + i]
        found = run(part, values, rows, sums)
        for i in range(part.sources):
            if f"source_grad{i}" in found:
                there[source_at + i] = found[f"source_grad{i}"]
        source_at += part.sources
        if source_at == len(sources):
            query_grads += [_summed(sums, f"query_sum{s}", queries[first + s]) for s in range(part.queries)]
            source_at, sums = 0, {}
    return query_grads + [there[i] for i, slot in enumerate(slots) if slot != _UNWANTED_SLOT]


# ------------------------------------------------------------------ specs


def _spec(
    kind: Any,
    query: Tensor,
    sources: Sequence[Tensor],
    eps: float,
    gain: float,
    scale: float,
    normalized: bool,
    rows: Rows,
) -> KernelSpec:
    return KernelSpec(
        kind=kind,
        sources=len(sources),
        dim=rows.width,
        dtype=_NAMES[sources[0].dtype],
        query_dtype=_NAMES.get(query.dtype, "float32"),
        gain=float(gain),
        eps=float(eps),
        scale=float(scale),
        normalized=bool(normalized),
    )


def _dtype_name(value: Tensor | None) -> str | None:
    return None if value is None else _NAMES.get(value.dtype, "float32")


def _letters(slots: Sequence[int]) -> str:
    return "".join(
        UNWANTED if slot == _UNWANTED_SLOT else FRESH if slot == _FRESH_SLOT else ACCUMULATE for slot in slots
    )


def _group(
    sources: Sequence[Tensor], accumulated: Sequence[Tensor], slots: Sequence[int], group: range
) -> dict[str, Tensor]:
    """The sources of one kernel and what is there of their gradients, under the kernel's own numbers."""
    values = {f"source{index}": sources[position] for index, position in enumerate(group)}
    for index, position in enumerate(group):
        if slots[position] >= 0:
            values[f"accumulated{index}"] = accumulated[slots[position]]
    return values


def _summed(sums: Mapping[str, list[Tensor]], name: str, parameter: Tensor) -> Tensor:
    """A parameter's gradient: the programs' rows in one order, whatever they ran in."""
    parts = sums[name]
    total = parts[0].sum(0)
    for part in parts[1:]:
        total = total + part.sum(0)
    return total.to(parameter.dtype)
