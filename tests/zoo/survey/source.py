"""Which version of the package a row was made with: a digest of the sources that conversion runs through."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "attnres_compile"
# What only shows results, only runs scripts, or only makes kernels for devices has no part in a row.
LEFT_OUT = ("cli", "views", "running", "kernels/codegen", "kernels/inspection")


@functools.cache
def digest(package: Path = PACKAGE) -> str:
    """Twelve hexadecimal digits, other ones whenever a source file that conversion needs is another."""
    made = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if not name.startswith(tuple(f"{folder}/" for folder in LEFT_OUT)):
            made.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return made.hexdigest()[:12]
