"""What a whole site costs: the kernels that it is planned as, compiled, and their bytes against the site's floor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnres_compile.kernels.codegen import generate
from attnres_compile.kernels.inspection.kernel import KernelFacts, inspect_kernel
from attnres_compile.kernels.spec import KernelSpec, Schedule, row_bytes
from attnres_compile.kernels.tuning import plan, schedule

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class SiteFacts:
    """A site's kernels on one architecture.

    Attributes:
        spec: the whole site.
        arch: the architecture.
        launches: one entry per launch, in order; launches of equal kernels share one.
    """

    spec: KernelSpec
    arch: str
    launches: tuple[KernelFacts, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values. Registers, spills and shared memory are the largest of the launches, widths the narrowest.

        ``load_bytes_per_token + store_bytes_per_token`` is what was counted in the compiled code. It is made up of
        ``floor_bytes_per_token`` (rows, each once), ``statistics_bytes_per_token`` and ``reread_bytes_per_token``
        (rows that several launches, or the two passes of one kernel, load again); what were left over would show as
        a difference. ``planned_bytes_per_token`` is what the launches' specs say, rows and statistics, each once.
        """
        spec, kernels = self.spec, self.launches

        def total(name: str) -> float:
            return _whole(sum(getattr(kernel, name) for kernel in kernels))

        floor = row_bytes(spec)
        between = sum(kernel.floor_bytes_per_token for kernel in kernels) - floor
        return {
            "kernel": label(spec),
            "arch": self.arch,
            "launches": len(kernels),
            "registers": max(kernel.registers for kernel in kernels),
            "spills": max(kernel.spills for kernel in kernels),
            "scalar_spills": max(kernel.scalar_spills for kernel in kernels),
            "shared_memory": max(kernel.shared_memory for kernel in kernels),
            "vector_bytes": min(kernel.vector_bytes for kernel in kernels),
            "load_bytes_per_token": total("load_bytes_per_token"),
            "store_bytes_per_token": total("store_bytes_per_token"),
            "floor_bytes_per_token": floor,
            "statistics_bytes_per_token": total("statistics_bytes_per_token"),
            "planned_bytes_per_token": total("floor_bytes_per_token") + total("floor_statistics_bytes_per_token"),
            "reread_bytes_per_token": _whole(total("reread_bytes_per_token") + between),
            "parameter_bytes_per_token": total("parameter_bytes_per_token"),
            "scratch_bytes_per_token": total("scratch_bytes_per_token"),
            "parameter_bytes_per_program": total("parameter_bytes"),
            "scratch_bytes_per_program": total("scratch_bytes"),
            "warps": max(kernel.warps for kernel in kernels),
            "chunk": max(kernel.chunk for kernel in kernels),
            "resident": all(kernel.resident for kernel in kernels),
            "compile_seconds": round(sum({id(kernel): kernel.compile_seconds for kernel in kernels}.values()), 3),
            "kind": spec.kind,
            "direction": spec.direction,
            "sources": spec.sources,
            "queries": spec.queries,
            "dim": spec.dim,
            "dtype": spec.dtype,
            "fused": list(fused(spec)),
            "kernels": [kernel.to_dict() for kernel in kernels],
        }


def site_texts(spec: KernelSpec, warp_size: int = 32) -> list[tuple[KernelSpec, Schedule, str]]:
    """The kernels of a site with their schedules and texts, in the order of their launches."""

    parts = [(part, schedule(part, warp_size)) for part in plan(spec)]
    return [(part, chosen, generate(part, chosen)) for part, chosen in parts]


def inspect_site(
    spec: KernelSpec, arch: str, inspect: Callable[[KernelSpec, Schedule, str], KernelFacts] = inspect_kernel
) -> SiteFacts:
    """Compiles each different kernel of a site once.

    Raises:
        KernelError: see :func:`~attnres_compile.kernels.inspection.kernel.inspect_kernel`.
    """
    compiled: dict[tuple[KernelSpec, Schedule], KernelFacts] = {}
    launches = []
    for part, chosen, _ in site_texts(spec, warp_size(arch)):
        if (part, chosen) not in compiled:
            compiled[part, chosen] = inspect(part, chosen, arch)
        launches.append(compiled[part, chosen])
    return SiteFacts(spec, arch, tuple(launches))


def warp_size(arch: str) -> int:
    """Threads of a warp: 64 on the AMD architectures known here, 32 on NVIDIA's."""
    return 64 if arch.startswith("gfx") else 32


def fused(spec: KernelSpec) -> tuple[str, ...]:
    """The neighbours fused in, as the command line names them."""
    return (("add",) if spec.branch_dtype is not None else ()) + ((spec.norm,) if spec.norm else ())


def label(spec: KernelSpec) -> str:
    """A short name of a site, made of words that are safe in file names."""
    parts = [spec.kind, spec.direction]
    if spec.kind != "merge":
        parts.append(f"n{spec.sources}")
    if spec.queries > 1:
        parts.append(f"s{spec.queries}")
    parts += [f"d{spec.dim}", SHORT[spec.dtype], *fused(spec)]
    if spec.normalized:
        parts.append("normalized")
    if "a" in spec.gradients:
        parts.append("accumulate")
    if spec.keep:
        parts.append("keep")
    if spec.strided:
        parts.append("strided")
    return "_".join(parts)


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value
