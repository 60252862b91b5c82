"""The one sink of the command line: people, JSON, progress, errors; and who may write to standard output."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.status import Status
from rich.syntax import Syntax

from attnres_compile.errors import AttnResError

# Work that takes longer than this, in seconds, says what it is doing.
PATIENCE = 1.0


@dataclass(frozen=True)
class Output:
    """What one command was asked to print, and how it prints it. Results go to stdout, all else to stderr.

    Attributes:
        json: print one JSON document, and nothing else, to standard output.
        quiet: one line for people; no progress and no notes.
        verbose: the passes with their times, and the graph before and after each, on standard error.
        debug: a traceback before an error's message.
    """

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    debug: bool = False

    def result(self, value: dict[str, Any] | list[Any], shown: RenderableType, line: RenderableType) -> None:
        """Prints the result of a command.

        Args:
            value: what ``--json`` prints.
            shown: what people see.
            line: what they see with ``--quiet``.
        """
        if self.json:
            show_json(value)
        else:
            show(line if self.quiet else shown)

    def note(self, message: str) -> None:
        """One line about the work to standard error, unless ``--quiet``."""
        if not self.quiet:
            _tolerant(sys.stderr)
            Console(file=sys.stderr, highlight=False, soft_wrap=True).print(f"attnres: {message}", markup=False)

    @contextlib.contextmanager
    def working(self, doing: str) -> Iterator[Callable[[str], None]]:
        """While open, foreign code prints to standard error, and a terminal there says what takes so long.

        Args:
            doing: what is being done, as ``"tracing the model"``.

        Yields:
            A function that changes this text.
        """
        with stdout_to_stderr(), _Progress(doing, shown=not self.quiet) as progress:
            yield progress.says

    def error(self, error: AttnResError, result: dict[str, Any] | None = None) -> None:
        """Prints an error: its traceback with ``--debug``, its message, and with ``--json`` both as data.

        Args:
            error: what went wrong.
            result: what is there all the same, for ``--json``.
        """
        if self.debug:
            traceback.print_exception(error)
        if self.json:
            found = {
                "kind": type(error).__name__,
                "message": str(error),
                "module": error.module,
                "where": error.where,
                "remedy": error.remedy,
            }
            show_json({**(result or {}), "error": found})
        show_error(str(error))


class _Progress:
    """A spinner on standard error, where that is a terminal, from the moment on that work takes long."""

    def __init__(self, doing: str, shown: bool) -> None:
        self._doing = doing
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._status: Status | None = None
        self._timer: threading.Timer | None = None
        console = Console(file=sys.stderr, highlight=False)
        if shown and console.is_terminal and not console.is_dumb_terminal:
            self._status = Status(self._text(), console=console, spinner="line")
            self._timer = threading.Timer(PATIENCE, self._start)
            self._timer.daemon = True

    def _text(self) -> str:
        return f"{self._doing} ..."

    def _start(self) -> None:
        with self._lock:
            if self._status is not None:
                self._status.start()

    def says(self, doing: str) -> None:
        """Changes the text."""
        with self._lock:
            self._doing = doing
            if self._status is not None:
                self._status.update(self._text())

    def __enter__(self) -> _Progress:
        if self._timer is not None:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            if self._status is not None:
                self._status.stop()
            self._status = None


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
    console = Console(file=sys.stdout, highlight=False)
    if console.is_terminal:
        console.print(renderable)
        return
    # Tables are filled up with spaces, which files and diffs can do without.
    text = io.StringIO()
    Console(file=text, highlight=False, width=console.width, force_terminal=False).print(renderable)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))


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
