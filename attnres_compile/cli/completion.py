"""What the shell offers when a word is to be completed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

SUFFIXES = (".py", ".pt2")


def among(*words: str) -> Callable[[str], list[str]]:
    """Completes to one of ``words``."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def target(incomplete: str) -> list[str]:
    """Scripts, exported programs and folders that begin so; behind ``hf:`` model types and folders."""
    if incomplete.startswith("hf:"):
        from attnres_compile.cli.targets import hf_model_types

        begun = incomplete.removeprefix("hf:")
        folders = [f"hf:{path}" for path in _paths(begun) if path.endswith(os.sep)]
        return [f"hf:{name}" for name in hf_model_types() if name.startswith(begun)] + folders
    return [*_paths(incomplete), *(["hf:"] if "hf:".startswith(incomplete) else [])]


def _paths(begun: str) -> Iterator[str]:
    folder, name = os.path.split(begun)
    try:
        entries = sorted(Path(folder or ".").iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(name) and (name.startswith(".") or not entry.name.startswith(".")):
            path = os.path.join(folder, entry.name)
            if entry.is_dir():
                yield path + os.sep
            elif entry.suffix in SUFFIXES:
                yield path
