"""Block layouts, and what each site sees, against the table in docs/method.md."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.passes.detect import detect
from attnres_compile.passes.plan import BlockPlan, block_ranges, plan, reader_path
from tests.passes.support import WIDTH, Stream, study


@pytest.mark.parametrize(
    ("sublayers", "options", "sizes"),
    [
        (8, {"num_blocks": 4}, [2, 2, 2, 2]),
        (9, {"num_blocks": 4}, [2, 2, 2, 3]),
        (11, {"num_blocks": 4}, [2, 2, 2, 5]),
        (8, {"num_blocks": 1}, [8]),
        (3, {"num_blocks": 8}, [1, 1, 1]),
        (5, {"num_blocks": None}, [1, 1, 1, 1, 1]),
        (8, {"block_size": 4}, [4, 4]),
        (9, {"block_size": 4}, [4, 5]),
        (3, {"block_size": 4}, [3]),
        (3, {"block_size": 1}, [1, 1, 1]),
        (24, {}, [3] * 8),
    ],
)
def test_block_sizes(sublayers: int, options: dict[str, int], sizes: list[int]) -> None:
    blocks = block_ranges(sublayers, ac.AttnResConfig(**options))
    assert [len(block) for block in blocks] == sizes


@settings(derandomize=True, database=None, deadline=None)
@given(
    st.integers(1, 200),
    st.one_of(
        st.builds(lambda n: {"num_blocks": n}, st.one_of(st.none(), st.integers(1, 300))),
        st.builds(lambda n: {"block_size": n}, st.integers(1, 300)),
    ),
)
def test_blocks_partition_the_sublayers(sublayers: int, options: dict[str, int]) -> None:
    blocks = block_ranges(sublayers, ac.AttnResConfig(**options))
    assert [i for block in blocks for i in block] == list(range(sublayers))
    assert all(len(block) > 0 for block in blocks)
    # Equal sizes but for the remainder, which the last one takes.
    assert len({len(block) for block in blocks[:-1]}) <= 1
    assert len(blocks[-1]) >= len(blocks[0])
    if options.get("num_blocks"):
        assert len(blocks) == min(options["num_blocks"], sublayers)


def planned(count: int = 6, **options: object) -> BlockPlan:
    config = ac.AttnResConfig(**options)
    model = Stream(lambda net, i, x: x + net.f(i, x), count=count)
    graph = study(model, config=config).captured.module.graph
    (only,) = plan(detect(graph, config).streams, config)
    return only


def test_sources_of_the_block_form() -> None:
    """i = 1: b_0 .. b_{n-1}; i >= 2: those and the first i - 1 terms of b_n; at the end all of b_0 .. b_N."""
    sites = planned(num_blocks=2).sites
    assert [site.sources for site in sites] == [
        ("root",),
        ("root", "partial 1"),
        ("root", "partial 1"),
        ("root", "block 1"),
        ("root", "block 1", "partial 2"),
        ("root", "block 1", "partial 2"),
        ("root", "block 1", "block 2"),
    ]
    assert [site.index for site in sites] == list(range(7))


def test_sources_of_the_full_form() -> None:
    sites = planned(count=4, num_blocks=None).sites
    assert [site.num_sources for site in sites] == [1, 2, 3, 4, 5]
    assert not any(site.partial for site in sites)


def test_a_remainder_joins_the_last_block() -> None:
    sites = planned(count=5, num_blocks=2).sites
    assert [site.sources[-1] for site in sites] == ["root", "partial 1", "block 1", "partial 2", "partial 2", "block 2"]


def test_only_sites_with_more_than_one_source_have_queries() -> None:
    made = planned(num_blocks=3)
    assert made.queries == tuple(site.name for site in made.sites[1:])


def test_names_are_paths_and_unique() -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        return x + net.f(0 if i < 2 else i, x)

    config = ac.AttnResConfig()
    graph = study(Stream(step, count=5)).captured.module.graph
    (only,) = plan(detect(graph, config).streams, config)
    names = [site.name for site in only.sites]
    # The norm that reads two states names two sites.
    assert names == ["norms.0", "norms.0:2", "norms.2", "norms.3", "norms.4", "norm"]


def test_names_are_relative_to_the_owner() -> None:
    config = ac.AttnResConfig()
    graph = study(Stream(lambda net, i, x: x + net.f(i, x))).captured.module.graph
    streams = detect(graph, config).streams
    (only,) = plan(streams, config, prefix="norms")
    assert [site.name for site in only.sites] == ["0", "1", "2", "3", "output"]
    assert reader_path(graph.output_node()) == "output"


def test_queries_per_reader() -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        return x + net.f(i, x) + net.parts[i](x)

    config = ac.AttnResConfig(queries="reader", num_blocks=2)
    graph = study(Stream(step, parts=lambda i: nn.Linear(WIDTH, WIDTH))).captured.module.graph
    (only,) = plan(detect(graph, config).streams, config)
    by_index = {i: [site.name for site in only.sites if site.index == i] for i in range(5)}
    assert by_index[1] == ["norms.1", "parts.1"] and by_index[4] == ["norm"]
    assert all(len(site.label) == 1 for site in only.sites)


def test_plans_of_two_graphs_agree() -> None:
    """Nothing about a plan depends on what was planned before."""
    first, second = planned(num_blocks=3), planned(num_blocks=3)
    assert [site.name for site in first.sites] == [site.name for site in second.sites]
    assert first.blocks == second.blocks
