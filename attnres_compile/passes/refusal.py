"""Why a chain of residual steps is no stream that may be rewritten, and what links one chain to the next."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from torch import fx

from attnres_compile.passes import facts, ops
from attnres_compile.passes.scan import Scan
from attnres_compile.passes.sides import AddRecord
from attnres_compile.passes.streams import Reason

# How far behind a chain's root to look for the end of another chain: a hand-written norm is about ten ops.
_SEARCH = 48


def link(root: fx.Node, tails: Container[fx.Node]) -> tuple[fx.Node, Reason] | None:
    """The chain end that ``root`` comes from without a learned op between, and what stands between them.

    Args:
        root: where a chain starts.
        tails: the ends of all chains.

    Returns:
        The end and the reason that names what was found (a norm, an activation, dropout, a clamp, a join of
        parts or a write), or ``None`` where the chain starts from something else.
    """
    value = facts.tensor(root)
    found: fx.Node | None = None
    seen: set[fx.Node] = set()
    walked: set[fx.Node] = set()
    todo = [root]
    joined = False
    while todo and len(seen) < _SEARCH:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in tails and node is not root:
            other = facts.tensor(node)
            if other is not None and value is not None and (joined or facts.same_shape(other.shape, value.shape)):
                found = found or node
            continue
        name = ops.name_of(node)
        if facts.is_parameter_input(node) or node.op == "placeholder" or not _is_local(node, name):
            continue
        walked.add(node)
        # What was put together from parts may be wider or longer than the state that one part comes from.
        joined = joined or name in ops.JOINS
        todo += node.all_input_nodes
    if found is None:
        return None
    reason = _reason(_between(found, walked))
    return (found, reason) if reason is not None else None


def _between(start: fx.Node, walked: set[fx.Node]) -> set[str]:
    """What stands on the ways from ``start`` through ``walked``, by name; a dropout that does nothing is left out."""
    names: set[str] = set()
    seen: set[fx.Node] = set()
    todo = [start]
    while todo:
        for user in todo.pop().users:
            if user not in walked or user in seen:
                continue
            seen.add(user)
            todo.append(user)
            name = ops.name_of(user)
            if ops.is_root(user):
                names.add("sqrt")
            elif name == "where" and _is_guard(user):
                names.add("clamp")
            elif name not in ops.DROPOUTS or not ops.dropout_is_identity(user):
                names.add(name)
    return names


def _is_guard(node: fx.Node) -> bool:
    """Whether a ``where`` puts numbers for what a state may not hold: its condition is made of the state."""
    inputs = [operand for operand in node.all_input_nodes if facts.is_float(operand)]
    kept = [operand for operand in inputs if operand.op != "get_attr" and operand.all_input_nodes]
    if len(kept) != 1:
        return False
    seen: set[fx.Node] = set()
    todo = [operand for operand in node.all_input_nodes if not facts.is_float(operand)]
    while todo and len(seen) < _SEARCH:
        behind = todo.pop()
        if behind is kept[0]:
            return True
        if behind not in seen:
            seen.add(behind)
            todo += behind.all_input_nodes
    return False


def _is_local(node: fx.Node, name: str) -> bool:
    """Whether ``node`` is of the kind that stands on a stream: no contraction, no lookup, no unknown op."""
    return (
        name in ops.NORMS
        or name in ops.NORM_PARTS
        or name in ops.ACTIVATIONS
        or name in ops.CLAMPS
        or name == "where"
        or name in ops.DROPOUTS
        or name in ops.SCALES
        or name in ops.ADDS
        or name in ops.SUBS
        or name in ops.CASTS
        or name in ops.RESHAPES
        or name in ops.PERMUTES
        or name in ops.SHUFFLES
        or name in ops.COPIES
        or name in ops.JOINS
        or name in ops.SLICES
        or name in ops.SPLITS
        or name in ("expand", "detach")
        or name in ops.INPLACE_ADDS
        or name in ops.INPLACE_SCALES
    )


def _reason(names: set[str]) -> Reason | None:
    if names & ops.JOINS:
        # Before norms: what is put together from parts begins a stream of its own, whatever else is done to it.
        return Reason.PARTIAL_UPDATE
    if names & ops.NORMS.keys() or names & ops.NORM_MARKS:
        return Reason.POST_NORM
    if names & ops.ACTIVATIONS:
        return Reason.POST_ACTIVATION
    if names & ops.CLAMPS:
        return Reason.CLAMP_ON_STREAM
    if "where" in names:
        return Reason.PARTIAL_UPDATE
    if names & ops.DROPOUTS:
        return Reason.DROPOUT_ON_STREAM
    if names & ops.INPLACE_SCALES.keys():
        return Reason.MUTATED
    return None


def is_gated(record: AddRecord, scan: Scan) -> bool:
    """Whether the branch of a step holds a multiple of the step's own skip, as ``x + t * (f - x)`` does.

    So does one that fades out a mean of it, as ``x + f + t * (g - x.mean(1))`` does. A term that is nothing but a copy
    of the skip (``x + w * x``, the innermost skip of a U-Net) is no gate.
    """
    assert record.base is not None
    if record.gated:
        return True
    if not record.anchored:
        # x + t * (pool(x) - x): nothing learned comes in for what goes out, so it is a weightless branch like others.
        return False
    seen: set[fx.Node] = set()
    nodes = [term.node for term in record.terms if term.product is None]
    todo = [node for node in nodes if scan.base.get(node) is not record.base]
    if any(term.factor < 0 and _is_mean_of(term.node, record.base, scan) for term in record.terms):
        return True
    while todo and len(seen) < _SEARCH:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if scan.base.get(node) is record.base:
            return True
        if node in scan.steps and node is not record.node:
            # Another state: it holds the skip only by way of its own stream.
            continue
        name = ops.name_of(node)
        if name in ops.SCALES or name in ops.ADDS or name in ops.SUBS or name in ops.DROPOUTS or name == "neg":
            todo += [i for i in node.all_input_nodes if facts.is_float(i)]
            if name in ops.SUBS and len(node.args) > 1 and _is_mean_of(node.args[1], record.base, scan):
                return True
        elif scan.base.get(node) is not node:
            todo.append(scan.base[node])
    return False


def _is_mean_of(node: object, base: fx.Node, scan: Scan) -> bool:
    """Whether ``node`` is a mean of ``base``, perhaps of some of its tokens, or such a mean scaled."""
    if not isinstance(node, fx.Node):
        return False
    name = ops.name_of(node)
    if name in ops.AVERAGES:
        averaged = node.all_input_nodes[0]
        return scan.base.get(averaged) is base or _is_mean_of(averaged, base, scan)
    if name in ops.SCALES:
        return any(_is_mean_of(factor, base, scan) for factor in (node.args[:1] if "div" in name else node.args))
    return False


def mixes_own_lanes(record: AddRecord, scan: Scan) -> bool:
    """Whether a step adds to its skip the skip's own lanes, mixed by something computed: ``x + matmul(x, m)``."""
    for term in record.terms:
        mixed = scan.base.get(term.node, term.node)
        inputs = mixed.all_input_nodes
        computed = ops.name_of(mixed) in ops.CONTRACTIONS and mixed not in scan.contractions
        if computed and any(scan.base.get(operand) is record.base for operand in inputs):
            return True
    return False


def is_scaled_and_shifted(records: Sequence[AddRecord], scan: Scan) -> bool:
    """Whether a scale and a shift per feature follow most of the learned steps, as a batch norm in eval mode would."""
    learned = sum(record.anchored for record in records)
    return learned > 0 and 2 * sum(record.node in scan.affine for record in records) >= learned


def attends_over_depth(states: Sequence[fx.Node], scan: Scan) -> bool:
    """Whether most of ``states`` are put beside others along a new dimension that a softmax then weighs."""
    joins = {join for state in states if (join := _weighed_join(state, scan)) is not None}
    return 2 * len(joins) >= len(states)


def _weighed_join(state: fx.Node, scan: Scan) -> fx.Node | None:
    value = facts.tensor(state)
    carried, todo = {state}, [state]
    while todo and value is not None:
        for user in todo.pop().users:
            made = facts.tensor(user)
            name = ops.name_of(user)
            if made is None or user in carried:
                continue
            if scan.base.get(user) is scan.base.get(state) and user not in scan.steps:
                carried.add(user)
                todo.append(user)
            elif name in ops.JOINS | ops.STACKS and made.dim() == value.dim() + 1 and _is_weighed(user):
                return user
    return None


def _is_weighed(node: fx.Node) -> bool:
    """Whether a softmax or an operator that attends is among the next things computed from ``node``."""
    seen: set[fx.Node] = set()
    todo = [node]
    while todo and len(seen) < _SEARCH:
        for user in todo.pop(0).users:
            if user in seen:
                continue
            seen.add(user)
            name = ops.name_of(user)
            if name in ops.SOFTMAXES or any(mark in name.lower() for mark in ops.ATTENTION_MARKS):
                return True
            todo.append(user)
    return False


def in_a_row(starts: Mapping[fx.Node, fx.Node], least: int) -> list[fx.Node]:
    """The adds of which each starts from the one before, ``least`` or more in a row.

    Args:
        starts: adds in graph order, each with what it starts from.
        least: the shortest row that counts.
    """
    length: dict[fx.Node, int] = {}
    follows: dict[fx.Node, fx.Node] = {}
    for node, base in starts.items():
        length[node] = 1 + length.get(base, 0)
        if base in length:
            follows[base] = node
    found: set[fx.Node] = set()
    for node in reversed(list(starts)):
        if length[node] >= least or follows.get(node) in found:
            found.add(node)
    return [node for node in starts if node in found]
