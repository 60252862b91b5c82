"""Steps of a stream that no add makes: a state and what is learned from it are put together in some other way.

``index_add(x, 0, i, f(x[i]))``, ``where(c, f(x), x)``, ``maximum(x, f(x))``, somebody's own operator: none of them is a
sum of whole tensors, so the stream ends there. They are recognised so that the report can call them by their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from attnres_compile.passes import facts, ops, refusal
from attnres_compile.passes.streams import Reason, Rejection

if TYPE_CHECKING:
    from attnres_compile.passes.scan import Scan, Scanner

# Update some elements of their first operand and hand on the others.
_PARTIAL = frozenset(
    {
        "index_add", "index_copy", "index_fill", "index_put", "index_reduce", "scatter", "scatter_add",
        "scatter_reduce", "slice_scatter", "select_scatter", "diagonal_scatter", "masked_scatter", "where",
    }
)  # fmt: skip
_WHOLE = frozenset(
    {
        "maximum", "minimum", "fmax", "fmin", "logaddexp", "logaddexp2", "hypot", "_foreach_add", "_foreach_sub",
        "_foreach_lerp", "_foreach_maximum", "_foreach_minimum", "addcdiv", "_foreach_addcmul",
    }
)  # fmt: skip
_BODIES = frozenset({"cond", "invoke_subgraph", "while_loop", "switch"})


@dataclass(frozen=True)
class Opaque:
    """What may be a step: the node that gives the new state, where the old one comes from, how they are put together.

    Attributes:
        result: the new state.
        base: the origin of the old one.
        partial: whether some of its elements are handed on as they are.
        inside: whether what is learned is computed inside the operator, which may just as well be a branch.
    """

    result: fx.Node
    base: fx.Node
    partial: bool
    inside: bool


def operands(node: fx.Node) -> list[fx.Node]:
    """What ``node`` puts together, if it may put a state and its branch together in a way that is no add."""
    name = ops.name_of(node)
    foreign = "::" in name
    if name in ops.STACKS and len(node.all_input_nodes) != 2:
        return []
    if name in _PARTIAL | _WHOLE | _BODIES | ops.STACKS or foreign:
        return [operand for operand in node.all_input_nodes if facts.is_float(operand)]
    return []


def note(scanner: Scanner, node: fx.Node) -> None:
    """Note what ``node`` makes, if one of its operands is computed from another one by a learned contraction."""
    base, given = scanner.out.base, operands(node)
    if not given:
        return
    name = ops.name_of(node)
    inside = name in _BODIES
    partial = name in _PARTIAL
    learned = inside and scanner.anchor_weight(node) is not None
    for held in given:
        if scanner.values.is_constant(held) or (partial and name != "where" and held is not given[0]):
            continue
        bit = scanner.bits.bit.get(base[held], 0)
        others = [each for each in given if base[each] is not base[held]]
        if not learned and not any(scanner.anchored_of(each) & bit for each in others):
            continue
        for result in _results(node):
            value, before = facts.tensor(result), facts.tensor(held)
            if value is None or before is None or value.dtype != before.dtype:
                continue
            if facts.same_shape(value.shape, before.shape):
                scanner.out.opaque.setdefault(result, Opaque(result, base[held], partial, inside or name in ops.STACKS))


def _results(node: fx.Node) -> list[fx.Node]:
    if facts.tensor(node) is not None and ops.name_of(node) not in ops.STACKS:
        return [node]
    return [user for user in node.users if user.op != "output" and facts.is_float(user)]


def rejections(found: Scan, known: Mapping[fx.Node, Rejection], least: int) -> dict[fx.Node, Rejection]:
    """The steps that no add makes, each with the reason why it is left alone.

    Such a step hands a state on: a step of a stream starts from what it makes, or it starts from such a state itself
    and is no branch, or there are many in a row.

    Args:
        found: what the walk over the graph noted.
        known: what is left alone for other reasons.
        least: how many in a row are a stream of their own.
    """
    branches = {found.base[term.node] for record in found.steps.values() for term in record.terms}
    maybe = {
        node: each
        for node, each in found.opaque.items()
        if node not in branches and node not in found.steps and node not in known
    }
    row = set(refusal.in_a_row({node: each.base for node, each in maybe.items()}, least))
    named: dict[fx.Node, Rejection] = {}
    for node, each in maybe.items():
        before = found.steps.get(each.base)
        follows = (before is not None and before.anchored) or each.base in named
        goes_on = any(record.anchored for record in found.children.get(node, ()))
        if node in row or (follows and goes_on if each.inside else follows or goes_on):
            reason = Reason.PARTIAL_UPDATE if each.partial else Reason.OPAQUE_STEP
            origin = node.all_input_nodes[0] if ops.name_of(node) == "getitem" else node
            named[node] = Rejection(reason, node, f"by {ops.name_of(origin)}")
    return named


__all__ = ["Opaque", "note", "operands", "rejections"]
