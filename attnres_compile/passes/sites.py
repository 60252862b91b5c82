"""What the passes behind rewriting share: the nodes of depth attention, their marks, and moving what they need."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from attnres_compile.config import AttnResConfig, Choice
from attnres_compile.kernels.plain import compute_dtype
from attnres_compile.passes import facts, ops
from attnres_compile.passes.memory import Memory
from attnres_compile.passes.writes import written

# Key in ``node.meta`` of a node's :class:`Mark`.
SITE = "attnres_site"
# Beside adds, casts and products: what an expression over parameters alone may be made of to be moved.
_MOVABLE = ops.CASTS | ops.ADDS | ops.SUBS | ops.SCALES | ops.RESHAPES | ops.COPIES
_LONGEST_MOVE = 8


@dataclass(frozen=True)
class Mark:
    """Which site a node computes, for the passes that come after rewriting.

    Attributes:
        name: of the site.
        stream: of its stream.
        blocks: number of finished blocks that it reads.
        partial: its last source is the sum of the block in progress.
        two_phase, fuse: what its configuration says, see :class:`~attnres_compile.config.AttnResConfig`.
    """

    name: str
    stream: str = ""
    blocks: int = 0
    partial: bool = False
    two_phase: Choice = "auto"
    fuse: Choice = "auto"


def mark(node: fx.Node) -> Mark:
    """The mark of a site; a site in a graph that nobody rewrote is named like its node, and left to ``auto``."""
    found = node.meta.get(SITE)
    return found if isinstance(found, Mark) else Mark(node.name)


def graphs(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """``gm`` and the bodies of its higher-order operators."""
    return [module for module in gm.modules() if isinstance(module, fx.GraphModule)]


def operator_name(node: fx.Node) -> str:
    """``namespace::name`` of the operator that a node calls, of any overload, or ``""``."""
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return node.target._qualified_op_name
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node that calls one of our operators by name, however the node spells them."""
    target: Any = node.target
    schema = (target.default if isinstance(target, torch._ops.OpOverloadPacket) else target)._schema
    names = [argument.name for argument in schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def key(node: fx.Node) -> str:
    """Where the graph's dialect keeps tensor facts."""
    return "example_value" if "example_value" in node.meta else "val"


def features_last(value: Tensor, dim: int) -> bool:
    """Whether dimension ``dim`` is the last one and contiguous; asks nothing about other sizes and strides."""
    return dim % value.dim() == value.dim() - 1 and value.stride(dim) == 1


def features(given: Mapping[str, Any], value: Tensor) -> int:
    """Size of the feature dimension, from a query where that is a parameter: asking a source may add a guard."""
    query = facts.tensor(given["query"] if "query" in given else given["queries"][0])
    size = query.shape[0] if query is not None else value.shape[given["dim"]]
    return int(size)


def served_by_kernels(node: fx.Node, config: AttnResConfig) -> bool:
    """Whether the generated kernels run this site, by its first source: device, dtype, layout and lowering."""
    if config.lowering == "eager":
        return False
    given = arguments(node)
    sources = given.get("sources") or [given["partial"]]
    value = facts.tensor(sources[0])
    if value is None or value.device.type != "cuda" or not features_last(value, given["dim"]):
        return False
    return kernels_for(value.dtype, features(given, value), value.device)


def kernels_for(dtype: torch.dtype, dim_size: int, device: torch.device) -> bool:
    """Whether generated kernels exist for rows of ``dim_size`` features of ``dtype`` on ``device``."""
    if device.type != "cuda":
        return False
    try:
        from attnres_compile.kernels import launch
    except ImportError:  # Triton is not on every platform.
        return False
    return bool(launch.served(dtype, dim_size, device))


def chosen(choice: Choice, served: bool) -> bool:
    """What ``"auto"``, ``"on"`` or ``"off"`` comes to where generated kernels do or do not serve."""
    return choice == "on" or (choice == "auto" and served)


def trains(gm: fx.GraphModule) -> bool:
    """Whether gradients will be asked for: of something that comes into the graph, where gradients are recorded."""
    inputs = [facts.tensor(node) for node in gm.graph.nodes if node.op in ("placeholder", "get_attr")]
    return torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in inputs)


# ------------------------------------------------------------------ new nodes


def emit(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, value: Any) -> fx.Node:
    """A call with the meta of ``like`` and a tensor fact (or several) of its own."""
    node = graph.call_function(target, args)
    node.meta = {name: entry for name, entry in like.meta.items() if name not in ("example_value", "val")}
    node.meta[key(like)] = value
    return node


def items(graph: fx.Graph, call: fx.Node, values: Sequence[Any], like: fx.Node) -> list[fx.Node]:
    """One node per result of ``call``; the call's own fact becomes the list of theirs."""
    call.meta[key(like)] = list(values)
    return [emit(graph, operator.getitem, (call, index), like, value) for index, value in enumerate(values)]


def fresh(node: fx.Node) -> Tensor | None:
    """A tensor fact like that of ``node``, of its own memory: one fake tensor at two nodes reads as one value."""
    value = facts.tensor(node)
    return None if value is None else torch.empty_like(value, memory_format=torch.contiguous_format)


def fresh_statistic(node: fx.Node, dim: int) -> Tensor | None:
    """A tensor fact for one number per token of ``node``."""
    value = facts.tensor(node)
    if value is None:
        return None
    shape = list(value.shape)
    del shape[dim % value.dim()]
    return value.new_empty(shape, dtype=compute_dtype(value.dtype))


# ------------------------------------------------------------------ moving


def is_idle_cast(node: fx.Node) -> bool:
    """Whether ``node`` casts a tensor to what it is already; exported graphs are full of these."""
    if ops.name_of(node) not in ops.CASTS or not node.all_input_nodes:
        return False
    if len(node.args) > 2 or set(node.kwargs) - {"dtype"}:
        return False
    before, after = facts.tensor(node.all_input_nodes[0]), facts.tensor(node)
    return before is not None and after is not None and (before.dtype, before.device) == (after.dtype, after.device)


def movable(node: fx.Node, before: fx.Node, memory: Memory) -> list[fx.Node] | None:
    """The nodes to move so that ``node`` stands before ``before``, in order; ``None`` where it cannot.

    Only what is computed from parameters, constants and earlier nodes moves, and only over nodes that write nothing.
    """
    found: dict[fx.Node, None] = {}

    def visit(each: fx.Node) -> bool:
        if each < before or each in found:
            return True
        pure = each.op == "get_attr" or (
            each.op in ("call_function", "call_method") and ops.name_of(each) in _MOVABLE and not written(each)
        )
        if not pure or len(found) >= _LONGEST_MOVE or not all(visit(operand) for operand in each.all_input_nodes):
            return False
        found[each] = None
        return True

    if not visit(node):
        return None
    read = [operand for each in found for operand in (each, *each.all_input_nodes)]
    return None if found and memory.written_between(before, node, read) else list(found)


def move(nodes: Sequence[fx.Node], before: fx.Node) -> None:
    """Put ``nodes`` right before ``before``, in their order."""
    for node in nodes:
        before.prepend(node)
