"""What must hold of every kernel that sites become, without a GPU: no spills, 16 bytes at a time, no byte too many.

A fixed spread of the matrix of docs/kernels.md; all of it with ``ATTNRES_MATRIX=full`` in the environment (hours).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attnres_compile.cli.kernels.matrix import DIMS, full_matrix
from attnres_compile.cli.kernels.tables import balanced
from attnres_compile.kernels.inspection.kernel import ARCHITECTURES
from attnres_compile.kernels.inspection.site import inspect_site, label
from attnres_compile.kernels.spec import KernelSpec

# Every so many-th of the narrower kernels, which compile in a second or two, on one architecture each.
STEP = 29


def cases() -> list[tuple[KernelSpec, str]]:
    every = full_matrix()
    if os.environ.get("ATTNRES_MATRIX") == "full":
        return [(spec, arch) for spec in every for arch in ARCHITECTURES]
    quick = [spec for spec in every if spec.sources <= 9 and (spec.queries == 1 or not spec.backward)]
    spread = [(spec, ARCHITECTURES[i % 4]) for i, spec in enumerate(quick[::STEP])]
    corner = KernelSpec("mix", 33, DIMS[-1], keep=True)
    return [*spread, *((corner, arch) for arch in ARCHITECTURES)]


CASES = cases()


@pytest.mark.parametrize(("spec", "arch"), CASES, ids=[f"{label(spec)}-{arch}" for spec, arch in CASES])
def test_site(spec: KernelSpec, arch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNRES_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    row = inspect_site(spec, arch).to_dict()
    assert row["spills"] == 0
    assert row["vector_bytes"] == 16
    assert balanced(row)
    counted = row["load_bytes_per_token"] + row["store_bytes_per_token"]
    beside = row["statistics_bytes_per_token"] + row["reread_bytes_per_token"]
    assert counted == row["floor_bytes_per_token"] + beside
    assert row["scratch_bytes_per_token"] == 0
    if row["launches"] == 1:
        assert row["reread_bytes_per_token"] == 0


def test_the_spread_meets_everything() -> None:
    specs = [spec for spec, _ in CASES]
    assert {(s.kind, s.backward) for s in specs} == {
        (kind, backward) for kind in ("mix", "inter", "merge") for backward in (False, True)
    } - (set() if os.environ.get("ATTNRES_MATRIX") == "full" else {("inter", True)})
    assert {s.dim for s in specs} == set(DIMS)
    assert {s.dtype for s in specs} == {"bfloat16", "float32"}
    assert {s.norm for s in specs} == {"", "rmsnorm", "layernorm"}
    assert {arch for _, arch in CASES} == set(ARCHITECTURES)
