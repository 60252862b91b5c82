"""The picture of a stream without scripts, for notebooks: a few SVG paths, however many sites there are."""

from __future__ import annotations

from dataclasses import dataclass

from attnres_compile.report import Stream
from attnres_compile.views.page.picture import picture

WIDTH, HEIGHT = 640.0, 360.0
MOST_WIDE, MOST_HIGH = 30.0, 9.0


@dataclass(frozen=True)
class Drawing:
    """Lengths in pixels.

    Attributes:
        width, height: of the picture, without the heads of the columns.
        mark: height of a mark.
        dashes: lengths of a mark and of the gap behind it: marks beside each other are one dashed line.
        heads: middle of a column and its number.
        steps: x, y, width and height of the rows during which a block is in progress, in its column.
        finished, partial: path data of the marks.
    """

    width: float
    height: float
    mark: float
    dashes: str
    heads: list[tuple[float, int]]
    steps: list[tuple[float, float, float, float]]
    finished: str
    partial: str


def drawing(stream: Stream) -> Drawing:
    """One stream, drawn."""
    values = picture(stream)
    columns, sites = len(values["columns"]), values["sites"]
    wide = min(MOST_WIDE, WIDTH / columns)
    high = min(MOST_HIGH, HEIGHT / max(1, len(sites)))
    marks: dict[bool, list[str]] = {False: [], True: []}
    rows: dict[int, list[int]] = {}
    for row, site in enumerate(sites):
        rows.setdefault(site["block"], []).append(row)
        finished = [column for column in site["sources"] if column != site["partial"]]
        partial = [] if site["partial"] is None else [site["partial"]]
        for beside, found in ((finished, False), (partial, True)):
            for first, last in _runs(beside):
                start, length = wide * (first + 0.15), wide * (last - first + 0.7)
                marks[found].append(f"M{_short(start)} {_short(high * (row + 0.5))}h{_short(length)}")
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if step * wide >= 20 or step == 1000)
    return Drawing(
        width=_short(wide * columns),
        height=_short(high * len(sites)),
        mark=_short(high * 0.7),
        dashes=f"{wide * 0.7:.2f} {wide * 0.3:.2f}",
        heads=[(_short(wide * (column + 0.5)), column) for column in range(0, len(stream.blocks) + 1, every)],
        steps=[
            (_short(wide * block), _short(high * found[0]), _short(wide), _short(high * len(found)))
            for block, found in rows.items()
            if block <= len(stream.blocks)
        ],
        finished="".join(marks[False]),
        partial="".join(marks[True]),
    )


def _runs(columns: list[int]) -> list[tuple[int, int]]:
    """First and last of each run of neighbours."""
    runs: list[tuple[int, int]] = []
    for column in sorted(columns):
        if runs and column == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], column)
        else:
            runs.append((column, column))
    return runs


def _short(length: float) -> float:
    return round(length, 1)
