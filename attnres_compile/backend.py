"""The torch.compile backend, and the pass that serves plain Inductor: what knows dynamo's internals, with
:mod:`dynamo_graphs` and :mod:`crossing.piece`.

A graph with a declaration (``attnres::declare``, left by a converted module) is rewritten with the queries that
the declaration brings. A graph without one, compiled by ``backend="attnres"``, gets queries made here, kept on
the model's own parameters so that recompilations find them again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx, nn

from attnres_compile.config import RUN_TIME, AttnResConfig, Lowering
from attnres_compile.dynamo_graphs import copy_graph_module
from attnres_compile.errors import ConfigError
from attnres_compile.kernels import ops as kernel_ops
from attnres_compile.parameters import LATE, Declaration, DepthQueries, queries_in
from attnres_compile.passes import facts
from attnres_compile.passes.checkpoint import close_regions, make_eager, open_regions
from attnres_compile.passes.detect import detect
from attnres_compile.passes.finish import Choices, finish
from attnres_compile.passes.gradients import unrecorded
from attnres_compile.passes.plan import BlockPlan, plan
from attnres_compile.passes.rewrite import QueryNodes, rewrite
from attnres_compile.passes.streams import ResidualStream
from attnres_compile.report import TransformReport
from attnres_compile.reporting import STREAM_REASONS, build_report, refuse_strict, with_choices
from attnres_compile.tally import counted

assert kernel_ops  # registers the ops that graphs hold

DECLARE = torch.ops.attnres.declare.default


# ------------------------------------------------------------------ declared streams


@dataclass(frozen=True)
class _Declared:
    """A declaration in a graph: its node, whose module it is, and the streams that belong to it."""

    node: fx.Node
    prefix: str
    declaration: Declaration
    streams: list[ResidualStream]


def rewrite_declared(graph: fx.Graph, options: Mapping[str, Any] | None = None, close: bool = True) -> int:
    """Rewrite every declared stream of ``graph`` in place and take the declarations out.

    Args:
        graph: the graph.
        options: fields of :class:`AttnResConfig` about running that take the place of the declared ones.
        close: fold checkpointed regions together again; a graph that runs without gradients can do without.

    Returns:
        The number of sites.

    Raises:
        PlanMismatchError: the graph does not hold the sites that a declaration names.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.target is DECLARE]
    declared = [
        _Declared(node, facts.module_path(node), Declaration.from_text(str(node.args[2])), []) for node in nodes
    ]
    module = graph.owning_module
    regions = open_regions(module) if module is not None else []
    position = {node: at for at, node in enumerate(graph.nodes)}
    reasons: list[str] = []
    # What runs under somebody's no_grad was made for a run that is not.
    off = unrecorded(graph)
    records = torch.is_grad_enabled() and not any(d.node in off for d in declared)
    for config in {d.declaration.config for d in declared}:
        detection = detect(graph, config, records)
        reasons += [r.reason.value for r in detection.rejections if r.reason in STREAM_REASONS]
        for stream in detection.streams:
            owner = _owner(stream, [d for d in declared if d.declaration.config == config], position)
            if owner is not None:
                owner.streams.append(stream)
    planned: list[tuple[_Declared, tuple[BlockPlan, ...]]] = []
    for item in declared:
        said = item.declaration
        plans = said.recognised(plan(tuple(item.streams), said.config, item.prefix, said.method))
        said.check(plans, item.prefix, reasons)
        planned.append((item, plans))
    for item, plans in planned:
        names = item.declaration.sites
        tensors = list(item.node.args[1])  # type: ignore[arg-type]
        norms: Sequence[Any] = tensors[len(names) :] or [None] * len(names)
        queries = {name: QueryNodes(q, k) for name, q, k in zip(names, tensors, norms, strict=False)}
        own = {name: value for name, value in (options or {}).items() if name in RUN_TIME}
        rewrite(graph, plans, queries, replace(item.declaration.config, **own))
    for node in nodes:
        graph.erase_node(node)
    if module is not None and close:
        close_regions(module, regions)
    return sum(len(item.declaration.sites) for item in declared)


def _owner(stream: ResidualStream, declared: list[_Declared], position: dict[fx.Node, int]) -> _Declared | None:
    """The innermost declaration that a stream stands under: the latest one before it whose path covers it."""
    paths = [facts.module_path(step.node) for step in stream.steps]
    start = position[stream.steps[0].node]
    covering = [
        item
        for item in declared
        if position[item.node] < start
        and all(not item.prefix or p == item.prefix or p.startswith(item.prefix + ".") for p in paths)
    ]
    return max(covering, key=lambda item: (len(item.prefix), position[item.node]), default=None)


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[Any], lowering: Lowering, done: Callable[[Choices], None] | None = None
) -> Callable[..., Any]:
    """Run the passes behind rewriting, tell ``done`` what they chose, and compile."""
    choices = finish(module, AttnResConfig(lowering=lowering))
    if done is not None:
        done(choices)
    if lowering == "eager":
        make_eager(module)
        module.recompile()
        call: Callable[..., Any] = module.forward
        return call
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(module, list(inputs))
    return cast(Callable[..., Any], compiled)


# ------------------------------------------------------------------ the backends


class ConvertedBackend:
    """Compiles what a converted module runs when it is called by itself."""

    def __init__(self, owner: nn.Module, lowering: Lowering) -> None:
        self.owner = owner
        self.lowering = lowering

    def __call__(self, module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        module = copy_graph_module(module, self.owner)
        sites = rewrite_declared(module.graph)
        return counted(compile_graph(module, example_inputs, self.lowering, self._report), sites)

    def _report(self, choices: Choices) -> None:
        queries = queries_in(self.owner)
        assert queries is not None
        owner = next((stream.owner for stream in queries.report.streams), "")
        queries.report = with_choices(queries.report, choices.phases, choices.fusions, owner)


def attnres(
    module: fx.GraphModule, example_inputs: list[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend behind ``torch.compile(model, backend="attnres", options={...})``.

    Args:
        module: the graph that dynamo captured.
        example_inputs: its inputs.
        options: fields of :class:`AttnResConfig`. On a transformed model only ``lowering``, ``two_phase`` and
            ``fuse`` may be others than it was transformed with.

    Raises:
        ConfigError: an option is unknown or not valid, or would change a transformed model's layout.
    """
    options = dict(options or {})
    config = AttnResConfig.from_dict(options)
    module = copy_graph_module(module)
    if any(node.target is DECLARE for node in module.graph.nodes):
        _check_options(module.graph, options)
        sites = rewrite_declared(module.graph, options)
        return counted(compile_graph(module, example_inputs, config.lowering), sites)
    return _late(module, example_inputs, config)


def _check_options(graph: fx.Graph, options: dict[str, Any]) -> None:
    for node in graph.nodes:
        if node.target is DECLARE:
            has = Declaration.from_text(str(node.args[2])).config
            wrong = [k for k, v in options.items() if k not in RUN_TIME and getattr(has, k) != v]
            if wrong:
                raise ConfigError(
                    f"the model was transformed with other values of {', '.join(wrong)}",
                    remedy="Leave them out of options, or revert the model and transform it anew",
                )


def _late(module: fx.GraphModule, inputs: list[Any], config: AttnResConfig) -> Callable[..., Any]:
    """Convert a graph of a model that was never transformed."""
    regions = open_regions(module)
    detection = detect(module.graph, config, torch.is_grad_enabled())
    plans = plan(detection.streams, config)
    if config.strict:
        found = build_report(detection, plans, config)
        refuse_strict(found.rejections, found)
    # How a model runs is no reason to give it other queries.
    declaration = Declaration.of(plans, config.layout())
    if not declaration.sites:
        if detection.rejections and not detection.streams:
            warnings.warn(
                "attnres found no residual stream in a graph of this model and left it as it is; "
                "attnres_compile.explain says why",
                stacklevel=2,
            )
        close_regions(module, regions)
        return compile_graph(module, inputs, config.lowering)
    anchor = anchor_of(module.graph, plans[0].stream)
    report = build_report(detection, plans, config)
    sample = DepthQueries(declaration)
    queries = _append_placeholders(module.graph, sample, anchor.like)
    rewrite(module.graph, plans, queries, config)
    close_regions(module, regions)
    extra = [nn.Parameter(q.to(anchor.like)) for q in sample.tensors()]
    # One model or many may run this code: dynamo does not tell models of one class apart. Looked up at each call.
    store = _store(anchor.like, declaration, report)

    def keep(choices: Choices) -> None:
        store.report = with_choices(store.report, choices.phases, choices.fusions)

    compiled = compile_graph(module, [*inputs, *extra], config.lowering, keep)

    index = anchor.index  # alone: this is kept for good, and a weight that it knew would be, too

    def run(*args: Any) -> Any:
        return compiled(*args, *_store(args[index], declaration, report).tensors())

    return counted(run, len(declaration.sites))


def _store(anchor: torch.Tensor, declaration: Declaration, report: TransformReport) -> DepthQueries:
    """The queries kept by a model's own weight: those of an earlier call or compilation, or new ones.

    Raises:
        PlanMismatchError: an earlier compilation of this model found other sites.
    """
    stores: dict[str, DepthQueries] | None = getattr(anchor, LATE, None)
    if stores is None:
        stores = {}
        setattr(anchor, LATE, stores)
    key = declaration.config.fingerprint()
    if key not in stores:
        stores[key] = DepthQueries(declaration, dtype=anchor.dtype, device=anchor.device, report=report)
        _warn_late()
    store = stores[key]
    if store.declaration != declaration:
        store.declaration.refuse(declaration, "")
    return store if store.token.device == anchor.device else store.to(anchor.device)


_WARNED = False


def _warn_late() -> None:
    global _WARNED
    if _WARNED:
        return
    _WARNED = True
    warnings.warn(
        "pseudo-queries were made while compiling: an optimizer built before this call does not hold them, and "
        "model.parameters() does not list them. Use attnres_compile.transform(model, example_inputs) before building "
        "the optimizer, or add attnres_compile.pseudo_queries(model).values() to it",
        stacklevel=2,
    )


@dataclass(frozen=True)
class _Anchor:
    """The weight of the user's model that late queries are kept by: which input it is, and the object itself."""

    index: int
    like: nn.Parameter


def anchor_of(graph: fx.Graph, stream: ResidualStream) -> _Anchor:
    """The first matrix that the stream's branches use.

    Raises:
        ConfigError: the graph takes none as an input.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    started = False
    for node in graph.nodes:
        started = started or stream.root in node.all_input_nodes
        if not started:
            continue
        for operand in node.all_input_nodes:
            value = getattr(operand.meta.get("grapharg"), "example", None) if operand.op == "placeholder" else None
            if isinstance(value, nn.Parameter) and value.dim() >= 2:
                return _Anchor(inputs.index(operand), value)
    raise ConfigError(
        "a residual stream without a parameter of the model to keep its queries by",
        remedy="Use attnres_compile.transform on the module instead of compiling a function",
    )


def _append_placeholders(graph: fx.Graph, store: DepthQueries, like: torch.Tensor) -> dict[str, QueryNodes]:
    """Inputs for the queries behind the graph's own, marked as dynamo marks parameters."""
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    fake_mode = next(
        (v.fake_mode for n in graph.nodes if (v := facts.tensor(n)) is not None and hasattr(v, "fake_mode")), None
    )

    def add(name: str, parameter: nn.Parameter) -> fx.Node:
        nonlocal last
        with graph.inserting_after(last):
            last = graph.placeholder(name)
        last._dynamo_source = None
        last.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
        value = nn.Parameter(parameter.to(like))
        last.meta["example_value"] = fake_mode.from_tensor(value) if fake_mode else value
        return last

    sites = {site: add(f"attnres_{store.keys[site]}", q) for site, q in store.queries().items()}
    norms = {site: add(f"attnres_{store.keys[site]}_key_norm", k) for site, k in store.key_norms().items()}
    return {site: QueryNodes(node, norms.get(site)) for site, node in sites.items()}


# ------------------------------------------------------------------ plain Inductor


def rewrite_for_inductor(graph: fx.Graph) -> None:
    """Rewrite and lower a graph inside Inductor, if it holds a declaration."""
    if all(node.target is not DECLARE for node in graph.nodes):
        return
    rewrite_declared(graph)
    if graph.owning_module is not None:
        finish(graph.owning_module, AttnResConfig())
