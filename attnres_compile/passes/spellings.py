"""Every spelling of an add, reduced to its two summands. Looks at one node; knows nothing of streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from attnres_compile.passes import facts, ops
from attnres_compile.passes.streams import Term


@dataclass(frozen=True)
class Sum:
    """What an add node adds.

    Attributes:
        left: a summand.
        right: the other one.
        packed: the ``stack`` that hands both to the node, or ``None``.
        gated: whether the summands share a weight of one (an interpolation), so that neither is the skip.
    """

    left: Term
    right: Term
    packed: fx.Node | None = None
    gated: bool = False

    @property
    def terms(self) -> tuple[Term, Term]:
        """Both summands."""
        return self.left, self.right

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """All that the add ``node`` takes, the summands behind a stack included."""
        return [*node.all_input_nodes, *(self.packed.all_input_nodes if self.packed is not None else ())]


def summands(node: fx.Node) -> Sum | None:
    """The two summands of an add of two floating tensors; ``None`` if ``node`` is none that can be taken apart."""
    if node.op not in ("call_function", "call_method") or not facts.is_float(node) or "out" in node.kwargs:
        return None
    name = ops.name_of(node)
    if name == "sum":
        return _stacked(node)
    if name in ops.FUSED_PRODUCTS:
        return _product(node, ops.FUSED_PRODUCTS[name])
    if name in ops.INTERPOLATIONS:
        sides = _two_tensors(node.args[:2])
        return Sum(Term(sides[0]), Term(sides[1]), gated=True) if sides else None
    if name in ops.ADDS or name in ops.INPLACE_ADDS:
        sign = 1.0
    elif name in ops.SUBS or name in ops.INPLACE_SUBS:
        sign = -1.0
    else:
        return None
    sides = _two_tensors([*node.args, *(node.kwargs[k] for k in ("input", "other") if k in node.kwargs)])
    alpha = node.kwargs.get("alpha", 1)
    if sides is None or not isinstance(alpha, (int, float)):
        return None
    return Sum(Term(sides[0]), Term(sides[1], sign * float(alpha)))


def is_opaque_add(node: fx.Node) -> bool:
    """Whether ``node`` adds floating tensors in a way that :func:`summands` does not take apart."""
    if node.op not in ("call_function", "call_method") or not facts.is_float(node) or summands(node) is not None:
        return False
    name = ops.name_of(node)
    if name == "sum":
        packed = node.args[0] if node.args else None
        return isinstance(packed, fx.Node) and ops.name_of(packed) == "stack" and _sums_stack(node, packed)
    adds = ops.ADDS | ops.SUBS | ops.INPLACE_ADDS | ops.INPLACE_SUBS | ops.FUSED_PRODUCTS.keys() | ops.OPAQUE_ADDS
    return name in adds and sum(facts.is_float(i) for i in node.all_input_nodes) > 1


def _two_tensors(arguments: Any) -> tuple[fx.Node, fx.Node] | None:
    if len(arguments) != 2 or not all(isinstance(a, fx.Node) and facts.is_float(a) for a in arguments):
        return None
    left, right = arguments
    return left, right


def _product(node: fx.Node, product: str) -> Sum | None:
    operands = node.args[:3]
    if len(operands) != 3 or not all(isinstance(a, fx.Node) and facts.is_float(a) for a in operands):
        return None
    first, left, right = operands
    assert isinstance(first, fx.Node) and isinstance(left, fx.Node) and isinstance(right, fx.Node)
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", node.kwargs.get("value", 1))
    if beta != 1 or not isinstance(alpha, (int, float)):
        return None
    return Sum(Term(first), Term(left, float(alpha), (product, right)))


def _stacked(node: fx.Node) -> Sum | None:
    """``stack([x, f], d).sum(d)``."""
    packed = node.args[0] if node.args else None
    if not isinstance(packed, fx.Node) or ops.name_of(packed) != "stack" or list(packed.users) != [node]:
        return None
    items = packed.args[0] if packed.args else None
    if not isinstance(items, (list, tuple)) or not _sums_stack(node, packed):
        return None
    sides = _two_tensors(items)
    if sides is None or sides[0] is sides[1]:
        return None
    return Sum(Term(sides[0]), Term(sides[1]), packed)


def _sums_stack(node: fx.Node, packed: fx.Node) -> bool:
    """Whether ``node`` sums over just the dimension that the stack ``packed`` made."""
    value, total = facts.tensor(packed), facts.tensor(node)
    if value is None or total is None or value.dtype != total.dtype or value.dim() != total.dim() + 1:
        return False
    made = packed.args[1] if len(packed.args) > 1 else packed.kwargs.get("dim", 0)
    over = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis"))
    over = over[0] if isinstance(over, (list, tuple)) and len(over) == 1 else over
    return isinstance(made, int) and isinstance(over, int) and made % value.dim() == over % value.dim()
