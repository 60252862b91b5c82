"""Paths of files as people read them."""

from __future__ import annotations

import contextlib
import os
import site
import sysconfig
from pathlib import Path


def short_path(path: str) -> str:
    """``path`` (a file, or ``file:line``) relative to the current folder or site-packages."""
    if not os.path.isabs(path):
        return path
    roots = [os.getcwd(), *site.getsitepackages(), site.getusersitepackages()]
    roots += [sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")]
    # The longest root wins: a virtual environment may lie in the current folder.
    for root in sorted(map(str, roots), key=len, reverse=True):
        with contextlib.suppress(ValueError):
            return str(Path(path).relative_to(root))
    return path
