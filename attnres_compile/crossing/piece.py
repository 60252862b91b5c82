"""What dynamo's graphs of a broken stream become: callables that take the stream's sources up and hand them on.

Knows dynamo: layers of one kind, of one model or of several, share its graphs, so that only a call tells which state
of which stream a graph gets. It has one variant for each number of sources that comes in.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from attnres_compile.backend import DECLARE, compile_graph, rewrite_declared
from attnres_compile.config import Lowering
from attnres_compile.crossing import following
from attnres_compile.crossing.journey import Journey, current
from attnres_compile.crossing.route import Route
from attnres_compile.crossing.splicing import Spliced, splice
from attnres_compile.dynamo_graphs import copy_graph_module
from attnres_compile.errors import PlainExecutionError
from attnres_compile.passes import facts
from attnres_compile.passes.checkpoint import close_regions, open_regions
from attnres_compile.passes.streams import ResidualStream
from attnres_compile.tally import ran

# What a graph's tensor facts belong to serves one thread at a time, and many threads may call what dynamo made once.
_BUILDING = threading.RLock()
# Where the stream begins in a graph: the number of the argument that it comes as, or its root inside.
_ROOT = -1


def crossing(module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """The backend of modules whose streams run through graph breaks.

    One for all: dynamo tells backends apart, and a class's code has only so many variants.
    """
    journey = current()
    module = copy_graph_module(module)
    if any(node.target is DECLARE for node in module.graph.nodes):
        rewrite_declared(module.graph)
    piece = Piece(module)
    if journey is not None:
        piece.prepare(journey, example_inputs)
    return piece


def compiled_in_pieces(function: Callable[..., Any], route: Route) -> Callable[..., Any]:
    """``function`` compiled by :func:`crossing`.

    Where dynamo gives up on a frame its part of the stream would be lost, so it may make a variant of its code for
    each layer; and in torch from 2.13 on other models of the same class take none of them away.
    """
    limit = torch._dynamo.config.recompile_limit * (1 + len(route.lines))
    known = inspect.signature(torch.compile).parameters
    wanted: dict[str, Any] = {"recompile_limit": limit, "isolate_recompiles": True}
    options = {name: value for name, value in wanted.items() if name in known}
    compiled: Callable[..., Any] = torch.compile(function, backend=crossing, **options)
    return compiled


@dataclass(frozen=True)
class _Stretch:
    """What a graph holds of a stream if it begins at one place: its steps by their lines, and what is read."""

    lines: tuple[str, ...]
    reads: tuple[int, ...]

    @classmethod
    def of(cls, stream: ResidualStream) -> _Stretch:
        """What ``stream``, whose root is the state that it begins with, comes to."""
        lines = tuple(facts.source_line(step.node) for step in stream.steps)
        return cls(lines, tuple(read.index for read in stream.reads if read.index))


@dataclass(frozen=True)
class _Variant:
    """A graph for one number of sources."""

    call: Callable[..., Any]
    spliced: Spliced


class Piece:
    """A graph that may hold steps of a broken stream."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.results = len(module.graph.output_node().args[0])  # type: ignore[arg-type]
        self._plain: dict[Lowering, Callable[..., Any]] = {}
        self._lines: dict[Route, tuple[str, ...]] = {}
        self._stretches: dict[tuple[Any, ...], _Stretch | None] = {}
        self._variants: dict[tuple[Any, ...], _Variant] = {}

    def prepare(self, journey: Journey, example_inputs: list[Any]) -> None:
        """Compile a graph that holds no step of the stream that passes now, while dynamo still takes guards."""
        lowering = journey.config.lowering
        if not self.lines(journey.route):
            self._plain[lowering] = compile_graph(copy_graph_module(self.module), example_inputs, lowering)

    def __call__(self, *args: Any) -> Any:
        journey = current()
        if journey is None:
            raise PlainExecutionError(
                "a piece of a residual stream ran outside of the call that it belongs to: activation checkpointing "
                "computes it again",
                remedy="Turn checkpointing off, or remove what breaks the graph (TORCH_LOGS=graph_breaks)",
            )
        lines = self.lines(journey.route)
        if not lines:
            return self._without(journey.config.lowering)(*args)
        journey.check_modes(lines[0])
        begin = self._begin(journey, args, lines[0])
        stretch = self._stretch(begin, journey)
        if stretch is None:
            raise journey.lost("the add here is no step of it, or writes into what came from outside", lines[0])
        journey.check_lines(stretch.lines)
        if any(journey.index + read not in journey.route.by_index for read in stretch.reads):
            raise journey.lost("a value of it is read here that nothing read when the model was transformed", lines[0])
        sources = journey.state.sources if journey.state is not None else ()
        variant = self._variant(begin, stretch, journey)
        spliced = variant.spliced
        indices = [journey.index + step for step in spliced.queried]
        results = list(variant.call(*args, *sources, *journey.queries_of(indices)))
        own, made = results[: self.results], results[self.results :]
        if spliced.leaves is None:
            journey.advance(len(stretch.lines), indices, (), None)
        else:
            own[spliced.leaves] = _normal(own[spliced.leaves])
            pool: dict[str, Sequence[Any]] = {"given": sources, "input": args, "made": made}
            known = {_memory(value) for value in (*args, *own) if isinstance(value, Tensor)}
            private = tuple(
                pool[kind][number] if kind == "given" else _private(pool[kind][number], known)
                for kind, number in spliced.sources
            )
            journey.advance(len(stretch.lines), indices, private, own[spliced.leaves])
        ran(len(indices))
        return tuple(own)

    # ---------------------------------------------------------------- where the stream is

    def lines(self, route: Route) -> tuple[str, ...]:
        """The lines of ``route``'s steps that adds of this graph stand on."""
        found = self._lines.get(route)
        if found is None:
            with _BUILDING:
                adds = following.candidates(self._opened().graph, route)
                found = self._lines[route] = tuple(facts.source_line(node) for node in adds)
        return found

    def _opened(self) -> fx.GraphModule:
        copied = copy_graph_module(self.module)
        open_regions(copied)
        return copied

    def _begin(self, journey: Journey, args: Sequence[Any], where: str) -> int:
        found = journey.find(args, where)
        if found is not None:
            return found
        if journey.index:
            raise journey.lost("what arrives here is another tensor than what left the graph before", where)
        journey.check_lines((where,))
        return _ROOT

    def _stretch(self, begin: int, journey: Journey) -> _Stretch | None:
        key = (begin, journey.route, journey.config.layout())
        if key not in self._stretches:
            with _BUILDING:
                stream = self._follow(self._opened(), begin, journey)
                self._stretches[key] = None if stream is None else _Stretch.of(stream)
        return self._stretches[key]

    def _follow(self, module: fx.GraphModule, begin: int, journey: Journey) -> ResidualStream | None:
        graph, route = module.graph, journey.route
        adds = following.candidates(graph, route)
        if begin == _ROOT:
            starts = [root for add in adds if (root := following.root(add, route)) is not None]
        else:
            starts = [[node for node in graph.nodes if node.op == "placeholder"][begin]]
        for last in reversed(adds):
            for start in dict.fromkeys(starts):
                if start.op == "placeholder" and following.written(graph, start) is not None:
                    continue
                stream = following.follow(graph, start, last, route, journey.config)
                if stream is not None:
                    return stream
        return None

    # ---------------------------------------------------------------- variants

    def _without(self, lowering: Lowering) -> Callable[..., Any]:
        if lowering not in self._plain:
            with _BUILDING:
                self._plain[lowering] = _compiled(copy_graph_module(self.module), lowering)
        return self._plain[lowering]

    def _variant(self, begin: int, stretch: _Stretch, journey: Journey) -> _Variant:
        route, index = journey.route, journey.index
        key = (
            begin,
            route.axis,
            journey.config,
            stretch,
            route.sources(index),
            route.starts[index : index + len(stretch.lines)],
        )
        if key not in self._variants:
            with _BUILDING:
                if key not in self._variants:
                    self._variants[key] = self._make(begin, journey)
        return self._variants[key]

    def _make(self, begin: int, journey: Journey) -> _Variant:
        module = copy_graph_module(self.module)
        regions = open_regions(module)
        stream = self._follow(module, begin, journey)
        assert stream is not None
        spliced = splice(module, stream, journey.index, journey.route, journey.config)
        close_regions(module, regions)
        return _Variant(_compiled(module, journey.config.lowering), spliced)


def _compiled(module: fx.GraphModule, lowering: Lowering) -> Callable[..., Any]:
    if lowering == "eager":
        return compile_graph(module, (), lowering)
    module.recompile()
    # Not by Inductor at once: the guards of the graph that dynamo made are fixed, and this one may need its own.
    return torch.compile(module, backend=_inductor)


def _inductor(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return compile_graph(copy_graph_module(module), inputs, "inductor")


# ------------------------------------------------------------------ tensors


def _normal(value: Tensor) -> Tensor:
    """``value`` as a tensor that counts how often it is written into."""
    if not value.is_inference():
        return value
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty_like(value).copy_(value)


def _memory(value: Tensor) -> int:
    return value.untyped_storage()._cdata if value.layout == torch.strided else id(value)


def _private(source: Tensor, known: set[int]) -> Tensor:
    """``source`` in memory that nobody else can write into."""
    return source.clone() if _memory(source) in known else source
