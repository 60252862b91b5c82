"""What a model of the user's is called with: ``--input``, ``example_inputs`` beside it, or its own dummies."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from attnres_compile.cli.targets.user_code import user_code
from attnres_compile.cli.targets.wording import listed
from attnres_compile.errors import InputsError, TargetError
from attnres_compile.inputs import GRAMMAR, Inputs, as_inputs


def find_inputs(space: ModuleType, place: str, model: nn.Module, given: Inputs | None) -> tuple[Inputs, str]:
    """The inputs of a model of a script or module, and where they came from.

    Args:
        space: the script or module.
        place: how the user named it.
        model: the model.
        given: what ``--input`` describes; it comes first.

    Raises:
        TargetError: there are none, or the code that makes them failed.
        InputsError: ``example_inputs`` is nothing that a model can be called with.
    """
    if given is not None:
        return beside(given, model), "--input"
    if hasattr(space, "example_inputs"):
        source = f"example_inputs in {place}"
        value = space.example_inputs
        if inspect.isroutine(value) or isinstance(value, functools.partial):
            needs = required(value)
            if len(needs) > 1:
                raise TargetError(f"{source} needs {', '.join(needs)}", remedy="It may take the model, no more")
            with user_code(source):
                value = value(model) if needs else value()
        try:
            return as_inputs(value), source
        except InputsError as error:
            raise InputsError(f"{source}: {error.what}", remedy=error.remedy) from error
    with user_code("the model's dummy_inputs"):
        dummy = getattr(model, "dummy_inputs", None)
    if dummy is not None:
        return beside(as_inputs(dummy), model), "the model's own dummy_inputs"
    raise no_inputs(model, f"Define example_inputs in {place}, or give")


def no_inputs(model: nn.Module, mend: str = "Give") -> TargetError:
    """The error for a model of which nobody says what it is called with."""
    return TargetError(
        f"no inputs for {type(model).__name__}, whose forward takes {arguments_of(model)}",
        remedy=f"{mend} --input for each. {GRAMMAR}",
    )


def arguments_of(model: nn.Module) -> str:
    """The names of what ``forward`` takes, for messages."""
    try:
        names = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        names = []
    return f"({listed(names, '')})"


def required(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments that a call cannot do without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins do not say
        return []
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in open_ended]


def beside(inputs: Inputs, model: nn.Module) -> Inputs:
    """``inputs`` on the device of the model, for inputs that nobody placed on purpose."""
    first = _first_tensor(model)
    if first is None:
        return inputs
    device = first.device

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    return Inputs(pytree.tree_map(move, inputs.args), pytree.tree_map(move, inputs.kwargs))


def _first_tensor(model: nn.Module) -> Tensor | None:
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            return tensor
    return None
