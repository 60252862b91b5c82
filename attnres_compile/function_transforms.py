"""Converted modules under the transforms of ``torch.func`` (``vmap``, ``grad``, ``jvp`` and what is built of them), and
in forward mode (``torch.autograd.forward_ad``).

dynamo does not trace while a transform is at work, nor with a tensor that carries a tangent: it would run the module
plain. What it needs to trace, and to check its guards, are shapes and dtypes. So it is called with the transforms taken
off, and with an ordinary tensor in the place of each one that a transform wraps or that has a tangent, and what it
calls puts transforms and tensors back before it runs the graph, op by op. This file knows internals of functorch and no
other does.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from attnres_compile.errors import PlainExecutionError


def active() -> bool:
    """Whether a transform is at work in this thread, or forward mode."""
    return torch._C._functorch.peek_interpreter_stack() is not None or _in_forward_mode()


def _in_forward_mode() -> bool:
    return forward_ad._current_level >= 0


def _has_tangent(value: Tensor) -> bool:
    return _in_forward_mode() and forward_ad.unpack_dual(value).tangent is not None


class _StandIns:
    """Ordinary tensors in the place of wrapped ones.

    Attributes:
        stack: the transforms that were taken off.
    """

    def __init__(self, stack: list[Any]) -> None:
        self.stack = stack
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        self._wrapped: dict[int, Tensor] = {}

    def of(self, value: Any, parameter: bool = False) -> Any:
        """What stands for ``value``: itself, where no transform wraps it and it has no tangent."""
        if not isinstance(value, Tensor):
            return value
        if not torch._C._functorch.is_functorch_wrapped_tensor(value) and not _has_tangent(value):
            return value
        if id(value) not in self._made:
            # Should one ever get into a result, nobody will take it for a number.
            filler = float("nan") if value.is_floating_point() or value.is_complex() else 0
            like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            like.fill_(filler)
            like = nn.Parameter(like, value.requires_grad) if parameter else like.requires_grad_(value.requires_grad)
            self._made[id(value)] = (like, value)
            self._wrapped[id(like)] = value
        return self._made[id(value)][0]

    def back(self, value: Any) -> Any:
        """What ``value`` stands for, or itself."""
        return self._wrapped.get(id(value), value)


_STAND_INS: contextvars.ContextVar[_StandIns | None] = contextvars.ContextVar("attnres_stand_ins", default=None)


def backend(compiler: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """``compiler``, whose compiled graphs run under the transforms and on the tensors that were taken away."""

    def compile_graph(module: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = compiler(module, example_inputs)

        def run(*args: Any) -> Any:
            stand_ins = _STAND_INS.get()
            if stand_ins is None:
                return compiled(*args)
            with pyfunctorch.temporarily_restore_interpreter_stack(stand_ins.stack):
                return compiled(*map(stand_ins.back, args))

        return run

    return compile_graph


# An outer compiler must not trace what takes transforms off.
@torch._compile._disable_dynamo
def run(owner: nn.Module, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a converted module under the transforms that are at work.

    Args:
        owner: the module.
        compiled: it, compiled by what :func:`backend` returned.
        args, kwargs: of the call.
    """
    with pyfunctorch.temporarily_clear_interpreter_stack() as stack:
        stand_ins = _StandIns(stack)
        token = _STAND_INS.set(stand_ins)
        try:
            given, named = pytree.tree_map(stand_ins.of, (args, kwargs))
            with _standing_in(owner, stand_ins):
                result = compiled(*given, **named)
        finally:
            _STAND_INS.reset(token)
        return pytree.tree_map(stand_ins.back, result)


def refuse(module: nn.Module) -> None:
    """Raise for a module that runs in pieces.

    Raises:
        PlainExecutionError: always.
    """
    raise PlainExecutionError(
        f"torch.func cannot transform a converted {type(module).__name__} whose residual stream runs through graph "
        "breaks",
        remedy="Remove what breaks the graph (TORCH_LOGS=graph_breaks shows all places)",
    )


@contextlib.contextmanager
def _standing_in(module: nn.Module, stand_ins: _StandIns) -> Iterator[None]:
    """Put stand-ins in the place of the module's wrapped parameters and buffers, for a while."""
    changed: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
    try:
        for each in module.modules():
            places: tuple[tuple[dict[str, Any], bool], ...] = ((each._parameters, True), (each._buffers, False))
            for held, parameter in places:
                for name, value in held.items():
                    instead = stand_ins.of(value, parameter)
                    if instead is not value and value is not None:
                        changed.append((held, name, value, instead))
                        held[name] = instead
        yield
    finally:
        for held, name, value, instead in changed:
            # A buffer that the module replaced on its way stays what it made of it.
            if held[name] is instead:
                held[name] = value
