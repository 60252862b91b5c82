"""A site with the residual add before it and the norm after it -> one ``attnres::site``.

The add is fused where the site is the first to read the new sum: its kernel then writes the sum, and all later readers
take it from there. The norm is fused where it is all that reads the site, over the features, in the sources' dtype
(:mod:`norms`). Whatever is left alone is so for a reason that is given. Fused values differ in the rounding of values
in between, and in nothing else.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from attnres_compile.config import AttnResConfig
from attnres_compile.passes import facts, norms, ops, sites
from attnres_compile.passes.gradients import switched_between
from attnres_compile.passes.memory import Memory
from attnres_compile.passes.norms import Norm
from attnres_compile.passes.record import watched
from attnres_compile.report import Fusion

_SITES = ("attnres::mix", "attnres::merge")
_SITE = torch.ops.attnres.site.default
_BRANCHES = (torch.float32, torch.float16, torch.bfloat16)


@watched("fuse_norm")
def fuse_norm(gm: fx.GraphModule, config: AttnResConfig) -> tuple[Fusion, ...]:
    """Fuse what stands beside the sites of ``gm``, editing it in place.

    Args:
        gm: a rewritten graph, with facts of its tensors in the nodes' meta.
        config: tells the lowering; whether to fuse is in each site's mark.

    Returns:
        For every site what was fused, and why not.
    """
    found: list[Fusion] = []
    for module in sites.graphs(gm):
        listed = [node for node in module.graph.nodes if sites.operator_name(node) in _SITES]
        memory = Memory(module.graph) if listed else None
        for site in listed:
            assert memory is not None
            found.append(_fuse(module, site, config, memory))
        if listed:
            module.graph.lint()
            module.recompile()
    return tuple(found)


def _fuse(module: fx.GraphModule, site: fx.Node, config: AttnResConfig, memory: Memory) -> Fusion:
    mark = sites.mark(site)
    given = sites.arguments(site)
    value = facts.tensor(site)
    if not sites.chosen(mark.fuse, sites.served_by_kernels(site, config)):
        why = 'fuse="off"' if mark.fuse == "off" else "no generated kernel runs this site"
        return Fusion(mark.name, "", False, why, why)
    if value is None or given["dim"] % value.dim() != value.dim() - 1:
        why = "the features are not in the last dimension"
        return Fusion(mark.name, "", False, why, why)
    norm = _norm(site, memory)
    add = _add(site, given, memory)
    found = Fusion(
        mark.name,
        norm.kind if isinstance(norm, Norm) else "",
        isinstance(add, _Add),
        norm if isinstance(norm, str) else "",
        add if isinstance(add, str) else "",
    )
    if found.norm or found.add:
        kept = norm if isinstance(norm, Norm) else None, add if isinstance(add, _Add) else None
        _replace(module, site, given, *kept, memory)
    return found


# ------------------------------------------------------------------ what may be fused


def _norm(site: fx.Node, memory: Memory) -> Norm | str:
    norm = norms.match(site)
    if isinstance(norm, str):
        return norm
    vectors = [vector for vector in (norm.weight, norm.bias) if isinstance(vector, fx.Node)]
    if any(sites.movable(vector, site, memory) is None for vector in vectors):
        return "the norm's parameters are computed after the site"
    if switched_between(site, norm.out):
        return "gradients are switched between the site and the norm"
    write = memory.written_between(site, norm.out, [site, *norm.inside, *vectors])
    return f"{write.name} writes into what the norm reads" if write is not None else norm


@dataclass(frozen=True)
class _Add:
    """The add that makes a site's last source: its node, what it adds to, and what it adds."""

    node: fx.Node
    so_far: fx.Node
    branch: fx.Node


def _add(site: fx.Node, given: dict[str, Any], memory: Memory) -> _Add | str:
    """The add whose result is the last source of ``site``, if the site may do it; or why not."""
    sources = given.get("sources") or [given["partial"]]
    node = sources[-1]
    if ops.name_of(node) not in ops.ADDS or len(node.args) != 2 or node.kwargs:
        return "its last source is no sum"
    so_far, branch = node.args
    if not isinstance(so_far, fx.Node) or not isinstance(branch, fx.Node) or so_far is branch:
        return "its last source is no sum of two tensors"
    if node in sources[:-1] or any(user is not site and user < site for user in node.users):
        return "something reads the sum before the site does"
    total, first, second = (facts.tensor(each) for each in (node, so_far, branch))
    if total is None or first is None or second is None:
        return "a shape of the sum is not known"
    if not (facts.same_shape(first.shape, total.shape) and facts.same_shape(second.shape, total.shape)):
        return "the sum broadcasts"
    if ops.name_of(branch) in ("expand", "expand_as", "broadcast_to"):
        return "the sum broadcasts"
    if first.dtype != total.dtype or second.dtype != total.dtype:
        return "the sum changes the dtype"
    if switched_between(node, site):
        return "gradients are switched between the sum and the site"
    write = memory.written_between(node, site, [node, so_far, branch])
    if write is not None:
        return f"{write.name} writes into what the sum reads"
    return _Add(node, so_far, _uncast(branch, node, memory))


def _uncast(branch: fx.Node, add: fx.Node, memory: Memory) -> fx.Node:
    """What a cast before the add was made of: the kernel adds in its own precision anyway."""
    if ops.name_of(branch) not in ops.CASTS or set(branch.users) != {add} or not branch.all_input_nodes:
        return branch
    before, after = facts.tensor(branch.all_input_nodes[0]), facts.tensor(branch)
    if before is None or after is None or before.dtype not in _BRANCHES or after.dtype not in _BRANCHES:
        return branch
    if before.device != after.device or not facts.same_shape(before.shape, after.shape):
        return branch
    if memory.written_between(branch, add, [branch.all_input_nodes[0]]) is not None:
        return branch
    return branch.all_input_nodes[0]


# ------------------------------------------------------------------ surgery


def _replace(
    module: fx.GraphModule, site: fx.Node, given: dict[str, Any], norm: Norm | None, add: _Add | None, memory: Memory
) -> None:
    graph = module.graph
    sources = list(given.get("sources") or [given["partial"]])
    if add is not None:
        sources[-1] = add.so_far
    vectors: list[fx.Node | None] = []
    for vector in (norm.weight, norm.bias) if norm is not None else (None, None):
        if isinstance(vector, fx.Node):
            sites.move(sites.movable(vector, site, memory) or [], site)
        vectors.append(_attribute(module, site, vector) if isinstance(vector, str) else vector)
    options = tuple(given[name] for name in ("dim", "eps", "gain", "scale", "normalized"))
    arguments = (
        given["query"],
        sources,
        given.get("mixed"),
        given.get("lse"),
        add.branch if add is not None else None,
        *vectors,
        norm.kind if norm is not None else "",
        norm.eps if norm is not None else 0.0,
        *options,
        False,
    )
    values = [sites.fresh(site), sites.fresh(site)][: 1 + (add is not None)]
    with graph.inserting_before(site):
        call = sites.emit(graph, _SITE, arguments, site, values)
        results = sites.items(graph, call, values, call)
    for result in results:
        result.meta.pop(sites.SITE, None)
    if norm is not None:
        norm.out.replace_all_uses_with(results[0])
        memory.replaced(norm.out, results[0])
    # What is left of its users asks for a shape.
    site.replace_all_uses_with(results[0], delete_user_cb=lambda user: norm is None or user not in norm.inside)
    memory.replaced(site, results[0])
    if norm is not None:
        for node in reversed(norm.inside):
            graph.erase_node(node)
    graph.erase_node(site)
    if add is not None:
        add.node.replace_all_uses_with(results[1], delete_user_cb=lambda user: user is not call)
        memory.replaced(add.node, results[1])
        branch = add.node.args[1]
        graph.erase_node(add.node)
        if isinstance(branch, fx.Node) and branch is not add.branch:
            graph.erase_node(branch)


def _attribute(module: fx.GraphModule, site: fx.Node, path: str) -> fx.Node:
    """A node for a parameter of a module that the graph called as a whole."""
    parameter: Any = operator.attrgetter(path)(module)
    like = facts.tensor(site)
    mode = getattr(like, "fake_mode", None)
    with module.graph.inserting_before(site):
        node = module.graph.get_attr(path)
    node.meta[sites.key(site)] = mode.from_tensor(parameter) if mode is not None else parameter
    assert isinstance(parameter, (torch.Tensor, nn.Parameter))
    return node
