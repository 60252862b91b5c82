"""The human form: everything that matters is there, and 24 layers fit on a screen."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from attnres_compile.config import AttnResConfig
from attnres_compile.exactness import Exactness
from attnres_compile.report import GraphBreak, Site, TransformReport
from attnres_compile.views import terminal as render
from attnres_compile.views.paths import short_path


def lines(renderable: RenderableType, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def cells(found: list[str]) -> list[list[str]]:
    return [[cell for cell in line.strip().split("  ") if cell] for line in found]


def test_24_layers_fit_on_a_screen(report: TransformReport) -> None:
    found = lines(render.report(report, "x.py:model"))
    assert max(map(len, found)) <= 80
    assert len(found) < 50
    text = [[cell.strip() for cell in row] for row in cells(found)]
    assert found[0] == "x.py:model: 1 residual stream, 48 sublayers, 48 queries, 36,864 parameters added"
    assert "Stream model in model: 48 sublayers, 768 features" in found
    assert ["1, 3..47", "model.layers.0..23", "/somewhere/model.py:21"] in text
    assert ["2, 4..48", "model.layers.0..23", "/somewhere/model.py:27"] in text
    assert ["3", "13..18", "model.layers.6..8"] in text
    assert ["1..6", "root + partial (1 bypass)", "model.layers.0..2.input_layernorm,"] in text
    assert ["13..18", "root, block 1..2 + partial", "model.layers.6..8.input_layernorm,"] in text
    assert ["49", "root, block 1..8", "model.norm"] in text
    assert "Left alone: 25 adds" in found
    assert "  no_contraction (24): no weight lies between skip and branch" in found
    assert "    model.layers.0..23.rope, /somewhere/model.py:9 (x24)" in found
    assert "    (model), /somewhere/model.py:5" in found


def test_all_shows_every_one(report: TransformReport) -> None:
    found = "\n".join(lines(render.report(report, "x", everything=True), width=200))
    assert "..." not in found
    for site in report.streams[0].sites:
        assert f"{site.name} " in found
    for i in range(24):
        assert f"model.layers.{i}.rope, /somewhere/model.py:9" in found
    assert "(model), /somewhere/model.py:5, node add_99" in found
    assert found.count("none: bypass") == 1


def test_full_form_is_cut_short_and_says_so(make_report: Callable[..., TransformReport]) -> None:
    full = make_report(size=1)
    found = lines(render.report(full, "x"))
    assert "  48 blocks: the full form, each sublayer is a source of its own" in found
    assert any("27 more rows (--all shows them)" in line for line in found)
    assert not any("more rows" in line for line in lines(render.report(full, "x", everything=True)))


def test_notes_name_sublayers(make_report: Callable[..., TransformReport]) -> None:
    even, odd, single = (make_report(layers=5, size=size).streams[0] for size in (5, 3, 1))
    assert not list(render.block_notes(even, AttnResConfig(num_blocks=2)))
    assert not list(render.block_notes(single, AttnResConfig(num_blocks=10)))
    assert not list(render.block_notes(single, AttnResConfig(num_blocks=None)))
    joined = replace(odd, blocks=(*odd.blocks[:2], odd.blocks[2] + odd.blocks[3]))
    assert list(render.block_notes(joined)) == [
        "the stream has 10 sublayers, which 3 blocks of 3 sublayers do not use up, so the last block has 4"
    ]
    assert list(render.block_notes(single, AttnResConfig())) == []
    assert list(render.block_notes(single, AttnResConfig(num_blocks=11))) == [
        "the stream has 10 sublayers, fewer than the 11 blocks asked for, so each sublayer is a block"
    ]
    whole = replace(odd, blocks=(tuple(range(10)),))
    assert list(render.block_notes(whole, AttnResConfig(block_size=11))) == [
        "the stream has 10 sublayers, fewer than the 11 sublayers asked for per block, so there is one block"
    ]


def test_many_places_of_one_reason(report: TransformReport) -> None:
    scattered = tuple(replace(item, where=f"/somewhere/model.py:{i}") for i, item in enumerate(report.rejections))
    found = lines(render.report(replace(report, rejections=scattered), "x"))
    assert "    and 21 more places (--all shows them)" in found


def test_nothing_converted_and_graph_breaks() -> None:
    empty = TransformReport((), (), (GraphBreak("print() was called", "/somewhere/a.py:3"),), 0)
    found = lines(render.report(empty, "x"))
    assert found[0] == "x: no residual stream can be converted"
    assert found[2:] == ["Graph breaks: 1", "  /somewhere/a.py:3: print() was called"]


def test_markup_in_names_is_text(report: TransformReport) -> None:
    stream = report.streams[0]
    sites = (Site("s", ("[red]reader[/red]",), ("root", "block 1"), "s"),)
    odd = replace(report, streams=(replace(stream, name="[bold]odd", sites=sites),))
    found = "\n".join(lines(render.report(odd, "[title]")))
    assert "[title]: 1 residual stream" in found
    assert "Stream [bold]odd in" in found
    assert "[red]reader[/red]" in found


def test_narrow_terminals_lose_nothing(report: TransformReport) -> None:
    found = lines(render.report(report, "x"), width=40)
    assert max(map(len, found)) <= 40
    assert "/somewhere/model.py:21" in "".join(line.split()[-1] for line in found[4:12] if line)


def test_output_is_ascii(report: TransformReport) -> None:
    assert all(line.isascii() for line in lines(render.report(report, "x")))


@pytest.mark.parametrize("holds", [True, False])
def test_exactness(holds: bool) -> None:
    found = Exactness(
        *(holds, 1.5e-7, None, 1e-5, "float32", 12, 0, "eval", True),
        worst_output="logits",
        notes=("gradients were not compared: [because]",),
    )
    text = lines(render.exactness(found, "x.py:model"))
    assert text[0] == f"x.py:model: {'exact' if holds else 'NOT exact'}"
    assert text[1].startswith("12 queries at zero, float32, eval mode, randomised weights, 0 gradients")
    assert [cell.split() for cell in text[3:5]] == [
        ["outputs", "1.50e-07", "1e-05", "logits"],
        ["gradients", "not", "compared", "1e-05"],
    ]
    assert text[5] == "note: gradients were not compared: [because]"


def test_short_path() -> None:
    import torch

    assert short_path(os.path.join(os.getcwd(), "a", "b.py:3")) == os.path.join("a", "b.py:3")
    assert short_path(torch.__file__ + ":7") == os.path.join("torch", "__init__.py:7")
    assert short_path(os.__file__) == "os.py"
    assert short_path("/nowhere/at/all.py:1") == "/nowhere/at/all.py:1"
    assert short_path("") == ""
    assert sys.path  # it looks at places, it adds none
