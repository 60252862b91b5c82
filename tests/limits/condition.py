"""What docs/limits.md is made of: conditions, what holds in them, and what is refused.

To add a limit, write a function without arguments that runs into it, and name it in a :class:`Limit` of the file in
``rows/`` that its condition has. The function runs whenever the document is made or tested: it must raise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Holds:
    """Something that holds, and the tests that say so.

    Attributes:
        what: one sentence, without a full stop at its end. Markdown.
        tests: each as ``tests/folder/test_file.py::test_name``, without parameters; they must exist.
    """

    what: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Limit:
    """Something that is refused.

    Attributes:
        what: what somebody tries, one sentence without a full stop. Markdown.
        program: a small program that tries it; it must raise.
        error: the class of what it raises, to the letter: no base class of it.
        why: why it is refused, in whole sentences. Markdown.
        instead: what to do instead, in whole sentences. Markdown.
        reason: where an error with a report is raised: the name that the report must give the refused adds.
        foreign: a regular expression for what other libraries say inside the message and may say otherwise in
            another version; shown as ``[..]``.
    """

    what: str
    program: Callable[[], object]
    error: type[BaseException]
    why: str
    instead: str
    reason: str = ""
    foreign: str = ""


@dataclass(frozen=True)
class Condition:
    """One section of the document.

    Attributes:
        order: where the section stands; ties go by title.
        title: its heading, without Markdown.
        holds, limits: see there.
        notes: what nothing here can show, in whole sentences: what was not run, and on what. Markdown.
    """

    order: int
    title: str
    holds: tuple[Holds, ...] = ()
    limits: tuple[Limit, ...] = ()
    notes: tuple[str, ...] = field(default=())
