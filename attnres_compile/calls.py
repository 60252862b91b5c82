"""Which converted calls are running: what a module inside a converted one, and what dynamo while it traces, must know.

Ordinary calls are known by a context variable, so threads do not meet. What dynamo traces is known by the frames that
it has open: a mark on a frame goes when the frame does, also where dynamo gives up and traces anew.
"""

from __future__ import annotations

import contextlib
import contextvars
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from attnres_compile.errors import PlainExecutionError
from attnres_compile.passes import facts

F = TypeVar("F", bound=Callable[..., Any])

_RUNNING: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("attnres_running", default=frozenset())
_PLAIN: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("attnres_plain", default=frozenset())
# Attribute of a frame that dynamo traces: the key of the converted module whose call it is.
_MARK = "_attnres_key"


@contextlib.contextmanager
def running(key: str) -> Iterator[None]:
    """While open, this thread is in a call of the converted module of that key."""
    token = _RUNNING.set(_RUNNING.get() | {key})
    try:
        yield
    finally:
        _RUNNING.reset(token)


@contextlib.contextmanager
def plainly(keys: frozenset[str]) -> Iterator[None]:
    """While open, converted modules of these keys run as the originals in this thread."""
    token = _PLAIN.set(_PLAIN.get() | keys)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def is_running(key: str) -> bool:
    """Whether this thread is in a call of the converted module of that key."""
    return key in _RUNNING.get()


def is_plain(key: str) -> bool:
    """Whether the converted module of that key is to run as the original."""
    return key in _PLAIN.get()


# ------------------------------------------------------------------ while dynamo traces


def asked_while_traced(function: F) -> F:
    """Have dynamo call ``function`` for real, while it traces, and take the answer for a constant. What
    :func:`torch.compiler.assume_constant_result` does, which would load dynamo when this package is imported.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@asked_while_traced
def entered() -> bool:
    """Note that the frame which asks is a call of a converted module; whether it is one inside another one of it.

    Asked by traced code alone, in a method of an object that has a ``key`` and holds its module as ``facts.OWNER``. The
    module joins dynamo's stack of modules, which knows no other calls than ``module(...)``.
    """
    frame: Any = _frame()
    if frame is None:  # dynamo gave up and calls this for real: what comes next will say so
        return False
    caller = _self(frame)
    inside = is_marked(caller.key)
    if is_plain(caller.key):
        raise PlainExecutionError(
            "attnres_compile.plain has no say in what torch.compile makes",
            remedy="Call the model itself inside of it, or attnres_compile.revert the model",
        )
    setattr(frame, _MARK, caller.key)
    owner = getattr(caller, facts.OWNER)
    key = str(id(owner))
    if not frame.nn_module_stack or next(reversed(frame.nn_module_stack)).partition("@")[0] != key:
        source = frame.symbolic_locals["self"].source
        name = source.name if isinstance(source.name, str) else source.name()
        path = f"{name}.{facts.OWNER}"
        count = frame.num_calls.get(path, 0)
        frame.num_calls[path] = count + 1
        frame.nn_module_stack[f"{key}@{count}" if count else key] = (path, type(owner))
    return inside


def asking() -> Any:
    """The object whose method the frame is that dynamo traces now."""
    return _self(_frame())


def is_marked(key: str) -> bool:
    """Whether the frame that dynamo traces stands in a call of the module of that key that it traces, too."""
    frame = _frame()
    while frame is not None:
        if getattr(frame, _MARK, None) == key:
            return True
        frame = getattr(frame, "parent", None)
    return False


def traced_codes() -> Iterator[types.CodeType]:
    """The code of each frame that dynamo has open, from the innermost one outwards."""
    frame = _frame()
    while frame is not None:
        yield frame.f_code
        frame = getattr(frame, "parent", None)


def _frame() -> Any:
    from torch._dynamo.symbolic_convert import tls

    outermost = getattr(tls, "current_tx", None)
    return None if outermost is None else outermost.output.current_tx


def _self(frame: Any) -> Any:
    variable = frame.symbolic_locals["self"]
    realize = getattr(variable, "realize", None)
    return (realize() if realize is not None else variable).value
