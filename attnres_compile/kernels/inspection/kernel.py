"""What a generated kernel compiles to, for GPUs that need not be there: registers, spills, widths and bytes.

Triton compiles for a named target; ptxas (in Triton's wheel) reports registers and spills. Bytes are counted in the
compiled code, by :mod:`.ptx` and (AMD) :mod:`.llvm_ir`, not taken
from the spec; the spec gives the floor beside them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attnres_compile.errors import KernelError
from attnres_compile.kernels import cache
from attnres_compile.kernels.codegen import generate
from attnres_compile.kernels.inspection import llvm_ir, ptx
from attnres_compile.kernels.inspection.accesses import Traffic, Way
from attnres_compile.kernels.spec import (
    BYTES,
    Argument,
    KernelSpec,
    Schedule,
    arguments,
    entry,
    is_row,
    row_bytes,
    statistics_bytes,
)

# What the table of docs/kernels.md is made for, and what else Triton's code generators and ptxas know.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
OTHERS = ("sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120", "gfx90a", "gfx950")
_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int32": "i32"}
_AMD_COUNTS = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
# Rows of the two counted runs: the difference is what one row costs.
_FEW, _MORE = 2, 4


@dataclass(frozen=True)
class KernelFacts:
    """One kernel, compiled for one architecture. Bytes are per token (row) unless it says otherwise.

    Attributes:
        kernel: name of the kernel function.
        arch: what it was compiled for.
        warps, chunk, ahead, resident: the schedule, see :class:`~attnres_compile.kernels.spec.Schedule`.
        registers: per thread (AMD: vector registers).
        spills: bytes per thread that spilled registers are stored to and loaded from memory, added up (AMD: four
            bytes per spilled vector register).
        scalar_spills: bytes of scalar registers that AMD's code generator keeps in lanes of vector registers instead;
            they move no memory. 0 for NVIDIA.
        shared_memory: bytes per program.
        vector_bytes: the narrowest access to a row, in bytes per thread.
        load_widths, store_widths: all widths of accesses to rows, narrowest first.
        load_bytes_per_token, store_bytes_per_token: of rows and per-token statistics. Every active thread of every
            instruction counts, so what several threads or instructions load again is in it; a number that all threads
            load from one address counts once.
        statistics_bytes_per_token: the statistics' part of the two.
        reread_bytes_per_token: the part of rows that is loaded more than once.
        parameter_bytes_per_token: of queries and norm parameters that each row loads again, from the caches.
        parameter_bytes: of those that each program loads once.
        scratch_bytes_per_token: of the parameter gradients' scratch that each row moves; 0 where their sums stay in
            registers.
        scratch_bytes: of the scratch that each program stores once.
        floor_bytes_per_token: rows that the kernel cannot do without, from the spec: each argument once.
        floor_statistics_bytes_per_token: the same of per-token statistics.
        compile_seconds: time it took.
        source: the Triton text.
        assembly: the PTX or AMD GPU text.
    """

    kernel: str
    arch: str
    warps: int
    chunk: int
    ahead: int
    resident: bool
    registers: int
    spills: int
    scalar_spills: int
    shared_memory: int
    vector_bytes: int
    load_widths: tuple[int, ...]
    store_widths: tuple[int, ...]
    load_bytes_per_token: float
    store_bytes_per_token: float
    statistics_bytes_per_token: float
    reread_bytes_per_token: float
    parameter_bytes_per_token: float
    parameter_bytes: float
    scratch_bytes_per_token: float
    scratch_bytes: float
    floor_bytes_per_token: int
    floor_statistics_bytes_per_token: int
    compile_seconds: float
    source: str
    assembly: str

    def to_dict(self) -> dict[str, Any]:
        """The facts as JSON values, without the two texts."""
        values = dataclasses.asdict(self)
        del values["source"], values["assembly"]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def inspect_kernel(
    spec: KernelSpec,
    schedule: Schedule,
    arch: str,
    *,
    text: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> KernelFacts:
    """Compiles a kernel for ``arch`` on this machine and counts what it does.

    Args:
        spec: the kernel.
        schedule: what its text is laid out for, with the warps of the architecture's size in mind.
        arch: one of :data:`ARCHITECTURES` or :data:`OTHERS`.
        text: Triton text for the spec instead of the generated one.
        options: further compile options of Triton, such as ``maxnreg``.

    Raises:
        KernelError: an unknown architecture, no Triton or ptxas, a kernel that does not compile, that accesses memory
            outside its arguments, or whose accesses cannot be counted.
    """
    vendor, _ = _target(arch)
    text = generate(spec, schedule) if text is None else text
    started = time.perf_counter()
    compiled, log = _compile(spec, schedule, arch, text, options or {})
    seconds = time.perf_counter() - started
    assembly = compiled.asm["ptx" if vendor == "cuda" else "amdgcn"]
    if vendor == "cuda":
        registers, spills = ptxas_report(log)
        scalar_spills = 0
        program = ptx.parse(assembly)
        counted = _count(spec, lambda values: ptx.run(program, values))
    else:
        registers, spills, scalar_spills = amd_report(assembly)
        function = llvm_ir.parse(compiled.asm["llir"])
        counted = _count(spec, lambda values: llvm_ir.run(function, values, schedule.warps))
    return KernelFacts(
        kernel=entry(spec),
        arch=arch,
        warps=schedule.warps,
        chunk=schedule.chunk,
        ahead=schedule.ahead,
        resident=schedule.resident,
        registers=registers,
        spills=spills,
        scalar_spills=scalar_spills,
        shared_memory=int(compiled.metadata.shared),
        floor_bytes_per_token=row_bytes(spec),
        floor_statistics_bytes_per_token=statistics_bytes(spec),
        compile_seconds=round(seconds, 3),
        source=text,
        assembly=assembly,
        **counted,
    )


# --- compiling


def _target(arch: str) -> tuple[str, int | str]:
    if arch not in ARCHITECTURES + OTHERS:
        raise KernelError(
            f"unknown architecture {arch!r}", remedy=f"Known are {', '.join(ARCHITECTURES)}; {', '.join(OTHERS)}"
        )
    if arch.startswith("gfx"):
        return "hip", arch
    return "cuda", int(arch.removeprefix("sm_").rstrip("a"))


def _compile(spec: KernelSpec, schedule: Schedule, arch: str, text: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Triton's compiled kernel and what ptxas printed."""
    try:
        from triton import compile as compile_kernel
        from triton import knobs
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError as error:
        raise KernelError("Triton is not installed", remedy="Install it: pip install triton") from error
    vendor, number = _target(arch)
    function = getattr(cache.load(text), entry(spec))
    listed = arguments(spec)
    signature = {a.name: ("*" if a.pointer else "") + _TYPES[a.dtype] for a in listed}
    # As Triton's launcher would specialise: tensors begin at multiples of 16 bytes, and strides follow the dim.
    even = [a.pointer or (a.name != "tokens" and spec.dim % 16 == 0) for a in listed]
    attributes = {(i,): [["tt.divisibility", 16]] for i, holds in enumerate(even) if holds}
    if vendor == "hip":
        # Tensors of up to 2 GiB, which is most of them: offsets fit into 32 bits.
        attributes |= {(i,): [*attributes[i,], ["tt.pointer_range", 32]] for i, a in enumerate(listed) if a.pointer}
    chosen = {**schedule.options(nvidia=vendor == "cuda"), **options}
    log = io.StringIO()
    with _fresh(knobs), contextlib.redirect_stdout(log), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            target = GPUTarget(vendor, number, 64 if vendor == "hip" else 32)
            compiled = compile_kernel(ASTSource(function, signature, {}, attributes), target=target, options=chosen)
        except Exception as error:
            words = (str(error).strip().splitlines() or [""])[0]
            missing = words.startswith("Cannot find ptxas")
            raise KernelError(
                f"{entry(spec)} does not compile for {arch}: {type(error).__name__}: {words}",
                remedy="It comes with Triton's wheel; else set TRITON_PTXAS_PATH and TRITON_PTXAS_BLACKWELL_PATH"
                if missing
                else "",
            ) from error
    return compiled, log.getvalue()


@contextlib.contextmanager
def _fresh(knobs: Any) -> Iterator[None]:
    """Compile anew, since a cached result has no report, and let ptxas speak."""
    with knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        yield


def ptxas_report(log: str) -> tuple[int, int]:
    """Registers per thread and bytes of spill stores and loads per thread, from what ``ptxas -v`` printed.

    Raises:
        KernelError: the report is not there.
    """
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        raise KernelError("ptxas did not report registers and spills")
    return int(registers.group(1)), int(spills.group(1)) + int(spills.group(2))


def amd_report(text: str) -> tuple[int, int, int]:
    """From the metadata of an AMD GPU kernel's text: registers per thread, bytes of spills, bytes of scalar spills.

    Spilled vector registers go to memory, spilled scalar registers to lanes of vector registers.

    Raises:
        KernelError: the metadata is not there.
    """
    found = [re.search(rf"\.{name}:\s+(\d+)", text) for name in _AMD_COUNTS]
    numbers = [int(match.group(1)) for match in found if match is not None]
    if len(numbers) < len(_AMD_COUNTS):
        raise KernelError("the compiled kernel does not report registers and spills")
    registers, vector, scalar = numbers
    return registers, 4 * vector, 4 * scalar


# --- counting

_Runs = Mapping[tuple[int, Way], Traffic]


def _count(spec: KernelSpec, run: Callable[[list[int | None]], _Runs]) -> dict[str, Any]:
    listed = arguments(spec)
    # Rows of strided arguments lie further apart than they are long, so that padding would be seen to be touched.
    stride = spec.dim + 16 if spec.strided else spec.dim
    runs = []
    for tokens in (_FEW, _MORE):
        values = [None if a.pointer else tokens if a.name == "tokens" else stride for a in listed]
        runs.append(run(values))
        for (index, way), seen in runs[-1].items():
            _check_inside(listed[index], spec, way, seen, tokens, stride)
    return _summary(spec, listed, *runs)


def _check_inside(argument: Argument, spec: KernelSpec, way: Way, seen: Traffic, tokens: int, stride: int) -> None:
    size = BYTES[argument.dtype]
    offsets = seen.bytes()
    if is_row(argument, spec):
        rows, columns, pitch = tokens, spec.dim * size, stride * size
    elif argument.role == "statistic":
        rows, columns, pitch = 1, tokens * size, tokens * size
    else:
        rows, columns, pitch = 1, spec.dim * size, spec.dim * size
    wrong_way = (
        argument.loads == 0 and way == "ld" and argument.role != "parameter" and argument.role != "scratch"
    ) or ((argument.stores == 0 and way == "st") and argument.role != "scratch")
    if wrong_way or int(offsets[-1]) >= rows * pitch or bool((offsets % pitch >= columns).any()):
        verb = "loads from" if way == "ld" else "stores to"
        raise KernelError(f"{entry(spec)} {verb} memory that is not its to touch, of argument {argument.name}")


def _summary(
    spec: KernelSpec,
    listed: tuple[Argument, ...],
    few: _Runs,
    more: _Runs,
) -> dict[str, Any]:
    """Bytes per row and per program from runs over two and four rows, by what the arguments are."""
    rows: dict[Way, float] = {"ld": 0.0, "st": 0.0}
    statistics: dict[Way, float] = {"ld": 0.0, "st": 0.0}
    distinct = 0.0
    widths: dict[Way, set[int]] = {"ld": set(), "st": set()}
    others = {"parameter": [0.0, 0.0], "scratch": [0.0, 0.0]}
    for (index, way), seen in more.items():
        argument = listed[index]
        before = few.get((index, way), Traffic())
        each = (seen.requested - before.requested) / (_MORE - _FEW)
        if is_row(argument, spec):
            rows[way] += each
            widths[way] |= seen.widths
            distinct += seen.bytes().numel() / _MORE
        elif argument.role == "statistic":
            statistics[way] += each
        else:
            others[argument.role][0] += each
            others[argument.role][1] += seen.requested - each * _MORE
    return {
        "vector_bytes": min(widths["ld"] | widths["st"], default=0),
        "load_widths": tuple(sorted(widths["ld"])),
        "store_widths": tuple(sorted(widths["st"])),
        "load_bytes_per_token": rows["ld"] + statistics["ld"],
        "store_bytes_per_token": rows["st"] + statistics["st"],
        "statistics_bytes_per_token": sum(statistics.values()),
        "reread_bytes_per_token": sum(rows.values()) - distinct,
        "parameter_bytes_per_token": others["parameter"][0],
        "parameter_bytes": others["parameter"][1],
        "scratch_bytes_per_token": others["scratch"][0],
        "scratch_bytes": others["scratch"][1],
    }
