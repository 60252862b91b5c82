"""Who differentiates an operator of this package: its own formula, or PyTorch through its plain code.

A formula is for the ordinary gradient: it saves little and computes the gradients in one sweep. All else - a second
derivative, forward mode, and the transforms of ``torch.func`` (``vmap``, ``grad``, ``jvp`` and what is built of them) -
runs the operator's plain code, which is made of PyTorch's own operators and so has all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad

Formula = Callable[..., Any]


def register(
    library: torch.library.Library, name: str, plain: Callable[..., Any], formula: Formula, save: Formula
) -> None:
    """Give the operator ``name`` a formula for its gradient, and its plain code for all other derivatives.

    Args:
        library: that the operator is defined in.
        name: the operator's, without its namespace.
        plain: computes what the operator does, with PyTorch's operators alone.
        formula, save: ``backward`` and ``setup_context``, as ``torch.library.register_autograd`` takes them.
    """
    # What register_autograd registers; it has no place for a choice before it.
    ordinary = make_autograd_impl(getattr(torch.ops.attnres, name).default, Info(formula, save))

    def differentiate(keys: Any, *arguments: Any) -> Any:
        return plain(*arguments) if transformed(arguments) else ordinary(keys, *arguments)

    library.impl(name, differentiate, "Autograd", with_keyset=True)
    library.impl(name, plain, "FuncTorchBatched")


def register_plainly(library: torch.library.Library, name: str, plain: Callable[..., Any]) -> None:
    """Let the operator ``name``, a gradient itself, be differentiated through its plain code.

    Args:
        library, name, plain: as for :func:`register`.
    """
    operator = getattr(torch.ops.attnres, name).default

    def differentiate(keys: Any, *arguments: Any) -> Any:
        recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(arguments))
        if recorded or transformed(arguments):
            return plain(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

    library.impl(name, differentiate, "Autograd", with_keyset=True)
    library.impl(name, plain, "FuncTorchBatched")


def transformed(arguments: Any) -> bool:
    """Whether a transform of ``torch.func`` is at work, or one of the tensors carries a tangent."""
    if torch._C._are_functorch_transforms_active():
        return True
    # No level, no tangents: nobody pays for looking.
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in _tensors(arguments))


def _tensors(arguments: Any) -> Iterator[Tensor]:
    for value in arguments:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (each for each in value if isinstance(each, Tensor))
