"""The one sink of the command line: people, JSON, errors; and who may write to standard output."""

from __future__ import annotations

import contextlib
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.syntax import Syntax


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Sends what foreign code prints to standard error, so that standard output holds our result alone.

    The file descriptor is redirected too: subprocesses and C code print there.
    """
    sys.stdout.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # one of them is closed
        kept = None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)


def show(renderable: RenderableType) -> None:
    """Prints for a person; colours only where the terminal has them, width of the terminal or of $COLUMNS."""
    _tolerant(sys.stdout)
    Console(file=sys.stdout, highlight=False).print(renderable)


def show_json(value: dict[str, Any] | list[Any]) -> None:
    """Prints one JSON document and nothing else."""
    print(json.dumps(value, indent=2, allow_nan=False))


def show_source(text: str) -> None:
    """Prints Python text: highlighted for a terminal with colours, as it is for everything else."""
    _tolerant(sys.stdout)
    console = Console(file=sys.stdout, highlight=False)
    if console.is_terminal and not console.no_color:
        console.print(
            Syntax(text, "python", theme="ansi_dark", background_color="default").highlight(text), soft_wrap=True
        )
    else:
        print(text)


def show_error(message: str) -> None:
    """Prints one message to standard error."""
    _tolerant(sys.stderr)
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    console.print("[bold red]error:[/bold red]", end=" ")
    console.print(message, markup=False)


def _tolerant(stream: TextIO) -> None:
    # A path or an error text may hold what the terminal's encoding lacks; that must not end the command.
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")


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
