"""The text of docs/limits.md."""

from __future__ import annotations

import importlib
import pkgutil
import textwrap

from tests.limits import rows
from tests.limits.condition import Condition, Holds, Limit
from tests.limits.running import run

HEAD = """\
# Limits

What holds under hard conditions, with the tests that hold it, and what is refused, with the error that says so.
`python -m tests.limits > docs/limits.md` makes this page: it runs a program for each refusal, and takes class and
message of what that raises. Lines of files are left out (`LINE`), and so is what other libraries say inside a message
(`[..]`).

Whatever is refused is refused with an error of `attnres_compile.AttnResError`, or one named here: nothing is converted
in part, or runs as the plain sum, without a word.
"""


def conditions() -> list[Condition]:
    """Those of all files in ``rows/``, in the order of the document."""
    names = [each.name for each in pkgutil.iter_modules(rows.__path__)]
    found = [importlib.import_module(f"{rows.__name__}.{name}").CONDITION for name in names]
    return sorted(found, key=lambda each: (each.order, each.title))


def document() -> str:
    """Run every program, and write down what holds and what is refused."""
    return "\n".join([HEAD, *(_section(each) for each in conditions())])


def _section(condition: Condition) -> str:
    parts = [f"## {condition.title}\n"]
    if condition.holds:
        parts.append("\n".join(_holds(each) for each in condition.holds) + "\n")
    parts += [_wrapped(note) + "\n" for note in condition.notes]
    parts += [_limit(each) for each in condition.limits]
    return "\n".join(parts)


def _holds(holds: Holds) -> str:
    tests = ", ".join(f"`{test}`" for test in holds.tests)
    return f"{_wrapped(f'- {holds.what}.', '  ')}\n{_wrapped(f'Tests: {tests}', '  ', '  ')}"


def _limit(limit: Limit) -> str:
    refusal = run(limit)
    said = textwrap.fill(f"{refusal.error}: {refusal.message}", 116, break_long_words=False, break_on_hyphens=False)
    parts = [_wrapped(f"**Refused:** {limit.what}."), f"```text\n{said}\n```"]
    parts += [_wrapped(f"`{reason}`: {message}") for reason, message in refusal.reasons]
    parts.append(_wrapped(f"{limit.why} Instead: {limit.instead}"))
    return "\n\n".join(parts) + "\n"


def _wrapped(text: str, later: str = "", first: str = "") -> str:
    return textwrap.fill(
        text, 118, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
