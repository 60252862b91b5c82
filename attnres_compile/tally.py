"""How many sites a converted module ran: what leaves its compiled graph on the way is caught by nothing else."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Tally:
    """Number of sites that ran since counting began."""

    sites: int = 0


_TALLY: contextvars.ContextVar[Tally | None] = contextvars.ContextVar("attnres_tally", default=None)


@contextlib.contextmanager
def counting() -> Iterator[Tally]:
    """Count the sites that compiled graphs run inside this context, inner contexts included."""
    tally, outer = Tally(), _TALLY.get()
    token = _TALLY.set(tally)
    try:
        yield tally
    finally:
        _TALLY.reset(token)
        if outer is not None:
            outer.sites += tally.sites


def counted(call: Callable[..., Any], sites: int) -> Callable[..., Any]:
    """``call``, which runs that many sites."""

    def run(*args: Any) -> Any:
        result = call(*args)
        ran(sites)
        return result

    return run


def ran(sites: int) -> None:
    """Count ``sites`` that just ran."""
    tally = _TALLY.get()
    if tally is not None:
        tally.sites += sites
