"""How other packages are asked to solve the problems of ``gpu_kernels.py``.

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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from gpu_cases import EPS, Bound, Case, Implementation, Problem, one_by_one
from torch import Tensor

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
def _older_autotune() -> Iterator[None]:
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
    """Shorten the measurements by which Triton's autotuner picks configurations: 1 ms each to warm up, 5 to measure.

    fla-core tries 24 configurations per shape and direction; by default that alone takes minutes. All are still tried.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    def quick(self: Any) -> Any:
        return lambda kernel_call, quantiles: do_bench(kernel_call, warmup=1, rep=5, quantiles=quantiles)

    # Some versions make it an attribute of each autotuner: a property with a setter goes before that.
    Autotuner.do_bench = property(quick, lambda self, value: None)


def installed(package: Package) -> bool:
    """Whether a package is there at all."""
    return bool(_version(package.distribution))
