"""Where in a graph gradients are recorded, by what ``no_grad``, ``set_grad_enabled`` and ``inference_mode`` leave."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

_ENTER: object = torch.autograd.grad_mode._enter_inference_mode
_EXIT: object = torch.autograd.grad_mode._exit_inference_mode


def is_switch(node: fx.Node) -> bool:
    """Whether ``node`` changes whether gradients are recorded."""
    return node.op == "call_function" and any(
        node.target is each for each in (torch._C._set_grad_enabled, _ENTER, _EXIT)
    )


def unrecorded(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that record no gradient in a graph that begins with gradients recorded."""
    found: set[fx.Node] = set()
    enabled, before = True, dict[fx.Node, bool]()
    for node in graph.nodes:
        if is_switch(node):
            if node.target is torch._C._set_grad_enabled:
                enabled = bool(node.args[0])
            elif node.target is _ENTER:
                before[node] = enabled
                # Leaving inference mode by it records again.
                enabled = not (node.args[0] if node.args else True)
            else:
                entered = node.args[0]
                enabled = before.get(entered, True) if isinstance(entered, fx.Node) else True
        elif not enabled:
            found.add(node)
    return found


def switched_between(first: fx.Node, last: fx.Node) -> bool:
    """Whether it changes from ``first`` to ``last``, which stands behind it, what records gradients."""
    node = first
    while node is not last and node.op != "root":
        if is_switch(node):
            return True
        node = node.next
    return False


def apart(nodes: Iterable[fx.Node], off: set[fx.Node]) -> bool | None:
    """Whether all of ``nodes`` record no gradient; ``None`` where some do and some do not."""
    found = {node in off for node in nodes}
    return found.pop() if len(found) == 1 else None


__all__ = ["apart", "is_switch", "switched_between", "unrecorded"]
