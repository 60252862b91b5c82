"""How kernels are laid out over threads, and which sites take more than one: rules, with how they were found.

The unit is the number of features that a thread holds of each row. A kernel keeps between three (forward) and nine
(backward of a merge with a LayerNorm) such pieces in registers, beside some thirty for addresses and statistics. With
16 features a thread everything but the widest rows fits; threads that load 16 bytes at a time then work on chunks of
``threads * 16 bytes``. Limits below were found by compiling for sm_90 and reading ptxas's count of registers and
spills: a program of more than 8 warps has 128 registers a thread, one of up to 8 warps has 255. ``attnres kernels
--matrix`` repeats it, docs/kernels.md is its table.
"""

from __future__ import annotations

import dataclasses

from attnres_compile.kernels.spec import BYTES, FRESH, KernelSpec, Schedule

# Bytes that one thread loads at a time.
_LOAD = 16
# Features of a row that a thread holds.
_HELD = 16
# The same in the backward of phase 1 with three or four queries, each of which has three rows of its own.
_HELD_BY_MANY = 8
# Threads of the largest program, and those up to which a thread has 255 registers.
_MOST_THREADS = 512
_ROOMY_THREADS = 256
# Sources of one backward kernel: more make code of which compilers take minutes, or do not fit.
_SOURCES_ROOMY, _SOURCES_TIGHT = 33, 9
# Sources up to which two queries share a pass over wide rows.
_SOURCES_TIGHT_FORWARD = 9
# What phase 1 is held to there: below the 128 that the hardware allows.
_TIGHT_REGISTERS = 120
# Programs of a launch per multiprocessor and thread count, see ``programs``.
_RESIDENT_THREADS = 1024


def schedule(spec: KernelSpec, warp_size: int = 32) -> Schedule:
    """The launch of one kernel.

    Args:
        spec: the kernel.
        warp_size: threads of a warp: 32, or 64 on CDNA.
    """
    vector = _LOAD // BYTES[spec.dtype]
    threads = warp_size
    held = _HELD_BY_MANY if spec.backward and spec.queries > 2 else _HELD
    if warp_size != 32 and spec.queries > 1:
        # AMD's compiler moves loads up as far as it can: less to move.
        held = vector
    while threads * held < spec.dim and threads < _MOST_THREADS:
        threads *= 2
    if threads * _HELD < spec.dim:
        return Schedule(8 * 32 // warp_size, 256 * vector, resident=False)
    # A narrow row is one chunk: loads get narrower, and the rest of the warp is not put to use.
    chunk = min(threads * vector, _power_of_two(spec.dim))
    # Wider rows come with fewer queries, see queries_per_kernel.
    tight = threads > _ROOMY_THREADS
    registers = _TIGHT_REGISTERS if tight and spec.queries > 1 and warp_size == 32 else None
    hold = not (tight and spec.backward and spec.kind != "merge" and spec.dtype == "float32")
    ahead = 0 if warp_size != 32 and spec.queries > 1 else _ahead(spec, threads)
    return Schedule(threads // warp_size, chunk, ahead, hold, registers)


def _ahead(spec: KernelSpec, threads: int) -> int:
    if threads > _ROOMY_THREADS:
        return 2 if spec.queries == 1 and not spec.backward else 0
    if spec.backward:
        return 2 if spec.sources <= 17 and spec.queries == 1 else 1
    return 2


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def roomy(dim: int) -> bool:
    """Whether rows of ``dim`` features leave a thread all of its registers."""
    return dim <= _ROOMY_THREADS * _HELD


def queries_per_kernel(dim: int, backward: bool, sources: int) -> int:
    """How many queries of phase 1 share one pass over the sources."""
    if backward:
        return 4 if dim <= _ROOMY_THREADS * _HELD_BY_MANY else 2 if roomy(dim) else 1
    if roomy(dim):
        return 4
    return 2 if sources <= _SOURCES_TIGHT_FORWARD else 1


def norm_apart(spec: KernelSpec) -> bool:
    """Whether a kernel of its own finds a norm's statistics, and sums its parameters' gradients, in the backward."""
    return spec.norm != "" and (not roomy(spec.dim) or spec.sources > _SOURCES_ROOMY)


def source_groups(spec: KernelSpec) -> tuple[range, ...]:
    """Which sources of a site share a backward kernel: the gradient is separable over them."""
    most = _SOURCES_ROOMY if roomy(spec.dim) else _SOURCES_TIGHT
    count = -(-spec.sources // most)
    size = -(-spec.sources // count) if count else 0
    return tuple(range(start, min(start + size, spec.sources)) for start in range(0, spec.sources, size or 1))


def query_groups(queries: int, dim: int, backward: bool, sources: int) -> tuple[range, ...]:
    """Which queries of phase 1 share a kernel."""
    most = queries_per_kernel(dim, backward, sources)
    return tuple(range(start, min(start + most, queries)) for start in range(0, queries, most))


def plan(spec: KernelSpec) -> tuple[KernelSpec, ...]:
    """The kernels that one site takes, in order.

    Args:
        spec: the site, as if one kernel did it all.

    Returns:
        ``(spec,)`` where one does. Otherwise phase 1 in groups of queries; a backward in groups of sources, the first
        of which leaves ``delta`` for the others; and before it a kernel that leaves a fused norm's statistics.
    """
    if spec.kind == "norm" or spec.delta != "compute" or (not spec.backward and spec.kind != "inter"):
        return (spec,)
    if spec.kind == "inter":
        return _phase_1(spec)
    before: tuple[KernelSpec, ...] = ()
    apart = norm_apart(spec)
    if apart:
        before = (dataclasses.replace(spec, kind="norm", sources=0, gradients=""),)
    if spec.kind == "merge":
        if not apart:
            return (spec,)
        # The merge was not kept: it is made again for its norm.
        without = dataclasses.replace(spec, backward=False, gradients="", norm="", norm_weight=None, norm_bias=None)
        return (without, *before, dataclasses.replace(spec, delta="load"))
    groups = source_groups(spec)
    if len(groups) == 1 and not apart:
        return (spec,)
    parts = [
        dataclasses.replace(
            spec,
            sources=len(group),
            gradients=spec.gradients[group.start : group.stop],
            delta="load" if apart or number else "store",
        )
        for number, group in enumerate(groups)
    ]
    return (*before, *parts)


def _phase_1(spec: KernelSpec) -> tuple[KernelSpec, ...]:
    parts = []
    for number, queries in enumerate(query_groups(spec.queries, spec.dim, spec.backward, spec.sources)):
        for group in source_groups(spec) if spec.backward else (range(spec.sources),):
            letters = spec.gradients[group.start : group.stop]
            if number:
                # What the queries before left is there now.
                letters = letters.replace(FRESH, "a")
            parts.append(dataclasses.replace(spec, queries=len(queries), sources=len(group), gradients=letters))
    return tuple(parts)


def programs(spec: KernelSpec, chosen: Schedule, tokens: int, multiprocessors: int, warp_size: int = 32) -> int:
    """How many programs share the rows: as many as fit on the device at once, but no more than there are rows."""
    each = max(1, _RESIDENT_THREADS // (chosen.warps * warp_size))
    most = multiprocessors * each
    if spec.backward:
        # Each leaves one float32 row per parameter: together a small fraction of one source.
        most = min(most, max(1, tokens // 16))
    return max(1, min(tokens, most))
