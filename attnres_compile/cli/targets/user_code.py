"""Errors of code that is not ours: one message with the error's own words and the user's line."""

from __future__ import annotations

import contextlib
import os
import sysconfig
import traceback
from collections.abc import Iterator

from attnres_compile.errors import TargetError
from attnres_compile.views.paths import short_path


@contextlib.contextmanager
def user_code(what: str, remedy: str = "", ended: str = "") -> Iterator[None]:
    """Turns any error of the user's code into a :class:`TargetError` with the error's own text and line.

    Args:
        what: whose code runs inside, as the subject of the message.
        remedy: what to do about an error.
        ended: what to do where the code ends the process (``sys.exit``).
    """
    try:
        yield
    except SystemExit as error:
        raise TargetError(
            f"{what} ended the process (SystemExit: {error.code})", where=line_of(error), remedy=ended or remedy
        ) from error
    except Exception as error:
        raise TargetError(f"{what} failed: {own_words(error)}", where=line_of(error), remedy=remedy) from error


def own_words(error: BaseException) -> str:
    """An error's class and text, without its traceback."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}".strip().rstrip(".:")


def line_of(error: BaseException) -> str:
    """The line that raised and, where that is library code, the last line before it that is not."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{short_path(error.filename)}:{error.lineno}"
    here = os.path.dirname(__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((here, "<frozen"))]
    frames = [f for f in frames if "importlib" not in f.filename and f.filename != contextlib.__file__]
    if not frames:
        return ""
    last = frames[-1]
    library = sysconfig.get_path("stdlib")
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(library)]
    lines = [own[-1], last] if own and own[-1] is not last else [last]
    return ", raised at ".join(f"{short_path(f.filename)}:{f.lineno}" for f in lines)
