"""Graph modules (``torch.fx.symbolic_trace``, ``torch.export``) as converted models.

The graph of one is run in more ways than by its ``forward``: interpreters, exporters and copies read it. So it says
itself where it may run, by its first node.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx, nn

from attnres_compile import calls, tracers
from attnres_compile.conversion import ConvertedForward
from attnres_compile.errors import PlainExecutionError
from attnres_compile.parameters import CHILD


@calls.asked_while_traced
def only_in_a_converted_call(key: str) -> None:
    """The first node of a converted graph module's graph.

    Args:
        key: of the converted module.

    Raises:
        PlainExecutionError: the graph runs without the depth attention of its module.
    """
    if not (calls.is_running(key) or calls.is_plain(key) or calls.is_marked(key)):
        traced = any(True for _ in calls.traced_codes())
        raise refusal(traced)


def refusal(traced: bool = False) -> PlainExecutionError:
    """The error for all that reads the graph of a converted graph module."""
    return tracers.refusal("a copy, an interpreter or an exporter of a torch.fx.GraphModule", traced, _REMEDY)


def convert(owner: nn.Module, method: ConvertedForward) -> None:
    """See to a module that was converted by ``method``, where it is a graph module."""
    if not isinstance(owner, fx.GraphModule):
        return
    # Deep copies have no other attributes than those that the graph names, and these.
    kept: dict[str, Any] = owner.meta.setdefault(_PRESERVED, {})
    kept.update({CHILD: owner._modules[CHILD], method.name: method})
    first = next(node for node in owner.graph.nodes if node.op != "placeholder")
    with owner.graph.inserting_before(first):
        owner.graph.call_function(only_in_a_converted_call, (method.key,))
    owner.recompile()


def revert(owner: nn.Module, names: Iterable[str]) -> None:
    """Take back what :func:`convert` did for methods of these names."""
    if not isinstance(owner, fx.GraphModule):
        return
    kept = owner.meta.get(_PRESERVED, {})
    for name in (CHILD, *names):
        kept.pop(name, None)
    if not kept:
        owner.meta.pop(_PRESERVED, None)
    for node in owner.graph.find_nodes(op="call_function", target=only_in_a_converted_call):
        owner.graph.erase_node(node)
    owner.recompile()


_REMEDY = (
    "Call the module itself, or a copy.deepcopy of it; or revert it, and use attnres_compile.rewrite_graph and "
    "attnres_compile.export_program on the plain graph"
)
_PRESERVED = fx.graph_module._USER_PRESERVED_ATTRIBUTES_KEY

__all__ = ["convert", "only_in_a_converted_call", "revert"]
