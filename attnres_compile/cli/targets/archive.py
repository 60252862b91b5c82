"""Opening a file of ``torch.export.save`` without running what is in it.

``torch.export.load`` unpickles parts of a file, and evaluates text of it as expressions. Here unpickling is held to
tensors and plain values (``weights_only``), and files that hold anything else are refused before they are loaded:
machine code, pickled objects, expressions that are more than arithmetic. Calls of what is no operator are refused by
torch's own verifier.
"""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.export.pt2_archive import PT2ArchiveReader, constants
from torch.utils._sympy import functions as torch_sympy

from attnres_compile.cli.targets.unpickling import nothing_unpickled
from attnres_compile.cli.targets.user_code import own_words
from attnres_compile.cli.targets.wording import listed
from attnres_compile.errors import TargetError
from attnres_compile.views.paths import short_path

_AGAIN = "Save it again: torch.export.save(torch.export.export(model, args, kwargs), 'model.pt2')"
_ARITHMETIC = (
    *(ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Load, ast.Constant, ast.Tuple),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)


def open_program(path: str) -> torch.export.ExportedProgram:
    """The program that ``path`` holds.

    Raises:
        TargetError: there is no such file, it is in no (or an old) format of ``torch.export.save``, it is damaged, or
            it holds what could run code of its own.
    """
    if not os.path.isfile(path):
        what = "is a folder, not a program" if os.path.isdir(path) else "does not exist"
        near = sorted(entry.name for entry in Path(path).absolute().parent.glob("*.pt2") if entry.is_file())
        raise TargetError(f"{path} {what}", remedy=f"The folder holds {listed(near, 'no .pt2')}")
    name = short_path(path)
    try:
        # torch looks for its older format, in which more is pickled, if the newer one cannot be read.
        with zipfile.ZipFile(path) as archive:
            old = "serialized_exported_program.json" in archive.namelist()
        if old:
            raise TargetError(f"{name} is in an older format of torch.export.save, which is not loaded", remedy=_AGAIN)
        reader = PT2ArchiveReader(path)
        records = set(reader.get_file_names())
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(f"{name} is no program saved by this torch.export.save", remedy=_AGAIN) from error
    model = constants.MODELS_FILENAME_FORMAT.format("model")
    if model not in records:
        raise TargetError(f"{name} holds no program, but {', '.join(sorted(records)[:3])}", remedy=_AGAIN)
    try:
        _refuse(reader, records, name)
        with nothing_unpickled(), _quiet():
            program = torch.export.load(path)
    except TargetError:
        raise
    except pickle.UnpicklingError as error:
        raise TargetError(
            f"{name} holds pickled objects that are neither tensors nor plain values, which are not loaded",
            remedy="Export with tensors, numbers, tuples and dicts as inputs. " + _AGAIN,
        ) from error
    except Exception as error:
        raise TargetError(
            f"{name} cannot be loaded: {own_words(error).splitlines()[0]}",
            remedy="Its operators must be known here, and its format be this torch's. " + _AGAIN,
        ) from error
    return program


def _refuse(reader: PT2ArchiveReader, records: set[str], name: str) -> None:
    """Looks through all that torch reads, the way torch reads it."""
    if any(record.startswith(constants.AOTINDUCTOR_DIR) for record in records):
        raise TargetError(f"{name} holds compiled machine code, which is not loaded", remedy=_AGAIN)
    configs = constants.CONSTANTS_DIR, constants.WEIGHTS_DIR
    for record in records:
        if record.startswith(configs) and record.endswith("_config.json"):
            for key, payload in json.loads(reader.read_string(record))["config"].items():
                prefixes = constants.CUSTOM_OBJ_FILENAME_PREFIX, constants.OPAQUE_OBJ_FILENAME_PREFIX
                if str(payload["path_name"]).startswith(prefixes):
                    raise TargetError(
                        f"{name} holds a pickled object ({key}), which is not loaded",
                        remedy="Export a model whose constants are tensors",
                    )
        elif record.startswith(constants.MODELS_DIR):
            for text in _expressions(json.loads(reader.read_string(record))):
                if not _is_arithmetic(text):
                    raise TargetError(f"{name} holds a size that is no arithmetic: {text[:60]!r}", remedy=_AGAIN)


def _expressions(value: Any) -> Iterator[str]:
    """Every text that torch hands to sympy, which evaluates it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "expr_str":
                yield str(inner)
            else:
                yield from _expressions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _expressions(inner)


def _is_arithmetic(text: str) -> bool:
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError):
        return False
    for node in ast.walk(tree):
        if not isinstance(node, _ARITHMETIC):
            return False
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and _is_symbolic(node.func.id)):
            return False
        # sympy evaluates text given to its functions in turn.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.isidentifier():
            return False
    return True


def _is_symbolic(name: str) -> bool:
    value = getattr(torch_sympy, name, None) or getattr(sympy, name, None)
    return isinstance(value, type) and issubclass(value, sympy.Basic)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the tracebacks that torch logs of errors that it then raises as well."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)
