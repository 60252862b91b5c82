"""Streams that one piece of code makes several times in a graph, from the same weights: calls of one network.

Energy and forces, a siamese encoder, the steps of a decoding loop: the network is one, and so are its queries.
"""

from __future__ import annotations

from torch import fx

from attnres_compile.passes import facts
from attnres_compile.passes.streams import ResidualStream


def first_calls(streams: tuple[ResidualStream, ...]) -> list[int]:
    """For each stream the number of the first one that the same lines made from the same weights: itself, as a rule."""
    lines = [_lines(stream) for stream in streams]
    first: list[int] = []
    for number, made_by in enumerate(lines):
        same = next(
            (
                earlier
                for earlier in range(number)
                if first[earlier] == earlier
                and made_by is not None
                and lines[earlier] == made_by
                and streams[earlier].feature_dim == streams[number].feature_dim
                and _weights(streams[earlier]) == _weights(streams[number])
            ),
            number,
        )
        first.append(same)
    return first


def _lines(stream: ResidualStream) -> tuple[tuple[str, str], ...] | None:
    """The code that makes the steps, by module and line; ``None`` where the graph does not tell."""
    found = tuple((facts.module_path(step.node), facts.source_line(step.node)) for step in stream.steps)
    return found if all(line for _, line in found) else None


def _weights(stream: ResidualStream) -> list[frozenset[fx.Node]]:
    """The parameters that each step's branch reads, by the nodes that bring them."""
    states = {stream.state(index) for index in range(len(stream.steps) + 1)}
    return [_read(step.node, states) for step in stream.steps]


def _read(step: fx.Node, states: set[fx.Node]) -> frozenset[fx.Node]:
    found: set[fx.Node] = set()
    seen, waiting = set(states), list(step.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if facts.is_parameter_input(node):
            found.add(node)
        waiting += node.all_input_nodes
    return frozenset(found)


__all__ = ["first_calls"]
