"""``attnres::mix`` sites of one block -> one ``attnres::inter`` over the finished blocks, and ``attnres::merge`` each.

The queries are parameters, so what a site attends to among finished blocks can be computed for all sites of the block
in progress at once, before the first of them (arXiv 2603.15031, Algorithm 1). Whether that moves fewer bytes is
counted (:mod:`traffic`) per block: with few finished blocks it does not. Sites belong together that read the same
nodes as finished sources; a stream that is cast or laid out anew between two sites has others. Checkpointed regions
are graphs of their own by the time of this pass, so no phase 1 reaches out of the region whose sites need it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from attnres_compile.config import AttnResConfig, Choice
from attnres_compile.passes import facts, sites
from attnres_compile.passes.checkpoint import REGION
from attnres_compile.passes.memory import Memory
from attnres_compile.passes.plan import BlockPlan, SitePlan
from attnres_compile.passes.record import watched
from attnres_compile.passes.sites import Mark
from attnres_compile.passes.traffic import Sites, direct_bytes, two_phase_bytes
from attnres_compile.passes.writes import written
from attnres_compile.report import Phase

aten = torch.ops.aten
_MIX = "attnres::mix"
_INTER = torch.ops.attnres.inter.default
_MERGE = torch.ops.attnres.merge.default


@watched("two_phase")
def two_phase(gm: fx.GraphModule, config: AttnResConfig) -> tuple[Phase, ...]:
    """Group the sites of ``gm``, editing it in place.

    Args:
        gm: a rewritten graph, with facts of its tensors in the nodes' meta. Sites without a mark (see
            :class:`~attnres_compile.passes.sites.Mark`) stay as they are.
        config: tells the lowering; whether to group is in each site's mark.

    Returns:
        What was counted and chosen, for every set of sites over the same finished blocks.
    """
    found: list[Phase] = []
    training = sites.trains(gm)
    for module in sites.graphs(gm):
        changed = False
        memory: Memory | None = None
        for group in _groups(module.graph):
            phase = _decide(group, config, training)
            if phase.applies and phase.chosen == "two_phase":
                memory = memory or Memory(module.graph)
                problem = _prepare(group, memory)
                if problem:
                    phase = _left(phase, problem)
                else:
                    _split(module.graph, group, memory)
                    changed = True
            found.append(phase)
        if changed:
            module.graph.lint()
            module.recompile()
    return tuple(found)


@dataclass
class _Group:
    """Sites over the same finished sources, in the graph's order."""

    base: tuple[fx.Node, ...]
    members: list[tuple[fx.Node, dict[str, Any], Mark]] = field(default_factory=list)


def _groups(graph: fx.Graph) -> list[_Group]:
    found: dict[Hashable, _Group] = {}
    for node in graph.nodes:
        mark = node.meta.get(sites.SITE)
        if sites.operator_name(node) != _MIX or not isinstance(mark, Mark):
            continue
        given = sites.arguments(node)
        base = tuple(map(_uncast, given["sources"][:-1] if mark.partial else given["sources"]))
        options = (given["dim"], given["eps"], given["scale"], given["normalized"])
        group = found.setdefault((mark.stream, mark.two_phase, base, options), _Group(base))
        group.members.append((node, given, mark))
    return list(found.values())


def _uncast(source: fx.Node) -> fx.Node:
    """The source before casts that change nothing, which may stand between two sites."""
    while sites.is_idle_cast(source):
        source = source.all_input_nodes[0]
    return source


def _decide(group: _Group, config: AttnResConfig, training: bool) -> Phase:
    first, given, mark = group.members[0]
    value = facts.tensor(group.base[0])
    partials = sum(each.partial for _, _, each in group.members)
    counted = Sites(
        len(group.base),
        partials,
        len(group.members) - partials,
        0 if value is None else sites.features(given, value),
        0 if value is None else value.itemsize,
        training,
    )
    served = all(sites.served_by_kernels(node, config) for node, _, _ in group.members)
    names = tuple(each.name for _, _, each in group.members)
    if value is None:
        return _choose(mark.stream, mark.blocks, names, counted, "off", served, f"no shape is known for {first.name}")
    return _choose(mark.stream, mark.blocks, names, counted, mark.two_phase, served)


def _choose(
    stream: str, blocks: int, names: tuple[str, ...], counted: Sites, choice: Choice, served: bool, why: str = ""
) -> Phase:
    """The one place that decides: sites alone stay as they are, then the configuration, then the bytes."""
    known = counted.dim and counted.itemsize
    direct, both = (direct_bytes(counted), two_phase_bytes(counted)) if known else (0, 0)
    fewer = both < direct
    if counted.count < 2:
        chosen, applies, reason = "direct", True, "one site alone reads these blocks"
    elif choice != "auto":
        chosen, applies = "two_phase" if choice == "on" else "direct", True
        reason = why or f'two_phase="{choice}"'
    else:
        chosen, applies = "two_phase" if fewer else "direct", served or not fewer
        reason = "fewer bytes" if fewer else "the direct form moves no more bytes"
        if not applies:
            reason += ", where generated kernels run; here each site runs by itself"
    return Phase(stream, blocks + 1, names, counted.sources, direct, both, counted.training, chosen, applies, reason)


def _left(phase: Phase, reason: str) -> Phase:
    values = {**phase.__dict__, "chosen": "direct", "reason": reason}
    return Phase(**values)


# ------------------------------------------------------------------ surgery


def _prepare(group: _Group, memory: Memory) -> str:
    """Move the queries before the first site; says why that cannot be, or ``""``."""
    first = group.members[0][0]
    moves: dict[fx.Node, None] = {}
    for node, given, mark in group.members:
        wanted = sites.movable(given["query"], first, memory)
        if wanted is None:
            return f"the query of {mark.name} is not there before the block's first site"
        moves.update(dict.fromkeys(wanted))
        if not mark.partial and any(user for user in node.users if node in written(user)):
            return f"what reads {mark.name} writes into it"
    read = [*group.base, *(given["query"] for _, given, _ in group.members)]
    write = memory.written_between(first, group.members[-1][0], read)
    if write is not None:
        return f"{write.name} writes into a source between the block's sites"
    sites.move(list(moves), first)
    return ""


def _split(graph: fx.Graph, group: _Group, memory: Memory) -> None:
    first, given, _ = group.members[0]
    queries = [arguments["query"] for _, arguments, _ in group.members]
    dim, eps, scale, normalized = (given[name] for name in ("dim", "eps", "scale", "normalized"))
    count = len(queries)
    values = [sites.fresh(first) for _ in range(count)]
    values += [sites.fresh_statistic(first, dim) for _ in range(count)]
    with graph.inserting_before(first):
        inter = sites.emit(graph, _INTER, (queries, list(group.base), dim, eps, scale, normalized), first, values)
        del inter.meta[sites.SITE]
        results = sites.items(graph, inter, values, inter)
    for index, (node, arguments, mark) in enumerate(group.members):
        mixed, lse = results[index], results[count + index]
        gain = arguments["gain"]
        with graph.inserting_before(node):
            if mark.partial:
                operands = (arguments["query"], mixed, lse, arguments["sources"][-1])
                options = (dim, eps, gain, scale, normalized)
                new = sites.emit(graph, _MERGE, (*operands, *options), node, sites.fresh(node))
            elif gain != 1.0:
                new = sites.emit(graph, aten.mul.Scalar, (mixed, gain), node, sites.fresh(node))
            else:
                new = mixed
                new.meta[sites.SITE] = mark
        node.replace_all_uses_with(new)
        memory.replaced(node, new)
        graph.erase_node(node)
        if not lse.users:
            graph.erase_node(lse)


# ------------------------------------------------------------------ without a rewritten graph


def predict(plan: BlockPlan, config: AttnResConfig) -> tuple[Phase, ...]:
    """What :func:`two_phase` will count and choose for a stream, from its plan alone.

    Where gradients are being recorded, training is what is counted: the queries want gradients. ``applies`` says
    whether that is what runs on the device that the stream's tensors are on.
    """
    steps = plan.stream.steps
    versions, states = [0], [facts.tensor(plan.stream.root), *(facts.tensor(step.node) for step in steps)]
    for step, before, after in zip(steps, states, states[1:], strict=False):
        relaid = not all(map(sites.is_idle_cast, step.passes))
        anew = relaid or before is None or after is None or before.dtype != after.dtype
        versions.append(versions[-1] + anew)
    found: dict[Hashable, list[SitePlan]] = {}
    for site in plan.sites:
        if site.num_sources > 1:
            region = site.readers[0].meta.get(REGION) if site.readers else None
            found.setdefault((site.blocks, versions[site.index], region), []).append(site)
    return tuple(_predicted(plan, members, config) for members in found.values())


def _predicted(plan: BlockPlan, members: Sequence[SitePlan], config: AttnResConfig) -> Phase:
    first = members[0]
    value = facts.tensor(plan.stream.state(first.index))
    axis = plan.stream.axes[first.index]
    partials = sum(site.partial for site in members)
    counted = Sites(
        1 + first.blocks,
        partials,
        len(members) - partials,
        plan.stream.feature_dim,
        0 if value is None else value.itemsize,
        torch.is_grad_enabled(),
    )
    served = (
        value is not None
        and config.lowering != "eager"
        and axis % value.dim() == value.dim() - 1
        and sites.kernels_for(value.dtype, plan.stream.feature_dim, value.device)
    )
    names = tuple(site.name for site in members)
    return _choose(plan.name, first.blocks, names, counted, config.two_phase, served)
