"""``python -m tests.zoo.survey``: measure every architecture and write docs/zoo.md."""

from __future__ import annotations

import fnmatch
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.zoo.survey import catalogue, rows
from tests.zoo.survey.entry import Entry
from tests.zoo.survey.row import STATUSES, Row
from tests.zoo.survey.worker import ENVIRONMENT, GIB, Limits, survey

BAD = ("wrong", "error")
app = typer.Typer(add_completion=False)


@app.command()
def main(
    library: Annotated[list[str] | None, typer.Option(help="Only this library; may be given again.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Only this kind; may be given again.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only names like this, with * and ?.")] = None,
    status: Annotated[str, typer.Option(help="Only those whose row has one of these statuses, as wrong,error.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Models at a time.")] = 1,
    seconds: Annotated[float, typer.Option(min=1, help="Time for one model.")] = 240.0,
    memory: Annotated[float, typer.Option(min=0.5, help="Memory for one model, GiB.")] = 6.0,
    path: Annotated[Path, typer.Option("--rows", help="The file of rows.")] = rows.ROWS,
    again: Annotated[bool, typer.Option("--again", help="Measure again what has an up-to-date row.")] = False,
    missing: Annotated[bool, typer.Option("--missing", help="Only what has no row, not even an old one.")] = False,
    names: Annotated[bool, typer.Option("--list", help="List the entries and stop.")] = False,
    show: Annotated[str, typer.Option(help="Measure this one here, and show its row, report and traceback.")] = "",
) -> None:
    """Build every architecture that the libraries offer, convert it, compare, and write one row each.

    An interrupted survey goes on where it was. The exit status is 1 where a row says wrong or error.
    """
    os.environ.update(ENVIRONMENT)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    console = Console(highlight=False)
    if show:
        raise typer.Exit(_show(show, console))
    libraries = library or list(catalogue.SOURCES)
    known: dict[str, Entry] = {}
    for each in libraries:
        if each not in catalogue.SOURCES:
            raise typer.BadParameter(f"{each} is none of {', '.join(catalogue.SOURCES)}")
        try:
            known |= catalogue.by_name(each)
        except ModuleNotFoundError as error:
            console.print(f"{each}: not looked at, {error}")
    have = rows.read(path)
    chosen = [entry for entry in known.values() if _matches(entry, kind, only, status, have)]
    if names:
        for entry in chosen:
            console.print(f"{entry.name}  {entry.design}", soft_wrap=True)
        return
    todo = [entry for entry in chosen if again or status or not _current(entry, have, missing)]
    console.print(f"{len(chosen)} architectures, {len(chosen) - len(todo)} of them up to date")
    os.environ["SURVEY_LIBRARIES"] = ",".join(sorted({entry.library for entry in todo}))
    _run(todo, jobs, Limits(seconds, memory * GIB), path, console)
    whole = not (kind or only or status)
    rows.tidy(path, known, {entry.library for entry in known.values()} if whole else ())
    bad = [row for name, row in rows.read(path).items() if row.status in BAD and name in {e.name for e in chosen}]
    for row in bad:
        console.print(f"[red]{row.status}[/] {row.name}: {row.reason}: {row.detail}", soft_wrap=True)
    raise typer.Exit(1 if bad else 0)


def _matches(
    entry: Entry, kinds: list[str] | None, patterns: list[str] | None, statuses: str, have: dict[str, Row]
) -> bool:
    if kinds and entry.kind not in kinds:
        return False
    if patterns and not any(fnmatch.fnmatch(entry.name, pattern) for pattern in patterns):
        return False
    if statuses:
        row = have.get(entry.name)
        return row is not None and row.status in statuses.split(",")
    return True


def _current(entry: Entry, have: dict[str, Row], missing: bool) -> bool:
    from tests.zoo.survey.source import digest
    from tests.zoo.survey.wording import versions

    row = have.get(entry.name)
    if row is None:
        return False
    return missing or (row.versions == versions(entry.library) and row.source == digest())


def _run(todo: list[Entry], jobs: int, limits: Limits, path: Path, console: Console) -> None:
    counts: Counter[str] = Counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[counts]}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("survey", total=len(todo), counts="")
        for row in survey(todo, jobs, limits, started=lambda entry: progress.update(bar, description=entry.name)):
            rows.append(row, path)
            counts[row.status] += 1
            shown = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
            progress.update(bar, advance=1, counts=shown)
            if not console.is_terminal or row.status in (*BAD, "timeout", "memory"):
                console.print(_line(row), soft_wrap=True)


def _line(row: Row) -> str:
    sizes = f"{list(row.found)} of {list(row.expected)}".replace("[", "(").replace("]", ")")
    return f"{row.status:9} {row.name}  {sizes}  {row.reason}  {row.seconds:.0f} s"


def _show(name: str, console: Console) -> int:
    import json
    import traceback

    from tests.zoo.survey import measure

    parts = name.split("/")
    known = catalogue.by_name(parts[0]) if parts[0] in catalogue.SOURCES else {}
    if name not in known:
        raise typer.BadParameter(f"{name} is no name in the survey; --list shows all")
    entry = known[name]

    def says(stage: str) -> None:
        console.print(f"[dim]{stage}[/]")

    with measure.keeping_errors() as errors:
        row = measure.measure(entry, says)
    for error in errors:
        console.print("".join(traceback.format_exception(error)), markup=False, soft_wrap=True)
    if row.status != "not_run":
        console.print(measure.report_of(entry))
        for stream in measure.counted(entry).streams:
            console.print(f"counted {len(stream)}: {', '.join(stream)}", soft_wrap=True)
    console.print(json.dumps(row.to_dict(), indent=1), markup=False, soft_wrap=True)
    return 1 if row.status in BAD else 0


if __name__ == "__main__":
    app()
