"""These tests run generated kernels in Triton's interpreter, which has to be chosen before Triton is imported.

``tests/kernels/test_interpreter.py`` runs them, each file in a process of its own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import pytest

from attnres_compile.kernels import rows, tuning
from attnres_compile.kernels.spec import KernelSpec, Schedule

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["*"]


@pytest.fixture
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How kernels are laid out: by the package's choice, or as rows too wide for it would be."""
    chosen = tuning.schedule

    def tight(spec: KernelSpec, warp_size: int = 32) -> Schedule:
        return dataclasses.replace(chosen(spec, warp_size), chunk=32, ahead=0)

    def chunked(spec: KernelSpec, warp_size: int = 32) -> Schedule:
        return Schedule(1, 32, resident=False)

    if request.param != "as chosen":
        monkeypatch.setattr(tuning, "schedule", {"tight": tight, "chunked": chunked}[request.param])
        monkeypatch.setattr(tuning, "roomy", lambda dim: False)
        monkeypatch.setattr(tuning, "_SOURCES_TIGHT", 2)
    rows._kernel.cache_clear()
    yield request.param
    rows._kernel.cache_clear()
