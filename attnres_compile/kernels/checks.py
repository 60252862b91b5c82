"""What the operators refuse: arguments that broadcasting would silently accept, and lists that do not belong together.

Every check raises ``ValueError``. :data:`CHECKS` has one per operator, which takes its arguments in the schema's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from attnres_compile.kernels.plain import UNWANTED
from attnres_compile.kernels.plain_phases import token_shape

NORMS = ("", "rmsnorm", "layernorm")


def _sources(name: str, sources: Sequence[Tensor]) -> None:
    if not sources:
        raise ValueError(f"attnres::{name} needs at least one source")
    first = sources[0]
    if not first.is_floating_point():
        raise ValueError(f"attnres::{name} needs floating-point sources, not {first.dtype}")
    for source in sources:
        if source.shape != first.shape or source.dtype != first.dtype:
            raise ValueError(
                f"attnres::{name} needs sources of one shape and dtype, not "
                f"{tuple(first.shape)} {first.dtype} and {tuple(source.shape)} {source.dtype}"
            )


def _features(name: str, what: str, vector: Tensor, source: Tensor, dim: int) -> None:
    if vector.dim() != 1 or vector.shape[0] != source.shape[dim]:
        raise ValueError(
            f"attnres::{name} needs a {what} of shape [{source.shape[dim]}], the size of dimension {dim} of its "
            f"sources, not {tuple(vector.shape)}"
        )


def _like(name: str, what: str, value: Tensor, source: Tensor, same_dtype: bool = False) -> None:
    if value.shape != source.shape or (same_dtype and value.dtype != source.dtype):
        raise ValueError(
            f"attnres::{name} needs a {what} like its sources, {tuple(source.shape)} {source.dtype}, "
            f"not {tuple(value.shape)} {value.dtype}"
        )


def _per_token(name: str, what: str, value: Tensor, source: Tensor, dim: int) -> None:
    shape = token_shape(source, dim)
    if list(value.shape) != shape:
        raise ValueError(
            f"attnres::{name} needs a {what} of shape {shape}, one number per token, not {list(value.shape)}"
        )


def _slots(name: str, sources: Sequence[Tensor], accumulated: Sequence[Tensor], slots: Sequence[int]) -> None:
    if len(slots) != len(sources):
        raise ValueError(f"attnres::{name} needs one slot per source, {len(sources)}, not {len(slots)}")
    if any(not UNWANTED <= slot < len(accumulated) for slot in slots):
        raise ValueError(f"attnres::{name} has slots {list(slots)} for {len(accumulated)} accumulated gradients")
    for value in accumulated:
        _like(name, "accumulated gradient", value, sources[0])


def _read(name: str, queries: Sequence[Tensor], sources: Sequence[Tensor], dim: int) -> None:
    _sources(name, sources)
    if not queries:
        raise ValueError(f"attnres::{name} needs at least one query")
    for query in queries:
        _features(name, "query", query, sources[0], dim)


def _merged(name: str, mixed: Tensor, lse: Tensor, partial: Tensor, dim: int) -> None:
    _like(name, "mix", mixed, partial, same_dtype=True)
    _per_token(name, "log-sum-exp", lse, partial, dim)


def _whole(
    name: str,
    query: Tensor,
    sources: Sequence[Tensor],
    mixed: Tensor | None,
    lse: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: str,
    dim: int,
) -> None:
    _read(name, [query], sources, dim)
    if mixed is not None and lse is not None:
        if len(sources) != 1:
            raise ValueError(f"attnres::{name} merges a mix with exactly one source, not {len(sources)}")
        _merged(name, mixed, lse, sources[0], dim)
    elif mixed is not None or lse is not None:
        raise ValueError(f"attnres::{name} needs a mix and its log-sum-exp together, or neither")
    if norm not in NORMS:
        raise ValueError(f"attnres::{name} knows the norms {', '.join(map(repr, NORMS))}, not {norm!r}")
    takes_weight, takes_bias = norm != "", norm == "layernorm"
    for what, vector, takes in (("norm weight", norm_weight, takes_weight), ("norm bias", norm_bias, takes_bias)):
        if vector is not None:
            if not takes:
                raise ValueError(f"attnres::{name} takes no {what} for the norm {norm!r}")
            _features(name, what, vector, sources[0], dim)


def mix(query: Tensor, sources: Sequence[Tensor], dim: int, *_: Any) -> None:
    """Arguments of ``attnres::mix``."""
    _read("mix", [query], sources, dim)


def _inter(queries: Sequence[Tensor], sources: Sequence[Tensor], dim: int, *_: Any) -> None:
    _read("inter", queries, sources, dim)


def _inter_backward(
    grads: Sequence[Tensor],
    queries: Sequence[Tensor],
    sources: Sequence[Tensor],
    mixes: Sequence[Tensor],
    lses: Sequence[Tensor],
    accumulated: Sequence[Tensor],
    slots: Sequence[int],
    dim: int,
    *_: Any,
) -> None:
    name, count = "inter_backward", len(queries)
    _read(name, queries, sources, dim)
    if (len(grads), len(mixes), len(lses)) != (2 * count, count, count):
        raise ValueError(
            f"attnres::{name} needs {2 * count} gradients, {count} mixes and {count} log-sum-exps for {count} "
            f"queries, not {len(grads)}, {len(mixes)} and {len(lses)}"
        )
    for value in (*grads[:count], *mixes):
        _like(name, "mix, and gradient of one,", value, sources[0])
    for value in (*grads[count:], *lses):
        _per_token(name, "log-sum-exp, and gradient of one,", value, sources[0], dim)
    _slots(name, sources, accumulated, slots)


def _merge(query: Tensor, mixed: Tensor, lse: Tensor, partial: Tensor, dim: int, *_: Any) -> None:
    _read("merge", [query], [partial], dim)
    _merged("merge", mixed, lse, partial, dim)


def _merge_backward(
    grad: Tensor, query: Tensor, mixed: Tensor, lse: Tensor, partial: Tensor, dim: int, *_: Any
) -> None:
    _read("merge_backward", [query], [partial], dim)
    _merged("merge_backward", mixed, lse, partial, dim)
    _like("merge_backward", "gradient", grad, partial)


def _site(*arguments: Any) -> None:
    query, sources, mixed, lse, branch, norm_weight, norm_bias, norm, _, dim, *_ = arguments
    _whole("site", query, sources, mixed, lse, norm_weight, norm_bias, norm, dim)
    if branch is not None:
        _like("site", "branch", branch, sources[0])


def _site_backward(*arguments: Any) -> None:
    grad, query, sources, mixed, lse, norm_weight, norm_bias, h, total, accumulated, slots, norm, _, dim, *_ = arguments
    name = "site_backward"
    _whole(name, query, sources, mixed, lse, norm_weight, norm_bias, norm, dim)
    _like(name, "gradient", grad, sources[0])
    if h is not None:
        _like(name, "mix", h, sources[0], same_dtype=True)
    if total is not None:
        _per_token(name, "log-sum-exp", total, sources[0], dim)
    _slots(name, sources, accumulated, slots)


CHECKS: dict[str, Callable[..., None]] = {
    "inter": _inter,
    "inter_backward": _inter_backward,
    "merge": _merge,
    "merge_backward": _merge_backward,
    "site": _site,
    "site_backward": _site_backward,
}
