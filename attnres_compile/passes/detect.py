"""graph -> residual streams, and for every add left alone a reason. Reads the graph, never changes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from attnres_compile.config import AttnResConfig
from attnres_compile.passes import facts, features, opaque, ops, refusal
from attnres_compile.passes.gradients import apart, unrecorded
from attnres_compile.passes.memory import Memory
from attnres_compile.passes.record import watched
from attnres_compile.passes.scan import Scan, scan
from attnres_compile.passes.sides import AddRecord
from attnres_compile.passes.streams import Detection, Read, Reason, Rejection, ResidualStream, Step
from attnres_compile.passes.wrapped import first_reason, wrapped


@dataclass
class _Chain:
    """Steps that follow one another, before it is known whether they are a stream."""

    root: fx.Node
    records: list[AddRecord]
    trimmed: list[AddRecord] = field(default_factory=list)


@watched("detect")
def detect(graph: fx.Graph, config: AttnResConfig | None = None, gradients: bool = True) -> Detection:
    """Find the residual streams of ``graph``.

    Args:
        graph: a torch-level or ATen graph whose nodes carry tensors in ``meta["example_value"]`` or
            ``meta["val"]``.
        config: ``min_sublayers`` and ``depth_loops`` are read; default :class:`AttnResConfig`.
        gradients: whether gradients are recorded where the graph begins. Where they are not, they are of no concern: a
            graph that is traced so does not show where it would switch them off.

    Returns:
        The streams in graph order. Every add of two floating tensors is in one of them, as a step or inside
        a branch's own sum, or among the rejections.
    """
    config = config or AttnResConfig()
    memory = Memory(graph)
    found = scan(graph, memory)
    rejections = dict(found.rejections)
    rejections.update(opaque.rejections(found, rejections, config.min_sublayers))
    for node in found.checkpoints:
        rejections[node] = Rejection(Reason.CHECKPOINTED, node)
    mixtures = (
        (found.highways, Reason.GATED),
        (found.lanes, Reason.MULTI_LANE),
        (found.shifted, Reason.SHIFTED_STREAM),
    )
    for starts, named in mixtures:
        for node in refusal.in_a_row(starts, config.min_sublayers):
            rejections[node] = Rejection(named, node)
    chains = [_trim(_without_unread_end(chain)) for chain in _chains(found, memory)]
    refused = _refusals(chains, found, memory, config)
    if gradients:
        refused = {**_unrecorded(chains, found, unrecorded(graph)), **refused}
    reasons = wrapped(graph)
    streams: list[ResidualStream] = []
    for chain in chains:
        _reject(rejections, chain.trimmed, Reason.NO_LEARNED_BRANCH)
        if not chain.records:
            continue
        reason = _first_wrapped(chain, reasons) or refused.get(id(chain))
        stream = None if reason else _stream(chain, found)
        if stream is None:
            _reject(rejections, chain.records, reason or Reason.UNKNOWN_FEATURES)
        else:
            streams.append(stream)
    streams = _without_mutated(streams, memory, rejections)
    _name_outer_skips(streams, rejections, found)
    for stream in streams:
        for step in stream.steps:
            for inner in step.inner:
                rejections.pop(inner, None)
    streams.sort(key=lambda s: memory.position[s.steps[0].node])
    ordered = sorted(rejections.values(), key=lambda r: memory.position[r.node])
    return Detection(tuple(streams), tuple(ordered))


def _reject(rejections: dict[fx.Node, Rejection], records: list[AddRecord], reason: Reason) -> None:
    for record in records:
        for node in (*record.inner, *record.adds):
            if node not in rejections or node in record.adds:
                rejections[node] = Rejection(reason, node)


# ------------------------------------------------------------------ chains


def _chains(found: Scan, memory: Memory) -> list[_Chain]:
    """Join steps into chains: of several steps on one state one continues, the others begin chains."""
    # Depth of the tree of steps below each step, to choose between parallel continuations.
    below: dict[fx.Node, int] = {}
    for node in reversed(found.steps):
        below[node] = 1 + max((below[c.node] for c in found.children.get(node, ())), default=0)
    continues: dict[fx.Node, AddRecord] = {}
    for base, records in found.children.items():
        if base in found.steps and (chosen := _continuation(records, below)) is not None:
            continues[base] = chosen
    chains: dict[fx.Node, _Chain] = {}
    for node, record in found.steps.items():
        assert record.base is not None and record.skip is not None
        if record.base in found.steps and continues.get(record.base) is record:
            chain = chains[record.base]
            chain.records.append(record)
        else:
            chain = _Chain(record.skip, [record])
        chains[node] = chain
    unique = {id(chain): chain for chain in chains.values()}
    return list(unique.values())


def _continuation(records: list[AddRecord], below: dict[fx.Node, int]) -> AddRecord | None:
    """Which of several steps on one state continues its stream.

    A step whose branch is computed from another step on the same state encloses that one, and continues; the
    enclosed one begins a stream of its own. Between independent ones the longer continuation wins.
    """
    chosen: AddRecord | None = None
    for record in records:
        if (
            chosen is None
            or (record.anchored and not chosen.anchored)
            or (
                record.anchored == chosen.anchored
                and (chosen.node in record.fed_by or below[record.node] > below[chosen.node])
            )
        ):
            chosen = record
    return chosen


def _without_unread_end(chain: _Chain) -> _Chain:
    """A last sum that nothing reads makes no state; it goes away with the step before it.

    A write that is a step is seen by nothing but its own users.
    """
    *kept, last = chain.records
    if not kept or last.node.users or last.skip is not kept[-1].node:
        return chain
    kept[-1].adds += last.adds
    kept[-1].inner += last.inner
    return _Chain(chain.root, kept)


def _trim(chain: _Chain) -> _Chain:
    """Cut weightless steps off both ends; what is between anchors belongs to the stream."""
    anchored = [i for i, record in enumerate(chain.records) if record.anchored]
    if not anchored:
        return _Chain(chain.root, [], chain.records)
    first, last = anchored[0], anchored[-1]
    kept = chain.records[first : last + 1]
    root = kept[0].skip
    assert root is not None
    return _Chain(root, kept, chain.records[:first] + chain.records[last + 1 :])


# ------------------------------------------------------------------ refusals


def _refusals(chains: list[_Chain], found: Scan, memory: Memory, config: AttnResConfig) -> dict[int, Reason]:
    """The chains that may not be rewritten, by ``id``, each with the reason."""
    kept = [chain for chain in chains if chain.records]
    by_tail = {chain.records[-1].node: chain for chain in kept}
    links: dict[int, tuple[_Chain, Reason]] = {}
    refused: dict[int, Reason] = {}
    for chain in kept:
        linked = refusal.link(chain.root, by_tail)
        if linked is None:
            continue
        before, reason = by_tail[linked[0]], linked[1]
        links[id(chain)] = (before, reason)
        links.setdefault(id(before), (chain, reason))
        if reason is Reason.POST_NORM:
            # A long stream whose final norm feeds a short head is no post-norm stream.
            for one, other in ((chain, before), (before, chain)):
                if 2 * len(other.records) >= len(one.records):
                    refused[id(one)] = reason
    projected = {node for node, left in found.rejections.items() if left.reason is Reason.UNRELATED_OPERANDS}
    for chain in kept:
        if id(chain) in refused:
            continue
        if refusal.is_scaled_and_shifted(chain.records, found):
            refused[id(chain)] = Reason.POST_NORM
        elif any(refusal.is_gated(record, found) for record in chain.records):
            refused[id(chain)] = Reason.GATED
        elif refusal.attends_over_depth([chain.root, *(record.node for record in chain.records)], found):
            refused[id(chain)] = Reason.DEPTH_ATTENTION
        elif not config.depth_loops and _shares_weights(chain, found, memory):
            lanes = any(refusal.mixes_own_lanes(record, found) for record in chain.records)
            refused[id(chain)] = Reason.MULTI_LANE if lanes else Reason.SHARED_WEIGHTS
        elif len(chain.records) < config.min_sublayers:
            neighbour = links.get(id(chain))
            refused[id(chain)] = neighbour[1] if neighbour else _alone(chain, projected)
    return refused


def _unrecorded(chains: list[_Chain], found: Scan, off: set[fx.Node]) -> dict[int, Reason]:
    """The chains of which a step records no gradient.

    A sum that records none keeps gradients from all that it adds up, and sources that are mixed elsewhere would not;
    a query that is used only there never trains. What a module does in several calls, one of which records gradients
    from its first step to its last, is one thing: that call trains the queries.
    """
    modes: dict[int, bool | None] = {}
    places: dict[int, frozenset[tuple[str, str]]] = {}
    if not off:
        return {}
    for chain in chains:
        nodes: list[fx.Node] = []
        before = chain.root
        for record in chain.records:
            assert record.skip is not None
            nodes += [*record.adds, *_passes(before, record.skip, found)]
            before = record.node
        modes[id(chain)] = apart(nodes, off) if nodes else False
        lines = [(facts.module_path(record.node), facts.source_line(record.node)) for record in chain.records]
        places[id(chain)] = frozenset(lines)
    training = {places[key] for key, mode in modes.items() if mode is False}
    return {
        key: Reason.GRADIENT_MODE
        for key, mode in modes.items()
        if mode is None or (mode and places[key] not in training)
    }


def _first_wrapped(chain: _Chain, reasons: dict[fx.Node, Reason]) -> Reason | None:
    return first_reason((node for record in chain.records for node in (record.node, *record.adds)), reasons)


def _alone(chain: _Chain, projected: set[fx.Node]) -> Reason:
    """Why a short chain without neighbours is none: what it starts from may be a block whose skip is projected."""
    linked = refusal.link(chain.root, projected)
    if linked is not None and linked[1] is Reason.POST_ACTIVATION:
        return Reason.POST_ACTIVATION
    return Reason.TOO_FEW_SUBLAYERS


def _shares_weights(chain: _Chain, found: Scan, memory: Memory) -> bool:
    """Whether most steps of a chain make their branches with a weight that another step's branch is made with too."""
    weights = found.contractions
    users: dict[fx.Node, set[int]] = {}
    for index, record in enumerate(chain.records):
        assert record.base is not None
        for node in _since(record.base, [term.node for term in record.terms], memory):
            if node in weights:
                users.setdefault(weights[node], set()).add(index)
    sharing = {index for steps in users.values() if len(steps) > 1 for index in steps}
    return 2 * len(sharing) > len(chain.records)


def _since(start: fx.Node, ends: list[fx.Node], memory: Memory) -> set[fx.Node]:
    """What ``ends`` are computed from, themselves included, as far as it stands behind ``start``."""
    first = memory.position[start]
    found: set[fx.Node] = set()
    todo = list(ends)
    while todo:
        node = todo.pop()
        if node not in found and memory.position[node] > first:
            found.add(node)
            todo += node.all_input_nodes
    return found


# ------------------------------------------------------------------ from chain to stream


def _stream(chain: _Chain, found: Scan) -> ResidualStream | None:
    steps: list[Step] = []
    for record in chain.records:
        assert record.skip is not None
        previous = steps[-1].node if steps else chain.root
        steps.append(
            Step(
                node=record.node,
                skip=record.skip,
                passes=_passes(previous, record.skip, found),
                terms=tuple(record.terms),
                adds=tuple(record.adds),
                inner=tuple(record.inner),
                anchored=record.anchored,
            )
        )
    axes = features.axes(chain.root, steps)
    if axes is None:
        return None
    # A state's size, not the root's: a size that an input leaves open is fixed by the first branch.
    value = facts.tensor(steps[0].node)
    size = value.shape[axes[1]] if value is not None else None
    if not isinstance(size, int):
        return None
    written = tuple(_written([chain.root, *(step.node for step in steps)], found))
    return ResidualStream(chain.root, tuple(steps), _reads(chain.root, steps), axes, size, written)


def _written(states: list[fx.Node], found: Scan) -> Iterator[fx.Node]:
    """The in-place scales that stand on a stream, or right behind it."""
    for state in states:
        todo = [state]
        while todo:
            for user in todo.pop().users:
                if found.carried.get(user) is not None and found.base[user] is found.base[state]:
                    todo.append(user)
                    if user in found.written:
                        yield user


def _passes(start: fx.Node, end: fx.Node, found: Scan) -> tuple[fx.Node, ...]:
    """The ops between a state and the operand that carries it into the next add."""
    path: list[fx.Node] = []
    node = end
    while node is not start:
        path.append(node)
        node = found.carried[node]
    return tuple(reversed(path))


# ------------------------------------------------------------------ reads


def _reads(root: fx.Node, steps: list[Step]) -> tuple[Read, ...]:
    reads: list[Read] = []
    for index in range(len(steps) + 1):
        following = steps[index] if index < len(steps) else None
        own = steps[index - 1] if index else None
        readers = [node for node in _readers(own.node if own else root, following) if not own or node not in own.adds]
        if readers:
            reads.append(Read(index, tuple(readers)))
    return tuple(reads)


def _readers(state: fx.Node, following: Step | None) -> list[fx.Node]:
    """All users of a state but the next add, the ops that only carry it there, and questions of shape."""
    carriers = following.passes if following is not None else ()
    gone = set(following.adds) if following is not None else set()
    if following is not None:
        # A step whose branch holds the state as it is (x + w * x) reads it like any other node.
        taken = {n for term in following.terms for n in (term.node, *(term.product[1:] if term.product else ()))}
        gone -= {add for add in gone if any(n in taken for n in add.all_input_nodes if n is state or n in carriers)}
    readers: list[fx.Node] = []
    for node in (state, *carriers):
        readers += [u for u in node.users if u not in gone and u not in carriers and not ops.is_metadata(u)]
    order = {node: i for i, node in enumerate(dict.fromkeys(readers))}
    return sorted(order, key=lambda n: order[n])


# ------------------------------------------------------------------ last checks


def _without_mutated(
    streams: list[ResidualStream], memory: Memory, rejections: dict[fx.Node, Rejection]
) -> list[ResidualStream]:
    """Drop streams of which a source or a state is written later by something that stays in the graph.

    An in-place add that belongs to a stream goes away with it, so dropping one stream may cost another.
    """
    while True:
        gone = {add for stream in streams for step in stream.steps for add in step.adds}
        gone |= {write for stream in streams for write in stream.written}
        kept: list[ResidualStream] = []
        for stream in streams:
            write = _late_write(stream, memory, gone)
            if write is None:
                kept.append(stream)
                continue
            for step in stream.steps:
                for node in (*step.inner, *step.adds):
                    rejections[node] = Rejection(Reason.MUTATED, node, f"written by {write.name}")
        if len(kept) == len(streams):
            return kept
        streams = kept


def _late_write(stream: ResidualStream, memory: Memory, gone: set[fx.Node]) -> fx.Node | None:
    at = memory.position
    places = [(stream.root, at[stream.root])]
    for step in stream.steps:
        places += [(node, at[node]) for node in (*step.passes, step.node)]
        for term in step.terms:
            factors = [term.node, *([term.product[1]] if term.product else [])]
            places += [(node, _taken(node, step, memory)) for node in factors]
    for node, position in places:
        if (write := memory.write_after(node, position, gone)) is not None:
            return write
    # What the stream went through is gone through again by its sources, up to its last step.
    last = at[stream.steps[-1].node]
    for before, step in zip([stream.root, *(step.node for step in stream.steps)], stream.steps, strict=False):
        carried = before
        for node in step.passes:
            for operand in node.all_input_nodes:
                write = memory.write_after(operand, at[node], gone) if operand is not carried else None
                if write is not None and at[write] <= last:
                    return write
            carried = node
    return None


def _taken(node: fx.Node, step: Step, memory: Memory) -> int:
    """Where the adds of a step first take ``node``, maybe through a stack: all of them are done at the last one."""
    adds = set(step.adds)
    takers = [user for user in node.users if user in adds or not adds.isdisjoint(user.users)]
    return min((memory.position[user] for user in takers), default=memory.position[step.node])


def _name_outer_skips(streams: list[ResidualStream], rejections: dict[fx.Node, Rejection], found: Scan) -> None:
    """A lone step around a converted stream is called what it is."""
    starts = {found.base[stream.root] for stream in streams}
    for node, rejection in rejections.items():
        record = found.steps.get(node)
        if rejection.reason is Reason.TOO_FEW_SUBLAYERS and record is not None and record.base in starts:
            rejections[node] = Rejection(Reason.OUTER_SKIP, node)
