"""What a script or module holds that may be a model, and on which line."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from attnres_compile.cli.targets.inputs import required
from attnres_compile.cli.targets.wording import listed


def usable(value: Any) -> bool:
    """Whether ``value`` is a model, or can be called without arguments to make one."""
    if isinstance(value, nn.Module):
        return True
    is_class = isinstance(value, type)
    is_function = inspect.isroutine(value) or isinstance(value, functools.partial)
    buildable = issubclass(value, nn.Module) if is_class else is_function
    return buildable and not required(value)


def instances(space: ModuleType) -> dict[str, nn.Module]:
    """The models that ``space`` holds, each under its first name."""
    seen: dict[int, tuple[str, nn.Module]] = {}
    for name, value in vars(space).items():
        if isinstance(value, nn.Module):
            seen.setdefault(id(value), (name, value))
    return dict(seen.values())


def defined(space: ModuleType) -> dict[str, Any]:
    """Model classes and functions that ``space`` itself defines, not those that it imports."""
    return {
        name: value
        for name, value in vars(space).items()
        if getattr(value, "__module__", None) == space.__name__
        and (inspect.isfunction(value) or (isinstance(value, type) and issubclass(value, nn.Module)))
    }


def inventory(space: ModuleType) -> str:
    """What can be named in ``space``, with kinds, lines and what it needs, as a sentence."""
    lines = _lines(space)

    def entry(name: str, kind: str, needs: list[str]) -> str:
        line = f", line {lines[name]}" if name in lines else ""
        return f"{name} ({kind}{line}{', needs ' + ', '.join(needs) if needs else ''})"

    entries = [entry(name, f"a {type(value).__name__}", []) for name, value in instances(space).items()]
    for name, value in defined(space).items():
        entries.append(entry(name, "class" if isinstance(value, type) else "function", required(value)))
    return f"It holds {listed(entries, 'no nn.Module and no function')}"


def works_when_run(space: ModuleType) -> bool:
    """Whether the script does something of its own when it is run: it has a main guard or parses arguments."""
    tree = _tree(space)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            return True
        if isinstance(node, ast.Attribute) and node.attr in ("parse_args", "parse_known_args"):
            return True
    return False


def _tree(space: ModuleType) -> ast.Module | None:
    try:
        return ast.parse(Path(space.__file__ or "").read_bytes())
    except (OSError, SyntaxError, ValueError):  # no file, or none of Python text
        return None


def _lines(space: ModuleType) -> dict[str, int]:
    """The line on which each name of the outermost level is bound, the last one where there are several."""
    tree = _tree(space)
    return dict(_bindings(tree.body)) if tree else {}


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    for statement in body:
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield statement.name, statement.lineno
            continue
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for node in (node for target in targets for node in ast.walk(target)):
                if isinstance(node, ast.Name):
                    yield node.id, statement.lineno
        for inner in ("body", "orelse", "finalbody"):
            yield from _bindings(getattr(statement, inner, []))
