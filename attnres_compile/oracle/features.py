"""Which dimension of a state holds its features: asked of what reads it.

A norm says so by what it normalises, a learned vector by where it varies, a contraction with weights by the dimension
that it sums over, and a mean that is kept as a dimension (a norm written by hand, or pooling) as well. They are
believed in this order; readers of one kind that say different things say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from attnres_compile.oracle.events import Call, is_float

NORM, VECTOR, CONTRACTION, MEAN = range(4)

# Functions that normalise their first argument over the last dimensions, and those that keep dimension 1.
_LAST = {"layer_norm": "normalized_shape", "rms_norm": "normalized_shape"}
_FIRST = {"batch_norm", "group_norm"}
_MEANS = {"mean", "var", "std", "var_mean", "std_mean", "norm", "vector_norm", "linalg_vector_norm", "sum"}
_LINEAR = {"linear", "bilinear", "lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward"}
_CONVOLUTIONS = {f"conv{n}d" for n in (1, 2, 3)} | {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
_PRODUCTS = {"matmul", "__matmul__", "bmm", "mm", "mv", "__rmatmul__"}
_PLUS_PRODUCTS = {"addmm", "baddbmm"}
_TIMES = {"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"}


def votes(call: Call, slot: int, is_weight: Any) -> Iterator[tuple[int, int]]:
    """Kind and dimension (of the tensor in ``slot``) that one reading call speaks for.

    Args:
        call: what reads.
        slot: which of its arguments is read.
        is_weight: whether a tensor is made of parameters and constants alone.
    """
    value: Tensor = call.leaves[slot]
    name, rank = call.name, value.dim()
    position = call.slots.index(slot)
    others = [call.leaves[other] for other in call.slots if other != slot]
    if name in _LAST and position == 0:
        sizes = call.argument(1, _LAST[name])
        if isinstance(sizes, (tuple, list)) and len(sizes) == 1:
            yield NORM, rank - 1
    elif name in _FIRST and position == 0 and rank > 1:
        yield NORM, 1
    elif name == "normalize" and position == 0:
        dim = call.argument(2, "dim", 1)
        if isinstance(dim, int):
            yield NORM, dim % rank
    elif name in _MEANS and position == 0:
        yield from _mean(call, rank)
    elif name in _TIMES and len(others) == 1:
        other = others[0]
        wide = [dim for dim, size in enumerate(other.shape) if size > 1]
        if len(wide) == 1 and is_float(other) and is_weight(other):
            dim = wide[0] - other.dim() + rank
            if dim >= 0 and value.shape[dim] == other.shape[wide[0]]:
                yield VECTOR, dim
    elif name in _LINEAR and position == 0:
        yield CONTRACTION, rank - 1
    elif name in _CONVOLUTIONS and position == 0:
        weight = call.argument(1, "weight")
        if weight.dim() > 1 and (name.startswith("conv_t") or weight.shape[1] > 1):
            yield CONTRACTION, rank - weight.dim() + 1
    elif name in _PRODUCTS and len(others) == 1 and is_weight(others[0]):
        first = (position == 0) != (name == "__rmatmul__")
        yield CONTRACTION, rank - 1 if first or rank == 1 else rank - 2
    elif name in _PLUS_PRODUCTS and position > 0 and is_weight(others[-1 if position == 1 else -2]):
        yield CONTRACTION, rank - 1 if position == 1 else rank - 2
    elif name == "einsum" and others and all(map(is_weight, others)):
        yield from _einsum(call, position)


def _mean(call: Call, rank: int) -> Iterator[tuple[int, int]]:
    dim = (
        call.argument(2, "dim")
        if call.name in ("norm", "linalg_vector_norm", "vector_norm")
        else call.argument(1, "dim")
    )
    keeps = any(leaf is True for leaf in call.leaves)
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if keeps and isinstance(dim, int) and not isinstance(dim, bool):
        yield MEAN, dim % rank


def _einsum(call: Call, position: int) -> Iterator[tuple[int, int]]:
    equation = call.leaves[0]
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return
    left, right = equation.replace(" ", "").split("->")
    for dim, letter in enumerate(left.split(",")[position]):
        if letter not in right:
            yield CONTRACTION, dim


def decided(found: Sequence[tuple[int, int]]) -> tuple[int | None, str, bool]:
    """The dimension that votes speak for, or why there is none, and whether norms or contractions contradict there."""
    told = ""
    contradicts = False
    for kind, name in enumerate(("norms", "learned vectors", "contractions", "means")):
        dims = {dim for each, dim in found if each == kind}
        if len(dims) == 1:
            return dims.pop(), "", False
        if dims:
            told = told or f"{name} that read it speak for dimensions {', '.join(map(str, sorted(dims)))}"
            contradicts = contradicts or kind in (NORM, CONTRACTION)
    return None, told or "nothing that reads it says which dimension holds the features", contradicts


def is_parameter(value: Tensor) -> bool:
    """Whether it is a parameter itself."""
    return isinstance(value, nn.Parameter)
