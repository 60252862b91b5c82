"""What came of running a script, for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from attnres_compile.config import AttnResConfig
from attnres_compile.running.outcome import Conversion, Outcome, Refused
from attnres_compile.views import terminal

# Queries that are listed, of those that moved farthest; and modules that were not converted.
FEW_QUERIES = 6
FEW_MODULES = 8


def outcome(found: Outcome, script: str, config: AttnResConfig) -> RenderableType:
    """The whole report at the end of a run.

    Args:
        found: what came of it.
        script: what was run, as it was named.
        config: how to convert.
    """
    conversion = found.conversion
    if conversion is None:
        return not_converted(found, script)
    parts = [terminal.report(conversion.report, f"{conversion.name} in {script}", config=config), "", moved(conversion)]
    parts += [Padding(Text(f"note: {note}", style="yellow"), (0, 0, 0, 0)) for note in found.notes]
    return Group(*parts)


def moved(conversion: Conversion) -> RenderableType:
    """Who trained the queries, and how far they moved from zero."""
    lines: list[RenderableType] = []
    for held in conversion.held:
        how = "they were among its parameters" if held.how == "own" else "they were added to it"
        lines.append(Text(f"Queries trained by {held}: {how}"))
    norms = conversion.moved()
    far = {site: norm for site, norm in norms.items() if norm != 0}
    if not far:
        why = "" if conversion.held else ": no optimizer held them"
        return Group(*lines, Text(f"All {len(norms)} queries are still zero{why}"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("distance", justify="right")
    table.add_column("query", overflow="fold")
    for site, norm in list(far.items())[:FEW_QUERIES]:
        table.add_row(f"{norm:.3g}", Text(site))
    head = f"{len(far)} of {len(norms)} queries moved from zero"
    more = "; the farthest:" if len(far) > FEW_QUERIES else ":"
    return Group(*lines, Text(head + more, style="bold"), Padding(table, (0, 0, 0, 2)))


def not_converted(found: Outcome, script: str) -> RenderableType:
    """Why nothing was."""
    if not found.refused:
        return Text(
            f"{script}: no module with parameters was called in this process (a model that other processes run, or "
            "that only runs inside compiled code, is not seen)"
        )
    shown, rest = found.refused[:FEW_MODULES], len(found.refused) - FEW_MODULES
    lines: list[RenderableType] = [Text(f"{script}: no model was converted; these were called:", style="bold")]
    lines += [Padding(Text(f"{each.module}: {each.reason}"), (0, 0, 0, 2)) for each in shown]
    lines += [Text(f"  and {rest} more")] if rest > 0 else []
    best = _most_telling(found.refused)
    if best is not None and best.report is not None:
        lines += ["", terminal.report(best.report, best.module)]
    return Group(*lines)


def _most_telling(refused: tuple[Refused, ...]) -> Refused | None:
    told = [
        each for each in refused if each.report is not None and (each.report.rejections or each.report.graph_breaks)
    ]
    return max(told, key=lambda each: len(each.report.rejections) if each.report else 0, default=None)
