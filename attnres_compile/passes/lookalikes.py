"""Adds that make a new state out of an old one without being a residual step: gates, lanes and partial updates.

None of them can be converted; they are recognised so that the report can call them by their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import fx

from attnres_compile.passes import facts, ops
from attnres_compile.passes.sides import AddRecord
from attnres_compile.passes.streams import Term

if TYPE_CHECKING:
    from attnres_compile.passes.scan import Scanner

Operands = tuple[Term, Term]


def looked_behind(scanner: Scanner, base: fx.Node) -> Sequence[fx.Node]:
    """The operands of an add's operand that may be a state themselves.

    What is scaled may be gated, what is cut may be a state of which parts are updated, what a constant is added to
    may be a state that is moved as a whole.
    """
    looked_at = ops.name_of(base) in ops.SCALES | ops.SLICES or _mixes_lanes(scanner, base)
    return base.all_input_nodes if looked_at or base in scanner.sums else ()


def updates_a_part(scanner: Scanner, node: fx.Node, operands: Operands) -> bool:
    """Whether this is ``cat([x[:k] + f(x), x[k:]])``: one operand a part of what the other is computed from."""
    if not any(ops.name_of(user) in ops.JOINS for user in node.users):
        return False
    out, bits = scanner.out, scanner.bits.bit
    for this, other in (operands, operands[::-1]):
        base = out.base[this.node]
        if ops.name_of(base) not in ops.SLICES or this.product or other.product:
            continue
        learned = _learned(scanner, other)
        if any(learned & bits.get(out.base[whole], 0) for whole in base.all_input_nodes):
            return True
    return False


def note_mixture(scanner: Scanner, node: fx.Node, operands: Operands) -> None:
    """Note ``t * f(x) + (1 - t) * x``, in which a learned gate weighs the stream, or mixes its lanes."""
    out, bits = scanner.out, scanner.bits.bit
    for this, other in (operands, operands[::-1]):
        mixed = out.base[this.node]
        lanes = _mixes_lanes(scanner, mixed)
        weighed = mixed if lanes else this.node
        if this.product or other.product or not (lanes or ops.name_of(weighed) in ops.SCALES):
            continue
        learned = _learned(scanner, other)
        for factor in weighed.all_input_nodes:
            base = out.base[factor]
            if learned & bits.get(base, 0):
                (out.lanes if lanes else out.highways)[node] = base


def note_shift(scanner: Scanner, node: fx.Node, operands: Operands) -> None:
    """Note ``(x + constant) * a + f(x)``: a constant is added to the state itself, which is scaled or read then."""
    out, bits = scanner.out, scanner.bits.bit
    for this, other in (operands, operands[::-1]):
        moved = scanner.sums.get(out.base[this.node])
        if moved is None or this.product or other.product:
            continue
        kept = [term.node for term in moved.terms if not scanner.values.is_constant(term.node)]
        if len(kept) == 1 and _learned(scanner, other) & bits.get(out.base[kept[0]], 0):
            out.shifted[node] = out.base[kept[0]]


def shifts_a_scaled_state(scanner: Scanner, record: AddRecord) -> bool:
    """Whether this is ``x * w + b`` with one learned number per feature each: a norm with fixed statistics."""
    if any(term.product or not _is_vector(scanner, term.node) for term in record.terms):
        return False
    node = record.skip
    while node is not None and (before := scanner.out.carried.get(node)) is not None:
        scales = ops.name_of(node) in ops.SCALES or ops.name_of(node) in ops.INPLACE_SCALES
        if scales and any(_is_vector(scanner, factor) for factor in node.all_input_nodes if factor is not before):
            return True
        node = before
    return False


def _is_vector(scanner: Scanner, node: fx.Node) -> bool:
    """Whether ``node`` holds a learned number per feature and no more: neither a table of positions nor one number."""
    value = facts.tensor(node)
    long = [size for size in value.shape if not isinstance(size, int) or size > 1] if value is not None else []
    return scanner.values.is_constant(node) and scanner.weights.is_one(node) and len(long) == 1


def _learned(scanner: Scanner, term: Term) -> int:
    """The tensors that a term is computed from by a learned contraction, as bits."""
    return scanner.reach_of(term.node) & scanner.anchored_of(term.node)


def _mixes_lanes(scanner: Scanner, node: fx.Node) -> bool:
    """Whether ``node`` multiplies two computed tensors, as the lanes of a state by their weights."""
    inputs = node.all_input_nodes
    contracts = ops.name_of(node) in ops.CONTRACTIONS and len(inputs) == 2
    return contracts and not any(scanner.values.is_constant(operand) for operand in inputs)
