"""One kernel on tensors: rows of matrices for its arguments, results for what it writes, and the launch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnres_compile.kernels import tuning
from attnres_compile.kernels.plain import like
from attnres_compile.kernels.spec import KernelSpec, Schedule, arguments, entry

# Multiprocessors that a launch is laid out for where no device is there to ask: those of an H200.
_MULTIPROCESSORS = 132


class Rows:
    """How tensors of the sources' shape become matrices of one row per token, and results become tensors again."""

    def __init__(self, model: Tensor, dim: int) -> None:
        self.model = model
        self.dim = dim % model.dim()
        self.last = self.dim == model.dim() - 1
        self.width = int(model.shape[self.dim])
        self.shape = model.shape if self.last else model.movedim(self.dim, -1).shape
        self.tokens = model.numel() // self.width if self.width else 0

    def matrix(self, value: Tensor) -> Tensor:
        """``[tokens, d]`` with contiguous rows; a view where the layout allows it."""
        moved = value if self.last else value.movedim(self.dim, -1)
        flat = moved.reshape(-1, self.width)
        return flat if self.width == 1 or flat.stride(1) == 1 else flat.contiguous()

    def tensor(self, matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A matrix that a kernel wrote, in the sources' shape and with the strides of ``empty_like`` of them."""
        shaped = matrix.view(self.shape)
        return like(shaped if self.last else shaped.movedim(-1, self.dim), self.model)

    def numbers(self, value: Tensor) -> Tensor:
        """Per-token numbers as a dense float32 vector."""
        return value.to(torch.float32).reshape(-1).contiguous()


def run(
    spec: KernelSpec, values: Mapping[str, Tensor], rows: Rows, sums: dict[str, list[Tensor]] | None = None
) -> dict[str, Tensor]:
    """Launch one kernel.

    Args:
        spec: which, but for ``strided``, which the tensors decide.
        values: tensors by the names of the kernel's arguments; what it writes is made here.
        rows: the layout.
        sums: gets the scratch matrices by name.

    Returns:
        What the kernel wrote, in the sources' shape (or that without features), by argument name.
    """
    device = rows.model.device
    matrices = {
        a.name: rows.matrix(values[a.name]) for a in arguments(spec) if a.loads == spec.dim and _is_matrix(a.role)
    }
    spec = dataclasses.replace(spec, strided=any(_stride(m) != spec.dim for m in matrices.values()))
    warp_size = 64 if torch.version.hip else 32
    function, chosen = _kernel(spec, warp_size)
    programs = _programs(spec, chosen, rows.tokens, device, warp_size)
    passed: list[Any] = []
    strides: list[int] = []
    written: dict[str, Tensor] = {}
    for argument in arguments(spec):
        name = argument.name
        if argument.role in ("source", "result", "gradient"):
            if name not in matrices:
                dtype = getattr(torch, argument.dtype)
                written[name] = torch.empty((rows.tokens, spec.dim), dtype=dtype, device=device)
                matrices[name] = written[name]
            passed.append(matrices[name])
            strides.append(_stride(matrices[name]))
        elif argument.role == "statistic":
            if argument.stores:
                written[name] = torch.empty((rows.tokens,), dtype=torch.float32, device=device)
            passed.append(written[name] if argument.stores else rows.numbers(values[name]))
        elif argument.role == "parameter":
            passed.append(values[name].to(getattr(torch, argument.dtype)).contiguous())
        elif argument.role == "scratch":
            make = torch.empty if chosen.resident and rows.tokens else torch.zeros
            scratch = make((programs, spec.dim), dtype=torch.float32, device=device)
            assert sums is not None
            sums.setdefault(name, []).append(scratch)
            passed.append(scratch)
    passed.append(rows.tokens)
    if spec.strided:
        passed += strides
    if rows.tokens:
        launch, options = _launcher(function, chosen, rows.model)
        launch[(programs,)](*passed, **options)
    numbers = rows.shape[:-1]
    return {name: value.view(numbers) if value.dim() == 1 else rows.tensor(value) for name, value in written.items()}


def _is_matrix(role: str) -> bool:
    return role in ("source", "gradient")


def _stride(matrix: Tensor) -> int:
    """Elements from one row to the next; a single row may claim anything."""
    return int(matrix.stride(0)) if matrix.shape[0] > 1 else int(matrix.shape[1])


@functools.cache
def _kernel(spec: KernelSpec, warp_size: int) -> tuple[Any, Schedule]:
    from attnres_compile.kernels import cache
    from attnres_compile.kernels.codegen import generate

    chosen = tuning.schedule(spec, warp_size)
    return getattr(cache.load(generate(spec, chosen)), entry(spec)), chosen


def _programs(spec: KernelSpec, chosen: Schedule, tokens: int, device: torch.device, warp_size: int) -> int:
    return tuning.programs(spec, chosen, tokens, _multiprocessors(device), warp_size)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    if not torch.cuda.is_available():
        return _MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _launcher(function: Any, chosen: Schedule, model: Tensor) -> tuple[Any, dict[str, int]]:
    """What to launch with, and its options: the kernel, or in a graph that is being traced a node for the launch."""
    options = chosen.options(nvidia=torch.version.hip is None)
    if type(model) in (Tensor, torch.nn.Parameter):
        return function, options
    if set(options) > {"num_warps", "num_stages"}:
        # A node takes these two alone; the others it takes from a configuration.
        return torch.library.wrap_triton(_configured(function, **options)), {}
    return torch.library.wrap_triton(function), options


@functools.cache
def _configured(function: Any, **options: int) -> Any:
    import triton

    return triton.autotune(configs=[triton.Config({}, **options)], key=[])(function)
