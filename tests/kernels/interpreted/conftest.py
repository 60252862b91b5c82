"""These tests run generated kernels in Triton's interpreter, which has to be chosen before Triton is imported.

``tests/kernels/test_interpreter.py`` runs them, each file in a process of its own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest
from triton.runtime import interpreter

from attnres_compile.kernels import rows, tuning
from attnres_compile.kernels.spec import KernelSpec, Schedule

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["*"]


@pytest.fixture(autouse=True, scope="session")
def reductions_in_halves() -> Iterator[None]:
    """Sums of several values at once are folded in halves, as a GPU does it: element by element takes very long."""
    slow = interpreter.ReduceOps.generic_reduce

    def halved(self: Any, parts: tuple[Any, ...]) -> Any:
        if self.axis != 0 or self.keep_dims:
            return slow(self, parts)
        while (length := len(parts[0].handle.data)) > 1:
            assert length % 2 == 0, "Triton's shapes are powers of two"
            ends = [[self.to_tensor(p.handle.data[at], p.dtype) for p in parts]
                    for at in (slice(length // 2), slice(length // 2, None))]  # fmt: skip
            made = self.combine_fn.fn(*ends[0], *ends[1])
            parts = made if isinstance(made, tuple) else (made,)
        return [self.to_tensor(part.handle.data[0], part.dtype) for part in parts]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.ReduceOps, "generic_reduce", halved)
        yield


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
