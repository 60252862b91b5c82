"""From a recorded forward to its states: the values that are read, and which of them carry which."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.zoo.survey.derivatives import Edge, scale
from tests.zoo.survey.hooked import Call, Recording, has_matrix


def bits(indices: Iterable[int]) -> int:
    """A set of indices as an integer."""
    found = 0
    for index in indices:
        found |= 1 << index
    return found


def members(mask: int) -> Iterator[int]:
    """The indices of a set, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Values:
    """Every value of a recording that may matter, and what it is computed from.

    Values have indices, in the order in which they were made; sets of them are integers with a bit for each.

    Attributes:
        within: for each value, the values that it is computed from by the code between the boxes, itself included.
        sources: the values that begin something: outputs of boxes, inputs of the model.
        parameters: the values that are weight matrices used between the boxes.
        read: the values that are read.
    """

    def __init__(self, recording: Recording) -> None:
        self.calls = recording.calls
        self.notes = recording.notes
        nodes, users = _graph(recording)
        boxes = [call for call in self.calls if call.box]
        entering = {e for call in boxes for e in call.inputs} | set(recording.outputs)
        starts = {e for call in boxes for e in call.outputs} | set(recording.inputs)
        # What a module returns and nobody takes is of no use: the end of nothing.
        leaving = {e for call in self.calls for e in call.outputs if e in users or e in entering}
        own = {(node, 0) for node in recording.parameters if node in nodes}
        weights = {(node, 0) for node, is_weight in recording.parameters.items() if node in nodes and is_weight}
        read = entering | {e for e, by in users.items() if len(by) > 1}
        # What a stream ends in may be read by nothing but one op between the boxes, a mean over tokens for example.
        ends = {e for e, by in users.items() if len(by) == 1 and len(_operands(e[0])) > 1 and _single(by)}
        every = (read | starts | leaving | ends) - own | weights
        self.edges = sorted((e for e in every if e[0] in nodes), key=lambda e: (e[0]._sequence_nr() % (1 << 62), e[1]))
        self.index = {e: i for i, e in enumerate(self.edges)}
        self.sources = self._bits(starts)
        self.parameters = self._bits(weights)
        self.read = self._bits(read - own)
        self.candidates = self.read | self._bits((ends | leaving) - own)
        self._below, self._next = _below(nodes, self.index, self.candidates, self.read)
        self.within = [self._below[e[0]] | 1 << i for i, e in enumerate(self.edges)]
        self._closure()

    def _bits(self, edges: Iterable[Edge]) -> int:
        return bits(self.index[e] for e in edges if e in self.index)

    def _closure(self) -> None:
        """What each source is computed from, through the boxes too, and what by way of a weight matrix."""
        self.behind: dict[int, int] = {}
        self.learned: dict[int, int] = {}
        self.given: dict[int, int] = {}
        for call in sorted((c for c in self.calls if c.box), key=lambda c: c.end):
            given = 0
            for e in call.inputs:
                if e in self.index:
                    given |= self.within[self.index[e]]
                elif e[0] in self._below:
                    given |= self._below[e[0]]
            before = given
            learned = 0
            for source in members(given & self.sources):
                before |= self.behind.get(source, 0)
                learned |= self.learned.get(source, 0)
            for e in call.outputs:
                if (i := self.index.get(e)) is not None and self.sources >> i & 1:
                    self.behind[i], self.given[i] = before, given
                    self.learned[i] = before if has_matrix(call.module) else learned

    def behind_value(self, value: int) -> int:
        """All that a value is computed from, itself included."""
        found = self.within[value]
        for source in members(found & self.sources):
            found |= self.behind.get(source, 0)
        return found

    def size(self, value: int) -> int:
        """The number of elements."""
        return math.prod(map(int, self._meta(value).shape))

    def _meta(self, value: int) -> Any:
        node, number = self.edges[value]
        return node._input_metadata[number]

    def carried(self, value: int) -> dict[int, Tensor | None]:
        """By what factors ``value`` carries each candidate that it is made from with no state between."""
        meta, size = self._meta(value), self.size(value)
        among = self._next[self.edges[value][0]] & ~(1 << value)
        mine = [i for i in members(among) if self.size(i) == size]
        if not mine or not size or not meta.dtype.is_floating_point:
            return {}
        like = torch.empty(tuple(meta.shape), dtype=meta.dtype)
        try:
            factors = scale(self.edges[value], [self.edges[i] for i in mine], like)
        except RuntimeError as error:
            self.notes.append(f"a derivative could not be taken: {str(error).splitlines()[0]}")
            return {}
        return dict(zip(mine, factors, strict=True))

    def names(self, before: int, after: int) -> str:
        """The outermost modules whose outputs are what ``after`` holds and ``before`` does not."""
        new = self.within[after] & ~self.within[before]
        outer: dict[int, None] = {}
        position = {id(call): i for i, call in enumerate(self.calls)}
        for call in self.calls:
            if not call.box or not any(e in self.index and new >> self.index[e] & 1 for e in call.outputs):
                continue
            for number in (*call.parents, position[id(call)]):
                if self._is_branch(self.calls[number], before, new):
                    outer.setdefault(number)
                    break
        inner = {n for n in outer if any(p in outer for p in self.calls[n].parents)}
        return " + ".join(self.calls[n].path or "the model" for n in outer if n not in inner)

    def _is_branch(self, call: Call, before: int, new: int) -> bool:
        """Whether what a call returns is part of what was added: it does not hold the state itself."""
        mine = [self.index[e] for e in call.outputs if e in self.index]
        return any(new >> i & 1 for i in mine) and not any(self.within[i] >> before & 1 for i in mine)


def _operands(node: Any) -> list[Edge]:
    return [(n, i) for n, i in node.next_functions if n is not None]


def _single(nodes: set[Any]) -> bool:
    return all(len(_operands(node)) == 1 for node in nodes)


def _graph(recording: Recording) -> tuple[list[Any], dict[Edge, set[Any]]]:
    """The nodes between the boxes, operands before users, and the users of each edge."""
    roots = [e for call in recording.calls for e in (*call.inputs, *call.outputs)] + recording.outputs
    users: dict[Edge, set[Any]] = {}
    order: dict[Any, None] = {}
    seen: set[Any] = set()
    for root, _ in roots:
        todo = [(root, False)]
        while todo:
            node, done = todo.pop()
            if done:
                order.setdefault(node)
                continue
            if node in seen:
                continue
            seen.add(node)
            todo.append((node, True))
            for operand in _operands(node):
                users.setdefault(operand, set()).add(node)
                todo.append((operand[0], False))
    return _Ordered(order), users


class _Ordered(list[Any]):
    """A list with a quick membership test."""

    def __init__(self, items: Iterable[Any]) -> None:
        super().__init__(items)
        self._set = set(self)

    def __contains__(self, item: object) -> bool:
        return item in self._set


def _below(nodes: list[Any], index: dict[Edge, int], among: int, stop: int) -> tuple[dict[Any, int], dict[Any, int]]:
    """For each node the values that it is computed from: all, and those ``among`` with none of ``stop`` between."""
    found: dict[Any, int] = {}
    nearest: dict[Any, int] = {}
    for node in nodes:
        mask = near = 0
        for e in _operands(node):
            i = index.get(e)
            own = 0 if i is None else 1 << i
            mask |= found[e[0]] | own
            near |= own & among | (0 if own & stop else nearest[e[0]])
        found[node], nearest[node] = mask, near
    return found, nearest


# --- states


@dataclass(eq=False)
class State:
    """Values that carry one another and hold the same: one state.

    Attributes:
        member: the first value.
        values: all of them.
        holds: the sources between the boxes.
        carries: the states that it carries.
        read: whether any of its values is read.
    """

    member: int
    values: int
    holds: int
    read: bool
    carries: set[State] = field(default_factory=set)


def states(values: Values) -> list[State]:
    """The states of a recording, in the order in which they were made; one that is not read is carried by no other."""
    direct = {i: found for i in members(values.candidates) if (found := values.carried(i))}
    carried: dict[int, int] = {}
    same: dict[int, int] = {}

    def first(i: int) -> int:
        while same.get(i, i) != i:
            i = same[i]
        return i

    for i, factors in direct.items():
        its = {s: factor for s, factor in factors.items() if factor is not None}
        carried[i] = 0
        for s in its:
            carried[i] |= carried.get(s, 0)
        # What it is made from and does not carry, it does not carry by way of another state either.
        carried[i] = carried[i] & ~bits(factors) | bits(its)
        for s in its:
            if _holds(values, i) == _holds(values, s) and _consistent(its, direct.get(s, {}), s):
                a, b = sorted((first(i), first(s)))
                same[b] = a
    made: dict[int, State] = {}
    for i in sorted({*carried, *(s for mask in carried.values() for s in members(mask))}):
        root = first(i)
        state = made.setdefault(root, State(root, 0, _holds(values, root), False))
        state.values |= 1 << i
        state.read |= bool(values.read >> i & 1)
    for i, mask in carried.items():
        made[first(i)].carries |= {made[first(s)] for s in members(mask)}
    for state in made.values():
        state.carries.discard(state)
    inside = {other for state in made.values() for other in state.carries}
    kept = {state for state in made.values() if state.read or state not in inside}
    for state in kept:
        state.carries = {other for other in state.carries if other in kept and other.read}
    return sorted(kept, key=lambda state: state.member)


def _holds(values: Values, value: int) -> int:
    return values.within[value] & values.sources


def _consistent(mine: dict[int, Tensor], its: dict[int, Tensor | None], state: int) -> bool:
    """Whether a value holds each older one just by carrying ``state``, and not once more beside it."""
    between = _number(mine[state])
    for older, factor in its.items():
        if between is None or factor is None or older not in mine:
            continue
        total, before = _number(mine[older]), _number(factor)
        if total is not None and before is not None and abs(total - between * before) > 1e-5 * abs(total):
            return False
    return True


def _number(factor: Tensor) -> float | None:
    """The one value of all factors, if they have one."""
    mean = float(factor.mean())
    return mean if bool((factor - mean).abs().max() <= 1e-6 * abs(mean)) else None
