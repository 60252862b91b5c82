"""``--verbose``: the passes that ran, with their times, and the graph before and after each."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from attnres_compile.cli.output import Output
from attnres_compile.passes.record import PassRecord, recording


@contextlib.contextmanager
def showing_passes(out: Output) -> Iterator[None]:
    """With ``--verbose``, prints the passes that run inside to standard error when it closes."""
    if not out.verbose:
        yield
        return
    with recording(code=True) as record:
        try:
            yield
        finally:
            _show(record.passes)


def _show(passes: list[PassRecord]) -> None:
    console = Console(file=sys.stderr, highlight=False)
    for number, each in enumerate(passes, 1):
        if each.before and each.after:
            console.rule(f"{number}. graph before {each.name}", align="left", characters="-")
            console.print(each.before, markup=False, soft_wrap=True)
        if each.after:
            console.rule(f"{number}. graph after {each.name}", align="left", characters="-")
            console.print(each.after, markup=False, soft_wrap=True)
    table = Table("pass", "seconds", "nodes before", "after", box=None, pad_edge=False, header_style="dim")
    for each in passes:
        table.add_row(each.name, f"{each.seconds:.3f}", str(each.nodes_before), str(each.nodes_after))
    console.print(table)
