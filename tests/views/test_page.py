"""The HTML report as text: what is in it, its size, that nothing of a model is markup, that colours can be read."""

from __future__ import annotations

import base64
import hashlib
import json
import linecache
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from attnres_compile.errors import AttnResError
from attnres_compile.report import Fusion, LeftAlone, TransformReport
from attnres_compile.views import html
from attnres_compile.views.page import tables
from attnres_compile.views.page.drawing import drawing
from attnres_compile.views.page.picture import picture
from tests.browser import pages

FILES = resources.files("attnres_compile.views.page")


class Parsed(HTMLParser):
    """Elements with their attributes, the text outside of scripts, and the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            (self.scripts if tag == "script" else self.styles).append("")

    def handle_data(self, data: str) -> None:
        last = self.elements[-1][0] if self.elements else ""
        if last == "script" and self.cdata_elem:
            self.scripts[-1] += data
        elif last == "style" and self.cdata_elem:
            self.styles[-1] += data
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def count(self, tag: str, **attributes: str) -> int:
        return sum(
            name == tag and all(found.get(key) == value for key, value in attributes.items())
            for name, found in self.elements
        )


def data_of(page: Parsed) -> Any:
    return json.loads(page.scripts[0])


# --- what is in it


def test_the_summary_and_the_headings_stand_in_order() -> None:
    report = pages.decoder(24, 6)
    text = Parsed(html.page(report, pages.weights(report), "my model")).text
    order = ["my model", "1 residual stream with 48 places", "Summary", "Stream model", "Cost", "How the sites run"]
    order += ["Adds left alone", "Depth weights", "Licence of D3", "Permission to use, copy, modify"]
    places = [text.find(part) for part in order]
    assert -1 not in places
    # The contents at the top name some of them first.
    after = text.index("Summary", text.index("Depth weights"))
    found = [text.find(part, after) for part in order[2:]]
    assert found == sorted(found) and -1 not in found
    for figure in ("49 sites", "48 sublayers", "36,864"):
        assert figure in text or " ".join(reversed(figure.split())) in text


def test_without_streams_it_says_so_and_shows_the_adds() -> None:
    page = Parsed(html.page(pages.nothing()))
    assert "Nothing was converted." in page.text and "1 graph break" in page.text and "/a/b.py:3 (a print)" in page.text
    assert "no_contraction 3 adds" in page.text and "model.layers.0..2.rope" in page.text
    assert page.count("div", **{"class": "picture"}) == 0
    assert "Depth weights" not in page.text


def test_an_empty_report_is_a_page() -> None:
    page = Parsed(html.page(TransformReport()))
    assert "No residual stream can be converted." in page.text and "Adds left alone" not in page.text


def test_costs_and_their_ratios() -> None:
    (stream,) = pages.decoder().streams
    inference, training = tables.traffic(stream)
    assert inference.bytes == (1000, 2500, 2000) and inference.ratios == (1.0, 2.5, 2.0)
    assert training.bytes == (2000, 7000, 5000) and training.ratios == (1.0, 3.5, 2.5)
    text = Parsed(html.page(pages.decoder())).text
    for part in ("2.50 x", "3.50 x", "2.4 KiB", "1.5 KiB per token", "6.1 KiB per token"):
        assert part in text
    assert tables.traffic(replace(stream, cost=None)) == []
    assert [tables.size(n) for n in (0, 512, 1536, 200 * 1024, 3 * 1024**3)] == [
        "0 B",
        "512 B",
        "1.5 KiB",
        "200 KiB",
        "3.0 GiB",
    ]


def test_phases_that_run_alike_are_one_row() -> None:
    report = pages.decoder(24, 6)
    last = replace(report.phases[0], block=9, chosen="direct", applies=True, training=True, reason="alone")
    (first, second) = tables.phases(replace(report, phases=(*report.phases, last)), report.streams[0])
    assert (first.blocks, first.sites, first.direct_bytes, first.two_phase_bytes) == ("1..8", 8, 2400, 1600)
    assert first.how == "each site by itself; in two phases on a GPU" and first.counted == "forward"
    assert (second.blocks, second.how, second.counted) == (
        "after the last",
        "each site by itself",
        "forward and backward",
    )


def test_fusions_in_words() -> None:
    fused = Fusion("a", "rmsnorm", True, "", "")
    left = Fusion("c", "", False, "two readers", "it broadcasts")
    assert tables.fusions(TransformReport(fusions=(fused, left, replace(fused, site="b")))) == [
        "Fused with the residual add before it and the rmsnorm after it: 2 sites.",
        "Nothing fused (no add because it broadcasts; no norm because two readers): 1 site.",
    ]


def test_the_tables_hold_what_the_picture_holds() -> None:
    (stream,) = pages.decoder(3, 2).streams
    rows = tables.sites(stream)
    assert [row.sources for row in rows] == [
        "root",
        "root, partial 1",
        "root, block 1",
        "root, block 1, partial 2",
        "root, block 1..2",
        "root, block 1..2, partial 3",
        "root, block 1..3",
    ]
    assert [row.kind for row in rows] == ["attention", "MLP"] * 3 + ["output"]
    assert rows[0].query == "none: bypass" and rows[1].query == "yes"
    assert rows[1].tensor == "bfloat16[2, s0, 768]"
    assert [(row.block, row.sublayers) for row in tables.blocks(stream)][:2] == [("1", "1"), ("1", "2")]


def test_the_picture_numbers_sources_as_columns() -> None:
    (stream,) = pages.decoder(3, 2).streams
    drawn = picture(stream)
    assert drawn["columns"] == ["root", "block 1", "block 2", "block 3"]
    sites = drawn["sites"]
    assert [site["sources"] for site in sites] == [
        [0],
        [0, 1],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]
    assert [site["partial"] for site in sites] == [None, 1, None, 2, None, 3, None]
    assert [site["block"] for site in sites] == [1, 1, 2, 2, 3, 3, 4]
    assert [site["behind"] for site in sites] == list(range(7))
    assert [site["label"] for site in sites] == [f"site_{number}" for number in range(7)]


def test_a_report_of_an_older_version_can_be_drawn(report: TransformReport) -> None:
    assert {site["behind"] for site in picture(report.streams[0])["sites"]} == {None}
    assert "Cost" not in Parsed(html.page(report)).text


def test_a_source_of_another_name_has_a_column_of_its_own() -> None:
    (stream,) = pages.decoder(3, 2).streams
    other = replace(stream.sites[-1], sources=("root", "memory", "partial 9"))
    drawn = picture(replace(stream, sites=(*stream.sites[:-1], other)))
    assert drawn["columns"][4:] == ["memory", "partial 9"] and drawn["sites"][-1]["sources"] == [0, 4, 5]


# --- adds left alone


def test_equal_adds_are_one_row_with_the_line_of_code(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("import torch\n    y = x + self.bias  # <b>\n")
    adds = [LeftAlone("bias", "a parameter", f"layers.{i}", f"{file}:2") for i in range(3)]
    adds += [LeftAlone("bias", "another sentence", "", f"{file}:7"), LeftAlone("late", "later", "x", "")]
    first, second = tables.reasons(adds)
    assert (first.name, first.message, first.adds) == ("bias", "a parameter", 4)
    merged, other = first.places
    assert (merged.module, merged.adds, merged.code) == ("layers.0..2", 3, "y = x + self.bias  # <b>")
    assert merged.modules == ("layers.0", "layers.1", "layers.2") and merged.message == ""
    assert (other.module, other.message, other.code) == ("(model)", "another sentence", "")
    assert (second.name, second.places[0].where) == ("late", "")
    page = html.page(TransformReport(rejections=tuple(adds)))
    assert "y = x + self.bias  # &lt;b&gt;" in page
    assert data_of(Parsed(page))["left"] == [["layers.0", "layers.1", "layers.2"], [""], ["x"]]


def test_only_python_is_looked_into(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password\n")
    assert tables.code_line(f"{secret}:1") == ""
    # Cells of a notebook are no files, but Python has their source.
    linecache.cache["<cell 3>"] = (5, None, ["a = b + c\n"], "<cell 3>")
    assert tables.code_line("<cell 3>:1") == "a = b + c"
    for where in ("", "x.py", "x.py:", "gone.py:3", "x.py:-1", "x\0.py:1", f"x.py:{'9' * 5000}"):
        assert tables.code_line(where) == ""


def test_long_lines_are_cut_and_changed_files_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text("x" * 500)
    assert tables.code_line(f"{file}:1") == "x" * 160 + "..."
    file.write_text("y = 1\n")
    assert tables.code_line(f"{file}:1") == "y = 1"


# --- size


@pytest.mark.parametrize("size", [1, 25])
def test_a_100_layer_model_is_under_2_mb(size: int) -> None:
    report = pages.decoder(100, size, "/home/somebody/projects/a-long-name/src/package/models/modeling_model.py")
    assert len(html.page(report).encode()) < 900_000
    assert len(html.page(report, pages.weights(report)).encode()) < 2_000_000
    assert len(html.fragment(report).encode()) < 40_000


# --- hostile text


def test_nothing_of_a_report_is_markup() -> None:
    report = pages.hostile()
    text = html.page(report, pages.weights(report), pages.HOSTILE)
    page = Parsed(text)
    assert page.count("img") == page.count("b") == 0
    assert len(page.scripts) == 1 + len(html.SCRIPTS)
    assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)
    assert pages.HOSTILE[:40] in page.text and "{{7*7}}" in page.text
    assert data_of(page)["streams"][0]["name"] == pages.HOSTILE
    data = text[text.index("report-data") :].split("</script>")[0].partition(">")[2]
    assert not set(data) & set("<>&\u2028\u2029")
    fragment = Parsed(html.fragment(report))
    assert fragment.count("img") == fragment.count("b") == fragment.count("script") == 0
    assert pages.HOSTILE[:40] in fragment.text


def test_names_that_are_no_text_are_written(tmp_path: Path) -> None:
    report = TransformReport(rejections=(LeftAlone("r", "m", "caf\u00e9", "/tmp/\udcff.py:1"),))
    html.write_page(report, tmp_path / "report.html", title="\udcff")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "caf\u00e9" in text and "/tmp/?.py:1" in text


def test_weights_that_are_no_numbers_stay_json() -> None:
    report = pages.decoder(2, 2)
    values = pages.weights(report).to_dict()
    values["streams"][0]["entropy"][0] = float("nan")
    values["streams"][0]["weights"][1][0] = 0.123456789
    (found,) = data_of(Parsed(html.page(report, pages.Weights(values))))["weights"]["streams"]
    assert found["entropy"][0] is None and found["weights"][1][0] == 0.1235


def test_only_our_own_scripts_and_style_may_run() -> None:
    page = Parsed(html.page(pages.decoder(2, 2)))
    (policy,) = [
        attributes["content"] or ""
        for tag, attributes in page.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.keys() == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"

    def hashes(texts: list[str]) -> list[str]:
        return [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts]

    assert rules["script-src"].split() == hashes(page.scripts[1:])
    assert rules["style-src"].split() == hashes(page.styles)
    # Links apart, nothing names another place.
    for tag, attributes in page.elements:
        assert "src" not in attributes and "style" not in attributes
        assert tag == "a" or "href" not in attributes


def test_the_scripts_make_no_markup_of_text() -> None:
    for name in html.SCRIPTS:
        text = FILES.joinpath(name).read_text(encoding="utf-8")
        assert "</script" not in text and "<!--" not in text
        if not name.startswith("vendor"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|\.html\(|document\.write|eval\(|Function\(", text
            )
            assert not re.search(r"fetch\(|XMLHttpRequest|localStorage|import\(", text)


def test_d3_is_the_published_file_with_its_licence() -> None:
    d3 = FILES.joinpath("vendor/d3.min.js").read_bytes()
    assert hashlib.sha256(d3).hexdigest() == "912111098ea99503a6f4967361d2bbdc9dbf58cf9c678c8e27e5b02d1a07f0c1"
    licence = FILES.joinpath("vendor/d3.LICENSE.txt").read_text(encoding="utf-8")
    assert "Mike Bostock" in licence and "d3 7.9.2" in licence


# --- files and notebooks


def test_a_file_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(AttnResError, match=r"cannot be written to .*gone.*\. Choose a file"):
        html.write_page(TransformReport(), tmp_path / "gone" / "report.html")


def test_equal_reports_make_equal_pages(report: TransformReport) -> None:
    assert html.page(report) == html.page(report)


def test_the_fragment_draws_each_site() -> None:
    report = pages.decoder(24, 6)
    page = Parsed(html.fragment(report))
    assert page.count("svg", role="img") == 1 and page.count("script") == 0
    drawn = drawing(report.streams[0])
    # A row of finished sources is one line, and so is a partial sum.
    assert drawn.finished.count("M") == 49 and drawn.partial.count("M") == 40
    assert len(drawn.steps) == 8 and drawn.steps[1][1] == pytest.approx(drawn.height * 6 / 49, abs=0.2)
    assert page.count("rect") == 8
    assert "36,864 parameters added" in page.text and "no_contraction" in page.text


def test_the_fragment_without_streams() -> None:
    text = Parsed(html.fragment(pages.nothing())).text
    assert "No residual stream can be converted." in text and "a print" in text


# --- colours


def variables() -> dict[str, tuple[str, str]]:
    css = FILES.joinpath("page.css").read_text(encoding="utf-8")
    return {name: (light, dark) for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\);", css)}


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_as_wcag_does() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def pairs() -> Iterator[tuple[str, str, float]]:
    for text in ("ink", "soft", "link"):
        for behind in ("page", "panel"):
            yield text, behind, 4.5
    for behind in ("notice", "bracket-odd", "bracket-even", "odd"):
        yield "ink", behind, 4.5
    # Marks are shapes: three to one (WCAG 1.4.11), on each ground that they stand on.
    for mark in ("attention", "mlp", "other", "output", "ring"):
        for behind in ("page", "odd", "filling"):
            yield mark, behind, 3.0


@pytest.mark.parametrize(("front", "behind", "least"), list(pairs()))
@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_contrast(front: str, behind: str, least: float, mode: int) -> None:
    colours = variables()
    assert contrast(colours[front][mode], colours[behind][mode]) >= least


def test_every_colour_is_a_pair() -> None:
    css = FILES.joinpath("page.css").read_text(encoding="utf-8")
    used = set(re.findall(r"var\(--([\w-]+)\)", css))
    assert used - {"mono"} <= variables().keys()
    outside = css.split("}", 1)[1]
    assert not re.findall(r"#[0-9a-f]{3,8}\b", outside)
