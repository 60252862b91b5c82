"""The HTML report in a real browser, opened from disk: what is drawn, and pointer, keyboard, zoom and colours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.browser import pages
from tests.browser.conftest import Open, Watch

SITE = "model.site_20"  # at 6 sublayers per block: two of block 4 are behind it


@pytest.fixture
def page(open_page: Open) -> Any:
    """A decoder of 24 layers in 8 blocks, with depth weights."""
    report = pages.decoder(24, 6)
    return open_page(report, pages.weights(report))


def cell(page: Any, row: int, place: int) -> Any:
    """The mark at the ``place``-th source of a site."""
    return page.locator(".picture g.row").nth(row).locator(".cell").nth(place)


def focused(page: Any) -> str:
    return str(page.evaluate("document.activeElement.getAttribute('aria-label')"))


def transform(page: Any) -> str:
    return str(page.locator(".picture .plot > g").get_attribute("transform"))


# --- what is drawn


@pytest.mark.parametrize(("layers", "size"), [(24, 6), (4, 1), (3, 4)])
def test_the_picture_has_the_reports_blocks_sites_and_sources(open_page: Open, layers: int, size: int) -> None:
    report = pages.decoder(layers, size)
    page = open_page(report)
    (stream,) = report.streams
    assert page.locator(".picture .column-heads .head").count() == 1 + len(stream.blocks)
    assert page.locator(".picture .row-heads .head").count() == len(stream.sites)
    assert page.locator(".picture .cell").count() == sum(len(site.sources) for site in stream.sites)
    partials = sum(source.startswith("partial") for site in stream.sites for source in site.sources)
    assert page.locator(".picture .cell.partial").count() == partials
    assert page.locator(".picture .cell.bypass").count() == 1
    assert page.locator(".picture .plot .filling").count() == len(stream.blocks)
    for kind in ("attention", "mlp", "output"):
        marks = sum(len(site.sources) for site in stream.sites if site.kind == kind)
        assert page.locator(f".picture .cell.{kind}").count() == marks


def test_each_mark_stands_in_its_row_and_column(page: Any) -> None:
    (stream,) = pages.decoder(24, 6).streams
    heads = [box["x"] + box["width"] / 2 for box in boxes(page, ".column-heads .hit")]
    rows = [box["y"] + box["height"] / 2 for box in boxes(page, ".row-heads .hit")]
    marks = iter(boxes(page, ".cell"))
    for row, site in enumerate(stream.sites):
        for source in site.sources:
            column = 0 if source == "root" else int(source.split()[1])
            mark = next(marks)
            assert mark["x"] + mark["width"] / 2 == pytest.approx(heads[column], abs=1)
            assert mark["y"] + mark["height"] / 2 == pytest.approx(
                rows[row], abs=3
            )  # a triangle's middle is no half height


def boxes(page: Any, selector: str) -> list[dict[str, float]]:
    script = """nodes => nodes.map(node => node.getBoundingClientRect())
        .map(({x, y, width, height}) => ({x, y, width, height}))"""
    found: list[dict[str, float]] = page.locator(f".picture {selector}").evaluate_all(script)
    return found


def test_a_partial_sum_is_filled_as_far_as_its_block(page: Any) -> None:
    fill = cell(page, 20, 4).get_attribute("fill").removeprefix("url(").removesuffix(")")
    assert float(page.locator(f"{fill} stop").first.get_attribute("offset")) == pytest.approx(1 - 2 / 6)


def test_a_model_of_100_layers_in_full_form(open_page: Open) -> None:
    report = pages.decoder(100, 1)
    page = open_page(report)
    assert page.locator(".picture .row-heads .head").count() == 201
    assert page.locator(".picture .column-heads .head").count() == 201
    assert (
        page.locator(".picture .cell").count() == 201 * 202 // 2 == sum(len(s.sources) for s in report.streams[0].sites)
    )
    last = page.locator(".picture .row-heads .head").last.bounding_box()
    frame = page.locator(".picture svg[role=grid]").bounding_box()
    assert last["y"] + last["height"] / 2 <= frame["y"] + frame["height"] <= last["y"] + 900


def test_each_stream_has_a_picture(open_page: Open) -> None:
    first, second = pages.decoder(2, 2), pages.decoder(4, 1)
    second = replace(second, streams=(replace(second.streams[0], name="decoder"),))
    both = first.merged(second)
    page = open_page(both, pages.weights(both))
    pictures = page.locator(".picture")
    assert [pictures.nth(i).locator(".row-heads .head").count() for i in range(2)] == [5, 9]
    assert page.locator("h2", has_text="Stream decoder").count() == 1
    assert page.locator("#heatmaps h3").count() == 2
    ids = page.locator("[id]").evaluate_all("all => all.map(one => one.id)")
    assert len(ids) == len(set(ids))


def test_no_stream_is_said_and_the_adds_are_shown(open_page: Open) -> None:
    page = open_page(pages.nothing())
    text = page.locator("#summary").inner_text()
    assert "Nothing was converted" in text and "a print" in text and "/a/b.py:3" in text
    assert page.locator(".picture").count() == 0
    assert page.locator("#left-alone tr[data-place]").count() == 2


# --- pointer


def test_hovering_shows_module_line_shape_and_sources(page: Any) -> None:
    tip = page.locator("#tip")
    assert tip.is_hidden()
    cell(page, 20, 2).hover()
    text = tip.inner_text()
    for part in (SITE, "attention", "model.layers.10.input_layernorm", "bfloat16[2, s0, 768]"):
        assert part in text
    assert "b2: the finished sum of sublayers 7\u201312" in text
    assert "/somewhere/model.py:21" in text and "model.layers.3" in text
    page.locator(".picture .row-heads .head").nth(20).hover()
    assert "5 sources" in tip.inner_text() and "b4 in progress" in tip.inner_text()
    page.locator(".picture .column-heads .head").nth(3).hover()
    assert "sublayers 13\u201318" in tip.inner_text()
    page.mouse.move(2, 2)
    assert tip.is_hidden()


def test_hovering_marks_the_row_and_its_sources(page: Any) -> None:
    cell(page, 20, 2).hover()
    assert page.locator(".picture .cell.on").count() == 5
    assert page.locator(".picture .column-heads .head.on").count() == 5
    assert page.locator(".picture .row-heads .head.on .label").all_text_contents() == ["site_20"]
    page.locator(".picture .column-heads .head").nth(3).hover()
    readers = sum("block 3" in site.sources or "partial 3" in site.sources for site in pages.decoder().streams[0].sites)
    assert page.locator(".picture .cell.on").count() == readers == page.locator(".picture .row-heads .head.on").count()


def test_a_place_without_a_source_says_why(page: Any) -> None:
    head, row = page.locator(".column-heads .hit").nth(8).bounding_box(), cell(page, 20, 2).bounding_box()
    page.mouse.move(head["x"] + head["width"] / 2, row["y"] + row["height"] / 2)
    assert "not a source" in page.locator("#tip").inner_text()


def test_a_click_pins_and_escape_closes(page: Any) -> None:
    tip = page.locator("#tip")
    cell(page, 20, 2).click()
    cell(page, 10, 0).hover()
    assert SITE in tip.inner_text()
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    cell(page, 20, 2).click()
    tip.get_by_role("button", name="Close").click()
    assert tip.is_hidden()


def test_the_tooltip_stays_in_the_window(page: Any) -> None:
    cell(page, 48, 8).scroll_into_view_if_needed()
    cell(page, 48, 8).hover()
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 1280 and box["y"] >= 0 and box["y"] + box["height"] <= 900


# --- keyboard


def test_one_tab_stop_and_arrows_from_there(page: Any) -> None:
    assert page.locator(".picture [tabindex='0']").count() == 1
    page.locator(".picture [tabindex='0']").focus()
    assert focused(page).startswith("model.site_0, attention: b0")
    for _ in range(20):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert focused(page) == f"{SITE}, attention: b2: the finished sum of sublayers 7\u201312"
    by_keyboard = page.locator("#tip").inner_text()
    assert page.locator(".picture [tabindex='0']").count() == 1
    page.evaluate("document.activeElement.blur()")
    cell(page, 20, 2).hover()
    assert page.locator("#tip").inner_text() == by_keyboard != ""


def test_heads_are_reached_and_ends_hold(page: Any) -> None:
    page.locator(".picture [tabindex='0']").focus()
    page.keyboard.press("ArrowLeft")
    assert focused(page) == "model.site_0, attention, 1 source, bypass"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    assert focused(page) == "b0, the root"
    page.keyboard.press("ArrowRight")
    assert focused(page) == "b1: block 1"
    page.keyboard.press("Home")
    assert focused(page) == "b0, the root"
    page.keyboard.press("ArrowDown")
    assert focused(page).startswith("model.site_0, attention: b0")
    page.keyboard.press("Control+End")
    assert focused(page).startswith("model.site_48, output: b8")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert focused(page).startswith("model.site_48, output: b8")


def test_the_focus_is_visible_and_enter_pins(page: Any) -> None:
    page.locator(".picture [tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator(".picture .ring.shown").count() == 1
    described = page.evaluate("document.activeElement.getAttribute('aria-describedby')")
    assert described == "tip"
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    assert "model.site_1" in page.locator("#tip .tip-title").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_the_grid_has_rows_and_heads_for_assistive_technology(page: Any) -> None:
    grid = page.locator(".picture svg[role=grid]")
    assert grid.get_attribute("aria-rowcount") == "50" and grid.get_attribute("aria-colcount") == "10"
    assert grid.locator("[role=row]").count() == 1 + 49
    assert grid.locator("[role=rowheader]").count() == 49 and grid.locator("[role=columnheader]").count() == 9
    assert grid.locator("[role=gridcell]:not([aria-label])").count() == 0
    owned = grid.locator("g.row").evaluate_all(
        "rows => rows.map(row => document.getElementById(row.getAttribute('aria-owns')))"
    )
    assert len(owned) == 49 and None not in owned


# --- zoom


def test_zoom_and_reset_by_buttons_keys_and_wheel(page: Any) -> None:
    whole = transform(page)
    page.get_by_role("button", name="Zoom in").first.click()
    assert "scale(1.5)" in transform(page) != whole
    page.get_by_role("button", name="Show everything").first.click()
    assert transform(page) == whole
    page.locator(".picture [tabindex='0']").focus()
    page.keyboard.press("+")
    assert "scale(1.5)" in transform(page)
    page.keyboard.press("-")
    page.keyboard.press("+")
    before = transform(page)
    page.keyboard.press("Shift+ArrowRight")
    assert transform(page) != before and "scale(1.5)" in transform(page)
    page.keyboard.press("0")
    assert transform(page) == whole
    cell(page, 10, 0).hover()
    page.mouse.wheel(0, -200)
    assert transform(page) == whole  # the wheel scrolls the page
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    assert transform(page) != whole


def test_heads_follow_and_the_focus_stays_in_view(page: Any) -> None:
    for _ in range(3):
        page.get_by_role("button", name="Zoom in").first.click()
    page.locator(".picture [tabindex='0']").focus()
    page.keyboard.press("Control+End")
    page.keyboard.press("ArrowUp")
    plot, mark = page.locator(".picture .catch").bounding_box(), cell(page, 47, 8).bounding_box()
    assert plot["x"] <= mark["x"] and mark["x"] + mark["width"] <= plot["x"] + plot["width"]
    assert plot["y"] <= mark["y"] and mark["y"] + mark["height"] <= plot["y"] + plot["height"]
    head = page.locator(".picture .row-heads .hit").nth(47).bounding_box()
    assert head["y"] + head["height"] / 2 == pytest.approx(mark["y"] + mark["height"] / 2, abs=2)


def test_dragging_pans_and_does_not_pin(page: Any) -> None:
    page.get_by_role("button", name="Zoom in").first.click()
    before = transform(page)
    cell(page, 24, 4).scroll_into_view_if_needed()
    box = cell(page, 24, 4).bounding_box()
    page.mouse.move(box["x"], box["y"])
    page.mouse.down()
    page.mouse.move(box["x"] + 60, box["y"] + 40, steps=4)
    page.mouse.up()
    assert transform(page) != before
    assert "pinned" not in (page.locator("#tip").get_attribute("class") or "")


# --- hostile text


def test_hostile_names_stay_text(open_page: Open, watch: Watch) -> None:
    report = pages.hostile()
    page = open_page(report, pages.weights(report))
    assert page.locator("img, main b, header b").count() == 0
    assert page.title() == "a title"
    for selector in (".cell", ".row-heads .head", ".column-heads .head"):
        page.locator(f".picture {selector}").last.hover()
        assert pages.HOSTILE[:30] in page.locator("#tip").inner_text() or selector == ".column-heads .head"
    page.locator("#weights summary").first.click()
    page.locator("#filter").fill("<img")
    assert page.locator("img").count() == 0
    assert pages.HOSTILE[:30] in page.locator("#left-alone").inner_text()
    assert watch.trouble == []


def test_scripts_that_got_in_would_not_run(open_page: Open, watch: Watch) -> None:
    page = open_page(pages.decoder(2, 2))
    refused = []
    page.on("requestfailed", lambda request: refused.append((request.url, request.failure)))
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.ran = true";
        const image = document.createElement("img");
        image.setAttribute("onerror", "window.ran = true");
        image.src = "https://example.org/x.png";
        document.body.append(script, image);
    }""")
    page.wait_for_function("() => document.querySelector('img').complete")
    assert page.evaluate("window.ran") is None
    assert refused == [("https://example.org/x.png", "csp")]
    assert sum("Content Security Policy" in text for text in watch.trouble) == len(watch.trouble) - 1 == 3
    watch.trouble.clear()


# --- colours and widths


def test_dark_and_light_and_the_button(open_page: Open) -> None:
    report = pages.decoder(4, 2)
    light, dark = open_page(report), open_page(report, scheme="dark")
    assert light.screenshot() != dark.screenshot()
    background = "getComputedStyle(document.body).backgroundColor"
    assert light.evaluate(background) == "rgb(255, 255, 255)"
    button = light.locator("#theme")
    assert button.inner_text() == "Dark"
    button.click()
    assert light.evaluate(background) == dark.evaluate(background)
    assert button.inner_text() == "Light" == dark.locator("#theme").inner_text()


@pytest.mark.parametrize("width", [360, 768, 1600])
@pytest.mark.parametrize("size", [6, 1])
def test_no_width_makes_the_page_scroll_sideways(open_page: Open, width: int, size: int) -> None:
    report = pages.decoder(24, size)
    page = open_page(report, pages.weights(report), width=width)
    for details in page.locator("main > section details > summary").all():
        details.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    frames = page.locator(".matrix-frame svg").evaluate_all("all => all.map(svg => svg.getBoundingClientRect().right)")
    assert frames and max(frames) <= width


def test_the_picture_follows_the_window(page: Any) -> None:
    page.locator(".picture [tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    before = focused(page)
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_function("() => document.querySelector('.picture svg[role=grid]').clientWidth < 400")
    assert page.locator(".picture .cell").count() == sum(len(s.sources) for s in pages.decoder().streams[0].sites)
    assert focused(page) == before


def test_printing_opens_what_is_folded(page: Any) -> None:
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("main details:not([open])").count() == 0
    assert page.locator("nav").is_hidden() and page.locator(".matrix-bar").first.is_hidden()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("main details[open]").count() == 0


# --- adds left alone


def test_the_filter_finds_each_module_of_a_row(page: Any) -> None:
    rows = page.locator("#left-alone tr[data-place]:visible")
    assert rows.count() == 2
    page.locator("#filter").fill("layers.17.rope")
    assert rows.count() == 1 and "model.layers.0..23.rope" in rows.inner_text()
    assert page.locator("#filtered").inner_text() == "1 of 2 rows"
    assert page.locator(".reason:visible").count() == 1
    page.locator("#filter").fill("neither MODEL.PY:5")
    assert rows.count() == 1 and "(model)" in rows.inner_text()
    page.locator("#filter").fill("no such thing")
    assert rows.count() == 0
    page.locator("#filter").fill("")
    assert rows.count() == 2
