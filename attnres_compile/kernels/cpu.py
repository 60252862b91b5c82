"""Depth attention on the CPU as one compiled function per direction, for any number of sources.

``templates/depth_mix.cpp`` is built once by the toolchain that Inductor uses, into Inductor's on-disk cache. Two
operators call it, both opaque to Inductor:

- ``attnres::mix_cpu`` computes what ``attnres::mix`` does;
- ``attnres::mix_cpu_backward`` computes its gradients and adds each to a gradient that is already there.

Where the library cannot be built, and for dtypes that it does not serve, they run the code of :mod:`plain`.
:func:`mix_through` joins the two under autograd so that the gradients of a source which many sites read are added
up inside the kernel instead of by an operator of their own.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import warnings
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnres_compile.kernels import differentiation, ops, plain

# How the library counts dtypes.
_KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
# Elements of all sources that make a thread worth waking, as in PyTorch's own loops.
_GRAIN = 32768
# Values of ``slots``, see _mix_cpu_backward; indices into ``accumulated`` follow.
UNWANTED = -2
FRESH = -1

ops.LIBRARY.define(
    "mix_cpu(Tensor query, Tensor[] sources, int dim, float eps, float gain, float scale, bool normalized) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
ops.LIBRARY.define(
    "mix_cpu_backward(Tensor grad, Tensor query, Tensor[] sources, Tensor[] accumulated, int[] slots, int dim, "
    "float eps, float gain, float scale, bool normalized) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, built at the first call (seconds, then cached on disk); ``None`` without a compiler."""
    from torch._inductor.codecache import CppCodeCache

    source = importlib.resources.files("attnres_compile.kernels") / "templates" / "depth_mix.cpp"
    try:
        loaded: ctypes.CDLL = CppCodeCache.load(source.read_text())
        forward, backward = loaded.attnres_forward, loaded.attnres_backward
    except Exception as error:  # The toolchain fails in its own ways; plain code serves all the same.
        warnings.warn(f"depth attention runs without its compiled CPU kernels: {error}", stacklevel=2)
        return None
    shape: list[Any] = [ctypes.c_int, *[ctypes.c_int64] * 3, *[ctypes.c_double] * 3, *[ctypes.c_int] * 2]
    forward.argtypes = [*shape, *[ctypes.c_void_p] * 3]
    backward.argtypes = [*shape, *[ctypes.c_void_p] * 6]
    return loaded


def served(dtype: torch.dtype) -> bool:
    """Whether the compiled kernels take sources of ``dtype``, and exist on this machine."""
    return dtype in _KINDS and library() is not None


def _mix_cpu(
    query: Tensor, sources: list[Tensor], dim: int, eps: float, gain: float, scale: float, normalized: bool
) -> Tensor:
    first = sources[0]
    kind = _KINDS.get(first.dtype)
    loaded = library()
    if kind is None or loaded is None:
        return plain.mix(query, sources, dim, eps, gain, scale, normalized)
    rows = _rows(sources, dim)
    query = query.to(plain.compute_dtype(first.dtype)).contiguous()
    out = torch.empty_like(rows[0])
    if out.numel():
        pointers = array("Q", [row.data_ptr() for row in rows])
        failed = loaded.attnres_forward(
            *_shape(kind, rows[0], len(rows), eps, gain, scale, normalized),
            query.data_ptr(),
            pointers.buffer_info()[0],
            out.data_ptr(),
        )
        if failed:
            raise MemoryError("attnres::mix_cpu ran out of memory")
    return out if rows[0] is first else plain.like(out.movedim(-1, dim), first)


def _mix_cpu_backward(
    grad: Tensor,
    query: Tensor,
    sources: list[Tensor],
    accumulated: list[Tensor],
    slots: list[int],
    dim: int,
    eps: float,
    gain: float,
    scale: float,
    normalized: bool,
) -> list[Tensor]:
    """The query's gradient, then the gradient of each wanted source.

    ``slots`` holds one number per source: ``UNWANTED``, ``FRESH``, or which of ``accumulated`` to add to.
    """
    first = sources[0]
    kind = _KINDS.get(first.dtype)
    loaded = library()
    if kind is None or loaded is None:
        return _mix_backward_plainly(grad, query, sources, accumulated, slots, dim, eps, gain, scale, normalized)
    rows = _rows(sources, dim)
    (grad_rows,) = _rows([grad.to(first.dtype)], dim)
    have = _rows([value.to(first.dtype) for value in accumulated], dim)
    give = [torch.empty_like(rows[0]) for slot in slots if slot != UNWANTED]
    wide = query.to(plain.compute_dtype(first.dtype)).contiguous()
    query_grad = torch.zeros_like(wide)
    if first.numel():
        writes = iter(give)
        pointers = array("Q", [row.data_ptr() for row in rows])
        reads = array("Q", [have[slot].data_ptr() if slot >= 0 else 0 for slot in slots])
        results = array("Q", [0 if slot == UNWANTED else next(writes).data_ptr() for slot in slots])
        failed = loaded.attnres_backward(
            *_shape(kind, rows[0], len(rows), eps, gain, scale, normalized),
            wide.data_ptr(),
            pointers.buffer_info()[0],
            grad_rows.data_ptr(),
            reads.buffer_info()[0],
            results.buffer_info()[0],
            query_grad.data_ptr(),
        )
        if failed:
            raise MemoryError("attnres::mix_cpu_backward ran out of memory")
    wanted = [source for source, slot in zip(sources, slots, strict=True) if slot != UNWANTED]
    grads = [
        value if rows[0] is first and source.is_contiguous() else plain.like(value.movedim(-1, dim), source)
        for value, source in zip(give, wanted, strict=True)
    ]
    return [query_grad.to(query.dtype), *grads]


def _rows(tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
    """The tensors with their features last and contiguous; copies only where the layout asks for it."""
    last = tensors[0].dim() - 1 if tensors else 0
    if dim in (-1, last):
        return [tensor.contiguous() for tensor in tensors]
    return [tensor.movedim(dim, -1).contiguous() for tensor in tensors]


def _shape(
    kind: int, row: Tensor, sources: int, eps: float, gain: float, scale: float, normalized: bool
) -> tuple[Any, ...]:
    """The arguments that both compiled functions begin with."""
    elements, width = row.numel(), row.shape[-1]
    tokens = elements // width
    threads = max(1, min(torch.get_num_threads(), tokens, elements * sources // _GRAIN))
    return kind, sources, tokens, width, eps, gain, scale, normalized, threads


def _accumulate(grads: list[Tensor], accumulated: list[Tensor], slots: list[int]) -> list[Tensor]:
    """The wanted ones of ``grads``, each added to what is there already."""
    return [
        grad if slot == FRESH else grad + accumulated[slot].to(grad.dtype)
        for grad, slot in zip(grads, slots, strict=True)
        if slot != UNWANTED
    ]


def _mix_backward_plainly(
    grad: Tensor,
    query: Tensor,
    sources: list[Tensor],
    accumulated: list[Tensor],
    slots: list[int],
    *options: Any,
) -> list[Tensor]:
    query_grad, *grads = plain.mix_backward(grad, query, sources, *options)
    return [query_grad, *_accumulate(grads, accumulated, slots)]


def _mix_cpu_fake(query: Tensor, sources: list[Tensor], *_: Any) -> Tensor:
    return torch.empty_like(sources[0])


def _mix_cpu_backward_fake(
    grad: Tensor, query: Tensor, sources: list[Tensor], accumulated: list[Tensor], slots: list[int], *_: Any
) -> list[Tensor]:
    wanted = [source for source, slot in zip(sources, slots, strict=True) if slot != UNWANTED]
    return [torch.empty_like(query), *(torch.empty_like(source) for source in wanted)]


for _name, _implementation, _fake in (
    ("mix_cpu", _mix_cpu, _mix_cpu_fake),
    ("mix_cpu_backward", _mix_cpu_backward, _mix_cpu_backward_fake),
):
    ops.LIBRARY.impl(_name, _implementation, "CPU")
    torch.library.register_fake(f"attnres::{_name}", _fake, lib=ops.LIBRARY)
differentiation.register_plainly(ops.LIBRARY, "mix_cpu_backward", _mix_backward_plainly)


class _MixThrough(torch.autograd.Function):
    """``mix_cpu`` that hands its sources on, so that later readers' gradients arrive in its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        dim: int,
        eps: float,
        gain: float,
        scale: float,
        normalized: bool,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.options = (dim, eps, gain, scale, normalized)
        ctx.save_for_backward(query, *sources)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[source for source in sources if not source.requires_grad])
        return torch.ops.attnres.mix_cpu.default(query, sources, *ctx.options), *sources

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *later: Tensor | None) -> tuple[Tensor | None, ...]:
        wants_query, *wanted = ctx.needs_input_grad[:1] + ctx.needs_input_grad[6:]
        if grad is None:
            return (None, *[None] * 5, *later)
        query, *sources = ctx.saved_tensors
        slots: list[int] = []
        accumulated: list[Tensor] = []
        for wants, value in zip(wanted, later, strict=True):
            if not wants or value is None:
                slots.append(FRESH if wants else UNWANTED)
            else:
                slots.append(len(accumulated))
                accumulated.append(value)
        query_grad, *grads = torch.ops.attnres.mix_cpu_backward.default(
            grad, query, sources, accumulated, slots, *ctx.options
        )
        results = iter(grads)
        return (
            query_grad if wants_query else None,
            *[None] * 5,
            *(next(results) if wants else None for wants in wanted),
        )


def mix_through(
    query: Tensor,
    sources: Sequence[Tensor],
    dim: int,
    eps: float,
    gain: float,
    scale: float,
    normalized: bool,
) -> tuple[Tensor, ...]:
    """Depth attention of one site, and its sources handed on for later readers to use.

    A reader of the returned sources instead of the given ones changes no value, but its gradient then reaches this
    site's backward, which adds its own to it: no gradient of a source is added up by a kernel of its own.

    Args:
        query, sources, dim, eps, gain, scale, normalized: as for ``attnres::mix``.

    Returns:
        The mix, then the sources as aliases.
    """
    if torch.is_grad_enabled() and (query.requires_grad or any(source.requires_grad for source in sources)):
        apply: Any = _MixThrough.apply
        handed_on: tuple[Tensor, ...] = apply(query, dim, eps, gain, scale, normalized, *sources)
        return handed_on
    return torch.ops.attnres.mix_cpu.default(query, sources, dim, eps, gain, scale, normalized), *sources
