"""From the states of a forward to its residual streams."""

from __future__ import annotations

from dataclasses import dataclass

from tests.zoo.survey.states import State, Values, members


@dataclass
class Sublayer:
    """What leads from one state to the next."""

    before: State
    after: State
    learned: bool


@dataclass
class Chain:
    """Sublayers that follow one another."""

    steps: list[Sublayer]

    @property
    def root(self) -> State:
        return self.steps[0].before

    @property
    def tail(self) -> State:
        return self.steps[-1].after


def chains(values: Values, states: list[State], least: int) -> list[Chain]:
    """The streams among the states, in the order of their first sublayers."""
    steps: dict[State, Sublayer] = {}
    depth: dict[State, int] = {}
    for state in states:
        before = _predecessor(values, state, depth)
        depth[state] = 1 + depth[before] if before is not None else 0
        if before is not None:
            steps[state] = Sublayer(before, state, _learned(values, before, state))
    found = [_trimmed(chain) for chain in _joined(values, states, steps)]
    found = [chain for chain in found if chain.steps]
    refused = _post_norm(values, found)
    kept = [chain for i, chain in enumerate(found) if len(chain.steps) >= least and i not in refused]
    return sorted(kept, key=lambda chain: chain.steps[0].after.member)


def _predecessor(values: Values, state: State, depth: dict[State, int]) -> State | None:
    """The state that a state adds something to."""
    carried = sorted((s for s in state.carries if s in depth), key=lambda s: s.member)
    last = [s for s in carried if not any(s in other.carries for other in carried)]
    if len(last) > 1:
        behind = {s: values.behind_value(s.member) for s in last}
        first = [s for s in last if all(behind[o] & s.values for o in last if o is not s)]
        # Sums of unrelated values go on with the longer stream.
        last = first[:1] or [max(last, key=lambda s: depth[s])]
    return last[0] if last else None


def _learned(values: Values, before: State, after: State) -> bool:
    new = after.holds & ~before.holds
    own = values.within[before.member]
    weights = (values.within[after.member] & ~own) & values.parameters
    dependent = False
    for source in members(new):
        if values.learned.get(source, 0) & before.values:
            return True
        if values.behind.get(source, 0) & before.values:
            dependent = True
            for step in members((values.behind[source] | 1 << source) & values.sources):
                if values.behind.get(step, 0) & before.values:
                    weights |= values.given[step] & ~own & values.parameters
    return dependent and bool(weights)


def _joined(values: Values, states: list[State], steps: dict[State, Sublayer]) -> list[Chain]:
    children: dict[State, list[Sublayer]] = {}
    for state in states:
        if state in steps:
            children.setdefault(steps[state].before, []).append(steps[state])
    below: dict[State, int] = {}
    for state in reversed(states):
        below[state] = 1 + max((below[c.after] for c in children.get(state, ())), default=0)
    goes_on: dict[State, Sublayer] = {}
    for state, following in children.items():
        chosen = following[0]
        for step in following[1:]:
            if step.learned != chosen.learned:
                better = step.learned
            else:
                better = _feeds(values, chosen, step) or below[step.after] > below[chosen.after]
            chosen = step if better else chosen
        goes_on[state] = chosen
    made: dict[State, Chain] = {}
    found: list[Chain] = []
    for state in (state for state in states if state in steps):
        step = steps[state]
        chain = made.get(step.before)
        if chain is None or goes_on[step.before] is not step:
            chain = Chain([])
            found.append(chain)
        chain.steps.append(step)
        made[state] = chain
    return found


def _feeds(values: Values, inner: Sublayer, outer: Sublayer) -> bool:
    """Whether what ``outer`` adds is computed from the state that ``inner`` makes."""
    new = outer.after.holds & ~outer.before.holds
    return any(values.behind.get(source, 0) & inner.after.values for source in members(new))


def _trimmed(chain: Chain) -> Chain:
    at = [i for i, step in enumerate(chain.steps) if step.learned]
    return Chain(chain.steps[at[0] : at[-1] + 1] if at else [])


def _post_norm(values: Values, found: list[Chain]) -> set[int]:
    """The chains that start from, or end in, a norm or an activation on the way from one to the next."""
    refused: set[int] = set()
    for i, chain in enumerate(found):
        for j, before in enumerate(found):
            if before is chain or not _follows(values, before.tail, chain.root):
                continue
            sizes = sorted((len(before.steps), len(chain.steps)))
            if 2 * sizes[0] >= sizes[1]:
                refused |= {i, j}
    return refused


def _follows(values: Values, tail: State, root: State) -> bool:
    """Whether ``root`` is made from ``tail`` alone, as large, without a weight matrix, and does not carry it."""
    if tail.values & root.values or tail in root.carries or values.size(tail.member) != values.size(root.member):
        return False
    if root.holds == tail.holds and values.within[root.member] & tail.values:
        return True
    return any(
        values.given.get(source, 0) & tail.values and not values.learned.get(source, 0) & tail.values
        for source in members(root.holds)
    )
