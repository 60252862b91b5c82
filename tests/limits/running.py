"""Runs the program of a limit, and takes down what it raises."""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.limits.condition import Limit

ROOT = Path(__file__).parents[2]


class Unmet(AssertionError):
    """A limit is not what the document would say of it."""


@dataclass(frozen=True)
class Refusal:
    """What a program raised.

    Attributes:
        error: the class's name.
        message: what it says; paths and numbers of lines are those of no machine.
        reasons: name and message of each kind of refused add, where the limit promises one.
    """

    error: str
    message: str
    reasons: tuple[tuple[str, str], ...] = ()


def run(limit: Limit) -> Refusal:
    """Run the limit's program from a clean state.

    Raises:
        Unmet: it does not raise, raises something else, or the report does not give the promised reason.
    """
    torch._dynamo.reset()
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            limit.program()
    except Exception as error:
        return _refusal(limit, error)
    finally:
        torch._dynamo.reset()
    raise Unmet(f"{_name(limit)} raised nothing, not {limit.error.__name__}")


def _refusal(limit: Limit, error: Exception) -> Refusal:
    if type(error) is not limit.error:
        raise Unmet(f"{_name(limit)} raised {type(error).__name__}, not {limit.error.__name__}") from error
    message = steady(str(error), limit.foreign)
    if not limit.reason:
        return Refusal(type(error).__name__, message)
    rejections = getattr(error, "report").rejections  # noqa: B009 - not every error has one
    found = dict.fromkeys((r.reason, steady(r.message, limit.foreign)) for r in rejections if r.reason == limit.reason)
    if not found:
        names = sorted({r.reason for r in rejections})
        raise Unmet(f"{_name(limit)} was refused as {names}, not as {limit.reason}") from error
    return Refusal(type(error).__name__, message, tuple(found))


def _name(limit: Limit) -> str:
    return f"{limit.program.__module__}.{limit.program.__qualname__}"


def steady(message: str, foreign: str = "") -> str:
    """``message`` as it reads on every machine."""
    if foreign:
        message = re.sub(foreign, "[..]", message, flags=re.DOTALL)
    # Before this folder, which may hold the environment that the libraries stand in.
    message = re.sub(r"/[^\s:'\"]*/(?:site|dist)-packages/", "", message)
    message = message.replace(f"{ROOT}/", "")
    for folder in sorted(sys.path, key=len, reverse=True):
        if folder:
            message = message.replace(f"{folder}/", "")
    message = re.sub(r"(\.py):\d+", r"\1:LINE", message)
    return re.sub(r"0x[0-9a-f]+", "0x..", message)
