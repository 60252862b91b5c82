"""Where the sublayers of a report are in a recorded run, and by which calls each state becomes the next."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from attnres_compile.oracle import features
from attnres_compile.oracle.recording import ADDS, OVER_A_STACK, Dims, Event, Link, Value
from attnres_compile.report import Stream, Sublayer

# What it costs to say that a sublayer ends where nothing is added: behind a sum over a stack, say.
_NO_ADD = 0.5
# And where nothing reads the sum.
_NOT_READ = 0.25
# No distance between what an add adds to and what it is computed from.
_PUTS_TOGETHER = ADDS - {"addmm", "baddbmm", "lerp"} | {"stack", "cat", "concat", OVER_A_STACK}


class NotFound(Exception):
    """A stream of the report is not there, or is not what the report says."""


class Disagreement(Exception):
    """The report says something of a stream that is not so."""


@dataclass(frozen=True)
class Hop:
    """One call on the way of a stream.

    Attributes:
        event: the call.
        slot: the argument that is the stream.
        out: the result that is the stream afterwards.
        nth: how many calls with its key read that value there before; of the first one, how many there were at all.
        adds: whether it adds something.
        ends: number of the sublayer that it ends, from 1; 0 where it ends none.
    """

    event: Event
    slot: int
    out: int
    nth: int
    adds: bool
    ends: int


@dataclass(frozen=True)
class Way:
    """One stream of the report in the run.

    Attributes:
        stream: what the report says.
        hops: the calls that it goes through, the first one the first add.
        axes: the dimension of the features of each state, by the number of sublayers before it.
        unknown: why that is not known, or ``""``.
        sure: whether the sums are where the report has them, with as many adds; of several sums on one line, others
            may be meant.
    """

    stream: Stream
    hops: tuple[Hop, ...]
    axes: tuple[int | None, ...]
    unknown: str
    sure: bool


def locate(stream: Stream, sums: Sequence[Value], model: nn.Module, taken: set[Value]) -> Way:
    """Find the sublayers of one stream.

    Args:
        stream: of the report.
        sums: the sums of the run, in order.
        model: that ran.
        taken: sums that other streams have; those of this stream are added.

    Raises:
        NotFound: with what is missing.
        Disagreement: the sublayers are there, and are no stream.
    """
    paths = _paths(model)
    candidates = [_candidates(sublayer, sums, paths, taken) for sublayer in stream.sublayers]
    for number, (found, sublayer) in enumerate(zip(candidates, stream.sublayers, strict=True), 1):
        if not found:
            raise NotFound(f"no sum is made at {sublayer.where or 'an unknown line'}, where sublayer {number} adds")
    chain, cost = _chain(stream, candidates)
    ends = [value for value, _ in chain]
    taken.update(ends)
    hops = _first_hops(ends[0], max(len(stream.sublayers[0].adds), 1))
    for number, (_, links) in enumerate(chain[1:], 2):
        hops += [_hop(link, number if link is links[-1] else 0) for link in links]
    axes, unknown = _axes(chain)
    if unknown is None:
        raise NotFound(f"nothing that the oracle understands tells the features of stream {stream.name}")
    # The last state may be what the model returns.
    sure = cost - _NOT_READ * (not ends[-1].is_read) < _NOT_READ
    return Way(stream, tuple(hops), axes, unknown, sure)


def _paths(model: nn.Module) -> dict[str, str]:
    """Every path of every module -> the one that events are marked with."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found[path] = first.setdefault(id(module), path)
    return found


def _candidates(sublayer: Sublayer, sums: Sequence[Value], paths: dict[str, str], taken: set[Value]) -> list[Value]:
    free = [value for value in sums if value not in taken and value.event is not None and _alike(value, sublayer)]
    here = [value for value in free if sublayer.where in value.places]
    path = paths.get(sublayer.module, sublayer.module)
    inside = [value for value in here if value.event is not None and value.event.key[0] == path]
    return inside or [value for value in here if value.places[0] == sublayer.where] or here


def _alike(value: Value, sublayer: Sublayer) -> bool:
    if not sublayer.shape:
        return True
    pairs = zip(value.shape, sublayer.shape, strict=False)
    return len(value.shape) == len(sublayer.shape) and all(a == b or isinstance(b, str) for a, b in pairs)


def _hop(link: Link, ends: int) -> Hop:
    return Hop(link.event, link.slot, link.out, link.nth, link.adds, ends)


# --- from one sublayer to the next


def _chain(stream: Stream, candidates: Sequence[Sequence[Value]]) -> tuple[list[tuple[Value, list[Link]]], float]:
    """One sum per sublayer, and the links from the one before: those that agree best with the numbers of adds. And how
    far they are from agreeing.
    """
    first = stream.sublayers[0]
    costs: dict[Value, float] = {value: _first_cost(value, max(len(first.adds), 1)) for value in candidates[0]}
    ways: list[dict[Value, tuple[Value, list[Link]]]] = []
    for number, sublayer in enumerate(stream.sublayers[1:], 2):
        adds = max(len(sublayer.adds), 1)
        found: dict[Value, tuple[float, Value, list[Link]]] = {}
        for value in candidates[number - 1]:
            for before, links in _back(value, costs, adds + 2):
                count = sum(link.counted for link in links)
                if not count:
                    continue
                made = _added(value, before)
                cost = costs[before] + abs(made - adds) + _NO_ADD * (not links[-1].adds) + 1e-3 * len(links)
                cost += _NOT_READ * (not value.is_read)
                if value not in found or cost < found[value][0]:
                    found[value] = cost, before, links
        if not found:
            where = sublayer.where or "an unknown line"
            operands = [v for value in candidates[number - 1] if value.event for _, v in value.event.operands]
            if any(origin in costs for operand in operands for origin in operand.origins):
                raise Disagreement(
                    f"what sublayer {number} of stream {stream.name} adds to, at {where}, is no state that sublayer "
                    f"{number - 1} made: an operator that is not linear changes it"
                )
            raise NotFound(
                f"nothing that hands the state on leads from sublayer {number - 1} to the add of sublayer {number} "
                f"at {where}"
            )
        costs = {value: cost for value, (cost, _, _) in found.items()}
        ways.append({value: (before, links) for value, (_, before, links) in found.items()})
    last = min(costs, key=lambda value: (costs[value], value.number))
    least = costs[last]
    chain: list[tuple[Value, list[Link]]] = []
    for way in reversed(ways):
        before, links = way[last]
        chain.append((last, links))
        last = before
    return [(last, []), *reversed(chain)], least


def _first_cost(value: Value, adds: int) -> float:
    """How far a sum is from being the first one, of so many adds."""
    operands = value.event.operands if value.event is not None else ()
    floats = [operand for _, operand in operands if operand.dtype.is_floating_point]
    is_add = value.event is not None and value.event.key[2] in ADDS and len(floats) > 1
    return abs(_added(value, None) - adds) + _NO_ADD * (not is_add) + _NOT_READ * (not value.is_read)


def _added(value: Value, before: Value | None) -> int:
    """How many adds, in the counting of the report, make ``value`` of the state ``before`` and branches.

    Sums of branches count, older states do not. Of the first sublayer of a stream no state is known: a sum that
    something reads is one.
    """
    found: set[Value] = set()
    waiting = [value]
    while waiting:
        at = waiting.pop()
        if at in found:
            continue
        found.add(at)
        for link in at.links:
            older = link.origin.is_read if before is None else link.origin.number <= before.number
            if not older:
                waiting.append(link.origin)
    return sum(map(_nodes, found))


def _nodes(value: Value) -> int:
    """How many adds the report counts where a sum was made, which may also have been handed on there."""
    if value.event is None:
        return 0
    name = value.event.key[2]
    if name == OVER_A_STACK:
        return 2
    # The sum of a list begins with 0.
    floats = sum(operand.dtype.is_floating_point for _, operand in value.event.operands)
    return int((name in ADDS and floats > 1) or any(link.adds for link in value.links))


def _back(value: Value, wanted: dict[Value, float], most: int) -> list[tuple[Value, list[Link]]]:
    """The wanted sums that ``value`` carries, each with the links from it, at most so many of which add something."""
    found: dict[tuple[Value, int], list[Link]] = {}
    waiting: deque[tuple[Value, int, list[Link]]] = deque([(value, 0, [])])
    seen: set[tuple[Value, int]] = set()
    while waiting:
        at, adds, links = waiting.popleft()
        for link in at.links:
            count = adds + link.counted
            state = (link.before, count)
            if count > most or state in seen:
                continue
            seen.add(state)
            way = [link, *links]
            if link.before in wanted:
                found.setdefault(state, way)
            waiting.append((link.before, count, way))
    return [(before, way) for (before, _), way in found.items()]


# --- where a stream starts


def _first_hops(end: Value, adds: int) -> list[Hop]:
    """The calls of the first sublayer: the root is what the rest of its first add is computed from."""
    links = _leading(end, adds)
    first = links[0].before if links else end
    event = first.event
    assert event is not None
    slot = _skip_slot(event, first)
    hops = [Hop(event, slot, first.out, event.nth, True, 0 if links else 1)]
    hops += [_hop(link, 1 if link is links[-1] else 0) for link in links]
    # A sum over a stack: the stream enters the stack.
    while len(floats := [value for _, value in hops[0].event.operands if value.dtype.is_floating_point]) == 1:
        inner = floats[0].event
        if inner is None or not inner.operands:
            raise NotFound("the first add of the stream has one operand, which comes from nowhere")
        head = Hop(inner, _skip_slot(inner, floats[0]), floats[0].out, inner.nth, True, 0)
        slot = next(slot for slot, value in hops[0].event.operands if value is floats[0])
        hops = [head, Hop(hops[0].event, slot, hops[0].out, 0, False, hops[0].ends), *hops[1:]]
    return hops


def _leading(end: Value, adds: int) -> list[Link]:
    """The links of the first sublayer behind its first add, where it has several adds and nothing reads their sums."""
    links: list[Link] = []
    at = end
    while 1 + sum(link.counted for link in links) < adds and at.event is not None:
        way: list[Link] = []
        inner: Value | None = at
        while inner is not None and inner.event is not None and (not way or not inner.places):
            slot = _skip_slot(inner.event, inner)
            link = next((each for each in inner.links if each.slot == slot), None)
            if link is not None:
                way = [link, *way]
            inner = link.before if link is not None else None
        if inner is None or not inner.places or inner.is_read:
            break
        links = [*way, *links]
        at = inner
    return links


def _skip_slot(event: Event, made: Value) -> int:
    """The argument that the others are computed from, or that is nearer to what both are computed from."""
    floats = [(slot, value) for slot, value in event.operands if value.dtype.is_floating_point and value.is_data]
    if not floats:
        raise NotFound("the first add of the stream adds no data")
    if len(floats) == 1:
        return floats[0][0]
    behind = {slot: _distances(value) for slot, value in floats}

    def nearness(slot: int) -> tuple[float, int]:
        others = [found for other, found in behind.items() if other != slot]
        shared = [distance for value, distance in behind[slot].items() if any(value in other for other in others)]
        return (min(shared, default=math.inf), slot)

    alike = [slot for slot, value in floats if value.shape == made.shape] or [slot for slot, _ in floats]
    return min(alike, key=nearness)


def _distances(value: Value, most: int = 20000) -> dict[Value, float]:
    """How far behind ``value`` is what it is computed from. What only puts tensors together is no distance."""
    found = {value: 0.0}
    waiting = [(0.0, value.number, value)]
    while waiting and len(found) < most:
        distance, _, at = heapq.heappop(waiting)
        if distance > found[at]:
            continue
        name = at.event.key[2] if at.event is not None else ""
        further = distance + (0.0 if name in _PUTS_TOGETHER else 1.0)
        for before in at.inputs:
            if before.is_data and further < found.get(before, math.inf):
                found[before] = further
                heapq.heappush(waiting, (further, before.number, before))
    return found


# --- the dimension of the features


def _axes(chain: Sequence[tuple[Value, list[Link]]]) -> tuple[tuple[int | None, ...], str | None]:
    """Per state the dimension of its features; the readers of all states are heard together. And why it is not known:
    ``None`` is no reason, where readers do not contradict one another.
    """
    ends = [value for value, _ in chain]
    frames: list[dict[int, int]] = [{dim: dim for dim in range(len(ends[0].shape))}]
    for (before, _), (after, links) in itertools.pairwise(chain):
        frames.append(_frame(before, after, links, frames[-1]))
    votes = [
        (kind, frame[dim])
        for value, frame in zip(ends, frames, strict=True)
        for kind, dim in value.votes
        if dim in frame
    ]
    axis, unknown, contradicts = features.decided(votes)
    if axis is None and not contradicts:
        return (), None
    back = [{first: dim for dim, first in frame.items()} for frame in frames]
    return (None, *(each.get(axis) if axis is not None else None for each in back)), unknown


def _frame(before: Value, after: Value, links: Sequence[Link], frame: dict[int, int]) -> dict[int, int]:
    """Which dimension of the first state each dimension of ``after`` is, where it is one and whole."""
    dims = _dims_between(before, after, links)
    if dims is None:
        return {}
    found: dict[int, int] = {}
    for dim, which in enumerate(dims):
        if len(which) == 1 and (at := next(iter(which))) in frame and after.shape[dim] == before.shape[at]:
            found[dim] = frame[at]
    return {dim: first for dim, first in found.items() if list(found.values()).count(first) == 1}


def _dims_between(before: Value, after: Value, links: Sequence[Link]) -> Dims | None:
    """For each dimension of ``after``, to which ``links`` lead, the dimensions of ``before`` that change along it;
    ``None`` where that is not known.
    """
    passed = {link.before for link in links}
    for link in after.links:
        if link.before not in passed or link.origin.number < before.number:
            continue
        if link.origin is before:
            return link.dims
        inner = _dims_between(before, link.origin, links)
        if inner is not None:
            return tuple(frozenset(d for dim in which for d in inner[dim]) for which in link.dims)
    return None
