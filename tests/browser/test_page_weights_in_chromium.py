"""Depth weights in the HTML report, in a real browser: heat maps, entropies, mixing matrices and the table."""

from __future__ import annotations

from typing import Any

import pytest

from attnres_compile.report import TransformReport
from tests.browser import pages
from tests.browser.conftest import Open


@pytest.fixture
def page(open_page: Open) -> Any:
    """A decoder of 24 layers in 8 blocks, with depth weights."""
    report = pages.decoder(24, 6)
    return open_page(report, pages.weights(report))


def focused(page: Any) -> str:
    return str(page.evaluate("document.activeElement.getAttribute('aria-label')"))


def heat(page: Any, kind: str) -> Any:
    return page.locator(f".heatmap[data-kind={kind}]")


def test_heat_maps_hold_the_weights(page: Any) -> None:
    report: TransformReport = pages.decoder(24, 6)
    (values,) = pages.weights(report).to_dict()["streams"]
    for kind in ("attention", "mlp", "output"):
        chosen = [i for i, found in enumerate(values["kinds"]) if found == kind]
        panel = heat(page, kind)
        numbers = [value for i in chosen for value in values["weights"][i] if value is not None]
        assert panel.locator("rect.cell").count() == len(numbers)
        assert panel.locator(".row-heads .head").count() == len(chosen) == panel.locator("rect.entropy").count()
        said = panel.locator("rect.cell").evaluate_all("cells => cells.map(cell => cell.getAttribute('aria-label'))")
        assert [float(text.rsplit(": ", 1)[1]) for text in said] == pytest.approx(numbers, rel=5e-3)
        written = panel.locator("text.value").all_text_contents()
        assert [float(text) for text in written] == pytest.approx(numbers, abs=0.0051)


def test_entropy_bars_end_left_of_the_tick_for_equal_weights(page: Any) -> None:
    script = "nodes => nodes.map(node => node.getBoundingClientRect().right)"
    bars = heat(page, "mlp").locator("rect.entropy").evaluate_all(script)
    ticks = heat(page, "mlp").locator("line.uniform").evaluate_all(script)
    assert len(bars) == 24 and all(bar < tick for bar, tick in zip(bars, ticks, strict=True))
    heat(page, "mlp").locator(".row-heads .head").nth(1).hover()
    assert "nats" in page.locator("#tip").inner_text() and "0.693 if equal" in page.locator("#tip").inner_text()


def test_brighter_cells_are_larger_weights_and_their_numbers_can_be_read(page: Any) -> None:
    both = "cell => [Number(cell.getAttribute('aria-label').split(': ').at(-1)), cell.getAttribute('fill')]"
    cells = heat(page, "attention").locator("rect.cell").evaluate_all(f"cells => cells.map({both})")
    light = [luminance(colour) for weight, colour in sorted(cells) if weight < 0.99]
    assert light == sorted(light) and len(set(light)) > 10
    texts = heat(page, "attention").locator("text.value").evaluate_all("texts => texts.map(text => text.style.fill)")
    for (_, colour), ink in zip(cells, texts, strict=True):
        high, low = sorted((luminance(colour), 1.0 if ink == "rgb(255, 255, 255)" else 0.0), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_heat_maps_by_keyboard_and_as_a_table(page: Any) -> None:
    heat(page, "mlp").locator("[tabindex='0']").focus()
    assert focused(page) == "model.site_1, root: 0.333"
    page.keyboard.press("ArrowRight")
    assert focused(page) == "model.site_1, partial: 0.667"
    assert "0.667 \u00b1 0.0823 over tokens; 0.5 if equal" in page.locator("#tip").inner_text()
    page.get_by_text("The weights as a table").click()
    rows = page.locator("table.weights tbody tr")
    rows.last.wait_for()
    assert rows.count() == 49
    assert rows.nth(1).locator("td.number").all_inner_texts()[:1] == ["0.3333"]
    assert rows.nth(1).locator("td.number").all_inner_texts()[-2:] == ["0.6667", "0.6365"]


def test_colours_by_the_square_root_are_brighter(page: Any) -> None:
    small = "cells => cells.map(cell => cell.getAttribute('fill'))"
    even = heat(page, "mlp").locator("rect.cell").evaluate_all(small)
    page.get_by_label("square root").check()
    root = heat(page, "mlp").locator("rect.cell").evaluate_all(small)
    assert all(luminance(after) >= luminance(before) for before, after in zip(even, root, strict=True)) and even != root


def test_mixing_matrices_read_their_entries(page: Any) -> None:
    assert page.locator("figcaption").all_inner_texts() == ["plain residual", "full form", "block form", "measured"]
    canvas = page.locator("canvas").nth(1)
    assert (canvas.get_attribute("width"), canvas.get_attribute("height")) == ("49", "49")
    canvas.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert page.locator("figure output").nth(1).inner_text() == "model.site_3, sublayer 1: 0.25"
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5 / 49, box["y"] + box["height"] * 9.5 / 49)
    assert page.locator("figure output").nth(1).inner_text() == "model.site_9, root: 0.1"
    pixels = "canvas => [...canvas.getContext('2d').getImageData(0, 9, 49, 1).data].filter((_, i) => i % 4 === 3)"
    assert canvas.evaluate(pixels) == [255] * 10 + [0] * 39
