"""What the passes do, for who wants to watch: names, times, sizes, and the graph before and after each."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, TypeVar

from torch import fx

G = TypeVar("G", fx.GraphModule, fx.Graph)
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class PassRecord:
    """One run of one pass.

    Attributes:
        name: of the pass, as ``"detect"``.
        seconds: how long it took.
        nodes_before, nodes_after: sizes of the graph; equal for passes that only read.
        before, after: the graph as code, where that was asked for; ``after`` is empty where nothing changed.
    """

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    before: str = ""
    after: str = ""


@dataclass
class Record:
    """The passes that ran, in order.

    Attributes:
        code: whether graphs are kept as code.
    """

    code: bool = False
    passes: list[PassRecord] = field(default_factory=list)


_RECORD: contextvars.ContextVar[Record | None] = contextvars.ContextVar("attnres_record", default=None)


@contextlib.contextmanager
def recording(code: bool = False) -> Iterator[Record]:
    """Record every pass that runs inside this context.

    Args:
        code: keep the graphs as code too.
    """
    record = Record(code)
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


def watched(name: str) -> Callable[[Callable[Concatenate[G, P], R]], Callable[Concatenate[G, P], R]]:
    """Marks a pass, a function whose first argument is a graph, for :func:`recording`; free where nobody records."""

    def decorate(run: Callable[Concatenate[G, P], R]) -> Callable[Concatenate[G, P], R]:
        @functools.wraps(run)
        def wrapper(module: G, /, *args: P.args, **kwargs: P.kwargs) -> R:
            record = _RECORD.get()
            if record is None:
                return run(module, *args, **kwargs)
            size, before = _size(module), _code(module) if record.code else ""
            began = time.perf_counter()
            result = run(module, *args, **kwargs)
            seconds = time.perf_counter() - began
            after = _code(module) if record.code else ""
            after = after if after != before else ""
            record.passes.append(PassRecord(name, seconds, size, _size(module), before, after))
            return result

        return wrapper

    return decorate


@contextlib.contextmanager
def making(name: str) -> Iterator[Callable[[fx.GraphModule], None]]:
    """A step that makes a graph; hand it to what this yields."""
    began = time.perf_counter()

    def made(module: fx.GraphModule) -> None:
        record = _RECORD.get()
        if record is not None:
            seconds = time.perf_counter() - began
            after = _code(module) if record.code else ""
            record.passes.append(PassRecord(name, seconds, 0, _size(module), "", after))

    yield made


def _graph(module: fx.GraphModule | fx.Graph) -> fx.Graph:
    return module.graph if isinstance(module, fx.GraphModule) else module


def _size(module: fx.GraphModule | fx.Graph) -> int:
    return len(_graph(module).nodes)


def _code(module: fx.GraphModule | fx.Graph) -> str:
    return _graph(module).python_code("self").src
