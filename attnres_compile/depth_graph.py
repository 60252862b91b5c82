"""The depth graph of a report: which source each site looks at, as a networkx graph, DOT or GraphML."""

from __future__ import annotations

import io
from pathlib import Path

import networkx as nx

from attnres_compile.errors import AttnResError
from attnres_compile.report import Stream, TransformReport

SUFFIXES = (".dot", ".graphml")


def depth_graph(report: TransformReport) -> nx.DiGraph:
    """Sources, sites and readers of all streams of ``report``.

    Returns:
        A directed graph from sublayers through sources and sites to readers. Every node has ``kind`` (``sublayer``,
        ``source``, ``site`` or ``reader``), ``stream`` and ``label``; all values are text.
    """
    graph = nx.DiGraph()
    for stream in report.streams:
        _add_stream(graph, stream)
    return graph


def _add_stream(graph: nx.DiGraph, stream: Stream) -> None:
    def node(kind: str, name: str) -> str:
        key = f"{stream.name}/{kind}/{name}"
        graph.add_node(key, kind=kind, stream=stream.name, label=name)
        return key

    node("source", "root")
    branches: dict[int, list[str]] = {}
    for number, indices in enumerate(stream.blocks, 1):
        for index in indices:
            sublayer = stream.sublayers[index]
            label = f"{index + 1} {sublayer.module}".strip()
            branches.setdefault(number, []).append(node("sublayer", label))
    for site in stream.sites:
        for source in site.sources:
            graph.add_edge(node("source", source), node("site", site.name))
        for reader in site.readers:
            graph.add_edge(node("site", site.name), node("reader", reader))
    for number, branch in branches.items():
        block, partial = node("source", f"block {number}"), f"{stream.name}/source/partial {number}"
        # A partial sum that is read on the way holds all branches of its block but the last.
        if partial in graph:
            graph.add_edge(partial, block)
        for name in branch:
            graph.add_edge(name, partial if partial in graph and name != branch[-1] else block)


def write_depth_graph(report: TransformReport, path: str | Path) -> None:
    """Write the depth graph to ``path``, in the format that its suffix names (``.dot`` or ``.graphml``).

    Raises:
        AttnResError: another suffix.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise AttnResError(
            f"a depth graph is written as {' or '.join(SUFFIXES)}, not {path.suffix or path.name!r}",
            remedy="Choose a file name with one of these suffixes",
        )
    graph = depth_graph(report)
    path.write_text(_dot(graph) if path.suffix == ".dot" else _graphml(graph), encoding="utf-8")


def _graphml(graph: nx.DiGraph) -> str:
    buffer = io.BytesIO()
    nx.write_graphml(graph, buffer)
    return buffer.getvalue().decode("utf-8")


_SHAPES = {"sublayer": "box", "source": "ellipse", "site": "diamond", "reader": "plaintext"}


def _dot(graph: nx.DiGraph) -> str:
    """DOT text; written here because networkx's own writer needs pydot."""

    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    lines = ["digraph depth {", "  rankdir=LR;"]
    for name, data in graph.nodes(data=True):
        lines.append(f"  {quoted(name)} [label={quoted(data['label'])}, shape={_SHAPES[data['kind']]}];")
    lines += [f"  {quoted(a)} -> {quoted(b)};" for a, b in graph.edges]
    return "\n".join([*lines, "}", ""])
