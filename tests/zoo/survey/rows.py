"""The file of rows: one JSON object per line, appended to while a survey runs, sorted when it is done."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Container, Iterable
from pathlib import Path

from tests.zoo.survey.row import Row

ROWS = Path(__file__).with_name("rows.jsonl")


def read(path: Path = ROWS) -> dict[str, Row]:
    """The rows by name; of several of one name the last one. Lines that an interruption cut off are left out."""
    found: dict[str, Row] = {}
    if not path.exists():
        return found
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            row = Row.from_dict(json.loads(line))
            found[row.name] = row
    return dict(sorted(found.items()))


def text(row: Row) -> str:
    """The line of a row."""
    return json.dumps(row.to_dict(), sort_keys=False) + "\n"


def append(row: Row, path: Path = ROWS) -> None:
    """Adds a row at the end, in one write; what an interruption left of a line before it is closed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.read_bytes() if path.exists() else b""
    with path.open("ab") as file:
        file.write((b"\n" if old and not old.endswith(b"\n") else b"") + text(row).encode())


def write(rows: Iterable[Row], path: Path = ROWS) -> None:
    """The file with these rows by name, replaced in one step."""
    made = path.with_suffix(".new")
    made.write_text("".join(text(row) for row in sorted(rows, key=lambda row: row.name)), encoding="utf-8")
    made.replace(path)


def tidy(path: Path, known: Container[str], libraries: Container[str]) -> None:
    """Sorts the file, one row per name, and drops rows of these libraries whose names are not known any more."""
    write((row for row in read(path).values() if row.library not in libraries or row.name in known), path)
