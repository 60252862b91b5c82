"""The depth graph against a stream that is counted by hand, and its two file formats read back."""

from __future__ import annotations

import re
from pathlib import Path

import networkx as nx
import pytest

import attnres_compile as ac
from attnres_compile.depth_graph import depth_graph, write_depth_graph
from attnres_compile.report import Site, Stream, Sublayer, TransformReport

# Four sublayers in two blocks of two; the final norm reads both complete blocks.
STREAM = Stream(
    name="s",
    feature_dim=4,
    sublayers=tuple(Sublayer(f"layer.{i // 2}", "", f"add_{i}") for i in range(4)),
    blocks=((0, 1), (2, 3)),
    sites=(
        Site("a", ("layer.0.norm",), ("root",), None),
        Site("b", ("layer.0.mlp",), ("root", "partial 1"), "b"),
        Site("c", ("layer.1.norm",), ("root", "block 1"), "c"),
        Site("d", ("layer.1.mlp", "output"), ("root", "block 1", "partial 2"), "d"),
        Site("e", ("norm",), ("root", "block 1", "block 2"), "e"),
    ),
)
REPORT = TransformReport((STREAM,), (), (), 16)
AWKWARD = 'we"ird\\name <&> ü'


def count(graph: nx.DiGraph, kind: str) -> int:
    return sum(data["kind"] == kind for _, data in graph.nodes(data=True))


def test_counted_by_hand() -> None:
    graph = depth_graph(REPORT)
    kinds = {kind: count(graph, kind) for kind in ("sublayer", "source", "site", "reader")}
    # root, block 1, block 2, partial 1, partial 2; six readers of five sites.
    assert kinds == {"sublayer": 4, "source": 5, "site": 5, "reader": 6}
    # 4 sublayers into blocks, 1 + 2 + 2 + 3 + 3 sources into sites, 6 sites to readers, 2 partials into blocks.
    assert graph.number_of_edges() == 4 + 11 + 6 + 2
    assert nx.is_directed_acyclic_graph(graph)
    assert set(graph.predecessors("s/site/d")) == {"s/source/root", "s/source/block 1", "s/source/partial 2"}
    assert set(graph.successors("s/site/d")) == {"s/reader/layer.1.mlp", "s/reader/output"}
    assert set(graph.predecessors("s/source/block 1")) >= {"s/source/partial 1"}
    assert all({"kind", "stream", "label"} == data.keys() for _, data in graph.nodes(data=True))


def test_streams_do_not_run_into_each_other() -> None:
    two = TransformReport((STREAM, Stream("t", *list(vars(STREAM).values())[1:])), (), (), 32)
    graph = depth_graph(two)
    assert graph.number_of_nodes() == 2 * depth_graph(REPORT).number_of_nodes()
    assert nx.number_weakly_connected_components(graph) == 2


def test_a_real_model() -> None:
    from tests.models import SITES, SUBLAYERS, build, example

    graph = depth_graph(ac.explain(build(), example(), ac.AttnResConfig(num_blocks=2)))
    assert count(graph, "sublayer") == SUBLAYERS
    assert count(graph, "site") == SITES + 1  # with the bypass
    assert nx.is_directed_acyclic_graph(graph)


def test_graphml_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "depth.graphml"
    write_depth_graph(REPORT, file)
    again, graph = nx.read_graphml(file), depth_graph(REPORT)
    assert dict(again.nodes(data=True)) == dict(graph.nodes(data=True))
    assert set(again.edges) == set(graph.edges)


def test_dot_is_well_formed(tmp_path: Path) -> None:
    file = tmp_path / "depth.dot"
    odd = Stream("s", 4, STREAM.sublayers, STREAM.blocks, (Site(AWKWARD, (AWKWARD,), ("root",), None),))
    write_depth_graph(TransformReport((odd,)), str(file))
    first, second, *body, last = file.read_text(encoding="utf-8").splitlines()
    assert (first, second, last) == ("digraph depth {", "  rankdir=LR;", "}")
    quoted = r'"((?:[^"\\]|\\.)*)"'
    nodes = [m[1] for line in body if (m := re.fullmatch(rf"  {quoted} \[label={quoted}, shape=\w+\];", line))]
    edges = [(m[1], m[2]) for line in body if (m := re.fullmatch(rf"  {quoted} -> {quoted};", line))]
    assert len(nodes) + len(edges) == len(body)

    def plain(text: str) -> str:
        return re.sub(r"\\(.)", r"\1", text)

    graph = depth_graph(TransformReport((odd,)))
    assert [plain(node) for node in nodes] == list(graph.nodes)
    assert [(plain(a), plain(b)) for a, b in edges] == list(graph.edges)
    assert f"s/site/{AWKWARD}" in graph


@pytest.mark.parametrize("suffix", [".dot", ".graphml"])
def test_a_report_without_streams(tmp_path: Path, suffix: str) -> None:
    write_depth_graph(TransformReport(), tmp_path / f"empty{suffix}")
    assert (tmp_path / f"empty{suffix}").stat().st_size > 0


@pytest.mark.parametrize("name", ["depth.png", "depth", "depth.DOT"])
def test_other_formats_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ac.AttnResError, match=r"\.dot or \.graphml"):
        write_depth_graph(REPORT, tmp_path / name)
    assert not list(tmp_path.iterdir())
