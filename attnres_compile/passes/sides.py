"""An add as it was understood, and one operand of an add with the questions that decide which one is the skip."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import fx

from attnres_compile.passes import facts, ops
from attnres_compile.passes.sites import is_idle_cast
from attnres_compile.passes.streams import Term
from attnres_compile.passes.writes import written

if TYPE_CHECKING:
    from attnres_compile.passes.scan import Scanner


@dataclass
class AddRecord:
    """An add as it was understood. ``skip`` is ``None`` where it is no residual step."""

    node: fx.Node
    terms: list[Term]
    skip: fx.Node | None = None
    base: fx.Node | None = None
    adds: list[fx.Node] = field(default_factory=list)
    inner: list[fx.Node] = field(default_factory=list)
    anchored: bool = False
    # An interpolation: both operands are weighted, so that neither is carried on whole.
    gated: bool = False
    # Earlier steps on the same state that this one's branch is computed from.
    fed_by: list[fx.Node] = field(default_factory=list)


class Side:
    """One operand of an add: the tensor itself, or an unread step opened into its skip and its terms.

    ``reader`` is the node that takes the operand: the add itself, or the stack in front of it.
    """

    def __init__(self, scanner: Scanner, term: Term, reader: fx.Node, add: fx.Node) -> None:
        self.scanner = scanner
        self.term = term
        out = scanner.out
        node = term.node
        alone = term.product is None and list(node.users) == [reader] and not _twice(reader, node)
        # sum([x + f, g]) is 0 + (x + f) + g; a move to the device where a tensor is changes nothing either.
        self.zeros: list[fx.Node] = []
        while alone and (behind := _unchanged(node)) is not None and list(behind.users) == [node]:
            self.zeros.insert(0, node)
            node = behind
        record = out.steps.get(node, scanner.loose.get(node)) if alone and term.factor == 1.0 else None
        if record is not None and (record.gated or not _same_type(node, add)):
            record = None
        self.opened = record
        self.unread_add = node if alone and record is None and node in out.rejections else None

    def close(self) -> None:
        """Take the operand as one tensor after all."""
        if self.opened is not None and self.opened.node in self.scanner.loose:
            self.unread_add = self.opened.node
        self.opened = None

    @property
    def head(self) -> fx.Node:
        """The tensor that would be the skip."""
        if self.opened is not None and self.opened.skip is not None:
            return self.opened.skip
        return self.term.node

    @property
    def head_factor(self) -> float:
        return self.term.factor if self.opened is None else 1.0

    @property
    def factors(self) -> tuple[fx.Node, ...]:
        """The tensors that the operand is made of."""
        return (self.term.node, self.term.product[1]) if self.term.product else (self.term.node,)

    @property
    def rest(self) -> list[Term]:
        """What is left of this side when its head is the skip."""
        return list(self.opened.terms) if self.opened is not None else []

    @property
    def terms(self) -> list[Term]:
        """This side as part of a branch."""
        if self.opened is None:
            return [self.term]
        return [Term(self.head), *self.opened.terms]

    @property
    def is_state(self) -> bool:
        """Whether the head is a state of a stream with a learned branch so far."""
        if self.opened is not None and self.opened.node in self.scanner.out.steps:
            return True
        return self.term.product is None and self.scanner.out.base[self.head] in self.scanner.out.steps

    def carries(self, other: Side) -> bool:
        """Whether this side can be the skip of a step whose branch is the other side."""
        if self.opened is not None and self.opened.node in self.scanner.out.steps:
            return True
        return self.term.product is None and self.reaches(other)

    def reaches(self, other: Side) -> bool:
        """Whether the other side is computed from this side's head."""
        scanner = self.scanner
        bit = scanner.bits.bit.get(scanner.out.base[self.head], 0)
        if scanner.out.base[self.head] is scanner.out.base[other.term.node] and not other.term.product:
            return False
        return any(scanner.reach_of(factor) & bit for factor in other.factors)


def _unchanged(node: fx.Node) -> fx.Node | None:
    """What ``node`` hands on as it is, or ``None``."""
    idle = is_idle_cast(node) or (ops.name_of(node) in ops.DROPOUTS and ops.dropout_is_identity(node))
    if idle and not written(node) and facts.is_float(node):
        return node.all_input_nodes[0]
    return ops.adds_zero(node)


def _twice(add: fx.Node, node: fx.Node) -> bool:
    return sum(argument is node for argument in add.args) > 1


def _same_type(node: fx.Node, add: fx.Node) -> bool:
    a, b = facts.tensor(node), facts.tensor(add)
    return a is not None and b is not None and a.dtype == b.dtype and facts.same_shape(a.shape, b.shape)
