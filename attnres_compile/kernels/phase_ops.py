"""Operators for the two phases and for whole sites: schemas, shapes and the default implementations.

``attnres::inter`` and ``attnres::merge`` are Algorithm 1 of arXiv 2603.15031; ``attnres::site`` is a mix or a merge
with the addition before it and the norm after it. Each has its gradients as an operator of its own, which adds the
gradient of a source to one that is there already: see :data:`plain.UNWANTED` for ``slots``. Arguments and results are
described in :mod:`plain_phases`. Results never alias arguments or one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnres_compile.kernels import ops, plain_phases
from attnres_compile.kernels.checks import CHECKS
from attnres_compile.kernels.ops import LIBRARY
from attnres_compile.kernels.plain import UNWANTED

_PARAMETERS = "Tensor? norm_weight, Tensor? norm_bias"
_NORM = "str norm, float norm_eps"
_READ = "int dim, float eps, float gain, float scale, bool normalized"
_INTER = "int dim, float eps, float scale, bool normalized"
_GIVEN = "Tensor[] accumulated, int[] slots"

for _schema in (
    f"inter(Tensor[] queries, Tensor[] sources, {_INTER}) -> Tensor[]",
    "inter_backward(Tensor[] grads, Tensor[] queries, Tensor[] sources, Tensor[] mixes, Tensor[] lses, "
    f"{_GIVEN}, {_INTER}) -> Tensor[]",
    f"merge(Tensor query, Tensor mixed, Tensor lse, Tensor partial, {_READ}) -> Tensor",
    f"merge_backward(Tensor grad, Tensor query, Tensor mixed, Tensor lse, Tensor partial, {_READ}) -> Tensor[]",
    f"site(Tensor query, Tensor[] sources, Tensor? mixed, Tensor? lse, Tensor? branch, {_PARAMETERS}, {_NORM}, "
    f"{_READ}, bool keep) -> Tensor[]",
    f"site_backward(Tensor grad, Tensor query, Tensor[] sources, Tensor? mixed, Tensor? lse, {_PARAMETERS}, Tensor? h, "
    f"Tensor? total, {_GIVEN}, {_NORM}, {_READ}) -> Tensor[]",
):
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _wanted(sources: Sequence[Tensor], slots: Sequence[int]) -> list[Tensor]:
    return [torch.empty_like(source) for source, slot in zip(sources, slots, strict=True) if slot != UNWANTED]


def _inter_fake(queries: list[Tensor], sources: list[Tensor], dim: int, *_: Any) -> list[Tensor]:
    first = sources[0]
    mixes = [torch.empty_like(first) for _ in queries]
    return [*mixes, *(plain_phases.empty_per_token(first, dim) for _ in queries)]


def _inter_backward_fake(*arguments: Any) -> list[Tensor]:
    _, queries, sources, _, _, _, slots, *_ = arguments
    return [*(torch.empty_like(query) for query in queries), *_wanted(sources, slots)]


def _merge_fake(query: Tensor, mixed: Tensor, lse: Tensor, partial: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(partial)


def _merge_backward_fake(grad: Tensor, *inputs: Any) -> list[Tensor]:
    return [torch.empty_like(value) for value in inputs[:4]]


def _site_fake(*arguments: Any) -> list[Tensor]:
    _, sources, mixed, _, branch, _, _, norm, _, dim, *_, keep = arguments
    out = torch.empty_like(sources[0])
    found = [out] if branch is None else [out, torch.empty_like(sources[-1])]
    if keep and mixed is None:
        found += [torch.empty_like(out)] if norm else []
        found.append(plain_phases.empty_per_token(out, dim))
    return found


def _site_backward_fake(*arguments: Any) -> list[Tensor]:
    _, query, sources, mixed, lse, norm_weight, norm_bias, _, _, _, slots, *_ = arguments
    inputs = [value for value in (query, norm_weight, norm_bias, mixed, lse) if value is not None]
    return [*(torch.empty_like(value) for value in inputs), *_wanted(sources, slots)]


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, after the check of the operator's arguments."""

    def run(*arguments: Any) -> Any:
        CHECKS[name](*arguments)
        return function(*arguments)

    return run


# The default implementation of each operator, its arguments not checked.
PLAIN: dict[str, Callable[..., Any]] = {
    "inter": plain_phases.inter,
    "inter_backward": plain_phases.inter_backward,
    "merge": plain_phases.merge,
    "merge_backward": plain_phases.merge_backward,
    "site": plain_phases.site,
    "site_backward": plain_phases.site_backward,
}
_FAKE: dict[str, Callable[..., Any]] = {
    "inter": _inter_fake,
    "inter_backward": _inter_backward_fake,
    "merge": _merge_fake,
    "merge_backward": _merge_backward_fake,
    "site": _site_fake,
    "site_backward": _site_backward_fake,
}

for _name, _plain in PLAIN.items():
    LIBRARY.impl(_name, _checked(_name, _plain), "CompositeExplicitAutograd")
    torch.library.register_fake(f"attnres::{_name}", _checked(_name, _FAKE[_name]), lib=LIBRARY)
    ops.DECOMPOSITIONS[getattr(torch.ops.attnres, _name).default] = _plain
