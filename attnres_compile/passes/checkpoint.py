"""Activation-checkpointed regions: opened for the other passes, closed again afterwards.

dynamo captures a checkpointed call as one op over a body graph. A stream that runs through such bodies is seen
only when they are opened. Each node then remembers its region; what rewriting adds goes to the region of what
reads it (a mix) or of what made it (a partial sum), and closing finds each region's new operands and results by
definition and use. What a region does not return is recomputed, as before.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import operator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from attnres_compile.errors import LoweringError
from attnres_compile.passes import ops
from attnres_compile.passes.normal_forms import normalise

# Key in ``node.meta`` of the region that a node belongs to.
REGION = "attnres_region"


@dataclass(frozen=True)
class Region:
    """A region that was opened: what calls its body, how, what the body says of itself, and which region holds it."""

    target: Any
    kwargs: dict[str, Any]
    meta: dict[str, Any]
    body_meta: dict[str, Any]
    parent: int | None = None


def open_regions(module: fx.GraphModule) -> list[Region]:
    """Put the bodies of checkpointed regions in place of their calls, in ``module.graph``, from the outside in.

    A region whose body calls modules stays closed. Steps that are spelt over several operators, in regions or
    outside, are put into normal form.

    Returns:
        The regions, by the number that their nodes carry in ``meta``: that of the innermost one. A region that holds
        another one has the lower number.
    """
    regions: list[Region] = []
    waiting = collections.deque(module.graph.nodes)
    while waiting:
        node = waiting.popleft()
        if ops.name_of(node) not in ops.CHECKPOINTS or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        body = _body(module, node.args[0])
        if body is None or any(n.op == "call_module" for n in body.graph.nodes):
            continue
        if any(user.target is not operator.getitem for user in node.users):
            continue
        regions.append(Region(node.target, dict(node.kwargs), dict(node.meta), dict(body.meta), node.meta.get(REGION)))
        waiting.extendleft(reversed(_inline(module, node, body, len(regions) - 1)))
    normalise(module.graph)
    return regions


def _body(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    body = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    return body if isinstance(body, fx.GraphModule) else None


def _inline(module: fx.GraphModule, call: fx.Node, body: fx.GraphModule, number: int) -> list[fx.Node]:
    """Put ``body`` in the place of ``call``; returns the nodes that it became."""
    graph = module.graph
    inner = [node for node in body.graph.nodes if node.op == "placeholder"]
    values: dict[fx.Node, Any] = dict(zip(inner, call.args[1:], strict=True))
    made: list[fx.Node] = []
    results: Any = ()
    with graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                results = fx.map_arg(node.args[0], lambda n: values[n])
                continue
            copied = graph.node_copy(node, lambda n: values[n])
            copied.meta = {**node.meta, REGION: number}
            if node.op == "get_attr":
                copied.target = _adopt(module, body, node)
                if _body(module, copied) is None:
                    # A constant is no matter of recomputation: it is made outside, and handed in.
                    del copied.meta[REGION]
            values[node] = copied
            made.append(copied)
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    attribute = call.all_input_nodes[0]
    graph.erase_node(call)
    if not attribute.users:
        graph.erase_node(attribute)
    return made


def _adopt(module: fx.GraphModule, body: fx.GraphModule, node: fx.Node) -> str:
    """Give ``module`` the attribute that ``node`` reads from ``body``; returns its name there."""
    value = operator.attrgetter(str(node.target))(body)
    name = next(
        name for at in itertools.count() if not hasattr(module, name := f"{node.target}_{at}".replace(".", "_"))
    )
    if isinstance(value, nn.Module):
        module.add_submodule(name, value)
    else:
        setattr(module, name, value)
    return name


def close_regions(module: fx.GraphModule, regions: list[Region]) -> None:
    """Fold each region of ``module.graph`` into a checkpointed call again, from the inside out."""
    if not regions:
        return
    members = _members(module.graph)
    holders = {region.parent for region in regions}
    for number in reversed(range(len(regions))):
        if number in holders:
            # Calls of the regions in this one came into it.
            _sort(module.graph)
            members = _members(module.graph)
        if number in members:
            _fold(module, regions[number], members[number], number)
    _sort(module.graph)
    module.delete_all_unused_submodules()
    module.recompile()


def _members(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """The nodes of each region, those of regions inside it left out, in order."""
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if REGION in node.meta:
            found.setdefault(node.meta[REGION], []).append(node)
    return found


def _fold(module: fx.GraphModule, region: Region, nodes: list[fx.Node], number: int) -> None:
    graph = module.graph
    inside = set(nodes)
    operands = list(dict.fromkeys(i for node in nodes for i in node.all_input_nodes if i not in inside))
    results = [node for node in nodes if any(user not in inside for user in node.users)]
    body = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for operand in operands:
        values[operand] = body.placeholder(operand.name)
        values[operand].meta = {k: v for k, v in operand.meta.items() if k in ("example_value", "val")}
    for node in nodes:
        values[node] = body.node_copy(node, lambda n: values[n])
        values[node].meta = {k: v for k, v in node.meta.items() if k != REGION}
    body.output(tuple(values[node] for node in results))
    # Bodies of the regions that this one holds go into it.
    held = {str(node.target): getattr(module, str(node.target)) for node in nodes if node.op == "get_attr"}
    inner = fx.GraphModule(held, body)
    inner.meta = dict(region.body_meta)
    name = f"attnres_region_{number}"
    module.add_submodule(name, inner)
    with graph.inserting_after(nodes[-1]):
        attribute = graph.get_attr(name)
    with graph.inserting_after(attribute):
        call = graph.call_function(region.target, (attribute, *operands), region.kwargs)
    call.meta = dict(region.meta)
    outer = {} if region.parent is None else {REGION: region.parent}
    attribute.meta = dict(outer)
    key = "example_value" if "example_value" in nodes[-1].meta else "val"
    call.meta[key] = tuple(node.meta.get(key) for node in results)
    last = call
    for index, node in enumerate(results):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (call, index))
        last.meta = {k: v for k, v in node.meta.items() if k != REGION} | outer
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        graph.erase_node(node)


def _sort(graph: fx.Graph) -> None:
    """Put every node behind its operands, and otherwise leave the order as it is."""
    nodes = list(graph.nodes)
    place = {node: at for at, node in enumerate(nodes)}
    waiting = {node: len(node.all_input_nodes) for node in nodes}
    ready = [place[node] for node in nodes if not waiting[node]]
    heapq.heapify(ready)
    ordered: list[fx.Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        ordered.append(node)
        for user in node.users:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, place[user])
    if len(ordered) < len(nodes):
        stuck = next(node for node in nodes if waiting[node])
        raise LoweringError(
            f"a checkpointed region would have to run before and after {stuck.name!r}",
            remedy="Please report this with the model; turning checkpointing off avoids it",
        )
    for before, node in itertools.pairwise(ordered):
        before.append(node)


def make_eager(module: fx.GraphModule) -> None:
    """Let the checkpointed calls of ``module`` run as such without a compiler.

    The op itself leaves the random state to the compiler: run op by op, dropout would draw other numbers when it is
    recomputed than it drew at first.
    """
    for node in module.graph.nodes:
        if ops.name_of(node) not in ops.CHECKPOINTS or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        body = _body(module, node.args[0])
        if body is None:
            continue
        graph = fx.Graph()
        graph.output(graph.graph_copy(body.graph, {}))
        own = fx.GraphModule(body, graph)
        own.meta = dict(body.meta)
        make_eager(own)
        own.recompile()
        setattr(module, str(node.args[0].target), own)
        node.target = _recomputed


def _recomputed(body: fx.GraphModule, *operands: Any, **kwargs: Any) -> Any:
    known = ("preserve_rng_state", "determinism_check", "debug")
    options: dict[str, Any] = {name: kwargs[name] for name in known if name in kwargs}
    if "_checkpoint_context_fn" in body.meta:
        options["context_fn"] = body.meta["_checkpoint_context_fn"]
    return checkpoint(body, *operands, use_reentrant=False, **options)
