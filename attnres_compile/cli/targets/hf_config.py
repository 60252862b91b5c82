"""A configuration of the transformers library from a model type or a folder, and fields of it set by text."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

from attnres_compile.cli.targets.user_code import own_words
from attnres_compile.cli.targets.wording import listed, meant
from attnres_compile.errors import TargetError

_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_FIXED = ("model_type", "transformers_version", "auto_map")


def configuration(place: str, settings: Sequence[str]) -> tuple[Any, str | None]:
    """The configuration and, where it came from one, the folder.

    Args:
        place: a model type or a folder.
        settings: ``NAME=VALUE``; dots lead into a part (``text_config.num_hidden_layers``), the value is JSON or text.

    Raises:
        TargetError: there is no such type or folder, or the configuration has no such field or refuses its value.
    """
    chosen = _parsed(settings)
    kind, stored, folder = _found(place)
    try:
        plain = kind.from_dict(copy.deepcopy(stored)) if folder else kind()
    except Exception as error:
        raise TargetError(f"transformers refuses hf:{place}: {own_words(error)}") from error
    values = copy.deepcopy(stored)
    for path, value in chosen.items():
        _set(values, plain, path, value)
    if chosen:
        try:
            config = kind.from_dict(values) if folder else kind(**values)
        except Exception as error:
            raise TargetError(
                f"transformers refuses --set {' --set '.join(settings)} for hf:{place}: {_reason(error)}",
                remedy="Fields that depend on each other are set together",
            ) from error
    else:
        config = plain
    if not any(path[-1] == "use_cache" for path in chosen):
        _without_cache(config)
    return config, folder


def _reason(error: Exception) -> str:
    """The last line of an error of a strict dataclass is the one that says what is wrong."""
    lines = own_words(error).splitlines()
    return lines[-1].strip()


# ------------------------------------------------------------------ where it is


def _found(place: str) -> tuple[Any, dict[str, Any], str | None]:
    """The class, the values that are given for it, and the folder that gives them."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import configuration_auto as auto

    types = sorted(vars(auto)["CONFIG_MAPPING_NAMES"])
    if place in types:
        return CONFIG_MAPPING[place], {}, None
    folder = os.path.expanduser(place)
    if os.path.basename(folder) == "config.json":
        folder = os.path.dirname(folder) or "."
    if not os.path.isdir(folder):
        raise TargetError(
            f"hf:{place} is neither a model type of transformers nor a folder",
            remedy=meant(place.lower(), types, "hf:") + "Nothing is downloaded: give a model type, as hf:llama, or "
            "the folder of a checkpoint, as hf:path/to/folder",
        )
    file = os.path.join(folder, "config.json")
    try:
        with open(file, encoding="utf-8") as text:
            stored = json.load(text)
    except OSError as error:
        raise TargetError(
            f"hf:{place} has no config.json that can be read: {error.strerror}",
            remedy=f"It holds {listed(sorted(os.listdir(folder)), 'nothing')}",
        ) from error
    except ValueError as error:
        raise TargetError(f"{file} is no JSON: {error}") from error
    model_type = str(stored.get("model_type")) if isinstance(stored, dict) else ""
    if model_type not in types:
        raise TargetError(
            f"{file} names the model type {model_type!r}, which transformers does not have",
            remedy=meant(model_type, types) + "Code that comes with a checkpoint is not run: build such a model "
            "in a script and name that",
        )
    return CONFIG_MAPPING[model_type], stored, folder


# ------------------------------------------------------------------ fields


def _parsed(settings: Sequence[str]) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        path = tuple(part.strip() for part in name.split("."))
        if not equals or not all(part.isidentifier() or part.isdigit() for part in path):
            raise TargetError(
                f"--set {setting} is not NAME=VALUE",
                remedy="As --set num_hidden_layers=4, or --set text_config.num_hidden_layers=4 for a part",
            )
        if path in found:
            raise TargetError(f"--set {name} is given twice", remedy="Give one")
        found[path] = _value(text.strip())
    for path in found:
        inner = [other for other in found if other[: len(path)] == path and other != path]
        if inner:
            names = " and ".join(".".join(each) for each in (path, inner[0]))
            raise TargetError(f"--set {names} contradict each other", remedy="Set the fields of a part one by one")
    return found


def _value(text: str) -> Any:
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _set(values: dict[str, Any], config: Any, path: tuple[str, ...], value: Any) -> None:
    """Puts ``value`` at ``path`` into ``values``, which ``config`` was or will be made of."""
    for depth, name in enumerate(path[:-1]):
        _check(config, path, depth)
        part = config[name] if isinstance(config, dict) else getattr(config, name)
        if not isinstance(part, dict) and not hasattr(part, "to_dict"):
            whole = ".".join(path[: depth + 1])
            raise TargetError(f"--set {'.'.join(path)}: {whole} is {part!r}, which has no fields")
        own = values.get(name)
        if not isinstance(own, dict):
            # A part that only its class's defaults describe: a dict as a whole, a configuration by its type.
            own = copy.deepcopy(part) if isinstance(part, dict) else {"model_type": part.model_type}
        values[name] = own
        values, config = own, part
    _check(config, path, len(path) - 1)
    name = path[-1]
    if not isinstance(config, dict):
        # One field may have two names (n_layer and num_hidden_layers); the stored one may be either.
        alias = config.attribute_map
        for other in {alias.get(name), *(short for short, real in alias.items() if real in (name, alias.get(name)))}:
            if other is not None and other != name:
                values.pop(other, None)
    values[name] = value


def _check(config: Any, path: tuple[str, ...], depth: int) -> None:
    name = path[depth]
    known = sorted(config) if isinstance(config, dict) else _fields(config)
    if name in known:
        return
    if name in _FIXED:
        raise TargetError(f"--set {'.'.join(path)}: {name} cannot be set", remedy="Name another target")
    whole = ".".join(path[:depth]) or (type(config).__name__ if not isinstance(config, dict) else "it")
    raise TargetError(
        f"--set {'.'.join(path)}: {whole} has no field {name!r}",
        remedy=meant(name, known) or f"It has {listed(known, 'none', most=40)}",
    )


def _fields(config: Any) -> list[str]:
    names = {*config.to_dict(), *config.attribute_map, *config.sub_configs}
    if dataclasses.is_dataclass(config):
        names.update(field.name for field in dataclasses.fields(config))
    return sorted(name for name in names if not name.startswith("_") and name not in _FIXED)


def _without_cache(config: Any) -> None:
    """Key-value caches are objects that a graph cannot return; without them the model computes the same."""
    if hasattr(config, "use_cache"):
        config.use_cache = False
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None and hasattr(part, "sub_configs"):
            _without_cache(part)
