"""A report as tables, readable at 80 columns. Our text is ASCII: any terminal can show it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from attnres_compile.config import AttnResConfig
from attnres_compile.exactness import Exactness
from attnres_compile.report import Cost, GraphBreak, LeftAlone, Site, Stream, Sublayer, TransformReport
from attnres_compile.views import collapse
from attnres_compile.views.paths import short_path

# Rows of a table that are shown without --all, and places that are named per reason.
FEW_ROWS = 24
FEW_PLACES = 3
# Longer paths are cut in tables, where they would break in the middle of a word.
LONG_PATH = 36


def report(
    found: TransformReport, title: str, everything: bool = False, config: AttnResConfig | None = None
) -> RenderableType:
    """The whole report.

    Args:
        found: what to show.
        title: what was inspected.
        everything: show every sublayer, site and rejected add, not only groups and a few examples.
        config: what was asked for, so that a note can say where a stream got something else.
    """
    parts: list[RenderableType] = [summary(found, title)]
    for stream in found.streams:
        parts += ["", _stream(stream, everything, config)]
    if found.graph_breaks:
        parts += ["", _graph_breaks(found.graph_breaks)]
    if found.rejections:
        parts += ["", _rejections(found.rejections, everything)]
    return Group(*parts)


def summary(found: TransformReport, title: str) -> Text:
    """One line: how much is converted."""
    text = Text(f"{title}: " if title else "", style="bold")
    if not found.streams:
        return text.append("no residual stream can be converted", style="bold red")
    sublayers = sum(len(stream.sublayers) for stream in found.streams)
    queries = sum(site.query == site.name for stream in found.streams for site in stream.sites)
    text.append(
        f"{_count(len(found.streams), 'residual stream')}, {_count(sublayers, 'sublayer')}, "
        f"{_count(queries, 'query', 'queries')}, {_count(found.parameters_added, 'parameter')} added",
        style="bold green",
    )
    return text


# --- one stream


def _stream(stream: Stream, everything: bool, config: AttnResConfig | None) -> RenderableType:
    head = Text.assemble(
        ("Stream ", "bold"),
        (stream.name, "bold cyan"),
        f" in {stream.owner or 'the model itself'}: {_count(len(stream.sublayers), 'sublayer')}, "
        f"{stream.feature_dim} features",
    )
    bodies = [
        _sublayers(stream.sublayers, everything),
        _blocks(stream, everything),
        *(Text(f"note: {note}", style="yellow") for note in block_notes(stream, config)),
        _sites(stream.sites, everything),
        *([_cost(stream.cost)] if stream.cost is not None else []),
    ]
    return Group(head, *(Padding(body, (1, 0, 0, 2)) for body in bodies))


def _sublayers(sublayers: Sequence[Sublayer], everything: bool) -> Table:
    table = _table("sublayer", "module", "added at")
    place = short_path if everything else _brief
    if everything:
        rows = [(str(i), sub.module, sub.where) for i, sub in enumerate(sublayers, 1)]
    else:
        rows = []
        # A layer holds several adds on lines of their own: equal lines of equal modules are one row.
        by_line: dict[str, list[int]] = {}
        for position, sub in enumerate(sublayers):
            by_line.setdefault(sub.where, []).append(position)
        groups = [
            (name, [positions[member] for member in members], where)
            for where, positions in by_line.items()
            for name, members in collapse.paths([sublayers[p].module for p in positions])
        ]
        for name, members, where in sorted(groups, key=lambda group: group[1][0]):
            rows.append((collapse.numbers(member + 1 for member in members), name, where))
    _fill(table, ((number, name or "(model)", place(where)) for number, name, where in rows), everything)
    return table


def _brief(where: str) -> str:
    """Library files by package and name: ``transformers/.../modeling_llama.py:321``."""
    path = short_path(where)
    parts = path.split(os.sep)
    return f"{parts[0]}/.../{parts[-1]}" if len(path) > LONG_PATH and parts[0] and len(parts) > 2 else path


def _blocks(stream: Stream, everything: bool) -> RenderableType:
    if all(len(block) == 1 for block in stream.blocks):
        count = len(stream.blocks)
        return Text(f"{_count(count, 'block')}: the full form, each sublayer is a source of its own")
    table = _table("block", "sublayers", "of")
    rows = (
        (
            str(number),
            collapse.numbers(member + 1 for member in block),
            _modules(stream.sublayers[member].module for member in block),
        )
        for number, block in enumerate(stream.blocks, 1)
    )
    _fill(table, rows, everything)
    return table


def block_notes(stream: Stream, config: AttnResConfig | None = None) -> Iterator[str]:
    """Where the blocks of a stream are not what a reader of the options expects, in sublayers."""
    sublayers, sizes = len(stream.sublayers), [len(block) for block in stream.blocks]
    count = f"the stream has {_count(sublayers, 'sublayer')}"
    if config is not None and config.num_blocks is not None and config.num_blocks > sublayers:
        yield f"{count}, fewer than the {config.num_blocks} blocks asked for, so each sublayer is a block"
    if config is not None and config.block_size is not None and config.block_size > sublayers:
        yield f"{count}, fewer than the {config.block_size} sublayers asked for per block, so there is one block"
    if len(set(sizes)) > 1:
        yield (
            f"{count}, which {len(sizes)} blocks of {_count(sizes[0], 'sublayer')} do not use up, "
            f"so the last block has {sizes[-1]}"
        )


def _sites(sites: Sequence[Site], everything: bool) -> Table:
    if everything:
        table = _table("site", "readers", "sources", "query")
        rows: Iterator[tuple[str, ...]] = (
            (
                site.name,
                ", ".join(site.readers),
                _sources(site.sources),
                "yes" if site.query else "none: bypass",
            )
            for site in sites
        )
        _fill(table, rows, everything)
        return table
    table = _table("sites", "sources", "read by")
    groups: list[tuple[tuple[str, ...], list[int]]] = []
    for number, site in enumerate(sites, 1):
        finished = tuple(source for source in site.sources if not source.startswith("partial"))
        if not groups or groups[-1][0] != finished:
            groups.append((finished, []))
        groups[-1][1].append(number)
    _fill(table, (_site_row(sites, finished, members) for finished, members in groups), everything)
    return table


def _site_row(sites: Sequence[Site], finished: tuple[str, ...], members: list[int]) -> tuple[str, str, str]:
    chosen = [sites[member - 1] for member in members]
    partial = any(len(site.sources) > len(finished) for site in chosen)
    sources = _sources(finished) + (" + partial" if partial else "")
    bypasses = sum(site.query is None for site in chosen)
    if bypasses:
        sources += f" ({_count(bypasses, 'bypass', 'bypasses')})"
    return collapse.numbers(members), sources, _modules(reader for site in chosen for reader in site.readers)


def _sources(names: Sequence[str]) -> str:
    """``root, block 1, block 2`` -> ``root, block 1..2``."""
    blocks = [int(name.removeprefix("block ")) for name in names if name.removeprefix("block ").isdigit()]
    others = [name for name in names if not name.removeprefix("block ").isdigit()]
    text = [f"block {collapse.numbers(blocks)}"] if blocks else []
    first = [name for name in others if not name.startswith("partial")]
    last = [name for name in others if name.startswith("partial")]
    return ", ".join(first + text + last)


def _modules(names: Iterator[str]) -> str:
    """``layers.0..2.norm1, .norm2``: what lies beside the one before is named by its last part."""
    parts: list[str] = []
    beside = ""
    for name, _ in collapse.paths(list(dict.fromkeys(names))):
        parent, dot, last = name.rpartition(".")
        same = bool(dot) and parent == beside and not last.startswith(tuple("0123456789{"))
        parts.append(f".{last}" if same else name or "(model)")
        beside = parent
    return ", ".join(parts)


def _cost(cost: Cost) -> Table:
    """Bytes per token: what the plain stream's adds move, and what depth attention moves and keeps."""
    table = _table("bytes per token", "plain", "one phase", "two phases")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, plain, direct, both in (
        ("moved, forward", cost.plain_bytes, cost.direct_bytes, cost.two_phase_bytes),
        (
            "moved, and backward",
            cost.plain_training_bytes,
            cost.direct_training_bytes,
            cost.two_phase_training_bytes,
        ),
    ):
        table.add_row(name, f"{plain:,}", *(f"{moved:,} ({moved / plain:.1f}x)" for moved in (direct, both)))
    table.add_row("kept more, inference", "", f"{cost.activation_bytes:,}", "")
    table.add_row("kept more, training", "", f"{cost.training_activation_bytes:,}", "")
    return table


# --- what was not converted


def _graph_breaks(breaks: Sequence[GraphBreak]) -> RenderableType:
    lines = [Text(f"  {short_path(item.where)}: {item.reason}") for item in breaks]
    return Group(Text(f"Graph breaks: {len(breaks)}", style="bold yellow"), *lines)


def _rejections(rejections: Sequence[LeftAlone], everything: bool) -> RenderableType:
    """Adds left alone, by reason, the most frequent first."""
    by_reason: dict[str, list[LeftAlone]] = {}
    for rejection in rejections:
        by_reason.setdefault(rejection.reason, []).append(rejection)
    parts: list[RenderableType] = [Text(f"Left alone: {_count(len(rejections), 'add')}", style="bold yellow")]
    for reason, members in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        head = Text.assemble((reason, "bold"), f" ({len(members)}): {members[0].message}")
        parts.append(Padding(head, (0, 0, 0, 2)))
        places = _rejected_places(members, everything)
        shown = places if everything else places[:FEW_PLACES]
        parts += [Padding(Text(place), (0, 0, 0, 4)) for place in shown]
        if len(shown) < len(places):
            parts.append(Text(f"    and {len(places) - len(shown)} more places (--all shows them)", style="dim"))
    return Group(*parts)


def _rejected_places(members: Sequence[LeftAlone], everything: bool) -> list[str]:
    if everything:
        message = members[0].message
        return [
            f"{_place(member.module, member.where, member.node)}"
            + (f": {member.message}" if member.message != message else "")
            for member in members
        ]
    by_line: dict[str, list[str]] = {}
    for member in members:
        by_line.setdefault(member.where, []).append(member.module)
    return [
        _place(name, where) + (f" (x{len(group)})" if len(group) > 1 else "")
        for where, modules in by_line.items()
        for name, group in collapse.paths(modules)
    ]


def _place(module: str, where: str, node: str = "") -> str:
    parts = [module or "(model)", short_path(where), f"node {node}" if node else ""]
    return ", ".join(part for part in parts if part)


# --- exactness


def exactness(found: Exactness, title: str) -> RenderableType:
    """The figures of ``attnres verify``."""
    table = _table("compared", "relative error", "allowed", "largest at")
    table.add_row("outputs", _figure(found.output_error), f"{found.tolerance:.0e}", found.worst_output)
    table.add_row("gradients", _figure(found.gradient_error), f"{found.tolerance:.0e}", found.worst_gradient)
    weights = "randomised weights" if found.randomised else "the model's own weights"
    about = (
        f"{_count(found.queries, 'query', 'queries')} at zero, {found.dtype}, {found.mode} mode, {weights}, "
        f"{_count(found.gradients, 'gradient')} compared"
    )
    notes = [Text(f"note: {note}", style="yellow") for note in found.notes]
    return Group(verdict(found.holds, title), Text(about), table, *notes)


def verdict(holds: bool | None, title: str) -> Text:
    """One line: exact or not."""
    told = ("exact", "bold green") if holds else ("NOT exact", "bold red")
    return Text.assemble((f"{title}: ", "bold"), ("not told", "bold yellow") if holds is None else told)


def _figure(error: float | None) -> str:
    return "not compared" if error is None else f"{error:.2e}"


# --- pieces


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table


def _fill(table: Table, rows: Iterator[tuple[str, ...]], everything: bool) -> None:
    listed = list(rows)
    shown = listed if everything or len(listed) <= FEW_ROWS else listed[: FEW_ROWS - 2]
    for row in shown:
        table.add_row(*map(Text, row))
    if len(shown) < len(listed):
        table.add_row(Text("..."), Text(f"{len(listed) - len(shown)} more rows (--all shows them)", style="dim"))


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
