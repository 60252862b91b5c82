"""What a higher-order operator (``torch.cond`` and its kin) does inside the graphs that it is called with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx
from torch.utils import _pytree as pytree

from attnres_compile.passes import ops


def learned_operand(
    node: fx.Node, rank: Callable[[fx.Node], int | None], contracts: Callable[[str], bool]
) -> fx.Node | None:
    """The operand of ``node`` that one of its bodies contracts with as a weight, or ``None``.

    Args:
        node: any node; only calls with graph modules among their arguments have bodies.
        rank: of operands as weights; 0 or none for what is no parameter, nor made of parameters alone.
        contracts: whether an operator of this name is a contraction.
    """
    for body, given in _bodies(node):
        # Of each of the body's values that weights alone make, its rank and the operand that it comes from.
        inside: dict[fx.Node, int] = {}
        origin: dict[fx.Node, fx.Node] = {}
        for inner, operand in given.items():
            if (size := rank(operand) or 0) > 0:
                inside[inner], origin[inner] = size, operand
        for inner in body.graph.nodes:
            inputs = inner.all_input_nodes
            known = [i for i in inputs if i in inside]
            if inner.op in ("placeholder", "output") or not known:
                continue
            if len(known) == len(inputs):
                largest = max(known, key=inside.__getitem__)
                inside[inner], origin[inner] = inside[largest], origin[largest]
            elif contracts(ops.name_of(inner)):
                if (weight := next((i for i in known if inside[i] >= 2), None)) is not None:
                    return origin[weight]
            elif (nested := learned_operand(inner, inside.get, contracts)) is not None:
                return origin[nested]
    return None


def _bodies(node: fx.Node) -> Iterator[tuple[fx.GraphModule, dict[fx.Node, fx.Node]]]:
    """Each graph module that ``node`` calls, with what its placeholders are given. Operands stand behind the bodies."""
    owner = node.graph.owning_module
    if node.op != "call_function" or owner is None:
        return
    bodies = {i: getattr(owner, str(i.target), None) for i in node.all_input_nodes if i.op == "get_attr"}
    called = {i: body for i, body in bodies.items() if isinstance(body, fx.GraphModule)}
    if not called:
        return
    flat = pytree.tree_leaves((node.args, node.kwargs))
    operands = [leaf for leaf in flat if isinstance(leaf, fx.Node) and leaf not in called]
    for body in called.values():
        places = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
        if len(operands) >= len(places):
            yield body, dict(zip(places, operands[len(operands) - len(places) :], strict=True))


__all__ = ["learned_operand"]
