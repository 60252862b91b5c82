"""A piece of a stream in a graph of its own: found between a past and a future that the graph does not hold.

Ordinary detection judges whole streams. To have it judge a piece, the piece is put between residual steps that are
made up: what comes in is then a state, whose next step needs no learned branch to be one, and what goes out is read
by more steps. Afterwards they are taken away again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from attnres_compile.config import AttnResConfig
from attnres_compile.crossing.route import Route
from attnres_compile.passes import facts
from attnres_compile.passes.detect import detect
from attnres_compile.passes.memory import Memory
from attnres_compile.passes.spellings import summands
from attnres_compile.passes.streams import Read, ResidualStream, Step


def candidates(graph: fx.Graph, route: Route) -> list[fx.Node]:
    """The adds of ``graph`` that stand on the lines of the route's steps, in graph order."""
    lines = set(route.lines)
    return [node for node in graph.nodes if summands(node) is not None and facts.source_line(node) in lines]


def root(add: fx.Node, route: Route) -> fx.Node | None:
    """Which operand of the stream's first add is its root, or ``None`` where that cannot be told."""
    total, value = summands(add), facts.tensor(add)
    if total is None or value is None:
        return None
    found: list[fx.Node] = []
    for term in total.terms:
        other = facts.tensor(term.node)
        if term.product is None and other is not None and facts.same_shape(other.shape, value.shape):
            found.append(term.node)
    if len(found) < 2:
        return found[0] if found else None
    left, right = found
    if _reaches(left, right):
        return left
    if _reaches(right, left):
        return right
    # The branch was computed elsewhere: the operands stand in the order in which they stood in the recording.
    return None if route.side is None else found[route.side]


def _reaches(start: fx.Node, end: fx.Node) -> bool:
    """Whether ``end`` is computed from ``start``."""
    seen: set[fx.Node] = set()
    todo = [end]
    while todo:
        node = todo.pop()
        if node is start:
            return True
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return False


def written(graph: fx.Graph, value: fx.Node) -> fx.Node | None:
    """What writes into the memory of ``value``, if anything does."""
    return Memory(graph).write_after(value, -1, set())


def follow(
    graph: fx.Graph, start: fx.Node, last: fx.Node, route: Route, config: AttnResConfig
) -> ResidualStream | None:
    """The steps from the state ``start`` up to the add ``last``; the graph is left as it was.

    Returns:
        A stream with ``start`` as its root, or ``None`` where ``last`` is no state of the stream of ``start``.
    """
    scaffold = _Scaffold(graph, start, last, route, config)
    try:
        detection = detect(graph, replace(config, depth_loops=True))
        for stream in detection.streams:
            nodes = [step.node for step in stream.steps]
            if scaffold.state in nodes and last in nodes:
                return scaffold.between(stream, nodes.index(scaffold.state), nodes.index(last))
        return None
    finally:
        scaffold.remove()


class _Scaffold:
    """Residual steps before ``start`` and behind ``last``."""

    def __init__(self, graph: fx.Graph, start: fx.Node, last: fx.Node, route: Route, config: AttnResConfig) -> None:
        self.graph = graph
        self.start = start
        self.route = route
        self.config = config
        self.made: list[fx.Node] = []
        self.inputs: list[fx.Node] = []
        self.key = "example_value" if "example_value" in start.meta else "val"
        value = facts.tensor(start)
        assert value is not None
        self.like = value
        users = list(start.users)
        root = self._input(torch.empty_like(value), False)
        length = max(config.min_sublayers, 3)
        before = next(n for n in graph.nodes if n.op != "placeholder") if start.op == "placeholder" else start.next
        with graph.inserting_before(before):
            self.state = self._steps(root, length)
            # A state that only the next add reads would be no state.
            self._branch(self.state)
        for user in users:
            user.replace_input_with(start, self.state)
        with graph.inserting_before(last.next):
            self._steps(last, length)

    def _input(self, value: Tensor, parameter: bool) -> fx.Node:
        places = [node for node in self.graph.nodes if node.op == "placeholder"]
        with self.graph.inserting_after(places[-1]):
            node = self.graph.placeholder(f"attnres_scaffold_{len(self.inputs)}")
        node.meta.update({self.key: value, "attnres_parameter": parameter})
        self.inputs.append(node)
        return node

    def _steps(self, state: fx.Node, count: int) -> fx.Node:
        for _ in range(count):
            state = self._emit(torch.add, (state, self._branch(state)))
        return state

    def _branch(self, state: fx.Node) -> fx.Node:
        """A learned branch on ``state`` whose features stand where the stream's do."""
        dim, rank = self.route.dim, self.like.dim()
        if self.route.axis == -1:
            weight = self._input(self.like.new_empty((dim, dim)), True)
            return self._emit(torch.nn.functional.linear, (state, weight))
        weight = self._input(self.like.new_empty((dim, dim, *[1] * (rank - 2))), True)
        convolution: Any = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}[rank]
        return self._emit(convolution, (state, weight))

    def _emit(self, target: Any, arguments: tuple[Any, ...]) -> fx.Node:
        node = self.graph.call_function(target, arguments)
        node.meta[self.key] = torch.empty_like(self.like)
        self.made.append(node)
        return node

    def between(self, stream: ResidualStream, before: int, last: int) -> ResidualStream | None:
        """The part of ``stream`` behind the step ``before`` and up to the step ``last``, with ``start`` as root."""
        made = set(self.made)
        steps = list(stream.steps[before + 1 : last + 1])
        if not steps:
            return None
        first = steps[0]
        factors = [n for term in first.terms for n in (term.node, *(term.product[1:] if term.product else ()))]
        if self.state in factors:
            return None
        steps[0] = replace(first, skip=self.start if first.skip is self.state else first.skip)
        reads = []
        for read in stream.reads:
            readers = tuple(reader for reader in read.readers if reader not in made)
            if before + 1 <= read.index <= last + 1 and readers:
                reads.append(Read(read.index - before - 1, readers))
        axes = stream.axes[before + 1 : last + 2]
        return ResidualStream(self.start, tuple(steps), tuple(reads), axes, stream.feature_dim)

    def remove(self) -> None:
        """Take the made-up steps away."""
        made = set(self.made)
        for user in list(self.state.users):
            if user not in made:
                user.replace_input_with(self.state, self.start)
        for node in reversed([n for n in self.graph.nodes if n in made]):
            self.graph.erase_node(node)
        for node in self.inputs:
            self.graph.erase_node(node)


def carried(graph: fx.Graph, step: Step, start: fx.Node, replacement: fx.Node) -> Step:
    """``step`` with ``replacement`` for the state ``start`` that it adds to; all other readers of that keep it."""
    twins: list[fx.Node] = []
    old, new = start, replacement
    for node in step.passes:
        with graph.inserting_after(node):
            before = old
            twin = graph.node_copy(node, lambda n, before=before, new=new: new if n is before else n)  # type: ignore[misc]
        twin.meta = dict(node.meta)
        twins.append(twin)
        old, new = node, twin
    for add in step.adds:
        add.replace_input_with(old, new)
    for node in reversed(step.passes):
        if not node.users:
            graph.erase_node(node)
    return replace(step, skip=new, passes=tuple(twins))
