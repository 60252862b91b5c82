"""Sites before and after the rewriting: in two columns on a wide terminal, otherwise as lines with - and +."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from attnres_compile.differences import Line, SiteDiff
from attnres_compile.views.paths import short_path

# Columns of a terminal from which on two of code stand side by side.
WIDE = 100
# Sites of a stream that are shown without --all.
FEW = 3

Row = tuple[Line | None, Line | None]


def diff(shown: Sequence[SiteDiff], total: int, title: str) -> RenderableType:
    """The differences at some sites.

    Args:
        shown: the sites to show.
        total: how many there are.
        title: what was rewritten.
    """
    parts: list[RenderableType] = [summary(shown, total, title)]
    for each in shown:
        parts += ["", _site(each)]
    if len(shown) < total:
        more = f"and {total - len(shown)} more sites (--all shows them, --site NAME one of them)"
        parts += ["", Text(more, style="dim")]
    return Group(*parts)


def summary(shown: Sequence[SiteDiff], total: int, title: str) -> Text:
    """One line: how many sites there are."""
    text = Text(f"{title}: ", style="bold")
    return text.append(f"{total} site{'' if total == 1 else 's'}, {len(shown)} shown", style="bold green")


def few(found: Sequence[SiteDiff]) -> list[SiteDiff]:
    """Some sites that tell the story: of each stream the first, one in the middle and the last that mix anything."""
    chosen: list[SiteDiff] = []
    for stream in dict.fromkeys(each.stream for each in found):
        own = [each for each in found if each.stream == stream]
        mixing = [each for each in own if len(each.sources) > 1] or own
        if len(own) <= FEW:
            chosen += own
        else:
            chosen += [mixing[at] for at in sorted({0, len(mixing) // 2, len(mixing) - 1})]
    return chosen


def _site(each: SiteDiff) -> RenderableType:
    head = Text.assemble(("Site ", "bold"), (each.site, "bold cyan"))
    readers = [reader for reader in each.readers if reader != each.site]
    if readers:
        head.append(f", read by {', '.join(readers)}")
    if len(each.sources) == 1:
        head.append(": only the root, so nothing changes")
    else:
        head.append(f": mixes {', '.join(each.sources)}")
    if each.where:
        head.append(f"; added at {short_path(each.where)}")
    return Group(head, Padding(_Changes(list(_rows(each.before, each.after))), (0, 0, 0, 2)))


def _rows(before: Sequence[Line], after: Sequence[Line]) -> Iterator[Row]:
    """Lines of both graphs, those of one node beside each other."""
    matcher = difflib.SequenceMatcher(a=[line.name for line in before], b=[line.name for line in after], autojunk=False)
    for _, a, b, c, d in matcher.get_opcodes():
        # Where nodes were replaced, what came stands beside what went.
        for at in range(max(b - a, d - c)):
            yield (before[a + at] if a + at < b else None, after[c + at] if c + at < d else None)


@dataclass
class _Changes:
    """Rows, laid out by the width of the console."""

    rows: list[Row]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # The padding around has taken two columns.
        yield self._columns() if console.is_terminal and options.max_width + 2 >= WIDE else self._lines()

    def _columns(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True, header_style="dim")
        table.add_column(Text("original"), ratio=1, overflow="fold")
        table.add_column(Text("rewritten"), ratio=1, overflow="fold")
        for left, right in self.rows:
            if _same(left, right):
                table.add_row(_line("  ", left), _line("  ", right))
            else:
                table.add_row(_line("- ", left), _line("+ ", right))
        return table

    def _lines(self) -> Table:
        table = Table(box=None, show_header=False, pad_edge=False, padding=0)
        table.add_column(overflow="fold")
        for left, right in self.rows:
            if _same(left, right):
                table.add_row(_line("  ", left))
                continue
            for mark, line in (("- ", left), ("+ ", right)):
                if line is not None:
                    table.add_row(_line(mark, line))
        return table


def _same(left: Line | None, right: Line | None) -> bool:
    return left is not None and right is not None and left.code == right.code


_STYLES = {"- ": "red", "+ ": "green", "  ": ""}


def _line(mark: str, line: Line | None) -> Table | Text:
    """A line with its mark; what does not fit is continued under the code."""
    if line is None:
        return Text("")
    text = Text(line.code, style=_STYLES[mark])
    if mark != "+ " and line.where:
        text.append(f"  # {short_path(line.where)}", style="dim")
    table = Table(box=None, show_header=False, pad_edge=False, padding=0)
    table.add_column(width=2)
    table.add_column(overflow="fold")
    table.add_row(Text(mark.rstrip(), style=_STYLES[mark]), text)
    return table
