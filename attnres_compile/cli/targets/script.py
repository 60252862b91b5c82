"""``script.py``, ``script.py:name`` or ``package.module:name`` -> a model and the inputs to call it with.

Everything that a user can get wrong here ends in a :class:`~attnres_compile.errors.TargetError` or
:class:`~attnres_compile.errors.InputsError` that says what was looked for and what is there.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from attnres_compile import api
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import InputsError, TargetError
from attnres_compile.inputs import GRAMMAR, Inputs, as_inputs, make_inputs
from attnres_compile.report import TransformReport
from attnres_compile.views.paths import short_path

# Tried in this order when the target names nothing inside the script.
DEFAULT_NAMES = ("model", "build_model", "make_model", "get_model", "create_model", "build", "Model", "net")


@dataclass(frozen=True)
class Target:
    """A model and a call of it.

    Attributes:
        name: where the model was found, as ``script.py:model``.
        model: the model itself, not a copy.
        inputs: what to call it with.
        inputs_from: where the inputs came from, for messages.
    """

    name: str
    model: nn.Module
    inputs: Inputs
    inputs_from: str

    def explain(self, config: AttnResConfig) -> TransformReport:
        """What would be converted, see :func:`attnres_compile.explain`."""
        from attnres_compile.cli.targets.blame import blame

        with blame(self):
            return api.explain(self.model, self.inputs, config)


def load_target(text: str, specs: Sequence[str] = (), settings: Sequence[str] = (), weights: bool = True) -> Target:
    """Imports or runs what ``text`` names and finds the model and its inputs there.

    Args:
        text: ``script.py``, ``script.py:name``, ``package.module`` or ``package.module:name``. ``name`` is a
            model, a model class without required arguments or a function without any that returns a model.
        specs: input descriptions (:func:`attnres_compile.inputs.parse_spec`). Without any, ``example_inputs``
            beside the model is taken (a value, or a function of nothing or of the model), then the
            model's own ``dummy_inputs``.

    Raises:
        TargetError: there is no such file, module, name or model, its code failed, or a description is wrong.
        InputsError: ``example_inputs`` is nothing that a model can be called with.
    """
    given = make_inputs(specs)  # first: a typing mistake should not cost the building of a model
    place, name = _split(text)
    if not place:
        raise TargetError(
            f"target {text!r} names no script and no module",
            remedy="Give script.py, script.py:name or package.module:name",
        )
    space = _run_script(place) if _is_path(place) else _import_module(place)
    name, model = _named(space, name, place) if name else _default_name(space, place)
    inputs, inputs_from = _find_inputs(space, place, model, given if specs else None)
    return Target(f"{short_path(place)}:{name}", model, inputs, inputs_from)


@contextlib.contextmanager
def user_code(what: str, remedy: str = "") -> Iterator[None]:
    """Turns any error of the user's code into a :class:`TargetError` with the error's own text and line."""
    try:
        yield
    except SystemExit as error:
        raise TargetError(
            f"{what} ended the process (SystemExit: {error.code})",
            where=_line_of(error),
            remedy="Only its definitions are needed: put the rest under if __name__ == '__main__'",
        ) from error
    except Exception as error:
        raise TargetError(f"{what} failed: {own_words(error)}", where=_line_of(error), remedy=remedy) from error


def own_words(error: BaseException) -> str:
    """An error's class and text, without its traceback."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}".strip().rstrip(".:")


def _line_of(error: BaseException) -> str:
    """The line that raised and, where that is library code, the last line before it that is not."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{short_path(error.filename)}:{error.lineno}"
    here = os.path.dirname(__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((here, "<frozen"))]
    frames = [f for f in frames if "importlib" not in f.filename and f.filename != contextlib.__file__]
    if not frames:
        return ""
    last = frames[-1]
    library = sysconfig.get_path("stdlib")
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(library)]
    lines = [own[-1], last] if own and own[-1] is not last else [last]
    return ", raised at ".join(f"{short_path(f.filename)}:{f.lineno}" for f in lines)


# --- where the model is


def _split(text: str) -> tuple[str, str]:
    if os.path.exists(text):
        return text, ""
    place, colon, name = text.rpartition(":")
    # The colon of C:\script.py is none of ours.
    if not colon or "/" in name or "\\" in name:
        return text, ""
    return place, name


def _is_path(place: str) -> bool:
    return place.endswith(".py") or os.sep in place or "/" in place or os.path.exists(place)


def _run_script(place: str) -> ModuleType:
    place = os.path.expanduser(place)
    if not os.path.isfile(place):
        what = "is a folder, not a script" if os.path.isdir(place) else "does not exist"
        raise TargetError(f"{place} {what}", remedy=_scripts_near(Path(os.path.abspath(place))))
    path = Path(place).resolve()
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{place} is not a Python script", remedy="Its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    kept_module, kept_argv = sys.modules.get(name), sys.argv
    # Dataclasses and pickle look the module up by its name; scripts may parse their own arguments.
    sys.modules[name] = module
    sys.argv = [str(path)]
    package = (path.parent / "__init__.py").exists()
    remedy = f"For relative imports name it as a module: {path.parent.name}.{path.stem}:NAME" if package else ""
    try:
        with user_code(place, remedy):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        if kept_module is not None:
            sys.modules[name] = kept_module
        raise
    finally:
        sys.argv = kept_argv
    return module


def _module_name(path: Path) -> str:
    """The script's own name, unless that means another module (a script may be called torch.py)."""
    stem = path.stem
    if stem.isidentifier():
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(stem)
            if spec is None or spec.origin == str(path):
                return stem
    return "attnres_target_" + re.sub(r"\W", "_", stem)


def _scripts_near(path: Path) -> str:
    folder = path if os.path.isdir(path) else path.parent
    if not os.path.isdir(folder):
        return f"There is no folder {short_path(str(folder))} either"
    scripts = sorted(entry.name for entry in folder.glob("*.py"))
    where = "The current folder" if folder == Path.cwd() else short_path(str(folder))
    return _meant(path.name, scripts) + f"{where} holds {_listed(scripts, 'no Python script')}"


def _import_module(place: str) -> ModuleType:
    if not all(part.isidentifier() for part in place.split(".")):
        raise TargetError(
            f"{place!r} is neither a script nor the name of a module",
            remedy="Give script.py, script.py:name or package.module:name",
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with user_code(place):
            return importlib.import_module(place)
    except TargetError as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if missing is None or not f"{place}.".startswith(f"{missing}."):
            raise
        raise TargetError(f"there is no module {missing!r}", remedy=_modules_near(missing)) from cause


def _modules_near(missing: str) -> str:
    parent, _, last = missing.rpartition(".")
    if not parent:
        script = f"{last}.py"
        return f"Did you mean {script}?" if os.path.exists(script) else "It was looked for here and on sys.path"
    paths = getattr(sys.modules.get(parent), "__path__", None)
    if paths is None:
        return f"{parent} is not a package; for a name inside it write {parent}:{last}"
    names = sorted(info.name for info in pkgutil.iter_modules(paths) if not info.name.startswith("_"))
    return _meant(last, names, f"{parent}.") + f"{parent} holds {_listed(names, 'no modules')}"


def _meant(word: str, names: Sequence[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(word, names, n=1)
    return f"Did you mean {prefix}{close[0]}? " if close else ""


# --- which object it is


def _named(space: ModuleType, name: str, place: str) -> tuple[str, nn.Module]:
    value: Any = space
    for part in name.split("."):
        if not hasattr(value, part):
            raise TargetError(f"{place} has no {name!r}", remedy=_meant(part, dir(value)) + _inventory(space))
        value = getattr(value, part)
    return name, _build(value, name, space, place)


def _build(value: Any, name: str, space: ModuleType, place: str) -> nn.Module:
    if isinstance(value, nn.Module):
        return value
    if isinstance(value, type) and not issubclass(value, nn.Module):
        raise TargetError(f"{place}:{name} is a class, but no nn.Module", remedy=_inventory(space))
    if not callable(value):
        raise TargetError(
            f"{place}:{name} is a value of type {type(value).__name__}, not a model", remedy=_inventory(space)
        )
    needs = _required(value)
    if needs:
        raise TargetError(
            f"{place}:{name} needs arguments: {', '.join(needs)}",
            remedy="Name a function without arguments that returns the model",
        )
    with user_code(f"{place}:{name}"):
        made = value()
    if not isinstance(made, nn.Module):
        raise TargetError(f"{place}:{name} returned a value of type {type(made).__name__}, not an nn.Module")
    return made


def _default_name(space: ModuleType, place: str) -> tuple[str, nn.Module]:
    for name in DEFAULT_NAMES:
        if _usable(getattr(space, name, None)):
            return name, _build(getattr(space, name), name, space, place)
    instances = _instances(space)
    classes = {name: value for name, value in _defined(space).items() if isinstance(value, type)}
    for candidates in (instances, {} if instances else classes):
        if len(candidates) == 1:
            ((name, value),) = candidates.items()
            return name, _build(value, name, space, place)
    raise TargetError(
        f"{place} does not say which model: it has none of {', '.join(DEFAULT_NAMES)} and not exactly one nn.Module",
        remedy=f"{_inventory(space)}. Name one of them: {place}:NAME",
    )


def _usable(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return True
    is_class = isinstance(value, type)
    is_function = inspect.isroutine(value) or isinstance(value, functools.partial)
    buildable = issubclass(value, nn.Module) if is_class else is_function
    return buildable and not _required(value)


def _required(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments that a call cannot do without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins do not say
        return []
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in open_ended]


def _instances(space: ModuleType) -> dict[str, nn.Module]:
    seen: dict[int, tuple[str, nn.Module]] = {}
    for name, value in vars(space).items():
        if isinstance(value, nn.Module):
            seen.setdefault(id(value), (name, value))
    return dict(seen.values())


def _defined(space: ModuleType) -> dict[str, Any]:
    """Model classes and functions that the script itself defines, not those that it imports."""
    return {
        name: value
        for name, value in vars(space).items()
        if getattr(value, "__module__", None) == space.__name__
        and (inspect.isfunction(value) or (isinstance(value, type) and issubclass(value, nn.Module)))
    }


def _inventory(space: ModuleType) -> str:
    entries = [f"{name} (a {type(value).__name__})" for name, value in _instances(space).items()]
    for name, value in _defined(space).items():
        needs = _required(value)
        kind = "class" if isinstance(value, type) else "function"
        entries.append(f"{name} ({kind}{', needs ' + ', '.join(needs) if needs else ''})")
    return f"It holds {_listed(entries, 'no nn.Module and no function')}"


def _listed(names: Sequence[str], nothing: str, most: int = 12) -> str:
    if not names:
        return nothing
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# --- what it is called with


def _find_inputs(space: ModuleType, place: str, model: nn.Module, given: Inputs | None) -> tuple[Inputs, str]:
    if given is not None:
        return _beside(given, model), "--input"
    if hasattr(space, "example_inputs"):
        source = f"example_inputs in {place}"
        value = space.example_inputs
        if inspect.isroutine(value) or isinstance(value, functools.partial):
            needs = _required(value)
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
        return _beside(as_inputs(dummy), model), "the model's own dummy_inputs"
    raise TargetError(
        f"no inputs for {type(model).__name__}, whose forward takes {arguments_of(model)}",
        remedy=f"Define example_inputs in {place}, or give --input for each. {GRAMMAR}",
    )


def arguments_of(model: nn.Module) -> str:
    """The names of what ``forward`` takes, for messages."""
    return f"({_listed(list(inspect.signature(model.forward).parameters), '')})"


def _beside(inputs: Inputs, model: nn.Module) -> Inputs:
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
