"""The heat maps in a terminal: what they say, at 80 columns, with and without colours."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from attnres_compile import DepthWeights
from attnres_compile.views import heatmap
from tests.made_weights import found, make


def text(shown: object, width: int = 80, colour: bool = False) -> str:
    file, system = io.StringIO(), "truecolor" if colour else None
    console = Console(file=file, width=width, highlight=False, force_terminal=colour, color_system=system)
    console.print(shown)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def test_golden_text() -> None:
    shown = text(heatmap.weights(found(), "demo"))
    assert shown == (Path(__file__).parent / "golden" / "weights.txt").read_text(encoding="utf-8")


def test_numbers_are_those_of_the_array() -> None:
    stream = make()
    shown = text(heatmap.weights(found(stream)))
    for label, row in zip(heatmap.labels(stream), stream.weights, strict=True):
        line = next(line for line in shown.splitlines() if line.strip().startswith(label))
        cells = re.findall(r"(?:1\.0|\.\d\d)", line.replace(label, "").rsplit("  ", 1)[0])
        wanted = [heatmap._number(value) for value in row if np.isfinite(value)]
        assert cells[: len(wanted)] == wanted
    assert [heatmap._number(value) for value in (0.0, 0.074, 0.996, 1.0)] == [".00", ".07", "1.0", "1.0"]


@pytest.mark.parametrize("layers", [1, 2, 5, 16, 24, 60, 100])
@pytest.mark.parametrize("size", [None, 2, 3, 7])
@pytest.mark.parametrize("everything", [False, True])
def test_every_line_fits_and_is_ascii(layers: int, size: int | None, everything: bool) -> None:
    shown = text(heatmap.weights(found(make(layers, size)), "a " * 20, everything))
    assert shown.isascii()
    assert max(map(len, shown.splitlines())) <= 80
    rows = sum(re.match(r"  (layers\.\d+\.|norm)", line) is not None for line in shown.splitlines())
    assert rows == (2 * layers if everything else 2 * min(layers, 24)) + 1
    assert ("--all" in shown) == (not everything and layers > 11)


def test_attention_and_mlp_readers_stand_apart() -> None:
    stream = make(2)
    assert heatmap.panels(stream) == [
        ("read by attention", [0, 2]),
        ("read by MLPs", [1, 3]),
        ("read behind the last sublayer", [4]),
    ]
    assert heatmap.panels(make(2, kinds=False)) == [("all sites", [0, 1, 2, 3, 4])]
    mixed = replace(stream, kinds=("other", "mlp", "", "mlp", "output"))
    assert ("read by others", [0, 2]) in heatmap.panels(mixed)


def test_many_sources_are_one_character_each() -> None:
    """The full form of 48 sublayers: one character per source, darker for more."""
    stream = make(24, None)
    shown = text(heatmap.weights(found(stream)))
    line = next(line for line in shown.splitlines() if line.startswith("  layers.10.in"))
    cells = line[line.index(".. ") + 3 :][:21]
    wanted = "".join(heatmap.SHADES[min(int(9 * w**0.5), 8)] for w in stream.weights[20] if np.isfinite(w))
    assert cells == wanted and len(wanted) == 21
    header = next(line for line in shown.splitlines() if line.startswith("  site"))
    start = header.index(" r") + 1
    assert header[start:].split() == ["r", "10", "20", "30", "40", "entropy"]
    assert header.index("40") + 1 == start + 40


def test_more_sources_than_columns_share_characters() -> None:
    shown = text(heatmap.weights(found(make(60, None))))
    assert "one character is 3 sources, their weights added" in shown
    added = heatmap._added(np.array([0.1, 0.2, np.nan, np.nan, np.nan]), 2)
    assert np.array_equal(added, [0.1 + 0.2, np.nan, np.nan], equal_nan=True)


def test_colours_change_no_character() -> None:
    shown = heatmap.weights(found(make(3)))
    coloured = text(shown, colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).split() == text(shown).split()
    # More weight is darker, and what is written on it can be read.
    light, dark = heatmap._shaded(0.0), heatmap._shaded(1.0)
    assert sum(light.bgcolor.triplet) > 3 * 200 > sum(dark.bgcolor.triplet)
    assert light.color.triplet.hex == "#000000" and dark.color.triplet.hex == "#ffffff"


def test_the_mixing_matrices_are_drawn() -> None:
    lines = text(heatmap.weights(found(make(2)))).splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith("plain"))
    assert lines[start].split() == ["plain", "full", "block", "measured"]
    rows = [line.split() for line in lines[start + 1 : start + 6]]
    assert [row[0] for row in rows] == ["@" * n for n in range(1, 6)]
    assert [row[1] for row in rows] == ["@", "##", "***", "++++", "+++++"]
    assert rows[2][2] == "###" and rows[4][2] == "*****"  # 2 and 3 sources
    assert all(len(row) == 4 for row in rows)


def test_shared_parts_of_names_are_left_out() -> None:
    assert heatmap.labels(make(2))[:2] == ["layers.0.input_layernorm", "layers.0.post_attention_layernorm"]
    one = replace(make(1), sites=("a.b", "a.b", "a.b"))
    assert heatmap.labels(one) == ["b", "b", "b"]


def test_markup_and_html_in_names_are_text() -> None:
    stream = make(1, prefix="[red]<b>&.")
    assert "[red]<b>&" in text(heatmap.weights(found(stream), "[bold]x[/]"))
    html = found(stream)._repr_html_()
    assert "<b>" not in html and "&lt;b&gt;&amp;" in html and "background-color" in html
    assert "<script" not in html and "http" not in html


def test_as_rich_renders_it() -> None:
    assert text(found()) == text(heatmap.weights(found()))


def test_several_streams_and_none() -> None:
    shown = text(heatmap.weights(found(make(2), make(3, prefix="second."))))
    assert "2 streams, 12 sites" in shown and "Stream second.stream0" in shown
    assert "0 streams, 0 sites" in text(heatmap.weights(DepthWeights(())))
    assert "0 streams" in DepthWeights(())._repr_html_()
