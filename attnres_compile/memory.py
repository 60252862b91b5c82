"""The most memory that tensors take at once while something runs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.profiler import profile


def peak_bytes(action: Callable[[], object], device: torch.device, clear: Callable[[], None] = lambda: None) -> int:
    """Runs ``action`` and returns the most bytes of tensors at one time, above what was there when it began.

    On a CUDA or ROCm device that is what PyTorch's allocator had in use. On the CPU it is what that allocator was
    asked for, the buffers of code that Inductor compiled included; what libraries take for themselves is not seen,
    nor that something goes which was there before.

    Args:
        action: warm: what it compiles would count.
        device: where it runs.
        clear: called before and after it, to drop what it leaves behind.
    """
    clear()
    try:
        return _peak_cuda(action, device) if device.type == "cuda" else _peak_cpu(action)
    finally:
        clear()


def _peak_cuda(action: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_cpu(action: Callable[[], object]) -> int:
    recorded = profile(use_cpu=True, profile_memory=True)
    with _quiet():
        recorded.__enter__()
    try:
        action()
    finally:
        with _quiet():
            recorded.__exit__(None, None, None)
    results: Any = recorded.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The profiler's library writes about its start and end to the process's standard error."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
