"""docs/limits.md says what the programs of the limits raise, and names tests that exist."""

from __future__ import annotations

import ast
import functools
import os
from pathlib import Path

import pytest

from attnres_compile.errors import AttnResError, ConfigError, NoStreamError
from tests.limits.condition import Limit
from tests.limits.document import conditions, document
from tests.limits.running import ROOT, Unmet, run, steady

FILE = ROOT / "docs" / "limits.md"


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test"))


def test_the_document_is_the_one_on_file() -> None:
    made = document()
    if os.environ.get("ATTNRES_ACCEPT"):
        FILE.write_text(made, encoding="utf-8")
    assert made == FILE.read_text(encoding="utf-8")


def test_named_tests_exist() -> None:
    named = [test for condition in conditions() for holds in condition.holds for test in holds.tests]
    assert named
    for each in named:
        path, _, name = each.partition("::")
        assert name in names_in(ROOT / path), each


def test_every_condition_says_something_and_every_refusal_is_ours_or_explained() -> None:
    for condition in conditions():
        assert condition.holds or condition.limits or condition.notes, condition.title
        for limit in condition.limits:
            # What is not of our family is named in words, for nobody who catches AttnResError meets it.
            assert issubclass(limit.error, AttnResError) or limit.error.__name__ in limit.why, limit.what


def _limit(error: type[BaseException], raised: Exception | None, reason: str = "") -> Limit:
    def program() -> None:
        if raised is not None:
            raise raised

    return Limit("what", program, error, "why.", "this.", reason)


def test_a_program_that_does_not_raise_what_it_promises_is_found(make_report: object) -> None:
    with pytest.raises(Unmet, match="raised nothing"):
        run(_limit(ConfigError, None))
    with pytest.raises(Unmet, match="raised ConfigError, not AttnResError"):
        run(_limit(AttnResError, ConfigError("x")))
    report = make_report()  # type: ignore[operator]
    with pytest.raises(Unmet, match="not as nonsense"):
        run(_limit(NoStreamError, NoStreamError("x", report=report), "nonsense"))
    assert run(_limit(ConfigError, ConfigError("x", where=f"{ROOT}/a.py:3"))).message == "x (a.py:LINE)"


def test_messages_are_those_of_no_machine() -> None:
    assert steady(f"at {ROOT}/tests/x.py:12, <T object at 0x7f00aa>") == "at tests/x.py:LINE, <T object at 0x..>"
    assert steady(f"in {Path(pytest.__file__).parent}/m.py:3") == "in pytest/m.py:LINE"
    # Wherever the environment is: elsewhere, or inside of the checkout, as the README puts it.
    for folder in (ROOT / ".venv" / "lib" / "python3.11" / "site-packages", Path("/usr/lib/python3/dist-packages")):
        assert steady(f"at '{folder}/torch/nn/m.py:3', in {ROOT}/tests/x.py:4") == (
            "at 'torch/nn/m.py:LINE', in tests/x.py:LINE"
        )
    assert steady("stops: a\nlong tale, so", r"(?<=stops: ).*(?=, so)") == "stops: [..], so"
