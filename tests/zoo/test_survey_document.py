"""docs/zoo.md says what the rows say, and its goals are decided by them."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.zoo.survey import rows
from tests.zoo.survey.document import FILE, document
from tests.zoo.survey.goals import goals, is_additive
from tests.zoo.survey.row import STATUSES, Row


def row(name: str, status: str = "converted", **more: object) -> Row:
    library, kind, _ = name.split("/")
    sizes = {"expected": (8,), "found": (8,)} if status == "converted" else {"expected": (8,)}
    return replace(Row(name, library, kind, "Model", status), **{**sizes, **more})  # type: ignore[arg-type]


def decided(*found: Row) -> dict[str, bool]:
    return {goal.text: goal.holds for goal in goals(found)}


def test_the_page_is_the_one_that_the_rows_make() -> None:
    text = document(rows.read().values())
    if os.environ.get("ATTNRES_ACCEPT"):
        FILE.write_text(text, encoding="utf-8")
    assert FILE.read_text(encoding="utf-8") == text


def test_the_file_of_rows_is_in_order() -> None:
    found = rows.read()
    assert rows.ROWS.read_text(encoding="utf-8") == "".join(rows.text(each) for each in found.values())
    assert {each.status for each in found.values()} <= set(STATUSES)
    # Whatever is not converted says why, and nothing is converted without having been compared and counted.
    for each in found.values():
        if each.status == "converted":
            assert sorted(each.found) == sorted(each.expected) != [], each.name
            assert each.output_error is not None, each.name
        else:
            assert each.reason, each.name


def test_every_row_stands_in_the_page_once_per_table() -> None:
    found = [row("a/b/one"), row("a/b/two", "refused", reason="post_norm", detail="a norm | on it"), row("a/c/three")]
    text = document(found)
    assert text == document(reversed(found)), "the order of the rows is nothing to the page"
    lines = text.splitlines()
    assert "| one | converted | 8 | 8 |  |  |  |  | 0 |" in lines
    assert "| two | refused: post_norm | 8 |  |  |  |  |  | 0 |" in lines
    assert "- `a/b/two` (Model): a norm \\| on it" in lines
    assert "| a, b | 2 | 1 | 1 |" in lines
    assert "| all | 3 | 2 | 1 |" in lines


@pytest.mark.parametrize("status", ["wrong", "partly", "error", "timeout", "memory"])
def test_one_causal_model_that_is_not_settled_breaks_the_goal(status: str) -> None:
    good = [row(f"transformers/causal-lm/m{index}") for index in range(40)]
    assert all(decided(*good, row("transformers/causal-lm/x", "refused", reason="gated")).values())
    found = decided(*good, row("transformers/causal-lm/x", status, reason="x"))
    assert not next(holds for text, holds in found.items() if text.startswith("every causal"))
    assert found["not one model is converted wrongly"] == (status != "wrong")


def test_a_refusal_without_a_reason_is_not_settled() -> None:
    found = decided(row("transformers/causal-lm/x", "refused"))
    assert not next(holds for text, holds in found.items() if text.startswith("every causal"))


def test_the_share_counts_what_is_additive_and_nothing_else() -> None:
    good = [row(f"timm/vision/m{index}") for index in range(19)]
    share = "timm: at least 95% of the models with an additive stream are converted whole"
    missed = row("timm/vision/x", "refused", reason="unsupported_form")
    assert decided(*good, missed)[share], "19 of 20"
    assert not decided(*good[:18], missed)[share], "18 of 19"
    assert decided(*good[:18], replace(missed, reason="post_activation"))[share], "another design"
    assert decided(*good[:18], replace(missed, expected=()))[share], "no stream by the count"
    assert not is_additive(replace(missed, status="not_run", expected=()))
    assert is_additive(replace(missed, status="timeout", expected=())), "not known, so held against it"


def test_post_norm_must_be_refused_as_such() -> None:
    named = row("torch/layers/x", "refused", reason="post_norm", expected=(), design="encoder, post-norm")
    assert all(decided(named).values())
    for other in (replace(named, reason="gated"), replace(named, status="converted", reason="", found=())):
        found = decided(other)
        assert not next(holds for text, holds in found.items() if text.startswith("post-norm"))


def test_one_model_that_disagrees_at_random_queries_breaks_the_goal() -> None:
    good = [row(f"a/b/m{index}", oracle="holds", oracle_error=1e-15) for index in range(3)]
    goal = "at random queries not one model disagrees with the equations"
    assert goal not in decided(row("a/b/old")), "rows from before there was an oracle say nothing"
    assert decided(*good, row("a/b/x", oracle="not judged"))[goal]
    assert not decided(*good, row("a/b/x", oracle="disagrees", oracle_error=0.5))[goal]
    lines = document([*good, row("a/b/x", oracle="disagrees", oracle_error=0.5)]).splitlines()
    assert "| m0 | converted | 8 | 8 |  |  | 1e-15 |  | 0 |" in lines
    assert "| x | converted | 8 | 8 |  |  | disagrees |  | 0 |" in lines
    assert "- `a/b/x`: 5e-01" in lines
