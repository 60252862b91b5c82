"""Registers, spills, widths and bytes of compiled kernels, against numbers worked out by hand and bad kernels."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attnres_compile.errors import KernelError
from attnres_compile.kernels.inspection import kernel as inspection
from attnres_compile.kernels.inspection import llvm_ir, ptx
from attnres_compile.kernels.inspection.kernel import (
    ARCHITECTURES,
    KernelFacts,
    amd_report,
    inspect_kernel,
    ptxas_report,
)
from attnres_compile.kernels.spec import KernelSpec, Schedule, arguments

NVIDIA = ("sm_80", "sm_90", "sm_100")
BF16 = "bfloat16"


@pytest.fixture(autouse=True)
def own_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of a user's caches is read, nothing is left there."""
    monkeypatch.setenv("ATTNRES_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def mix(sources: int = 3, dim: int = 1024, **more: Any) -> KernelSpec:
    return KernelSpec("mix", sources, dim, **more)


def facts(spec: KernelSpec, arch: str, warps: int = 2, chunk: int = 1024, **more: Any) -> KernelFacts:
    return inspect_kernel(spec, Schedule(warps, chunk), arch, **more)


# --- bytes of generated kernels. Rows times dim times bytes, counted on fingers from Algorithm 1 and its gradient.

CASES = {
    # 3 sources in, out out
    "mix": (mix(), 3 * 2048, 2048, 0, 1024 * 4),
    # 5 sources and a float32 branch in; partial, mix and out out; the log-sum-exp
    "everything fused": (
        mix(
            5,
            branch_dtype="float32",
            norm="layernorm",
            norm_weight=BF16,
            norm_bias=BF16,
            keep=True,
        ),
        5 * 2048 + 4096,
        3 * 2048 + 4,
        4,
        1024 * 4,
    ),
    # sources, grad, mix and one accumulated gradient in, 2 gradients out, 1 log-sum-exp in
    "mix backward": (mix(2, backward=True, gradients="fa"), 5 * 2048 + 4, 2 * 2048, 4, 1024 * 4),
    # an unwanted gradient is not written
    "mix backward, one unwanted": (mix(2, backward=True, gradients="f-"), 4 * 2048 + 4, 2048, 4, 1024 * 4),
    # 4 sources read once for 3 queries; 3 mixes and 3 log-sum-exps out
    "inter": (KernelSpec("inter", 4, 1024, queries=3), 4 * 2048, 3 * 2048 + 12, 12, 3 * 1024 * 4),
    # 2 sources, 2 gradients, 2 mixes, 2 log-sum-exps and their 2 gradients in; 2 gradients out
    "inter backward": (
        KernelSpec("inter", 2, 1024, queries=2, backward=True, gradients="ff"),
        6 * 2048 + 16,
        2 * 2048,
        16,
        2 * 1024 * 4,
    ),
    # the partial sum, phase 1's mix and log-sum-exp in, one row out
    "merge": (KernelSpec("merge", 1, 1024), 2 * 2048 + 4, 2048, 4, 1024 * 4),
    # the partial sum, grad, mixed and lse in; the gradients of mixed, lse and the partial sum out
    "merge backward": (KernelSpec("merge", 1, 1024, backward=True, gradients="f"), 3 * 2048 + 4, 2 * 2048 + 4, 8, 4096),
    "float32": (mix(2, 1024, dtype="float32"), 2 * 4096, 4096, 0, 4096),
    # a masked tail: 768 of 1024 lanes, and 1032, of which the second chunk holds 8
    "three quarters": (mix(2, 768), 2 * 1536, 1536, 0, 768 * 4),
    "eight more": (mix(2, 1032), 2 * 2064, 2064, 0, 1032 * 4),
    "strided": (mix(2, 768, strided=True), 2 * 1536, 1536, 0, 768 * 4),
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES)
def test_bytes_by_hand(case: str, arch: str) -> None:
    spec, loads, stores, statistics, parameters = CASES[case]
    found = facts(spec, arch)
    assert found.load_bytes_per_token == loads
    assert found.store_bytes_per_token == stores
    assert found.statistics_bytes_per_token == statistics
    assert found.floor_bytes_per_token == loads + stores - statistics
    assert found.reread_bytes_per_token == 0
    assert found.parameter_bytes == parameters
    # A norm's weight and bias are loaded for each row.
    assert found.parameter_bytes_per_token == (2 * 2048 if spec.norm_bias else 0)
    assert found.scratch_bytes == (parameters if spec.backward else 0)
    assert found.scratch_bytes_per_token == 0
    assert found.spills == 0
    assert found.vector_bytes == 16
    assert found.load_widths == found.store_widths == (16,)
    assert 16 <= found.registers <= 255
    assert found.kernel == f"attnres_{spec.kind}_{spec.direction}"
    assert found.arch == arch


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("dim", "width"),
    [(1001, 2), (1002, 4), (1004, 8), (1008, 16)],
)
def test_rows_that_begin_at_odd_places_are_accessed_narrowly(dim: int, width: int, arch: str) -> None:
    found = facts(mix(2, dim), arch)
    assert found.vector_bytes == width
    assert found.load_bytes_per_token == 2 * dim * 2
    assert found.store_bytes_per_token == dim * 2


@pytest.mark.parametrize(("arch", "copies"), [("sm_90", 4), ("gfx942", 8)])
def test_loads_that_several_threads_repeat_are_counted(arch: str, copies: int) -> None:
    # 64 float32 features on 4 warps of 32 (64) threads: each is loaded 2 (4) times, and stored once.
    found = inspect_kernel(mix(2, 64, dtype="float32"), Schedule(4, 64), arch)
    assert found.load_bytes_per_token == 2 * 256 * copies / 2
    assert found.store_bytes_per_token == 256
    assert found.reread_bytes_per_token == 2 * 256 * (copies / 2 - 1)


def test_too_many_warps_show_as_narrow_loads() -> None:
    assert facts(mix(2, 1024), "sm_90", warps=8).vector_bytes == 8
    assert facts(mix(2, 1024), "gfx942", warps=4).vector_bytes == 8


# --- kernels written by hand, with their mistakes

HEAD = """
import triton
import triton.language as tl


@triton.jit
def attnres_mix_forward(query0, source0, source1, out, tokens):
    lanes = tl.arange(0, 1024)
    program = tl.program_id(0)
    for row in tl.range(program, tokens, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * 1024
"""
GOOD = """
        a = tl.load(source0 + at + lanes).to(tl.float32)
        b = tl.load(source1 + at + lanes).to(tl.float32)
        q = tl.load(query0 + lanes)
        tl.store(out + at + lanes, a * q + b)
"""


def by_hand(body: str, arch: str, dim: int = 1024, warps: int = 4, **more: Any) -> KernelFacts:
    return inspect_kernel(mix(2, dim), Schedule(warps, 1024), arch, text=HEAD + body, **more)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
class TestByHand:
    def test_good(self, arch: str) -> None:
        found = by_hand(GOOD, arch)
        assert (found.load_bytes_per_token, found.store_bytes_per_token) == (4096, 2048)
        assert found.reread_bytes_per_token == 0

    def test_a_source_read_twice(self, arch: str) -> None:
        # Behind a barrier, so that no pass of the compiler makes one load of the two.
        body = GOOD.replace(
            "a * q + b)",
            "a * q + b + tl.sum(a))\n        tl.debug_barrier()\n        "
            "tl.store(out + at + lanes, tl.load(source0 + at + lanes, volatile=True))",
        )
        found = by_hand(body, arch)
        assert found.load_bytes_per_token == 3 * 2048
        assert found.store_bytes_per_token == 2 * 2048
        assert found.reread_bytes_per_token == 2 * 2048

    def test_a_source_left_out(self, arch: str) -> None:
        found = by_hand(GOOD.replace("source1 + at", "source0 + at"), arch)
        assert found.load_bytes_per_token + found.store_bytes_per_token < found.floor_bytes_per_token

    def test_a_loop_over_chunks(self, arch: str) -> None:
        body = """
        total = 0.0
        for start in tl.range(0, 4096, 1024):
            total += tl.sum(tl.load(source0 + at * 4 + start + lanes).to(tl.float32))
        for start in tl.range(0, 4096, 1024):
            a = tl.load(source0 + at * 4 + start + lanes).to(tl.float32)
            b = tl.load(source1 + at * 4 + start + lanes).to(tl.float32)
            tl.store(out + at * 4 + start + lanes, a * total + b)
"""
        found = by_hand(body, arch, dim=4096)
        assert found.load_bytes_per_token == 3 * 8192
        assert found.store_bytes_per_token == 8192
        assert found.reread_bytes_per_token == 8192
        assert found.floor_bytes_per_token == 3 * 8192

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (("source0 + at + lanes", "source0 + at + lanes + 1"), "loads from .* not its to touch.*source0"),
            (("(out + at", "(out + at + 8"), "stores to .* not its to touch.*out"),
            (("(out + at", "(source1 + at"), "stores to .* not its to touch.*source1"),
            (("query0 + lanes", "query0 + at + lanes"), "loads from .* not its to touch.*query0"),
            (("source0 + at + lanes", "source0 - at - 8 + lanes"), "no argument|not its to touch"),
        ],
    )
    def test_memory_that_is_not_its_own(self, arch: str, wrong: tuple[str, str], message: str) -> None:
        with pytest.raises(KernelError, match=message):
            by_hand(GOOD.replace(*wrong), arch)

    def test_addresses_and_masks_that_depend_on_data(self, arch: str) -> None:
        gather = GOOD.replace("source1 + at + lanes", "source1 + at + a.to(tl.int32)")
        with pytest.raises(KernelError, match="depends on floating-point data"):
            by_hand(gather, arch)
        masked = GOOD.replace("a * q + b)", "a * q + b, mask=a > 0)")
        with pytest.raises(KernelError, match="floating-point data"):
            by_hand(masked, arch)

    def test_atomics_are_not_overlooked(self, arch: str) -> None:
        with pytest.raises(KernelError, match="cannot be counted"):
            by_hand(GOOD + "        tl.atomic_add(query0 + lanes, q)\n", arch)

    def test_a_kernel_that_does_not_compile(self, arch: str) -> None:
        with pytest.raises(KernelError, match=f"does not compile for {arch}: CompilationError"):
            by_hand(GOOD.replace("query0 + lanes", "nothing + lanes"), arch)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_programs_share_the_rows(arch: str) -> None:
    """Three programs over seven rows: each row is read by one of them, each keeps its own row of the scratch."""
    spec, schedule = mix(2, 768, backward=True, gradients="ff"), Schedule(2, 1024)
    names = [argument.name for argument in arguments(spec)]
    values = [7 if name == "tokens" else None for name in names]
    compiled, _ = inspection._compile(spec, schedule, arch, inspection.generate(spec, schedule), {})
    seen: dict[str, list[int]] = {"source0": [], "source_grad1": [], "total": [], "query_sum0": []}
    for block in range(3):
        if arch == "gfx942":
            traffic = llvm_ir.run(llvm_ir.parse(compiled.asm["llir"]), values, 2, block, 3)
        else:
            traffic = ptx.run(ptx.parse(compiled.asm["ptx"]), values, block, 3)
        for (index, _), memory in traffic.items():
            if names[index] in seen:
                seen[names[index]] += memory.bytes().tolist()
    assert sorted(seen["source0"]) == list(range(7 * 768 * 2))
    assert sorted(seen["source_grad1"]) == list(range(7 * 768 * 2))
    assert sorted(seen["total"]) == list(range(7 * 4))
    assert sorted(seen["query_sum0"]) == list(range(3 * 768 * 4))


@pytest.mark.parametrize("arch", NVIDIA)
def test_spills_are_reported(arch: str) -> None:
    spec = mix(3, 4096)
    calm = inspect_kernel(spec, Schedule(4, 4096), arch)
    forced = inspect_kernel(spec, Schedule(4, 4096), arch, options={"maxnreg": 48})
    assert calm.spills == 0
    assert calm.registers > 48
    assert forced.spills > 100
    assert forced.registers <= 48
    # Spills go to local memory, none of the arguments'.
    assert forced.load_bytes_per_token == calm.load_bytes_per_token


def test_spills_are_reported_on_amd() -> None:
    forced = inspect_kernel(mix(3, 4096), Schedule(1, 4096), "gfx942", options={"waves_per_eu": 8})
    assert forced.spills > 0
    assert inspect_kernel(mix(3, 4096), Schedule(4, 4096), "gfx942").spills == 0


@pytest.mark.parametrize("arch", NVIDIA)
def test_registers_are_those_of_the_machine_code(arch: str, tmp_path: Path) -> None:
    import triton.backends.nvidia

    spec, schedule = mix(5, 2048), Schedule(4, 2048)
    compiled, log = inspection._compile(spec, schedule, arch, inspection.generate(spec, schedule), {})
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    call = [str(tool), "--dump-resource-usage", str(tmp_path / "kernel.cubin")]
    printed = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert usage is not None
    assert ptxas_report(log) == (int(usage.group(1)), 0)
    assert int(usage.group(2)) == 0


def test_reports_are_read() -> None:
    log = """ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function 'attnres_mix_backward' for 'sm_90a'
ptxas info    : Function properties for attnres_mix_backward
    72 bytes stack frame, 108 bytes spill stores, 64 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 72 bytes cumulative stack size
"""
    assert ptxas_report(log) == (255, 172)
    text = "    .sgpr_count: 100\n    .sgpr_spill_count: 3\n    .vgpr_count:     512\n    .vgpr_spill_count: 10\n"
    assert amd_report(text) == (512, 40, 12)
    for read in (ptxas_report, amd_report):
        with pytest.raises(KernelError, match="report registers and spills"):
            read("nothing of the kind")


def test_facts_are_data() -> None:
    found = facts(mix(), "sm_90")
    values = found.to_dict()
    assert values["registers"] == found.registers
    assert values["load_widths"] == [16]
    assert {"source", "assembly"}.isdisjoint(values)
    assert ".entry attnres_mix_forward" in found.assembly
    assert "def attnres_mix_forward(" in found.source
    assert found.compile_seconds > 0
    assert (found.warps, found.chunk, found.resident) == (2, 1024, True)


def test_other_architectures() -> None:
    for arch in ("sm_90a", "sm_120", "gfx90a", "gfx950"):
        assert facts(mix(), arch).load_bytes_per_token == 3 * 2048


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    with pytest.raises(KernelError, match=r"unknown architecture 'sm_91'.*sm_90"):
        facts(mix(), "sm_91")
    monkeypatch.setattr(knobs.NvidiaTool, "from_path", lambda path: None)
    with pytest.raises(KernelError, match=r"Cannot find ptxas.*TRITON_PTXAS_PATH"):
        facts(mix(), "sm_90")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(KernelError, match="pip install triton"):
        facts(mix(), "sm_90")
