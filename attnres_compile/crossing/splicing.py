"""A graph that holds a piece of a stream, rewritten to take the stream's sources in and to hand them on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attnres_compile.config import AttnResConfig
from attnres_compile.crossing.following import carried
from attnres_compile.crossing.route import Route
from attnres_compile.passes import sites as marks
from attnres_compile.passes.plan import BlockPlan, SitePlan
from attnres_compile.passes.rewrite import QueryNodes, rewrite
from attnres_compile.passes.streams import Read, ResidualStream, Step, Term

STREAM = "stream0"


@dataclass(frozen=True)
class Spliced:
    """What a rewritten graph takes and returns beside what it did.

    Attributes:
        queried: the states whose queries it takes behind the sources, as numbers of steps from its first state on;
            each is followed by its key norm's weight where the configuration has them.
        leaves: which of its results is the stream as it leaves; ``None`` where it ends inside.
        sources: the sources of that state in depth order: ``("given", n)`` is the n-th source that came in,
            ``("input", n)`` the n-th argument of the graph and ``("made", n)`` the n-th of the results behind its own.
    """

    queried: tuple[int, ...]
    leaves: int | None
    sources: tuple[tuple[str, int], ...]


def splice(module: fx.GraphModule, stream: ResidualStream, index: int, route: Route, config: AttnResConfig) -> Spliced:
    """Rewrite the piece ``stream`` of ``module`` in place.

    Args:
        module: the graph.
        stream: the piece; its root is the state behind ``index`` steps of the whole stream.
        index: number of steps behind the root; 0 for the stream's own root.
        route: the whole stream.
        config: of the conversion.

    Raises:
        KeyError: a state is read that the route has no query for.
    """
    graph = module.graph
    own = [node for node in graph.nodes if node.op == "placeholder"]
    places = _Places(graph, stream)
    given = [places.input(f"attnres_source_{number}") for number in range(route.sources(index))] if index else []
    steps, blocks = _past(graph, stream, given)
    behind = len(steps)
    for number, step in enumerate(stream.steps):
        if number == 0 and given:
            state = steps[-1].node if steps else given[0]
            step = carried(graph, step, stream.root, state)
        steps.append(step)
        if route.starts[index + number] or not blocks:
            blocks.append([])
        blocks[-1].append(behind + number)
    found, reads, queried = _sites(stream, behind, index, route)
    whole = ResidualStream(
        given[0] if given else stream.root,
        tuple(steps),
        tuple(reads),
        (stream.axes[0],) * behind + stream.axes,
        stream.feature_dim,
    )
    plan = BlockPlan(STREAM, whole, tuple(range(b[0], b[-1] + 1) for b in blocks), tuple(found))
    nodes: dict[str, QueryNodes] = {}
    for site in found:
        query = places.input(f"attnres_query_{site.index - behind}")
        norm = places.input(f"attnres_key_norm_{site.index - behind}") if config.key_norm_weight else None
        nodes[site.name] = QueryNodes(query, norm)
    rewrite(graph, (plan,), nodes, config)
    last = behind + len(stream.steps)
    leaving = _mixes(graph, [site.name for site in found if site.index == last])
    spliced = _hand_on(graph, leaving[0] if leaving else None, given, own, queried)
    graph.lint()
    return spliced


class _Places:
    """New inputs behind those that the graph has."""

    def __init__(self, graph: fx.Graph, stream: ResidualStream) -> None:
        self.graph = graph
        self.like = stream.root
        self.dim = stream.feature_dim
        self.last: fx.Node = [node for node in graph.nodes if node.op == "placeholder"][-1]

    def input(self, name: str) -> fx.Node:
        with self.graph.inserting_after(self.last):
            self.last = self.graph.placeholder(name)
        key = marks.key(self.like)
        value = self.like.meta[key]
        self.last.meta[key] = torch.empty_like(value) if "source" in name else value.new_empty((self.dim,))
        return self.last


def _past(graph: fx.Graph, stream: ResidualStream, given: list[fx.Node]) -> tuple[list[Step], list[list[int]]]:
    """The steps that the sources stand for: each adds one of them."""
    steps: list[Step] = []
    if not given:
        return steps, []
    state, key = given[0], marks.key(stream.root)
    before = next(node for node in graph.nodes if node.op != "placeholder")
    for source in given[1:]:
        with graph.inserting_before(before):
            node = graph.call_function(torch.add, (state, source))
        node.meta[key] = torch.empty_like(stream.root.meta[key])
        steps.append(Step(node, state, (), (Term(source),), (node,)))
        state = node
    return steps, [[number] for number in range(len(steps))]


def _sites(
    stream: ResidualStream, behind: int, index: int, route: Route
) -> tuple[list[SitePlan], list[Read], tuple[int, ...]]:
    """The sites of the states behind the root that are read here."""
    found: list[SitePlan] = []
    reads: list[Read] = []
    queried: list[int] = []
    for read in stream.reads:
        if read.index == 0:
            continue
        stop = route.by_index[index + read.index]
        place = behind + read.index
        reads.append(Read(place, read.readers))
        queried.append(read.index)
        found.append(SitePlan(stop.name, place, read.readers, stop.blocks, stop.partial, stop.readers))
    return found, reads, tuple(queried)


def _mixes(graph: fx.Graph, names: list[str]) -> list[fx.Node]:
    return [
        node
        for node in graph.nodes
        if node.target is torch.ops.attnres.mix.default
        and marks.mark(node).stream == STREAM
        and marks.mark(node).name in names
    ]


def _hand_on(
    graph: fx.Graph, leaving: fx.Node | None, given: list[fx.Node], own: list[fx.Node], queried: tuple[int, ...]
) -> Spliced:
    """Return the sources of the state that leaves, behind the graph's own results."""
    output = graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    if leaving is None or leaving not in results:
        return Spliced(queried, None, ())
    place = results.index(leaving)
    extra: list[fx.Node] = []
    sources: list[tuple[str, int]] = []
    for source in marks.arguments(leaving)["sources"]:
        if source in given:
            sources.append(("given", given.index(source)))
        elif source in own:
            sources.append(("input", own.index(source)))
        else:
            sources.append(("made", len(extra)))
            extra.append(source)
    output.args = ((*results, *extra),)
    return Spliced(queried, place, tuple(sources))
