"""A method of somebody's class, replaced for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patch:
    """Puts ``make(original)`` in the place of a class's attribute, and takes it out again.

    If somebody else replaces ours meanwhile, theirs stays when we leave; then ``active`` tells our function, which
    theirs still calls, to pass everything on.
    """

    def __init__(self, owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.owner, self.name = owner, name
        self.original: Callable[..., Any] = owner.__dict__[name]
        self.replacement = make(self.original)
        self.active = False

    def start(self) -> None:
        """Put ours in."""
        self.active = True
        setattr(self.owner, self.name, self.replacement)

    def stop(self) -> None:
        """Take ours out."""
        self.active = False
        if self.owner.__dict__.get(self.name) is self.replacement:
            setattr(self.owner, self.name, self.original)
