"""Random networks as dynamo sees them: its graphs, checkpointed regions, graph breaks, and whole transformations."""

from __future__ import annotations

from tests.properties import drawing
from tests.properties.searching import search


def test_graphs_of_dynamo() -> None:
    search("dynamo", drawing.networks(), 30)


def test_checkpointed_regions() -> None:
    search("regions", drawing.region_networks(), 10)


def test_graph_breaks() -> None:
    search("breaks", drawing.broken_networks(), 8)


def test_transform_and_revert() -> None:
    search("transform", drawing.networks(), 8)
