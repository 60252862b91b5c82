"""The problems of ``gpu_kernels.py``, and how other packages are asked to solve them.

Every adapter calls what its package offers to users, from the signatures of the versions named in ``pyproject.toml``,
and is given what it likes best: sources stacked beforehand where it wants them stacked, at no cost in time. What it
cannot do is a gap that says why. All compute the convex mix (gain 1) with raw values, scale 1 and one eps; a key
norm's weight, where one is asked for, is ones, and no gradient of it is used.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EPS = 1e-6
KINDS = ("mix", "inter", "block")


@dataclass(frozen=True)
class Case:
    """What is to be computed.

    Attributes:
        kind: ``"mix"`` one read of all sources; ``"inter"`` several queries' reads of the same sources; ``"block"``
            the same, and each query also reads a tensor of its own, the running sum of its block.
        sources: N.
        dim: features d.
        tokens: rows of each source.
        dtype: of the sources, a name in ``torch``.
        queries: S, 1 for ``"mix"``.
    """

    kind: str
    sources: int
    dim: int
    tokens: int
    dtype: str = "bfloat16"
    queries: int = 1

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one source, X."""
        return self.tokens * self.dim * getattr(torch, self.dtype).itemsize

    def floor(self, both: bool) -> int:
        """Bytes that the forward, or forward and backward, cannot do without (docs/method.md).

        One read N + 1 tensors and, backward, 2N + 2. Phase 1 reads the sources once for all S queries: N + S, and
        2N + 2S backward. With a merge for each query in addition 3 each (mix, running sum, result), and 5 backward
        (gradient, mix, running sum; the gradients of both).
        """
        n, s = self.sources, self.queries
        merges = s if self.kind == "block" else 0
        tensors = n + s + 3 * merges + ((2 * n + 2 * s + 5 * merges) if both else 0)
        return tensors * self.tensor_bytes

    def __str__(self) -> str:
        reads = "" if self.kind == "mix" else f", S={self.queries}"
        return f"{self.kind} N={self.sources}, D={self.dim}{reads}"


class Problem:
    """The tensors of one case, the same ones for the same seed."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        dtype: torch.dtype = getattr(torch, case.dtype)

        def random(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

        self.case, self.device, self.dtype = case, device, dtype
        self.stack = random(case.sources, case.tokens, case.dim)
        self.partials = random(case.queries if case.kind == "block" else 0, case.tokens, case.dim)
        # Logits of deviation 1. The numbers are bfloat16's, so that everyone computes with the same ones.
        wide = torch.randn(case.queries, case.dim, generator=generator, device=device)
        self.queries = (wide * case.dim**-0.5).bfloat16().float()
        self.grad = random(case.queries, case.tokens, case.dim)

    def listed(self) -> list[Tensor]:
        """The sources, each a leaf."""
        return [value.detach().requires_grad_() for value in self.stack]

    def sums(self) -> list[Tensor]:
        """The running sums of a block, each a leaf."""
        return [value.detach().requires_grad_() for value in self.partials]

    def query(self, index: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """One query, a leaf."""
        return self.queries[index].to(dtype, copy=True).requires_grad_()

    def ones(self) -> Tensor:
        """The weight of a key norm that changes nothing."""
        return torch.ones(self.case.dim, device=self.device)


@dataclass
class Bound:
    """An implementation with the tensors of one problem.

    Attributes:
        run: gives the results, in the order of the queries; one tensor may hold several.
        queries: leaves, in order; one may hold several.
        values: leaves: the sources, then the running sums of a block; one may hold several.
        grads: of the results.
    """

    run: Callable[[], list[Tensor]]
    queries: list[Tensor]
    values: list[Tensor]
    grads: list[Tensor]

    def forward(self) -> list[Tensor]:
        """The results, with nothing kept for a backward."""
        with torch.no_grad():
            return self.run()

    def both(self) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """The results, and the gradients of queries and values."""
        found = self.run()
        return found, torch.autograd.grad(found, [*self.queries, *self.values], self.grads)


@dataclass(frozen=True)
class Implementation:
    """A way to compute a case.

    Attributes:
        name: in the table.
        bind: puts a problem's tensors into it.
        gap: why it cannot do a case, or ``""``.
        peer: another package's, which ours has to be ahead of.
        loose: nothing is to be compiled for it: it is checked on a few of the tokens.
    """

    name: str
    bind: Callable[[Problem], Bound]
    gap: Callable[[Case], str]
    peer: bool = False
    loose: bool = False


def one_by_one(problem: Problem, read: Callable[[Tensor, list[Tensor]], Tensor], dtype: torch.dtype) -> Bound:
    """A function of one query and a list of sources, called once for each query."""
    sources, sums = problem.listed(), problem.sums()
    queries = [problem.query(index, dtype) for index in range(problem.case.queries)]

    def run() -> list[Tensor]:
        if sums:
            return [read(query, [*sources, own]) for query, own in zip(queries, sums, strict=True)]
        return [read(query, sources) for query in queries]

    return Bound(run, queries, [*sources, *sums], list(problem.grad))


# ------------------------------------------------------------------ what is installed


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class Package:
    """Another package: its names, and what is asked of it."""

    distribution: str
    module: str

    def load(self) -> tuple[Any, str]:
        """The module, or ``None`` and why not."""
        if not _version(self.distribution):
            return None, "not installed"
        try:
            with _older_autotune():
                return importlib.import_module(self.module), ""
        except Exception as error:
            return None, f"import failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.distribution} {_version(self.distribution)}".strip()


@contextmanager
def _older_autotune() -> Any:
    """Let ``triton.autotune`` pass over keys that are no arguments, as it did before Triton 3.9.

    flash-attn-res 0.1.12 names such keys, and would not be importable otherwise.
    """
    import triton

    strict = triton.autotune

    def lenient(configs: Any, key: Any, **options: Any) -> Any:
        def decorate(function: Any) -> Any:
            names = getattr(function, "arg_names", None)
            known = [name for name in key if names is None or name in names]
            return strict(configs=configs, key=known, **options)(function)

        return decorate

    triton.autotune = lenient
    try:
        yield
    finally:
        triton.autotune = strict


FLA = Package("fla-core", "fla.ops.attnres")
LIGER = Package("liger-kernel", "liger_kernel.transformers.functional")
FLASH = Package("flash-attn-res", "flash_attn_res")
FAST = Package("fast-attnres", "attnres")
PACKAGES = (FLA, LIGER, FLASH, FAST)


def _cuda_only(device: torch.device) -> str:
    return "" if device.type == "cuda" else "runs on CUDA only"


# ------------------------------------------------------------------ adapters


def _fla(device: torch.device, gluon: bool = False) -> Implementation:
    """``fused_attnres(query, residuals, rms_weight, rms_eps=)``: a list of sources, one query.

    It has a second set of kernels, in Gluon, that an environment variable asks for; it is read at every call.
    """
    module, missing = FLA.load()

    def gap(case: Case) -> str:
        if gluon and not missing and importlib.util.find_spec("triton.experimental.gluon") is None:
            return "this Triton has no Gluon"
        return missing or _cuda_only(device)

    def bind(problem: Problem) -> Bound:
        weight = problem.ones()

        def read(query: Tensor, sources: list[Tensor]) -> Tensor:
            os.environ["FLA_ATTNRES_GLUON"] = "1" if gluon else "0"
            # What the backward would otherwise compute again is kept: one tensor more instead of N more.
            level = 0 if torch.is_grad_enabled() else 1
            found: Tensor = module.fused_attnres(query, sources, weight, rms_eps=EPS, scale=1.0, checkpoint_level=level)
            return found

        return one_by_one(problem, read, torch.float32)

    return Implementation(f"{FLA.title} (gluon)" if gluon else FLA.title, bind, gap, peer=True)


def _liger(device: torch.device) -> Implementation:
    """``liger_attn_res(V, w_query, w_norm, eps)``: stacked sources, one query."""
    module, missing = LIGER.load()

    def gap(case: Case) -> str:
        if case.kind == "block":
            return "each read would need a stack of its own"
        return missing or _cuda_only(device)

    def bind(problem: Problem) -> Bound:
        weight = problem.ones()
        stack = problem.stack.detach().requires_grad_()
        queries = [problem.query(index) for index in range(problem.case.queries)]
        call = module.liger_attn_res
        return Bound(
            lambda: [call(stack, query, weight, EPS) for query in queries], queries, [stack], list(problem.grad)
        )

    return Implementation(f"{LIGER.title} (stacked)", bind, gap, peer=True)


def _flash(device: torch.device) -> Implementation:
    """``phase_1_batched_attention_triton_op`` over a stack ``[N, B, T, d]``, and ``phase_2_..._triton_op``."""
    module, missing = FLASH.load()

    def gap(case: Case) -> str:
        if case.dim & (case.dim - 1):
            return "d is not a power of two"
        if case.dtype != "bfloat16":
            return "stores bfloat16 only"
        return missing or _cuda_only(device)

    def bind(problem: Problem) -> Bound:
        case = problem.case
        _leave_out_spilling(module, case)
        stack = problem.stack.unsqueeze(1).detach().requires_grad_()
        queries = problem.queries.clone().requires_grad_()
        sums = [value.unsqueeze(0).detach().requires_grad_() for value in problem.partials]
        grads = [problem.grad.unsqueeze(1)]
        if case.kind == "block":
            grads = [value.unsqueeze(0) for value in problem.grad]

        def run() -> list[Tensor]:
            mixes, lses = module.phase_1_batched_attention_triton_op(stack, queries, EPS)
            if not sums:
                return [mixes]
            merge = module.phase_2_online_softmax_merge_triton_op
            return [merge(own, queries[index], mixes[index], lses[index], EPS) for index, own in enumerate(sums)]

        return Bound(run, [queries], [stack, *sums], grads)

    return Implementation(f"{FLASH.title} (stacked)", bind, gap, peer=True)


def _leave_out_spilling(module: Any, case: Case) -> None:
    """Keep flash-attn-res's autotuner from what cannot win: more than 1024 numbers per thread, all of them spilled.

    Its kernels hold all sources of a row at once, padded to a power of two. At 33 sources of 4096 features a single
    configuration of one warp takes Triton more than a minute to compile.
    """
    kernels = importlib.import_module("flash_attn_res.kernels.phase_1")
    held = (1 << (case.sources - 1).bit_length()) * case.dim
    for kernel, offered in (
        (kernels.phase_1_batched_attention_forward_kernel, kernels.forward_configs),
        (kernels.phase_1_batched_attention_backward_kernel, kernels.phase1_backward_configs),
    ):
        most = max(each.num_warps for each in offered)
        kept = [each for each in offered if each.num_warps == most or held <= 1024 * 32 * each.num_warps]
        if list(kernel.configs) != kept:
            module.set_autotune_configs(kernel, kept)


def _fast(device: torch.device) -> Implementation:
    """``attnres(values, query, eps=)`` and ``attnres_multi(values, queries, eps=)``: a list, bfloat16 queries."""
    module, missing = FAST.load()

    def gap(case: Case) -> str:
        if case.dtype != "bfloat16":
            return "bfloat16 only"
        if case.kind != "mix" and case.queries > 16:
            return "more than 16 queries"
        if case.sources > 129 or case.dim > 8192:
            return "more than 129 sources or 8192 features"
        return missing or _cuda_only(device)

    def bind(problem: Problem) -> Bound:
        if problem.case.kind != "inter":
            return one_by_one(
                problem, lambda query, sources: module.attnres(sources, query, eps=EPS, scale=1.0), torch.bfloat16
            )
        sources = problem.listed()
        queries = problem.queries.bfloat16().requires_grad_()
        return Bound(
            lambda: [module.attnres_multi(sources, queries, eps=EPS, scale=1.0)], [queries], sources, [problem.grad]
        )

    return Implementation(FAST.title, bind, gap, peer=True)


def peers(device: torch.device) -> list[Implementation]:
    """All of them, installed or not."""
    return [_fla(device), _fla(device, gluon=True), _liger(device), _flash(device), _fast(device)]


def hurry_autotuning() -> None:
    """Shorten the measurements by which Triton's autotuner picks configurations: 2 ms each to warm up, 10 to measure.

    fla-core tries 24 configurations per shape and direction; by default that alone takes minutes. All are still tried.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    def quick(self: Any) -> Any:
        return lambda kernel_call, quantiles: do_bench(kernel_call, warmup=2, rep=10, quantiles=quantiles)

    # Some versions make it an attribute of each autotuner: a property with a setter goes before that.
    Autotuner.do_bench = property(quick, lambda self, value: None)  # type: ignore[attr-defined]


def installed(package: Package) -> bool:
    """Whether a package is there at all."""
    return bool(_version(package.distribution))
