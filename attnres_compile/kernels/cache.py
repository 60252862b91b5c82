"""Kernel text to a module whose source lies on disk, where Triton, debuggers and profilers look for it.

A file's name is the SHA-256 of its text and nothing else, so equal texts share a file across processes and users'
names reach no path. What runs is always the text in memory: a file that was damaged, planted or swapped is never
executed, only noticed by its content and written anew.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.util
import linecache
import os
import shutil
import stat
import sys
import tempfile
import threading
import types
import warnings
from pathlib import Path

from attnres_compile.errors import KernelError

ENVIRONMENT = "ATTNRES_CACHE_DIR"
_PREFIX = "attnres_kernel_"
_modules: dict[str, types.ModuleType] = {}
_temporary: dict[int, Path] = {}
_lock = threading.RLock()


def load(text: str) -> types.ModuleType:
    """The module that ``text`` is the source of; one object per text and process.

    The file is kept in ``$ATTNRES_CACHE_DIR``, else in ``attnres_compile`` below ``$XDG_CACHE_HOME`` or ``~/.cache``.
    Where that cannot be written to, or others could write into it, a private temporary directory takes its place,
    with one warning that names both.

    Args:
        text: Python source, as :func:`attnres_compile.kernels.codegen.generate` gives it.

    Raises:
        KernelError: the text does not run, Triton is missing, or there is no place for the file at all.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()
    with _lock:
        found = _modules.get(digest)
        if found is None:
            found = _modules[digest] = _run(text, _PREFIX + digest, _file(text, _PREFIX + digest + ".py"))
        return found


def _run(text: str, name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    # Without a time linecache never asks the disk again: the source of what runs is this text, come what may there.
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    sys.modules[name] = module
    try:
        exec(compile(text, str(path), "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[name], linecache.cache[str(path)]
        missing = isinstance(error, ModuleNotFoundError)
        raise KernelError(
            f"a generated kernel does not load: {type(error).__name__}: {error}",
            where=str(path),
            remedy="Install it: pip install triton" if missing and str(getattr(error, "name", "")) == "triton" else "",
        ) from error
    return module


# --- the file


def _file(text: str, name: str) -> Path:
    """A file of that name which holds the text."""
    content = text.encode()
    try:
        folder = _folder()
        _ensure(folder / name, content)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        folder = _private_folder(str(error))
        _ensure(folder / name, content)
    return folder / name


def _folder() -> Path:
    """The cache directory, made if needed; OSError where it is not ours alone."""
    given = os.environ.get(ENVIRONMENT)
    if given:
        folder = Path(given).expanduser().absolute()
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
        # A relative $XDG_CACHE_HOME counts as unset, as the XDG specification says.
        folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "attnres_compile"
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.mkdir(exist_ok=True, mode=0o700)
    if hasattr(os, "geteuid"):
        trusted = (os.geteuid(), 0)
        link, found = folder.lstat(), folder.stat()
        if found.st_uid != os.geteuid() or link.st_uid not in trusted:
            raise PermissionError(f"{folder} belongs to another user")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{folder} can be written to by other users")
    return folder


def _private_folder(reason: str) -> Path:
    """A temporary directory of this process, the same at each call; the first one warns."""
    process = os.getpid()  # a forked process needs one of its own: its parent may end first
    if process not in _temporary:
        try:
            folder = tempfile.mkdtemp(prefix="attnres_compile_")
        except OSError as error:
            raise KernelError(
                f"there is no place to keep generated kernels: {error}",
                remedy=f"Set {ENVIRONMENT} to a directory that you can write to",
            ) from error
        atexit.register(_remove, folder, process)
        _temporary[process] = Path(folder)
        warnings.warn(
            f"generated kernels are kept in {folder} for this process only: {reason}. "
            f"Set {ENVIRONMENT} to a directory of your own that you can write to",
            RuntimeWarning,
            stacklevel=4,
        )
    return _temporary[process]


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _ensure(path: Path, content: bytes) -> None:
    """Makes ``path`` a file with that content unless it is one, so that readers see all of it or none."""
    if _content(path, len(content)) == content:
        return
    descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)  # takes the place of a symlink, does not follow it
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _content(path: Path, size: int) -> bytes | None:
    """What the file holds (at most one byte more than ``size``); None for anything but a plain file of our own."""
    try:
        # Neither through a planted link nor waiting for a planted pipe.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        foreign = hasattr(os, "geteuid") and (
            found.st_uid != os.geteuid() or bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
        )
        if foreign or not stat.S_ISREG(found.st_mode) or found.st_size != size:
            return None
        return file.read(size + 1)
