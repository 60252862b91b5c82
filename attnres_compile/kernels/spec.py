"""What one generated kernel computes, as plain data: nothing here writes code, compiles or launches.

A :class:`KernelSpec` says which part of depth attention (arXiv 2603.15031, Algorithm 1 for the two phases) a kernel
does and with which neighbours fused in. :func:`arguments` derives from it the list of what the kernel is called
with, and what each argument costs per token; code generation, launching and the byte counts all read that one list.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from attnres_compile.errors import KernelError

Kind = Literal["mix", "inter", "merge", "norm"]
Norm = Literal["", "rmsnorm", "layernorm"]
Role = Literal["source", "result", "gradient", "statistic", "parameter", "scratch", "count"]

KINDS = ("mix", "inter", "merge", "norm")
NORMS = ("", "rmsnorm", "layernorm")
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4}
FLOATS = ("float32", "float16", "bfloat16")
# One letter per source in ``KernelSpec.gradients``.
FRESH, ACCUMULATE, UNWANTED = "f", "a", "-"


@dataclass(frozen=True)
class KernelSpec:
    """One kernel, over sources that are matrices of ``[tokens, dim]`` with contiguous rows.

    Attributes:
        kind: ``"mix"`` (one read over all sources), ``"inter"`` (phase 1: several queries over the finished blocks in
            one pass; results are normalised mixes and log-sum-exps), ``"merge"`` (phase 2: a normalised mix, its
            log-sum-exp and the partial sum) or ``"norm"`` (backward only: the gradient of a fused norm by itself, where
            it does not fit into the kernel that uses it: it leaves numbers per token and the parameters' gradients).
        backward: the gradients instead of the result.
        sources: number of tensors read as sources; 1 for ``"merge"``, 0 for ``"norm"``.
        dim: number of features d.
        dtype: of the sources, the results and their gradients; what is computed in is float32.
        queries: number of queries S; 1 unless ``"inter"``.
        query_dtype: of the queries and of their gradients' scratch's readers.
        gain: factor on the mix; 1 for ``"inter"``.
        eps: added to the mean square inside the key norm.
        scale: factor on the logits.
        normalized: mix ``RMSNorm(v)`` instead of ``v``.
        branch_dtype: the partial-sum add before the site is fused in; this is the branch's dtype. Forward only: the
            gradient of the new partial sum is that of both operands.
        norm: the norm after the site that is fused in.
        norm_eps: its eps.
        norm_weight, norm_bias: dtypes of its parameters, ``None`` for one that it does not have.
        keep: forward only, store what the backward asks for: the log-sum-exp, and the mix itself where a norm follows.
        gradients: backward only, one letter per source: ``f`` a fresh gradient, ``a`` added to one that is there, ``-``
            not wanted.
        delta: backward only. ``"compute"`` what the gradients of all logits share from the gradient and the mix,
            ``"store"`` it too for later groups of sources, or ``"load"`` what an earlier group stored. With a norm,
            ``"load"`` means that a ``"norm"`` kernel left its statistics, and summed its parameters' gradients.
        strided: rows may lie further apart than ``dim`` elements: each row argument brings its row stride.

    Raises:
        KernelError: a combination that no kernel computes.
    """

    kind: Kind
    sources: int
    dim: int
    dtype: str = "bfloat16"
    backward: bool = False
    queries: int = 1
    query_dtype: str = "float32"
    gain: float = 1.0
    eps: float = 1e-6
    scale: float = 1.0
    normalized: bool = False
    branch_dtype: str | None = None
    norm: Norm = ""
    norm_eps: float = 1e-6
    norm_weight: str | None = None
    norm_bias: str | None = None
    keep: bool = False
    gradients: str = ""
    delta: Literal["compute", "store", "load"] = "compute"
    strided: bool = False

    def __post_init__(self) -> None:
        wrong = self._wrong()
        if wrong:
            raise KernelError(f"no kernel for {self}: {wrong}")

    def _wrong(self) -> str:
        """What is contradictory, or ``""``."""
        dtypes = [self.dtype, self.query_dtype, self.branch_dtype, self.norm_weight, self.norm_bias]
        whole = (self.sources, self.dim, self.queries)
        floats = (self.gain, self.eps, self.scale, self.norm_eps)
        least = 0 if self.kind == "norm" else 1
        checks = {
            f"kind must be one of {', '.join(KINDS)}": self.kind in KINDS,
            f"norm must be one of {', '.join(map(repr, NORMS))}": self.norm in NORMS,
            f"dtypes must be among {', '.join(FLOATS)}": all(d is None or d in FLOATS for d in dtypes),
            "sources, dim and queries are whole numbers": all(type(n) is int for n in whole),
            f"it needs at least {least} sources": self.sources >= least,
            "dim and queries are at least 1": self.dim >= 1 and self.queries >= 1,
            "gain, eps, scale and norm_eps are finite numbers": all(
                isinstance(f, float) and math.isfinite(f) for f in floats
            ),
            "only inter takes several queries": self.queries == 1 or self.kind == "inter",
            "inter has no gain": self.gain == 1.0 or self.kind != "inter",
            "a merge reads exactly one source": self.sources == 1 or self.kind != "merge",
            "a norm kernel is backward, has a norm and no sources": self.kind != "norm"
            or (self.backward and self.norm != "" and self.sources == 0),
            "inter fuses no neighbours": self.kind != "inter" or not (self.norm or self.branch_dtype),
            "a norm's parameters need a norm": self.norm != "" or not (self.norm_weight or self.norm_bias),
            "an RMSNorm has no bias": self.norm != "rmsnorm" or self.norm_bias is None,
            "branch_dtype and keep are for the forward": not self.backward or not (self.branch_dtype or self.keep),
            "gradients has one letter f, a or - per source, in the backward": len(self.gradients)
            == (self.sources if self.backward else 0)
            and not set(self.gradients) - {FRESH, ACCUMULATE, UNWANTED},
            "delta is for the backward of a mix": self.delta == "compute"
            or (self.backward and self.kind == "mix")
            or (self.backward and self.kind == "merge" and self.delta == "load" and self.norm != ""),
            "with a norm delta is computed or loaded": self.delta != "store" or self.norm == "",
        }
        return "; ".join(text for text, holds in checks.items() if not holds)

    @property
    def direction(self) -> str:
        """``"forward"`` or ``"backward"``."""
        return "backward" if self.backward else "forward"


@dataclass(frozen=True)
class Schedule:
    """How a kernel is laid out over threads.

    Attributes:
        warps: warps per program.
        chunk: features handled by one load of all threads together, a power of two; ``dim`` is cut into such chunks.
        ahead: what is asked for before the sum over a row that precedes its use: 0 nothing, 1 the gradient that is
            there already, 2 also the next source. It hides latency and takes registers.
        held: whether queries stay in registers over all rows; otherwise each use reads them anew, from the cache.
        registers: most registers of a thread that the compiler may use, or ``None`` for its own choice. Left to itself
            at the edge of what a program can have, it prefers to move loads up and spills a little.
        resident: whether a row's chunks stay in registers between the sums over a row and their use; otherwise a loop
            over the chunks reads them twice (the second time from the cache).
    """

    warps: int
    chunk: int
    ahead: int = 0
    held: bool = True
    registers: int | None = None
    resident: bool = True

    def options(self, nvidia: bool) -> dict[str, int]:
        """Triton's compile options for this launch; only NVIDIA's compiler can be told how many registers to use."""
        limit = {"maxnreg": self.registers} if nvidia and self.registers is not None else {}
        return {"num_warps": self.warps, "num_stages": 1, **limit}


@dataclass(frozen=True)
class Argument:
    """One argument of a generated kernel.

    Attributes:
        name: as in the generated text; made of the role and a number, never of a user's name.
        dtype: of the elements (``"int32"`` for numbers, which are passed by value as Triton's launcher passes them).
        role: what it is.
        loads: elements read per token, each once.
        stores: elements written per token.
        pointer: whether it is a tensor.
    """

    name: str
    dtype: str
    role: Role
    loads: int = 0
    stores: int = 0
    pointer: bool = True


def entry(spec: KernelSpec) -> str:
    """Name of the kernel function in the generated module."""
    return f"attnres_{spec.kind}_{spec.direction}"


def arguments(spec: KernelSpec) -> tuple[Argument, ...]:
    """What the kernel is called with, in order; ``tokens`` (rows, a number) is last but for the row strides.

    Row strides are numbers named ``<argument>_stride``, one for each row argument, only where ``spec.strided``.
    """
    listed = _backward(spec) if spec.backward else _forward(spec)
    strides = [Argument(f"{a.name}_stride", "int32", "count", pointer=False) for a in listed if is_row(a, spec)]
    return (
        *listed,
        Argument("tokens", "int32", "count", pointer=False),
        *(strides if spec.strided else ()),
    )


def is_row(argument: Argument, spec: KernelSpec) -> bool:
    """Whether the argument is a matrix of one row of ``dim`` features per token."""
    return argument.role in ("source", "result", "gradient")


def _rows(names: list[str], dtype: str, role: Role, dim: int, store: bool = False) -> list[Argument]:
    return [Argument(name, dtype, role, loads=0 if store else dim, stores=dim if store else 0) for name in names]


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}{index}" for index in range(count)]


def _statistics(names: list[str], store: bool = False) -> list[Argument]:
    return _rows(names, "float32", "statistic", 1, store)


def _queries(spec: KernelSpec) -> list[Argument]:
    return [Argument(name, spec.query_dtype, "parameter") for name in _numbered("query", spec.queries)]


def _norm_parameters(spec: KernelSpec) -> list[Argument]:
    """The norm's weight and bias, as far as their values are used: no gradient depends on the bias."""
    given = [("norm_weight", spec.norm_weight)] + ([] if spec.backward else [("norm_bias", spec.norm_bias)])
    return [Argument(name, dtype, "parameter") for name, dtype in given if dtype is not None]


def _forward(spec: KernelSpec) -> list[Argument]:
    dim, dtype = spec.dim, spec.dtype
    found = _queries(spec) + _rows(_numbered("source", spec.sources), dtype, "source", dim)
    if spec.kind == "merge":
        found += _rows(["mixed"], dtype, "source", dim) + _statistics(["lse"])
    if spec.branch_dtype is not None:
        found += _rows(["branch"], spec.branch_dtype, "source", dim)
        found += _rows(["partial"], dtype, "result", dim, store=True)
    found += _norm_parameters(spec)
    if spec.kind == "inter":
        found += _rows(_numbered("mix", spec.queries), dtype, "result", dim, store=True)
        return found + _statistics(_numbered("lse", spec.queries), store=True)
    found += _rows(["out"], dtype, "result", dim, store=True)
    if spec.keep and spec.kind == "mix":
        found += _rows(["mix"], dtype, "result", dim, store=True) if spec.norm else []
        found += _statistics(["total"], store=True)
    return found


def _backward(spec: KernelSpec) -> list[Argument]:
    dim, dtype = spec.dim, spec.dtype
    if spec.kind == "norm":
        found = _rows(["grad", "mix"], dtype, "source", dim) + _norm_parameters(spec)
        return found + _statistics(norm_statistics(spec), store=True) + _scratch(spec)
    loads = spec.delta == "load"
    found = _queries(spec) + _rows(_numbered("source", spec.sources), dtype, "source", dim)
    if spec.kind == "inter":
        found += _rows(_numbered("grad", spec.queries), dtype, "source", dim)
        found += _rows(_numbered("mix", spec.queries), dtype, "source", dim)
        found += _statistics(_numbered("lse", spec.queries) + _numbered("lse_grad", spec.queries))
    elif spec.kind == "merge":
        found += _rows(["grad", "mixed"], dtype, "source", dim) + _statistics(["lse"]) + _norm_parameters(spec)
        found += _rows(["mix"], dtype, "source", dim) if loads else []
        found += _rows(["mixed_grad"], dtype, "result", dim, store=True) + _statistics(["lse_grad"], store=True)
    else:
        found += _rows(["grad"], dtype, "source", dim)
        found += _rows(["mix"], dtype, "source", dim) if spec.norm or not loads else []
        found += _statistics(["total"]) + _norm_parameters(spec)
        found += _statistics(["delta"], store=spec.delta == "store") if spec.delta != "compute" else []
    if loads and spec.norm:
        found += _statistics([name for name in norm_statistics(spec) if name != "delta"])
    there = [f"accumulated{i}" for i, letter in enumerate(spec.gradients) if letter == ACCUMULATE]
    wanted = [f"source_grad{i}" for i, letter in enumerate(spec.gradients) if letter != UNWANTED]
    found += _rows(there, dtype, "gradient", dim) + _rows(wanted, dtype, "gradient", dim, store=True)
    return found + _scratch(spec)


def norm_statistics(spec: KernelSpec) -> list[str]:
    """Per-token numbers that the gradient of a norm's operand follows from, and what all logits' gradients share."""
    return ["delta", "rstd", "pull"] + (["mean", "shift"] if spec.norm == "layernorm" else [])


def _scratch(spec: KernelSpec) -> list[Argument]:
    """Per-program sums of the parameters' gradients, float32 ``[programs, dim]`` each."""
    names = _numbered("query_sum", spec.queries) if spec.kind != "norm" else []
    return [Argument(name, "float32", "scratch") for name in names + [f"{name}_sum" for name in summed(spec)]]


def summed(spec: KernelSpec) -> list[str]:
    """The norm's parameters whose gradients this kernel sums."""
    given = (("norm_weight", spec.norm_weight), ("norm_bias", spec.norm_bias))
    return [name for name, dtype in given if dtype is not None and spec.backward and spec.delta != "load"]


def row_bytes(spec: KernelSpec) -> int:
    """Bytes of rows that the kernel loads and stores per token: each row argument once."""
    return sum((a.loads + a.stores) * BYTES[a.dtype] for a in arguments(spec) if is_row(a, spec))


def statistics_bytes(spec: KernelSpec) -> int:
    """Bytes of per-token numbers that the kernel loads and stores per token."""
    return sum((a.loads + a.stores) * BYTES[a.dtype] for a in arguments(spec) if a.role == "statistic")
