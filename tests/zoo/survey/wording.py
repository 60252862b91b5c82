"""How rows put things: errors, places and sizes in one line, without this machine's paths."""

from __future__ import annotations

import math
import re
import site
import sys
import sysconfig
import traceback
from importlib import metadata
from pathlib import Path

from attnres_compile.errors import AttnResError
from tests.zoo.survey.entry import NotBuilt

LONGEST_DETAIL = 400


def versions(library: str) -> dict[str, str]:
    """Of torch and the library, without the build's local part."""
    return {name: metadata.version(name).split("+")[0] for name in sorted({"torch", library})}


def sizes(numbers: tuple[int, ...]) -> str:
    """Sizes of streams."""
    return "+".join(map(str, numbers)) if numbers else "none"


def rounded(error: float | None) -> float | None:
    """Two digits; a NaN or infinite error is the largest float, as JSON has no other."""
    if error is None:
        return None
    return float(f"{error:.1e}") if math.isfinite(error) else sys.float_info.max


def one_line(error: BaseException) -> str:
    """What an error says first; of this package's own, what was wrong and where."""
    if isinstance(error, AttnResError):
        # The remedy is for users.
        place = ", ".join(part for part in (error.module, error.where) if part)
        return f"{error.what} ({place})" if place else error.what
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def kind_and_place(error: BaseException) -> str:
    """An error's class, what it says first, and the line that raised it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{': '.join([type(error).__name__, *lines[:1]])}{place}"


_MISSING = re.compile(r"requires the (.+?) library but it was not found")
# What an error says, and what it means for the survey.
_MEANINGS = {
    "make sure to use `model.train()`": "its backward pass is written by hand and refuses eval mode, "
    "in which outputs and gradients are compared here",
}


def why_not(error: BaseException) -> str:
    """Why a model cannot be built or run: in words where they are known, or the error's."""
    text = " ".join(str(error).split())
    if missing := _MISSING.search(text):
        return f"it needs the library {missing[1]}, which is not installed"
    for says, means in _MEANINGS.items():
        if says in text:
            return means
    return one_line(error) if isinstance(error, NotBuilt) else kind_and_place(error)


def snake(name: str) -> str:
    """``CamelCase`` as ``camel_case``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


_ROOTS = sorted(
    {
        *site.getsitepackages(),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("stdlib"),
        str(Path(__file__).parents[3]),
        str(Path.home()),
    },
    key=len,
    reverse=True,
)


def clean(text: str) -> str:
    """One line without this machine's paths and addresses, so that equal runs say the same."""
    text = " ".join(text.split())
    for root in _ROOTS:
        text = text.replace(f"{root}/", "")
    text = re.sub(r"0x[0-9a-f]{6,}", "0x..", text)
    return text if len(text) <= LONGEST_DETAIL else f"{text[: LONGEST_DETAIL - 3]}..."
