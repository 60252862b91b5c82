"""What is known of a stream before it runs in pieces: its steps by line of code, its blocks and its sites."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from attnres_compile.passes import facts
from attnres_compile.passes.plan import BlockPlan


@dataclass(frozen=True)
class Stop:
    """A site of the stream.

    Attributes:
        name: by which its query is found.
        blocks: number of finished blocks that it reads.
        partial: whether it also reads the sum of the block in progress.
        readers: module paths of what reads it, relative to the module that owns the stream.
    """

    name: str
    blocks: int
    partial: bool
    readers: tuple[str, ...]

    @property
    def sources(self) -> int:
        """Number of sources, the root included."""
        return 1 + self.blocks + self.partial


@dataclass(frozen=True)
class Route:
    """One stream, as plain data that can be copied and pickled.

    Attributes:
        lines: ``file:line`` of each step's add, in depth order.
        starts: for each step whether it begins a block.
        stops: the sites that have a query, each with the number of steps behind it.
        axis: the dimension of the features: -1 for the last one, or counted from the front.
        dim: number of features.
        side: which operand of the first add is the root: 0, 1, or ``None`` where it is neither by itself.
    """

    lines: tuple[str, ...]
    starts: tuple[bool, ...]
    stops: tuple[tuple[int, Stop], ...]
    axis: int
    dim: int
    side: int | None

    @functools.cached_property
    def by_index(self) -> dict[int, Stop]:
        """The sites that have a query, by the number of steps behind them."""
        return dict(self.stops)

    def sources(self, index: int) -> int:
        """Number of sources of the state behind ``index`` steps."""
        return 1 + sum(self.starts[:index])


def route_of(plans: tuple[BlockPlan, ...]) -> Route | str:
    """The route of the one stream of ``plans``; or why it cannot be followed in pieces, as the end of a sentence."""
    if len(plans) != 1:
        return f"the module owns {len(plans)} streams, and one at a time is followed across breaks"
    (plan,) = plans
    stream = plan.stream
    state = facts.tensor(stream.steps[0].node)
    axes = set(stream.axes)
    if state is None or len(axes) != 1:
        return "the features of the stream change their place on its way"
    (axis,) = axes
    if axis == state.dim() - 1:
        axis = -1
    elif axis != 1 or not 3 <= state.dim() <= 5:
        return "the features of the stream are neither its last nor its second dimension"
    stops: dict[int, Stop] = {}
    for site in plan.sites:
        if site.num_sources == 1:
            continue
        if site.index in stops:
            return 'a state of the stream has several readers with queries of their own (queries="reader")'
        stops[site.index] = Stop(site.name, site.blocks, site.partial, site.label)
    lines = tuple(facts.source_line(step.node) for step in stream.steps)
    if not all(lines):
        return "an add of the stream stands in no file, so that it cannot be told again"
    starts = {block.start for block in plan.blocks}
    begins = tuple(index in starts for index in range(len(stream.steps)))
    first = stream.steps[0]
    side = next((place for place, value in enumerate(first.adds[0].args[:2]) if value is first.skip), None)
    return Route(lines, begins, tuple(stops.items()), axis, stream.feature_dim, side)
