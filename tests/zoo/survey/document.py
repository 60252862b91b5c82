"""Rows -> docs/zoo.md. The text depends on the rows and on the docstrings that it quotes, and on nothing else."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from attnres_compile.oracle import DISAGREES, HOLDS, NOT_JUDGED
from tests.zoo.survey import goals, rows
from tests.zoo.survey.row import STATUSES, Row

FILE = Path(__file__).parents[3] / "docs" / "zoo.md"

MEANINGS = {
    "converted": "all of its sublayers, exact",
    "partly": "exact, but fewer sublayers than the count says",
    "refused": "nothing was converted, and the reason says why",
    "no_stream": "by the count it adds nothing up over depth, and nothing was converted",
    "differs": "exact, but with more sublayers than the count says; one of the two is mistaken",
    "traced": "`torch.compile` alone, without this package, makes it compute something else; converted, and exact "
    "against that, so `transform` converts it and `transform(verify=True)` refuses it",
    "wrong": "converted and not exact",
    "not_run": "eager PyTorch cannot build or run it here",
    "error": "something failed that is no refusal",
    "timeout": "over the survey's limit of time",
    "memory": "over the survey's limit of memory",
}

HEAD = """\
# The zoo

Every architecture that the libraries offer, built small with random weights, converted and measured by this code. The
page is made from `tests/zoo/survey/rows.jsonl`, one row per architecture; a test compares the two, and another measures
a sample of the rows again.

```sh
python3 -m venv .venv && .venv/bin/pip install '.[zoo,test]'
OMP_NUM_THREADS=1 .venv/bin/python -m tests.zoo.survey            # all; goes on where it was interrupted
.venv/bin/python -m tests.zoo.survey --library timm --jobs 2      # a part
.venv/bin/python -m tests.zoo.survey --show torch/layers/encoder-pre-norm-no-bias
ATTNRES_ACCEPT=1 .venv/bin/python -m pytest tests/zoo/test_survey_document.py   # writes this page
```

Each model runs in a process of its own with a limit on its time and its memory, so that one that hangs or crashes costs
its own row alone."""


def document(found: Iterable[Row]) -> str:
    """The page, in Markdown."""
    ordered = sorted(found, key=lambda row: row.name)
    parts = [
        HEAD,
        _made_with(ordered),
        "## Goals",
        _goals(ordered),
        "## In numbers",
        _summary(ordered),
        *(f"- `{status}`: {MEANINGS[status]}" for status in STATUSES),
        "## Why nothing or not all was converted",
        _reasons(ordered),
        "## How a row is made",
        *_told("tests.zoo.survey.measure"),
        "## How sublayers are counted",
        *_told("tests.zoo.survey.count"),
        *_tables(ordered),
        *_left(ordered),
    ]
    return "\n".join(_spaced(parts)) + "\n"


def _spaced(parts: Sequence[str]) -> Iterator[str]:
    """A blank line between parts, but not between the items of a list."""
    for index, part in enumerate(parts):
        if index and not (part.startswith("- ") and parts[index - 1].startswith("- ")):
            yield ""
        yield part


def _made_with(found: Sequence[Row]) -> str:
    versions: dict[str, set[str]] = {}
    for row in found:
        for name, version in row.versions.items():
            versions.setdefault(name, set()).add(version)
    text = ", ".join(f"{name} {' and '.join(sorted(versions[name]))}" for name in sorted(versions))
    hours = sum(row.seconds for row in found) / 3600
    return f"Made with {text}: {len(found)} architectures in {hours:.1f} hours of one core."


def _goals(found: Sequence[Row]) -> str:
    lines = [("holds" if goal.holds else "does not hold", goal.text, goal.numbers) for goal in goals.goals(found)]
    return _table(("goal", "", "by the rows"), [(text, holds, numbers) for holds, text, numbers in lines])


def _summary(found: Sequence[Row]) -> str:
    used = [status for status in STATUSES if any(row.status == status for row in found)]
    lines: list[tuple[str, ...]] = []
    for (library, kind), group in groupby(sorted(found, key=_kind), key=_kind):
        lines.append((f"{library}, {kind}", *_counts(list(group), used)))
    lines.append(("all", *_counts(found, used)))
    return _table(("", "all", *used), lines, right=len(used) + 1)


def _counts(found: Sequence[Row], used: Sequence[str]) -> list[str]:
    counts = Counter(row.status for row in found)
    return [str(len(found)), *(str(counts[status] or "") for status in used)]


def _reasons(found: Sequence[Row]) -> str:
    """One line per reason: how many are refused for it, how many left in part, and where."""
    left = [row for row in found if row.status in ("refused", "partly", "no_stream")]
    lines = []
    for reason, number in Counter(row.reason for row in left).most_common():
        group = [row for row in left if row.reason == reason]
        counts = Counter(row.status for row in group)
        where = Counter(f"{row.library}, {row.kind}" for row in group)
        places = "; ".join(f"{place} {n}" for place, n in sorted(where.items()))
        shares = [str(counts[status] or "") for status in ("refused", "partly", "no_stream")]
        lines.append((number, f"`{reason}`", shares, goals.meaning(reason), places))
    lines.sort(key=lambda line: (-line[0], line[1]))
    body = [(name, *shares, meaning, places) for _, name, shares, meaning, places in lines]
    return _table(("reason", "refused", "partly", "no_stream", "what it means", "where"), body)


def _tables(found: Sequence[Row]) -> Iterator[str]:
    """One table per kind, one line per model."""
    heads = ("model", "status", "counted", "converted", "outputs", "gradients", "random queries", "breaks", "s")
    for (library, kind), group in groupby(sorted(found, key=_kind), key=_kind):
        yield f"## {library}, {kind}"
        yield _table(heads, [_model(row) for row in group])


def _model(row: Row) -> tuple[str, ...]:
    status = f"{row.status}: {row.reason}" if row.reason else row.status
    breaks = "" if not row.graph_breaks else str(row.graph_breaks)
    return (
        short(row),
        status,
        sizes(row.expected),
        sizes(row.found),
        error(row.output_error),
        error(row.gradient_error),
        _oracle(row),
        breaks,
        f"{row.seconds:.0f}",
    )


def _oracle(row: Row) -> str:
    """What the oracle says: the error where it holds."""
    return error(row.oracle_error) if row.oracle == HOLDS else row.oracle


def _left(found: Sequence[Row]) -> Iterator[str]:
    """What is not converted whole, each with what its row says."""
    titles = {
        "differs": "More than counted",
        "traced": "Changed by tracing alone",
        "wrong": "Wrong",
        "error": "Failed",
        "timeout": "Over the limit of time",
        "memory": "Over the limit of memory",
        "partly": "Converted in part",
        "refused": "Refused",
        "no_stream": "Nothing that adds up over depth",
        "not_run": "Not run",
    }
    for status, title in titles.items():
        group = [row for row in found if row.status == status]
        if not group:
            continue
        yield f"## {title}"
        for row in group:
            yield f"- `{row.name}` ({row.class_name or 'not built'}): {_cell(row.detail or row.reason)}"
    for status, title in ((DISAGREES, "Not what the equations give, at random queries"), (NOT_JUDGED, "Not judged")):
        group = [row for row in found if row.oracle == status]
        if group:
            yield f"## {title}"
        for row in group:
            yield f"- `{row.name}`: {_cell(row.oracle_note or error(row.oracle_error))}"
    decided = [row for row in found if row.status in ("converted", "partly") and "times that is rounding" in row.detail]
    if decided:
        yield "## Where float32 did not decide"
        yield "Their float32 error is above 1e-5, and is rounding by the rule above."
        for row in decided:
            yield f"- `{row.name}`: {_cell(row.detail)}"


# --- small parts


def _kind(row: Row) -> tuple[str, str]:
    return row.library, row.kind


def short(row: Row) -> str:
    """The name of a model within its kind."""
    return row.name.removeprefix(f"{row.library}/{row.kind}/")


def sizes(numbers: Sequence[int]) -> str:
    """Sizes of streams; equal ones in a row are told once: ``4, 6 (3 times)``."""
    parts = []
    for number, group in groupby(numbers):
        times = len(list(group))
        parts.append(str(number) if times == 1 else f"{number} ({times} times)")
    return ", ".join(parts)


def error(value: float | None) -> str:
    """An error as text."""
    if value is None:
        return ""
    if value >= sys.float_info.max:
        return "inf"
    return "0" if value == 0 else f"{value:.0e}"


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]], right: int = 0) -> str:
    """A Markdown table whose last ``right`` columns are numbers."""
    marks = ["---"] * (len(heads) - right) + ["---:"] * right
    body = [[_cell(cell) for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, marks, *body))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _told(module: str) -> list[str]:
    """What a module says of itself, but for its first line, as Markdown."""
    try:
        text = inspect.cleandoc(importlib.import_module(module).__doc__ or "")
    except ModuleNotFoundError:
        return ["(not counted)"]
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    # An underlined title would be one of the page's own.
    text = re.sub(r"^.+\n-{3,}\n", "", text, flags=re.MULTILINE)
    first, _, rest = text.partition("\n\n")
    return [rest or first]


def main() -> None:
    FILE.write_text(document(rows.read().values()), encoding="utf-8")


if __name__ == "__main__":
    main()
