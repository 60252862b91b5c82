"""How messages list what is there, and what may have been meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def meant(word: str, names: Sequence[str], prefix: str = "") -> str:
    """A question after the closest name, with a space after it; empty if none is close."""
    close = difflib.get_close_matches(word, names, n=1)
    return f"Did you mean {prefix}{close[0]}? " if close else ""


def listed(names: Sequence[str], nothing: str, most: int = 12) -> str:
    """``names`` with commas, at most so many of them; ``nothing`` if there are none."""
    if not names:
        return nothing
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
