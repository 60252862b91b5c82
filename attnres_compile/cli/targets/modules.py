"""A script that is run, or a module that is imported, as a namespace to find a model in."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType

from attnres_compile.cli.targets.user_code import user_code
from attnres_compile.cli.targets.wording import listed, meant
from attnres_compile.errors import TargetError
from attnres_compile.views.paths import short_path

FORMS = "Give script.py, script.py:name, package.module:name, hf:model_type, hf:folder or program.pt2"
_DEFINITIONS = "Only its definitions are needed: put the rest under if __name__ == '__main__'"


def is_path(place: str) -> bool:
    """Whether ``place`` is meant as a file rather than as the name of a module."""
    return place.endswith(".py") or os.sep in place or "/" in place or os.path.exists(place)


def run_script(place: str) -> ModuleType:
    """Runs a script under a name of its own (not ``__main__``) and with no arguments in ``sys.argv``.

    Raises:
        TargetError: there is no such script, or its code failed or ended the process.
    """
    path = os.path.expanduser(place)
    if not os.path.isfile(path):
        what = "is a folder, not a script" if os.path.isdir(path) else "does not exist"
        raise TargetError(f"{place} {what}", remedy=_scripts_near(Path(os.path.abspath(path))))
    if not path.endswith(".py"):
        raise TargetError(
            f"{place} is not a Python script",
            remedy="Its name must end in .py; weights alone, and pickled models, are not loaded. " + FORMS,
        )
    return _executed(place, Path(path).resolve())


def _executed(place: str, path: Path) -> ModuleType:
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    kept_module, kept_argv = sys.modules.get(name), sys.argv
    # Dataclasses and pickle look the module up by its name; scripts may parse their own arguments.
    sys.modules[name] = module
    sys.argv = [str(path)]
    package = (path.parent / "__init__.py").exists()
    remedy = f"For relative imports name it as a module: {path.parent.name}.{path.stem}:NAME" if package else ""
    try:
        with user_code(place, remedy, f"{_DEFINITIONS}, or {run_it(place)}"):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        if kept_module is not None:
            sys.modules[name] = kept_module
        raise
    finally:
        sys.argv = kept_argv
    return module


def run_it(place: str) -> str:
    """The way for a script whose model exists only while it runs."""
    return f"run the script as it is, with its model converted: attnres run {place} [ITS ARGUMENTS]"


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
    return meant(path.name, scripts) + f"{where} holds {listed(scripts, 'no Python script')}"


def import_module(place: str) -> ModuleType:
    """Imports a module by its dotted name, the current folder included in where it is looked for.

    Raises:
        TargetError: there is no such module, or its code failed.
    """
    if not all(part.isidentifier() for part in place.split(".")):
        raise TargetError(f"{place!r} is neither a script nor the name of a module", remedy=FORMS)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with user_code(place, ended=_DEFINITIONS):
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
    return meant(last, names, f"{parent}.") + f"{parent} holds {listed(names, 'no modules')}"
