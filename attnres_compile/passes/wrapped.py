"""Nodes of a graph whose tensors are no plain ones, which operators of depth attention could not take."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from attnres_compile.passes import facts
from attnres_compile.passes.streams import Reason

# By name: torch has moved these functions between its modules.
_ENTER, _LEAVE = "_vmap_increment_nesting", "_vmap_decrement_nesting"


def wrapped(graph: fx.Graph) -> dict[fx.Node, Reason]:
    """The nodes that compute inside ``torch.vmap``, and those that give nested tensors, each with its reason."""
    found: dict[fx.Node, Reason] = {}
    level = 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        level += (name == _ENTER) - (name == _LEAVE)
        if level:
            found[node] = Reason.UNDER_VMAP
        elif (value := facts.tensor(node)) is not None and value.is_nested:
            found[node] = Reason.NESTED_TENSOR
    return found


def first_reason(nodes: Iterable[fx.Node], reasons: dict[fx.Node, Reason]) -> Reason | None:
    """The reason of the first of ``nodes`` that has one."""
    return next((reasons[node] for node in nodes if node in reasons), None)


__all__ = ["first_reason", "wrapped"]
