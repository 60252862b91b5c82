"""Reports and depth weights for pages, written out by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from attnres_compile.report import Cost, GraphBreak, LeftAlone, Phase, Stream, TransformReport
from tests.reports import make_report

HOSTILE = "</script><img src=x onerror=alert(1)><b>&amp;\u2028'\"`${alert(2)}{{7*7}}"


def decoder(layers: int = 24, size: int = 6, file: str = "/somewhere/model.py") -> TransformReport:
    """A decoder's report with kinds, shapes, costs and phases."""
    report = make_report(layers, size, file)
    (stream,) = report.streams
    last = len(stream.sites) - 1
    sites = tuple(
        replace(
            site,
            index=index,
            kind="output" if index == last else ("attention", "mlp")[index % 2],
            shape=(2, "s0", 768),
            dtype="bfloat16",
        )
        for index, site in enumerate(stream.sites)
    )
    sublayers = tuple(replace(sub, shape=(2, "s0", 768), dtype="bfloat16") for sub in stream.sublayers)
    cost = Cost(768 * last, 2, 1000, 2500, 2000, 2000, 7000, 5000, 1536, 6240)
    phases = tuple(
        Phase("model", number, (f"model.site_{number}",), number, 300, 200, False, "two_phase", False, "fewer bytes")
        for number in range(1, len(stream.blocks) + 1)
    )
    return replace(
        report, streams=(replace(stream, sites=sites, sublayers=sublayers, cost=cost),), phases=phases, fusions=()
    )


def nothing() -> TransformReport:
    """No stream was found."""
    return TransformReport(rejections=make_report(3).rejections, graph_breaks=(GraphBreak("a print", "/a/b.py:3"),))


def hostile() -> TransformReport:
    """Every text of the report is markup that would run a script."""
    report = decoder(3, 2)
    (stream,) = report.streams
    sites = tuple(
        replace(site, name=f"{HOSTILE}{i}", readers=(HOSTILE,), dtype=HOSTILE, shape=(HOSTILE, 3))
        for i, site in enumerate(stream.sites)
    )
    sites = (*sites[:-1], replace(sites[-1], kind=HOSTILE, sources=(*sites[-1].sources, HOSTILE)))
    sublayers = tuple(replace(sub, module=HOSTILE, where=f"{HOSTILE}:3", dtype=HOSTILE) for sub in stream.sublayers)
    return replace(
        report,
        streams=(replace(stream, name=HOSTILE, owner=HOSTILE, sites=sites, sublayers=sublayers),),
        rejections=(LeftAlone(HOSTILE, HOSTILE, HOSTILE, f"{HOSTILE}:1", HOSTILE),),
        graph_breaks=(GraphBreak(HOSTILE, HOSTILE),),
        phases=tuple(replace(phase, stream=HOSTILE, reason=HOSTILE) for phase in report.phases),
    )


@dataclass(frozen=True)
class Weights:
    """Depth weights in the form of :class:`attnres_compile.depth_weights.DepthWeights`."""

    values: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return self.values


def weights(report: TransformReport) -> Weights:
    """Made up: the j-th of n sources of a site has weight (j + 1) / (1 + .. + n)."""
    return Weights({"streams": [_stream(stream) for stream in report.streams]})


def _stream(stream: Stream) -> dict[str, Any]:
    names = ["root", *(f"block {number}" for number in range(1, len(stream.blocks) + 1)), "partial"]
    rows: list[list[float | None]] = []
    for site in stream.sites:
        total = sum(range(1, len(site.sources) + 1))
        values = {name if name in names else "partial": (j + 1) / total for j, name in enumerate(site.sources)}
        rows.append([values.get(name) for name in names])
    columns = len(stream.sublayers) + 1
    lower = [[1.0 if j <= i else 0.0 for j in range(columns)] for i in range(len(stream.sites))]
    shares = [[value / (i + 1) for value in row] for i, row in enumerate(lower)]
    return {
        "name": stream.name,
        "sites": [site.name for site in stream.sites],
        "kinds": [site.kind for site in stream.sites],
        "sources": names,
        "weights": rows,
        "std": [[value and value * 0.123456 for value in row] for row in rows],
        "entropy": [-sum(p * math.log(p) for p in row if p) for row in rows],
        "tokens": 4096,
        "mixing": {"plain": lower, "full": shares, "block": shares, "measured": shares},
    }
