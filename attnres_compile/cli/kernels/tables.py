"""Facts about compiled kernels as tables: for a terminal of 80 columns, and as the Markdown of docs/kernels.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attnres_compile.kernels.inspection.site import SHORT
from attnres_compile.kernels.spec import KINDS

Row = dict[str, Any]

# Heading of a column, and how a row fills it.
_BYTES = ("loaded", "stored", "floor", "stats", "again")
_KEYS = (
    "load_bytes_per_token",
    "store_bytes_per_token",
    "floor_bytes_per_token",
    "statistics_bytes_per_token",
    "reread_bytes_per_token",
)

_LEGEND = (
    "Bytes are per token, counted in the compiled code. loaded + stored = floor + stats + again: the floor is each row "
    "once, stats are per-token numbers, again is what is loaded more than once. vec: the narrowest access to a row, "
    "in bytes per thread. spills: bytes per thread."
)

_INTRODUCTION = """\
# What the generated kernels compile to

{origin}Compiled without a GPU by Triton {triton}; registers and spills of NVIDIA kernels are ptxas's own report,
those of AMD kernels the code generator's.

How to read it:

- **Bytes are per token and counted in the compiled code**, by running the integer part of the PTX (AMD: of the LLVM IR
  that the code generator gets) for every thread of a block, so masked tails, loads that several threads repeat and
  widths are what the code says, not what was meant. Every active thread of every instruction counts.
- *loaded* and *stored*: rows and per-token statistics. *floor*: each row that must be read or written, once, from the
  spec. *stats*: per-token numbers (log-sum-exps, deltas). *again*: rows that are loaded more than once, because
  a site is handled by several launches (the number in *launches*) or a row does not fit into registers.
  loaded + stored = floor + stats + again, within 2%.
- *cached*: queries and norm parameters that are loaded again for each row; they come from the caches.
- Per architecture: registers per thread / narrowest access to a row in bytes per thread; spilled bytes per thread
  follow in bold where there are any (none means none).
- In backward kernels marked *accumulate*, each source's gradient is added to one that is there.
"""


def rich_tables(rows: Sequence[Row]) -> RenderableType:
    """One table per kernel, one row per architecture."""
    parts: list[RenderableType] = []
    for name in dict.fromkeys(row["kernel"] for row in rows):
        members = [row for row in rows if row["kernel"] == name]
        parts += [Text(title(members[0]), style="bold"), _rich_table(members), ""]
    return Group(*parts, Text(_LEGEND, style="dim"))


def _rich_table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("arch")
    for heading in ("regs", "spills", "shared", "vec", *_BYTES):
        table.add_column(heading, justify="right")
    for row in rows:
        spills = Text(str(row["spills"]), style="bold red" if row["spills"] else "")
        wide = Text(str(row["vector_bytes"]), style="" if row["vector_bytes"] >= 16 else "yellow")
        table.add_row(
            row["arch"],
            str(row["registers"]),
            spills,
            str(row["shared_memory"]),
            wide,
            *(_number(row[k]) for k in _KEYS),
        )
    return table


def title(row: Row) -> str:
    """What a kernel is, in words."""
    sources = row["sources"]
    parts = [f"{row['kind']} {row['direction']}"]
    if row["kind"] == "merge":
        parts.append(f"{row['dim']} features in {SHORT[row['dtype']]}")
    else:
        parts.append(f"{sources} source{'s' * (sources > 1)} of {row['dim']} features in {SHORT[row['dtype']]}")
    if row["queries"] > 1:
        parts.append(f"{row['queries']} queries")
    if row["fused"]:
        parts.append(f"with {' and '.join(row['fused'])}")
    if row["launches"] > 1:
        parts.append(f"{row['launches']} launches")
    return ", ".join(parts)


def document(rows: Sequence[Row], matrix: str | None = None) -> str:
    """All rows as one Markdown document, those of different architectures side by side."""
    origin = f"Printed by `attnres kernels --matrix {matrix} --markdown`; do not edit.\n" if matrix else ""
    parts = [_INTRODUCTION.format(triton=_version("triton"), origin=origin)]
    for kind in KINDS:
        for direction in ("forward", "backward"):
            members = [row for row in rows if row["kind"] == kind and row["direction"] == direction]
            if members:
                parts.append(f"## {kind}, {direction}\n\n{_markdown_table(members)}")
    return "\n".join(parts)


def _markdown_table(rows: Sequence[Row]) -> str:
    architectures = list(dict.fromkeys(row["arch"] for row in rows))
    head = ["N", "S", "D", "dtype", "fused", "launches", *_BYTES, "cached", *architectures]
    lines = [head, ["---"] * 5 + ["--:"] * (len(head) - 5)]
    # Launches and bytes may differ between architectures, by their plans; such kernels take several lines.
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in sorted(rows, key=_order):
        groups.setdefault((*_order(row), row["kernel"], *_cells(row)), {})[row["arch"]] = row
    for members in groups.values():
        row = next(iter(members.values()))
        lines.append(
            [
                "" if row["kind"] == "merge" else str(row["sources"]),
                str(row["queries"]),
                str(row["dim"]),
                SHORT[row["dtype"]],
                ", ".join([*row["fused"], *(["accumulate"] if "accumulate" in row["kernel"] else [])]),
                *_cells(row),
                *(_compiled(members.get(name)) for name in architectures),
            ]
        )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _order(row: Row) -> tuple[Any, ...]:
    return tuple(row["fused"]), row["dtype"], row["dim"], row["sources"], row["queries"]


def _cells(row: Row) -> list[str]:
    return [str(row["launches"]), *(_number(row[key]) for key in _KEYS), _number(row["parameter_bytes_per_token"])]


def _compiled(row: Row | None) -> str:
    if row is None:
        return ""
    spills = f" **{row['spills']} spilled**" if row["spills"] else ""
    return f"{row['registers']} / {row['vector_bytes']}{spills}"


def _number(value: float) -> str:
    return f"{value:,}" if value == int(value) else f"{value:,.1f}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of an unknown version"


def summary(rows: Iterable[Row]) -> str:
    """One line about a whole matrix, for standard error."""
    listed = list(rows)
    spilled = [row for row in listed if row["spills"]]
    narrow = [row for row in listed if row["vector_bytes"] < 16]
    off = [row for row in listed if not balanced(row)]
    return (
        f"{len(listed)} compiled: {len(spilled)} spill, {len(narrow)} access rows by less than 16 bytes, "
        f"{len(off)} move other bytes than the floor, the statistics and what is loaded again"
    )


def balanced(row: Row) -> bool:
    """Whether the counted bytes are what was planned, within 2%.

    That is the floor, the statistics and what several launches load again; what one kernel loads again counts only
    where its rows do not stay in registers.
    """
    counted = row["load_bytes_per_token"] + row["store_bytes_per_token"]
    planned = row["planned_bytes_per_token"]
    planned += sum(kernel["reread_bytes_per_token"] for kernel in row["kernels"] if not kernel["resident"])
    return bool(abs(counted - planned) <= 0.02 * planned)
