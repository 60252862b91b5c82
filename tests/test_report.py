"""The report's shape: stable, documented in docs/report.md, and the same after a round trip through JSON."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.depth_graph import depth_graph
from attnres_compile.report import Cost, Fusion, GraphBreak, LeftAlone, Phase, Site, Stream, Sublayer, TransformReport
from attnres_compile.reporting import STREAM_REASONS

DOCS = Path(__file__).parents[1] / "docs"
REPORT = TransformReport(
    (
        Stream(
            "s",
            4,
            (Sublayer("layers.0", "m.py:3", "add", ("add_0", "add")), Sublayer("layers.1", "", "add_1", ("add_1",))),
            ((0,), (1,)),
            (Site("a", ("norm", "output"), ("root",), None), Site("b", ("norm",), ("root", "block 1"), "b")),
            "encoder",
            Cost(8, 4, 96, 200, 190, 192, 400, 380, 32, 72),
        ),
    ),
    (LeftAlone("post_norm", "why", "layers.0", "m.py:5", "add_2"),),
    (GraphBreak("print", "m.py:9"),),
    4,
    (Phase("encoder.s", 2, ("a", "b"), 2, 100, 90, True, "two_phase", False, "fewer bytes"),),
    (Fusion("a", "rmsnorm", True, "", ""), Fusion("b", "", False, "no norm reads it", "the sum broadcasts")),
)
SHAPE: dict[str, list[str]] = {
    "report": ["streams", "rejections", "graph_breaks", "parameters_added", "phases", "fusions"],
    "streams": ["name", "feature_dim", "sublayers", "blocks", "sites", "owner", "cost"],
    "sublayers": ["module", "where", "add", "adds", "shape", "dtype"],
    "sites": ["name", "readers", "sources", "query", "index", "kind", "shape", "dtype"],
    "cost": [
        "parameters", "itemsize", "plain_bytes", "direct_bytes", "two_phase_bytes", "plain_training_bytes",
        "direct_training_bytes", "two_phase_training_bytes", "activation_bytes", "training_activation_bytes",
    ],
    "rejections": ["reason", "message", "module", "where", "node"],
    "graph_breaks": ["reason", "where"],
    "phases": [
        "stream", "block", "sites", "sources", "direct_bytes", "two_phase_bytes", "training", "chosen", "applies",
        "reason",
    ],
    "fusions": ["site", "norm", "add", "norm_reason", "add_reason"],
}  # fmt: skip


def shape(values: dict[str, Any]) -> dict[str, list[str]]:
    (stream,) = values["streams"]
    lists = {**values, **stream, "cost": [stream["cost"]]}
    return {
        "report": list(values),
        **{name: list(lists[name][0]) for name in SHAPE if name != "report"},
    }


def test_the_shape_is_stable() -> None:
    assert shape(REPORT.to_dict()) == SHAPE


def test_only_json_values() -> None:
    values = REPORT.to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["streams"][0]["blocks"] == [[0], [1]]
    assert values["streams"][0]["sites"][0]["query"] is None


@pytest.mark.parametrize("report", [REPORT, TransformReport()], ids=["full", "empty"])
def test_round_trip(report: TransformReport) -> None:
    again = TransformReport.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again == report
    # What equality leaves out is there too.
    assert again.to_dict() == report.to_dict()
    assert hash(again) == hash(report)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        REPORT.parameters_added = 5  # type: ignore[misc]


def test_merged() -> None:
    both = REPORT.merged(REPORT)
    assert (len(both.streams), len(both.rejections), len(both.graph_breaks), both.parameters_added) == (2, 2, 2, 8)
    assert (both.phases, both.fusions) == (REPORT.phases * 2, REPORT.fusions * 2)
    assert REPORT.merged(TransformReport()) == REPORT == TransformReport().merged(REPORT)


def test_documented_keys_are_the_real_ones() -> None:
    documented: dict[str, list[str]] = {}
    section = ""
    for line in (DOCS / "report.md").read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## .*`(\w+)`", line):
            section = heading[1]
        elif row := re.match(r"\| `(\w+)` \|", line):
            documented.setdefault(section, []).append(row[1])
    assert documented == SHAPE


def test_every_reason_is_documented() -> None:
    text = (DOCS / "detection.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", text, flags=re.MULTILINE))
    assert list(documented) == [reason.value for reason in ac.Reason]
    assert {reason for reason, kind in documented.items() if kind == "stream"} == STREAM_REASONS
    assert set(documented.values()) == {"stream", "add"}


def test_a_real_report_has_the_shape_and_known_reasons() -> None:
    from tests.models import build, example

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build()

        def forward(self, x: Tensor) -> Any:
            return self.inner(x + x.mean(-1, keepdim=True))

    report = ac.explain(Shifted(), example(), ac.AttnResConfig(num_blocks=2))
    values = {**report.to_dict(), **{name: REPORT.to_dict()[name] for name in ("graph_breaks", "fusions")}}
    assert shape(values) == SHAPE
    assert {rejection.reason for rejection in report.rejections} <= {reason.value for reason in ac.Reason}
    assert TransformReport.from_dict(report.to_dict()) == report
    assert TransformReport.from_dict(report.to_dict()).phases == report.phases
    assert {phase.stream for phase in report.phases} == {stream.name for stream in report.streams}
    assert [name for phase in report.phases for name in phase.sites] == [
        site.name for stream in report.streams for site in stream.sites if site.query is not None
    ]


def test_a_report_of_version_0_1_is_read() -> None:
    values = REPORT.to_dict()
    old = {name: value for name, value in values.items() if name not in ("phases", "fusions")}
    for stream in old["streams"]:
        del stream["cost"]
        for part in stream["sublayers"] + stream["sites"]:
            for name in ("index", "kind", "shape", "dtype"):
                part.pop(name, None)
    read = TransformReport.from_dict(old)
    assert read == REPORT
    assert (read.phases, read.fusions) == ((), ())
    assert read.streams[0].cost is None


def test_as_a_graph() -> None:
    graph = REPORT.to_networkx()
    kinds = [data["kind"] for _, data in graph.nodes(data=True)]
    assert (kinds.count("sublayer"), kinds.count("site")) == (2, 2)
    assert graph.number_of_nodes() == depth_graph(REPORT).number_of_nodes()


def test_shown_in_a_terminal_and_in_a_notebook() -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(REPORT)
    text = console.export_text()
    assert "1 residual stream, 2 sublayers, 1 query, 4 parameters added" in " ".join(text.split())
    assert "post_norm (1): why" in text
    html = REPORT._repr_html_()
    assert "layers.0" in html
    assert "<script" not in html


def test_as_a_page(tmp_path: Path) -> None:
    REPORT.to_html(tmp_path / "report.html", title="of <mine>")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "of &lt;mine&gt;" in page
    assert "post_norm" in page
    with pytest.raises(ac.AttnResError, match="cannot be written"):
        REPORT.to_html(tmp_path / "nowhere" / "report.html")
