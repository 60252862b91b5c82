"""Tracebacks of a script as it would have them without us."""

from __future__ import annotations

import os
from types import FrameType, TracebackType

from attnres_compile import backend, conversion
from attnres_compile.version import __file__ as _version_file

_PACKAGE = os.path.dirname(_version_file)
_FOLDERS = tuple(os.path.join(_PACKAGE, name) + os.sep for name in ("running", "cli"))
_FILES = frozenset({backend.__file__, conversion.__file__})


def without_our_frames(error: BaseException) -> None:
    """Take the frames of the runner and of converted forwards out of an error and of what it was raised from."""
    seen: set[int] = set()
    left = [error]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _cleaned(each.__traceback__)
        left += [other for other in (each.__cause__, each.__context__) if other is not None]
        if isinstance(each, BaseExceptionGroup):
            left += each.exceptions


def _cleaned(trace: TracebackType | None) -> TracebackType | None:
    kept = []
    while trace is not None:
        if not _ours(trace.tb_frame):
            kept.append(trace)
        trace = trace.tb_next
    result = None
    for each in reversed(kept):
        result = TracebackType(result, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return result


def _ours(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name in _FILES or name.startswith(_FOLDERS)
