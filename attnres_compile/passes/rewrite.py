"""graph + BlockPlan -> graph of ``attnres::mix`` ops. Does the surgery, decides nothing.

The adds of a stream go away; block sums take their place, and every read of a state becomes a mix of the
sources that sum up to it. What happened to the stream on its way (casts, re-layouts, scales) is replayed on
the sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attnres_compile.config import AttnResConfig
from attnres_compile.errors import LoweringError
from attnres_compile.passes import facts, ops
from attnres_compile.passes.checkpoint import REGION
from attnres_compile.passes.plan import BlockPlan, SitePlan
from attnres_compile.passes.record import watched
from attnres_compile.passes.sites import SITE, Mark
from attnres_compile.passes.streams import Step, Term

aten = torch.ops.aten


@dataclass(frozen=True)
class QueryNodes:
    """The graph's nodes for one site's parameters.

    Attributes:
        query: the pseudo-query, ``[d]``.
        key_norm: weight of the key norm, ``[d]``, or ``None``.
    """

    query: fx.Node
    key_norm: fx.Node | None = None


@watched("rewrite")
def rewrite(
    graph: fx.Graph,
    plans: tuple[BlockPlan, ...],
    queries: Mapping[str, QueryNodes],
    config: AttnResConfig,
) -> None:
    """Rewrite ``graph`` in place.

    Args:
        graph: the graph that the plans were made from.
        plans: one per stream.
        queries: parameter nodes by site name, for every name in :attr:`BlockPlan.queries`; they must stand
            before the first use.
        config: gain, eps, value and logit scale.
    """
    surgery = _Surgery(graph, queries, config)
    surgery.name_reads(plans)
    for plan in plans:
        surgery.stream(plan)
    surgery.clean_up()
    graph.lint()


class _Source:
    """A source of depth attention, with what the stream went through since it was last made into a node.

    ``pending`` holds ops of the stream's path, each with the operand that carried the stream into it, and
    casts.
    """

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.pending: list[tuple[fx.Node, fx.Node] | torch.dtype] = []


class _Surgery:
    def __init__(self, graph: fx.Graph, queries: Mapping[str, QueryNodes], config: AttnResConfig) -> None:
        self.graph = graph
        self.queries = queries
        self.config = config
        self.adds: set[fx.Node] = set()
        self.carriers: set[fx.Node] = set()
        self.replaced: dict[fx.Node, fx.Node] = {}
        # What a step's adds read of this or another stream, by step and by the value read.
        self.reads: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self.stand_ins: dict[fx.Node, list[fx.Node]] = {}

    def name_reads(self, plans: tuple[BlockPlan, ...]) -> None:
        """Put a node of its own in front of every read of a state by a step's adds.

        The adds go away; what they read (an older state, another stream's, the root of a nested stream) is used by
        the nodes that take their place, and has to be handed its mix like any other reader.
        """
        states = {node for plan in plans for step in plan.stream.steps for node in (step.node, *step.passes)}
        for plan in plans:
            for index, step in enumerate(plan.stream.steps):
                wanted = [n for term in step.terms for n in (term.node, *(term.product[1:] if term.product else ()))]
                wanted += [plan.stream.root] if index == 0 else []
                for add in step.adds:
                    for node in add.all_input_nodes:
                        if node in wanted and node in states and (step.node, node) not in self.reads:
                            self._stand_in(step, add, node)

    def _stand_in(self, step: Step, add: fx.Node, node: fx.Node) -> None:
        with self.graph.inserting_before(step.adds[0]):
            named = self.graph.call_function(aten.alias.default, (node,))
        named.meta = dict(node.meta)
        self.reads[step.node, node] = named
        self.stand_ins.setdefault(add, []).append(named)

    # ---------------------------------------------------------------- one stream

    def stream(self, plan: BlockPlan) -> None:
        """Replace one stream's adds by block sums and its reads by mixes."""
        stream = plan.stream
        for node in stream.written:
            node.target = ops.functional(node)
        sites: dict[int, list[SitePlan]] = {}
        for site in plan.sites:
            if site.num_sources > 1:
                sites.setdefault(site.index, []).append(site)
        ends = {block.stop for block in plan.blocks}
        first = stream.steps[0].node
        sources = [_Source(self._read(first, stream.root))]
        partial = False
        for index, step in enumerate(stream.steps):
            path = list(zip(step.passes, (stream.state(index), *step.passes), strict=False))
            with self.graph.inserting_before(step.node):
                for source in sources:
                    source.pending += path
                    source.pending.append(_dtype(step.node))
                branch = self._branch(step)
                if partial:
                    so_far = self._made(sources.pop())
                    branch = self._emit(aten.add.Tensor, (so_far, branch), step.node, like=step.node)
                sources.append(_Source(branch))
                partial = index + 1 not in ends
                axis = stream.axes[index + 1]
                mixes = {
                    site: self._mix(plan.name, site, [self._made(source) for source in sources], axis, step)
                    for site in sites.get(index + 1, ())
                }
            following = stream.steps[index + 1].passes if index + 1 < len(stream.steps) else ()
            self._hand_over(step.node, following, mixes, branch)
            self.adds.update(step.adds)
            self.carriers.update(step.passes)

    def _read(self, step: fx.Node, node: fx.Node) -> fx.Node:
        """What a step's adds see where they read ``node``."""
        return self.reads.get((step, node)) or self._now(node)

    def _now(self, node: fx.Node) -> fx.Node:
        """What stands for ``node`` after the streams rewritten so far."""
        while node in self.replaced:
            node = self.replaced[node]
        return node

    def _hand_over(
        self, state: fx.Node, carriers: tuple[fx.Node, ...], mixes: dict[SitePlan, fx.Node], fallback: fx.Node
    ) -> None:
        """Give a state's readers its mix. What only carried the state to the next add is dead afterwards."""
        # Where nothing reads the value its shape may still be asked for, here or behind a carrier.
        main = next(iter(mixes.values()), fallback)
        for site, mixed in mixes.items():
            if mixed is main:
                continue
            # Readers with a query of their own may also read behind a carrier: it gets a twin.
            twins = {state: mixed}
            before = state
            for carrier in carriers:
                if any(carrier in reader.all_input_nodes for reader in site.readers):
                    for node in carriers[: carriers.index(carrier) + 1]:
                        if node not in twins:
                            # Where the carrier stands all its operands are there, and none of its readers yet.
                            with self.graph.inserting_after(node):
                                twins[node] = self._twin(node, before, twins[before])
                        before = node
            for reader in site.readers:
                for old, new in twins.items():
                    for taker in (reader, *self.stand_ins.get(reader, ())):
                        taker.replace_input_with(old, new)
        state.replace_all_uses_with(main)
        self.replaced[state] = main

    # ---------------------------------------------------------------- nodes

    def _branch(self, step: Step) -> fx.Node:
        total: fx.Node | None = None
        for term in step.terms:
            value = self._term(step, term)
            total = value if total is None else self._emit(aten.add.Tensor, (total, value), step.node, like=step.node)
        assert total is not None
        return total

    def _term(self, step: Step, term: Term) -> fx.Node:
        node = self._read(step.node, term.node)
        origin = step.node
        if term.product is not None:
            kind, right = term.product
            node = self._emit(_PRODUCTS[kind], (node, self._read(step.node, right)), origin, like=step.node)
        node = self._cast(node, _dtype(step.node), origin)
        if term.factor != 1.0:
            node = self._emit(aten.mul.Scalar, (node, term.factor), origin, like=node)
        value, state = facts.tensor(node), facts.tensor(step.node)
        assert value is not None and state is not None
        if not facts.same_shape(value.shape, state.shape):
            node = self._emit(aten.expand_as.default, (node, self._now(step.skip)), origin, like=step.node)
        return node

    def _made(self, source: _Source) -> fx.Node:
        """The source as the stream is now: replays what the stream went through in between."""
        for passed in source.pending:
            if isinstance(passed, torch.dtype):
                source.node = self._cast(source.node, passed, source.node)
            else:
                source.node = self._twin(passed[0], passed[1], source.node)
        source.pending = []
        return source.node

    def _cast(self, node: fx.Node, dtype: torch.dtype, origin: fx.Node) -> fx.Node:
        value = facts.tensor(node)
        if value is None or value.dtype == dtype:
            return node
        return self._emit(aten.to.dtype, (node, dtype), origin, like=node, dtype=dtype)

    def _twin(self, node: fx.Node, carried: fx.Node, replacement: fx.Node) -> fx.Node:
        """The carrier ``node`` once more, with ``replacement`` for the operand ``carried``."""
        now = self._now(carried)
        twin = self.graph.node_copy(node, lambda n: replacement if n is now or n is carried else self._now(n))
        # A source may be laid out otherwise than the sum was, so that a view of it may not exist.
        if twin.target in _COPYING_VIEWS:
            twin.target = _COPYING_VIEWS[twin.target]
        twin.meta = dict(node.meta)
        value = facts.tensor(node)
        assert value is not None
        _set_tensor(twin, torch.empty_like(value), node)
        return twin

    def _mix(self, stream: str, site: SitePlan, sources: list[fx.Node], axis: int, step: Step) -> fx.Node:
        origin = next((r for r in site.readers if r.meta.get("nn_module_stack")), step.node)
        parameters = self.queries[site.query]
        query = parameters.query
        if parameters.key_norm is not None:
            query = self._emit(aten.mul.Tensor, (query, parameters.key_norm), origin, like=query)
        value = facts.tensor(step.node)
        assert value is not None
        config = self.config
        arguments = (
            query,
            sources,
            axis,
            config.eps,
            float(len(sources)) if config.gain == "sum" else 1.0,
            config.scale_for(int(value.shape[axis])),
            config.value == "normalized",
        )
        mixed = self._emit(torch.ops.attnres.mix.default, arguments, origin, like=step.node)
        # A mix is recomputed with what reads it first.
        mixed.meta.pop(REGION, None)
        mixed.meta[SITE] = Mark(site.name, stream, site.blocks, site.partial, config.two_phase, config.fuse)
        if REGION in site.readers[0].meta:
            mixed.meta[REGION] = site.readers[0].meta[REGION]
        return mixed

    def _emit(
        self,
        target: Any,
        arguments: tuple[Any, ...],
        origin: fx.Node,
        like: fx.Node,
        dtype: torch.dtype | None = None,
    ) -> fx.Node:
        node = self.graph.call_function(target, arguments)
        for key in ("nn_module_stack", "stack_trace", "source_fn_stack", "seq_nr", REGION):
            if key in origin.meta:
                node.meta[key] = origin.meta[key]
        value = facts.tensor(like)
        if value is not None:
            layout = torch.contiguous_format
            _set_tensor(node, torch.empty_like(value, dtype=dtype, memory_format=layout), like)
        return node

    # ---------------------------------------------------------------- the end

    def clean_up(self) -> None:
        """Erase the streams' adds, and the carriers that nothing reads.

        Raises:
            LoweringError: an add of a stream is still used. That would be a bug of this pass.
        """
        for named in self.reads.values():
            named.replace_all_uses_with(named.all_input_nodes[0])
            self.graph.erase_node(named)
        for node in reversed(self.graph.nodes):
            if node in self.adds or node in self.carriers:
                if not node.users:
                    self.graph.erase_node(node)
                elif node in self.adds:
                    raise LoweringError(
                        f"the residual add {node.name} is still used by {', '.join(u.name for u in node.users)}",
                        module=facts.module_path(node),
                        where=facts.source_line(node),
                        remedy="Please report this graph; the model was not changed",
                    )


_PRODUCTS: dict[str, Any] = {"mm": aten.mm.default, "bmm": aten.bmm.default, "mul": aten.mul.Tensor}
_COPYING_VIEWS: dict[Any, Any] = {
    "view": "reshape",
    "view_as": "reshape_as",
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    torch.Tensor.view: torch.reshape,
}


def _dtype(node: fx.Node) -> torch.dtype:
    value = facts.tensor(node)
    if value is None:
        raise LoweringError(f"the graph holds no tensor fact for {node.name}")
    return value.dtype


def _set_tensor(node: fx.Node, value: torch.Tensor, like: fx.Node) -> None:
    """Store a tensor fact under the key that the graph's dialect uses."""
    node.meta["example_value" if "example_value" in like.meta else "val"] = value
