"""Depth-attention weights as text: heat maps of numbers, or of one character per source where there are many.

The characters say all; a terminal with colours shades them too. Every line fits into the width that there is.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from attnres_compile.depth_weights import FORMS, PARTIAL, Array, DepthWeights, StreamWeights

# Rows of a heat map that are shown without --all: as many, evenly spread.
FEW_ROWS = 24
NARROW = 60
# Of the shortest label, a number, and the entropy.
LABEL, CELL, ENTROPY = 16, 4, 12
# From no weight to all of it; a weight w is character ``floor(9 * sqrt(w))``, so that 1/50 is still seen.
SHADES = ".:-=+*#%@"
_LIGHT, _DARK = (247, 251, 255), (8, 48, 107)
_TITLES = {
    "attention": "read by attention",
    "mlp": "read by MLPs",
    "output": "read behind the last sublayer",
}


def panels(stream: StreamWeights) -> list[tuple[str, list[int]]]:
    """The sites of a stream by what reads them: a title and the rows, attention and MLP readers apart."""
    known = any(kind in ("attention", "mlp") for kind in stream.kinds)
    found: dict[str, list[int]] = {title: [] for title in _TITLES.values()}
    for row, kind in enumerate(stream.kinds):
        found.setdefault(_TITLES.get(kind, "read by others") if known else "all sites", []).append(row)
    return [(title, rows) for title, rows in found.items() if rows]


def labels(stream: StreamWeights) -> list[str]:
    """Names of the sites without the modules that all of them lie in."""
    parts = [site.split(".") for site in stream.sites]
    shared = 0
    while all(len(each) > shared + 1 and each[shared] == parts[0][shared] for each in parts):
        shared += 1
    return [".".join(each[shared:]) for each in parts]


def summary(found: DepthWeights, title: str = "") -> Text:
    """One line: how far the weights are from uniform."""
    text = Text(f"{title}: " if title else "", style="bold")
    sites = sum(len(stream.sites) for stream in found.streams)
    measured, uniform = (
        float(sum(getattr(stream, name).sum() for stream in found.streams)) for name in ("entropy", "uniform_entropy")
    )
    share = f", entropy {measured / uniform:.1%} of uniform" if uniform else ""
    return text.append(f"{_count(len(found.streams), 'stream')}, {_count(sites, 'site')}{share}", style="bold green")


@dataclass(frozen=True)
class _Weights:
    found: DepthWeights
    title: str
    everything: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(options.max_width, NARROW)
        yield summary(self.found, self.title)
        for stream in self.found.streams:
            yield ""
            yield from _Picture(stream, width, self.everything).lines()
        yield ""
        yield from _legend(self.found)


def weights(found: DepthWeights, title: str = "", everything: bool = False) -> _Weights:
    """The heat maps of all streams, the entropies, and the mixing matrices.

    Args:
        found: what to show.
        title: whose weights they are.
        everything: show every site, and not at most 24 per map.
    """
    return _Weights(found, title, everything)


def html(found: DepthWeights, title: str = "") -> str:
    """The same, shaded, as a piece of HTML; everything in it is escaped."""
    console = Console(record=True, file=io.StringIO(), width=100, highlight=False, color_system="truecolor")
    console.print(weights(found, title))
    style = "font-family:monospace;line-height:1.25;white-space:pre;overflow-x:auto"
    return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')


def _legend(found: DepthWeights) -> Iterator[Text]:
    text = "Softmax weights without the gain, mean over all tokens; entropy per token, in nats and of log n."
    if any(PARTIAL in stream.sources for stream in found.streams):
        text += " now: the sum of the block in progress."
    yield Text(text, style="dim")
    bounds = [(number / len(SHADES)) ** 2 for number in range(1, len(SHADES))]
    below = "  ".join(f"{shade} <{_number(bound)}" for shade, bound in zip(SHADES, bounds, strict=False))
    yield Text(f"{below}  {SHADES[-1]} more", style="dim")


class _Picture:
    """One stream at one width."""

    def __init__(self, stream: StreamWeights, width: int, everything: bool) -> None:
        self.stream = stream
        self.width = width
        self.everything = everything
        self.labels = labels(stream)
        columns = len(stream.sources)
        longest = max(map(len, self.labels))
        room = width - 2 - ENTROPY
        self.numbers = room - CELL * columns >= min(longest, LABEL)
        # More sources than there is room for share a character.
        self.each = 1 if self.numbers else math.ceil(columns / (room - LABEL - 1))
        taken = CELL * columns if self.numbers else 1 + math.ceil(columns / self.each)
        self.label = min(longest, room - taken)

    def lines(self) -> Iterator[Text]:
        stream = self.stream
        count = len(stream.sources)
        yield Text.assemble(
            ("Stream ", "bold"),
            (stream.name, "bold cyan"),
            f": {_count(len(stream.sites), 'site')} over {_count(count, 'source')}, {_count(stream.tokens, 'token')}",
        )
        if self.each > 1:
            yield Text(f"  one character is {self.each} sources, their weights added", style="dim")
        for title, rows in panels(stream):
            chosen = self._thinned(rows)
            yield Text("")
            yield Text(f"  {title}{_of(chosen, rows)}", style="bold")
            yield self._header()
            yield from map(self._row, chosen)
        yield Text("")
        yield from self._mixing()

    def _thinned(self, rows: Sequence[int]) -> list[int]:
        if self.everything or len(rows) <= FEW_ROWS:
            return list(rows)
        return [rows[round(at)] for at in np.linspace(0, len(rows) - 1, FEW_ROWS)]

    def _header(self) -> Text:
        names = ["now" if name == PARTIAL else name.removeprefix("block ") for name in self.stream.sources]
        start = f"  {'site':<{self.label}}"
        columns = "".join(f"{name:>{CELL}}" for name in names) if self.numbers else " " + _ruler(names, self.each)
        return Text(f"{start}{columns}{'entropy':>{ENTROPY}}", style="dim")

    def _row(self, row: int) -> Text:
        text = Text("  ").append(f"{_cut(self.labels[row], self.label):<{self.label}}")
        values = self.stream.weights[row]
        if self.numbers:
            for value in values:
                text.append(" " if np.isfinite(value) else " " * CELL)
                if np.isfinite(value):
                    text.append(f"{_number(value):>{CELL - 1}}", style=_shaded(value))
        else:
            text.append(" ").append_text(_shades(_added(values, self.each)))
        entropy, most = self.stream.entropy[row], self.stream.uniform_entropy[row]
        share = f"{entropy / most:5.0%}" if most else "    -"
        return text.append(f"{entropy:{ENTROPY - 5}.2f}{share}")

    def _mixing(self) -> Iterator[Text]:
        """The four matrices side by side, two by two where they are wide."""
        matrices = {form: self.stream.mixing(form) for form in FORMS}
        columns = matrices["plain"].shape[1]
        beside = 4 if 4 * max(columns, 8) + 8 <= self.width else 2
        room = (self.width - 2 * beside) // beside
        each = math.ceil(columns / room)
        rows = self._thinned(range(len(self.stream.sites)))
        merged = f"; one character is {each} sublayers, their mean" if each > 1 else ""
        yield Text(
            f"  depth mixing: sites over the root and each sublayer{_of(rows, self.stream.sites)}{merged}", style="bold"
        )
        size = max(math.ceil(columns / each), 8)
        for first in range(0, len(FORMS), beside):
            group = FORMS[first : first + beside]
            if first:
                yield Text("")
            yield Text("".join(f"  {form:<{size}}" for form in group), style="dim")
            for row in rows:
                line = Text("")
                for form in group:
                    values = np.where(np.arange(columns) <= self.stream.index[row], matrices[form][row], np.nan)
                    cells = _shades(_averaged(values, each))
                    line.append("  ").append_text(cells).append(" " * (size - len(cells)))
                line.rstrip()
                yield line


# ------------------------------------------------------------------ pieces


def _number(value: float) -> str:
    """``.07``, ``1.0``: at most three characters for a weight."""
    text = f"{value:.2f}"
    return text[1:] if text.startswith("0") else text[:3]


def _shades(values: Array) -> Text:
    text = Text()
    for value in values:
        if np.isfinite(value):
            text.append(SHADES[min(int(len(SHADES) * math.sqrt(max(value, 0.0))), len(SHADES) - 1)], _shaded(value))
        else:
            text.append(" ")
    return text


def _shaded(value: float) -> Style:
    depth = math.sqrt(min(max(value, 0.0), 1.0))
    red, green, blue = (round(light + depth * (dark - light)) for light, dark in zip(_LIGHT, _DARK, strict=True))
    front = "#ffffff" if depth > 0.55 else "#000000"
    return Style(color=front, bgcolor=f"#{red:02x}{green:02x}{blue:02x}")


def _added(values: Array, each: int) -> Array:
    """The sum of every ``each`` columns; NaN where none of them is there."""
    return np.array([np.nan if np.isnan(part).all() else np.nansum(part) for part in _cells(values, each)])


def _averaged(values: Array, each: int) -> Array:
    """The same for the mean."""
    return np.array([np.nan if np.isnan(part).all() else np.nanmean(part) for part in _cells(values, each)])


def _cells(values: Array, each: int) -> list[Array]:
    return [values[start : start + each] for start in range(0, len(values), each)]


def _ruler(names: Sequence[str], each: int) -> str:
    """``r        10        20``: a name ends where its column is."""
    line = [" "] * math.ceil(len(names) / each)
    line[0] = "r"
    for position, name in enumerate(names):
        at = position // each + 1
        if name.isdigit() and int(name) % (10 * each) == 0 and all(c == " " for c in line[at - len(name) : at]):
            line[at - len(name) : at] = name
    return "".join(line)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 2]}.."


def _of(chosen: Sequence[object], rows: Sequence[object]) -> str:
    return f": {len(chosen)} of {len(rows)} sites (--all shows them)" if len(chosen) < len(rows) else ""


def _count(number: int, one: str) -> str:
    return f"{number:,} {one if number == 1 else one + 's'}"
