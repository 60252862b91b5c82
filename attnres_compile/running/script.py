"""Runs a Python script as the main program, as ``python script.py`` and ``python -m module`` do."""

from __future__ import annotations

import builtins
import contextlib
import difflib
import importlib.machinery
import importlib.util
import io
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnres_compile.errors import TargetError
from attnres_compile.running.traces import without_our_frames


@dataclass(frozen=True)
class Ending:
    """How a script ended.

    Attributes:
        code: the argument of the ``sys.exit`` that plain Python would end with: 0, the script's own number, or 1.
        error: the uncaught exception, which has been shown already; ``None`` for an end by ``sys.exit``.
        interrupted: by Ctrl-C: plain Python then dies by the signal itself.
    """

    code: int = 0
    error: BaseException | None = None
    interrupted: bool = False


def check(script: str) -> None:
    """Refuse what cannot be a script, before anything is run.

    Raises:
        TargetError: there is no such file.
    """
    if os.path.isfile(script):
        return
    if os.path.isdir(script):
        raise TargetError(f"{script} is a folder, not a script", remedy="Name the script, or a package with -m")
    folder = os.path.dirname(script) or "."
    near: list[str] = []
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(folder) if name.endswith(".py")]
        near = difflib.get_close_matches(os.path.basename(script), names, n=1)
    remedy = f"Did you mean {os.path.join(os.path.dirname(script), near[0])}?" if near else ""
    dotted = all(part.isidentifier() for part in script.split("."))
    if not remedy and dotted and not script.endswith(".py"):
        remedy = f"A module is run by: attnres run -m {script}"
    raise TargetError(f"{script} does not exist", remedy=remedy)


def execute(script: str, arguments: Sequence[str], as_module: bool = False, keep_frames: bool = False) -> Ending:
    """Run a script or module as ``__main__`` and show an uncaught exception as Python does.

    ``sys.argv``, ``sys.path[0]``, ``sys.excepthook`` and ``sys.modules["__main__"]`` are the script's from here on,
    and stay so: what it left to be run at exit needs them.

    Args:
        script: a file, or the name of a module.
        arguments: its own arguments.
        as_module: ``script`` names a module.
        keep_frames: leave our frames in a traceback.

    Raises:
        TargetError: there is no such module.
    """
    sys.excepthook = sys.__excepthook__
    try:
        code, main = (_of_module if as_module else _of_file)(script, list(arguments))
        # The module that was there is kept: without a reference its names would be gone for what still uses them.
        _REPLACED.append(sys.modules["__main__"])
        sys.modules["__main__"] = main
        exec(code, main.__dict__)
    except _NoModuleError as error:
        raise TargetError(str(error), remedy="It was looked for in the current folder and on sys.path") from None
    except BaseException as error:
        caught = error
    else:
        return Ending()
    # Here and not in the handler: what fails now does not fail during the handling of that.
    return _exited(caught) if isinstance(caught, SystemExit) else _failed(caught, keep_frames)


_REPLACED: list[types.ModuleType] = []


class _NoModuleError(Exception):
    """There is nothing to run under this name."""


def _of_file(script: str, arguments: list[str]) -> tuple[types.CodeType, types.ModuleType]:
    path = os.path.abspath(script)
    sys.argv = [script, *arguments]
    _search(os.path.dirname(os.path.realpath(script)))
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main = _main(__file__=path, __loader__=loader, __package__=None, __spec__=None, __cached__=None)
    with io.open_code(path) as file:
        source = file.read()
    return compile(source, path, "exec", dont_inherit=True), main


def _of_module(name: str, arguments: list[str]) -> tuple[types.CodeType, types.ModuleType]:
    sys.argv = ["-m", *arguments]
    _search(os.getcwd())
    spec = _spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name, spec = f"{name}.__main__", _spec(f"{name}.__main__")
    if spec is None:
        package = name.removesuffix(".__main__")
        what = f"there is no module {package!r}"
        raise _NoModuleError(what if package == name else f"{package!r} is a package without __main__.py, or missing")
    find_code = getattr(spec.loader, "get_code", None)
    code = find_code(name) if find_code is not None else None
    if code is None:
        raise _NoModuleError(f"module {name!r} holds no Python code")
    sys.argv[0] = spec.origin or name
    main = _main(
        __file__=spec.origin, __loader__=spec.loader, __package__=spec.parent, __spec__=spec, __cached__=spec.cached
    )
    return code, main


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # The packages around it are imported, and their own failures are theirs.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise
    except ValueError:  # a module without a spec, as ``__main__``
        return None


def _main(**attributes: Any) -> types.ModuleType:
    main = types.ModuleType("__main__")
    if sys.version_info < (3, 14):
        attributes["__annotations__"] = {}
    main.__dict__.update(attributes, __builtins__=builtins)
    return main


def _search(folder: str) -> None:
    """Puts the script's folder where our own command's was, unless Python was told not to look in such places."""
    if not sys.flags.safe_path:
        sys.path[:1] = [folder]


def _exited(error: SystemExit) -> Ending:
    if error.code is None:
        return Ending()
    if isinstance(error.code, int):
        return Ending(int(error.code))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(error.code, file=sys.stderr, flush=True)
    return Ending(1)


def _failed(error: BaseException, keep_frames: bool) -> Ending:
    if not keep_frames:
        without_our_frames(error)
    kind = type(error)
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, error.__traceback__
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    try:
        sys.excepthook(kind, error, error.__traceback__)
    except SystemExit as ended:
        return _exited(ended)
    except BaseException as broken:
        without_our_frames(broken)
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(broken), broken, broken.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(kind, error, error.__traceback__)
    return Ending(1, error, interrupted=isinstance(error, KeyboardInterrupt))
