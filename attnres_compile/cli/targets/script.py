"""``script.py``, ``script.py:name`` or ``package.module:name`` -> a model and the inputs to call it with.

Everything that a user can get wrong here ends in a :class:`~attnres_compile.errors.TargetError` or
:class:`~attnres_compile.errors.InputsError` that says what was looked for and what is there.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from torch import nn

from attnres_compile.cli.targets.candidates import defined, instances, inventory, usable, works_when_run
from attnres_compile.cli.targets.inputs import find_inputs, required
from attnres_compile.cli.targets.modules import FORMS, import_module, is_path, run_it, run_script
from attnres_compile.cli.targets.target import Target
from attnres_compile.cli.targets.user_code import user_code
from attnres_compile.cli.targets.wording import meant
from attnres_compile.errors import TargetError
from attnres_compile.inputs import Inputs
from attnres_compile.views.paths import short_path

# Tried in this order when the target names nothing inside the script.
DEFAULT_NAMES = ("model", "build_model", "make_model", "get_model", "create_model", "build", "Model", "net")


def load_script(text: str, given: Inputs | None) -> Target:
    """Imports or runs what ``text`` names and finds the model and its inputs there.

    Args:
        text: ``script.py``, ``script.py:name``, ``package.module`` or ``package.module:name``. ``name`` is a
            model, a model class without required arguments or a function without any that returns a model.
        given: what ``--input`` describes, or ``None``.

    Raises:
        TargetError: there is no such file, module, name or model, or its code failed.
        InputsError: ``example_inputs`` is nothing that a model can be called with.
    """
    place, name = _split(text)
    if not place:
        raise TargetError(f"target {text!r} names no script and no module", remedy=FORMS)
    space = run_script(place) if is_path(place) else import_module(place)
    name, model = _named(space, name, place) if name else _default_name(space, place)
    inputs, inputs_from = find_inputs(space, place, model, given)
    return Target(f"{short_path(place)}:{name}", model, inputs, inputs_from)


def _split(text: str) -> tuple[str, str]:
    if os.path.exists(text):
        return text, ""
    place, colon, name = text.rpartition(":")
    # The colon of C:\script.py is none of ours.
    if not colon or "/" in name or "\\" in name:
        return text, ""
    return place, name


def _named(space: ModuleType, name: str, place: str) -> tuple[str, nn.Module]:
    value: Any = space
    for part in name.split("."):
        if not hasattr(value, part):
            raise TargetError(f"{place} has no {name!r}", remedy=meant(part, dir(value)) + inventory(space))
        value = getattr(value, part)
    return name, _build(value, name, space, place)


def _build(value: Any, name: str, space: ModuleType, place: str) -> nn.Module:
    if isinstance(value, nn.Module):
        return value
    if isinstance(value, type) and not issubclass(value, nn.Module):
        raise TargetError(f"{place}:{name} is a class, but no nn.Module", remedy=inventory(space))
    if not callable(value):
        raise TargetError(
            f"{place}:{name} is a value of type {type(value).__name__}, not a model", remedy=inventory(space)
        )
    needs = required(value)
    if needs:
        raise TargetError(
            f"{place}:{name} needs arguments: {', '.join(needs)}",
            remedy="Name a function without arguments that returns the model" + _or_run(space, place),
        )
    with user_code(f"{place}:{name}", ended="Name a function that returns the model"):
        made = value()
    if not isinstance(made, nn.Module):
        raise TargetError(f"{place}:{name} returned a value of type {type(made).__name__}, not an nn.Module")
    return made


def _default_name(space: ModuleType, place: str) -> tuple[str, nn.Module]:
    for name in DEFAULT_NAMES:
        if usable(getattr(space, name, None)):
            return name, _build(getattr(space, name), name, space, place)
    models = instances(space)
    classes = {name: value for name, value in defined(space).items() if isinstance(value, type)}
    for candidates in (models, {} if models else classes):
        if len(candidates) == 1:
            ((name, value),) = candidates.items()
            return name, _build(value, name, space, place)
    found = inventory(space)
    if not models and not defined(space):
        raise TargetError(f"{place} holds no model", remedy=f"{found}{_or_run(space, place, '. Or ')}")
    raise TargetError(
        f"{place} does not say which model: it has none of {', '.join(DEFAULT_NAMES)} and not exactly one nn.Module",
        remedy=f"{found}. Name one of them: {place}:NAME{_or_run(space, place)}",
    )


def _or_run(space: ModuleType, place: str, joint: str = ", or ") -> str:
    """The other way, for a script that builds its model when it is run."""
    return joint + run_it(place) if is_path(place) and works_when_run(space) else ""
