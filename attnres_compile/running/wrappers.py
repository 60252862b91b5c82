"""What scripts put around a model: torch.compile, data parallelism; and how to get at the model inside."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch.nn.parallel import DataParallel, DistributedDataParallel

from attnres_compile.errors import AttnResError
from attnres_compile.parameters import converted

# Backends that carry the depth attention of a converted model.
CARRIERS = ("inductor", "attnres")


def is_parallel(module: nn.Module) -> bool:
    """Whether a module calls the model inside it with inputs that it has prepared: its call should be looked into."""
    return isinstance(module, (DataParallel, DistributedDataParallel))


def inner(module: nn.Module) -> nn.Module:
    """The model inside all wrappers."""
    while True:
        if isinstance(module, OptimizedModule):
            module = module._orig_mod
        elif is_parallel(module):
            module = module.module  # type: ignore[assignment]
        else:
            return module


def wrapped_by(module: nn.Module) -> list[DistributedDataParallel]:
    """The data-parallel wrappers from a module inwards."""
    found = []
    while isinstance(module, OptimizedModule) or is_parallel(module):
        if isinstance(module, DistributedDataParallel):
            found.append(module)
        module = module._orig_mod if isinstance(module, OptimizedModule) else module.module  # type: ignore[assignment]
    return found


def refuse_sharded(module: nn.Module) -> None:
    """Raise where a model's parameters are not whole on this process.

    Raises:
        AttnResError: they are not.
    """
    remedy = "Call attnres_compile.transform in the script, before it wraps the model"
    if isinstance(module, DataParallel) and len(module.device_ids) > 1:
        raise AttnResError("DataParallel copies the model to several devices at each call", remedy=remedy)
    sharded = type(module).__name__ == "FullyShardedDataParallel" or any(
        type(parameter).__name__ == "DTensor" for parameter in module.parameters()
    )
    if sharded:
        raise AttnResError("its parameters are sharded over processes already", remedy=remedy)


def share_gradients(wrapper: DistributedDataParallel, queries: Iterable[nn.Parameter]) -> None:
    """Average the gradients of parameters that a data-parallel wrapper does not know over its processes.

    Each backward averages what has been accumulated. Under ``no_sync`` too: what came before is equal everywhere, so
    that its average is itself.
    """
    ranks = dist.get_process_group_ranks(wrapper.process_group)
    # A group of its own: its messages cannot come between the wrapper's, in whatever order gradients get ready.
    whole = len(ranks) == dist.get_world_size()
    group = cast("dist.ProcessGroup", dist.new_group(ranks) if whole else wrapper.process_group)
    # Groups have threads, which must end when the script destroys its groups and not when the process ends.
    own, size = weakref.ref(group), len(ranks)
    del group

    def average(query: Tensor) -> None:
        if query.grad is not None:
            dist.all_reduce(query.grad, group=own())
            query.grad.div_(size)

    for query in queries:
        query.register_post_accumulate_grad_hook(average)


@contextlib.contextmanager
def uncompiled(model: nn.Module) -> Iterator[list[str]]:
    """While open, no module of ``model`` has what ``module.compile()`` left on it.

    Afterwards it is back, except inside modules that were converted, which compile as wholes, and where its backend
    cannot carry the depth attention.

    Yields:
        A list that holds the names of those backends in the end.
    """
    left_out: list[str] = []
    taken = {path: call for path, m in model.named_modules() if (call := m._compiled_call_impl) is not None}
    for path in taken:
        model.get_submodule(path)._compiled_call_impl = None
    try:
        yield left_out
    finally:
        owners = [path for path, _, _ in converted(model)]
        for path, call in taken.items():
            inside = any(path != owner and (not owner or path.startswith(f"{owner}.")) for owner in owners)
            around = any(not path or owner == path or owner.startswith(f"{path}.") for owner in owners)
            if around and not carries(call):
                left_out.append(backend_name(call) or "another backend")
            elif not inside:
                model.get_submodule(path)._compiled_call_impl = call


def bypassed(module: nn.Module, model: nn.Module) -> list[str]:
    """Make compiled wrappers around a converted model call it directly where their backend cannot carry it.

    Args:
        module: the outermost wrapper.
        model: the converted model inside.

    Returns:
        The names of these backends.
    """
    names = []
    while module is not model:
        if isinstance(module, OptimizedModule):
            if not carries(module.forward):
                names.append(backend_name(module.forward) or "another backend")
                module.forward = module._orig_mod.__call__
            module = module._orig_mod
        else:
            module = module.module  # type: ignore[assignment]
    return names


def carries(compiled: Callable[..., Any]) -> bool:
    """Whether a compiled function's backend carries the depth attention; what does not say so is taken to be one."""
    name = backend_name(compiled)
    return name is None or name in CARRIERS


def backend_name(compiled: Callable[..., Any]) -> str | None:
    """Name of the backend of what ``torch.compile`` returned, or ``None``."""
    try:
        callback = inspect.getclosurevars(compiled).nonlocals.get("callback")
    except TypeError:
        return None
    if not callable(callback):
        return None
    backend = innermost_backend(callback)
    return getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
