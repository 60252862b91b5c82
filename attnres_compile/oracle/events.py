"""One eager run, seen operator by operator: what is called, on which tensors, in which module and on which line."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from attnres_compile import comparison

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep
# What runs the model.
_RUNS = comparison.__file__
_OVERRIDES = os.path.join(_TORCH, "overrides.py")

Key = tuple[str, str, str]
"""Module path, ``file:line`` and name of the function: what an event is known by in another run."""


@dataclass
class Call:
    """One call of a function of torch.

    Attributes:
        func, leaves, spec: what is called on what, its arguments flattened.
        slots: where among the leaves the tensors are.
        name: of the function.
        path: of the module whose code calls.
        places: ``file:line`` of all frames of the run, the innermost first.
    """

    func: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    slots: list[int]
    name: str
    path: str
    places: list[str] = field(default_factory=list)

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """One argument, given by position or by name."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        return kwargs[name] if name in kwargs else args[index] if len(args) > index else default

    def again(self, values: dict[int, Tensor], written: Sequence[int] = ()) -> list[Tensor]:
        """The tensors that it gives with other tensors in some slots. What it writes is a copy."""
        leaves = list(self.leaves)
        for slot, value in values.items():
            leaves[slot] = value
        for slot in written:
            leaves[slot] = leaves[slot].clone()
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        made = tensors(self.func(*args, **kwargs))
        return made or [leaves[slot] for slot in written]


def tensors(value: Any) -> list[Tensor]:
    """The tensors of a nested value, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def is_float(value: Tensor) -> bool:
    """Whether it is an ordinary floating-point tensor."""
    return value.is_floating_point() and value.layout == torch.strided and not value.is_nested


def version(value: Tensor) -> int:
    """How often its memory was written, as far as torch counts."""
    return -1 if value.is_inference() else int(value._version)


class Watch(TorchFunctionMode):
    """While open, hands every call of torch by this thread to :meth:`seen`, and runs everything eagerly.

    Checkpointed functions are called as they are, compiled ones uncompiled, and fused layers layer by layer.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
        self.stack: list[str] = []
        self.open = contextlib.ExitStack()

    def __enter__(self) -> Any:
        self.open.enter_context(_op_by_op())
        self.open.enter_context(self._modules())
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> Any:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.open.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        slots = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        name = getattr(func, "__name__", "") or str(func)
        if name == "__get__":
            name = f"get {getattr(getattr(func, '__self__', None), '__name__', '')}"
        return self.seen(
            Call(func, leaves, spec, slots, name, self.stack[-1] if self.stack else ""), args, kwargs or {}
        )

    def seen(self, call: Call, args: Any, kwargs: Any) -> Any:
        """Runs a call, and returns what it gives."""
        raise NotImplementedError

    def returned(self, path: str, result: Any) -> Any:
        """What stands for the result of a module; ``None`` is the result itself."""
        return None

    @contextlib.contextmanager
    def _modules(self) -> Iterator[None]:
        thread = threading.get_ident()

        def enter(module: nn.Module, args: Any) -> None:
            if threading.get_ident() == thread and id(module) in self.paths:
                self.stack.append(self.paths[id(module)])

        def leave(module: nn.Module, args: Any, result: Any) -> Any:
            if threading.get_ident() == thread and id(module) in self.paths:
                return self.returned(self.stack.pop(), result)
            return None

        handles = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def places() -> list[str]:
    """``file:line`` of the frames of the model's run, the innermost first.

    torch's own come last: a line is that of the user's code where there is any.
    """
    users: list[str] = []
    inner: list[str] = []
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_HERE) or file == _RUNS:
            if users or inner:
                break
        elif file.startswith(_TORCH):
            if file != _OVERRIDES:
                inner.append(f"{file}:{frame.f_lineno}")
        elif not file.startswith("<"):
            users.append(f"{file}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return users + inner


@contextlib.contextmanager
def _op_by_op() -> Iterator[None]:
    fast = torch.backends.mha.get_fastpath_enabled()
    module = torch.utils.checkpoint
    names = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with contextlib.ExitStack() as open_:
            open_.enter_context(torch.compiler.set_stance("force_eager"))
            open_.enter_context(mock.patch.object(module, "CheckpointFunction", _Called))
            for name in names:
                if hasattr(module, name):
                    open_.enter_context(mock.patch.object(module, name, _once))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _Called:
    """In the place of a reentrant checkpoint."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _once(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield
