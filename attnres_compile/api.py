"""What users call: explain, transform, report, pseudo_queries, revert, rewrite_graph."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from attnres_compile import graphs
from attnres_compile.capture import Capture, capture, capture_owners
from attnres_compile.config import AttnResConfig
from attnres_compile.conversion import ConvertedForward
from attnres_compile.errors import (
    AlreadyCompiledError,
    AlreadyTransformedError,
    AttnResError,
    GraphBreakError,
    NoStreamError,
    NotTransformedError,
)
from attnres_compile.inputs import Inputs, as_inputs
from attnres_compile.parameters import CHILD, Declaration, DepthQueries, converted, late_queries
from attnres_compile.passes import facts, ops
from attnres_compile.passes.checkpoint import close_regions, open_regions
from attnres_compile.passes.detect import detect
from attnres_compile.passes.plan import BlockPlan, plan
from attnres_compile.passes.streams import Detection, Reason, ResidualStream
from attnres_compile.report import GraphBreak, LeftAlone, TransformReport
from attnres_compile.reporting import build_report, join, left_alone, parameters_per_site, refuse_strict


@dataclass(frozen=True)
class _Conversion:
    """A module to convert and the plans of its streams, named relative to it."""

    path: str
    plans: tuple[BlockPlan, ...]


def explain(model: nn.Module, example_inputs: Any, config: AttnResConfig | None = None) -> TransformReport:
    """Say what :func:`transform` would do. Changes nothing and, unless tracing breaks, runs nothing.

    Args:
        model: any module, on any device, the meta device included.
        example_inputs: a tensor, a tuple or list (positional), a dict (keywords), or
            :class:`attnres_compile.Inputs`.
        config: how to convert; default :class:`AttnResConfig`.

    Returns:
        The report: streams, sites and blocks, and every add left alone with its reason. A model without a stream
        gives a report without streams.

    Raises:
        AlreadyTransformedError, AlreadyCompiledError, InputsError: see :func:`transform`.
    """
    config = config or AttnResConfig()
    _refuse_wrapped(model)
    try:
        return _study(model, example_inputs, config)[1]
    except GraphBreakError as error:
        return TransformReport(graph_breaks=(GraphBreak(error.what, error.where),))


def transform(model: nn.Module, example_inputs: Any, config: AttnResConfig | None = None) -> nn.Module:
    """Convert ``model`` into a Block AttnRes model, in place.

    The module that owns each residual stream gets a child module ``attnres`` with its pseudo-queries, and runs
    compiled from then on. Class, methods, hooks and state_dict keys stay; with ``gain="sum"`` the output stays too
    until the queries move (docs/method.md).

    Args:
        model: the model, in the mode (train or eval) and dtype that it will run in.
        example_inputs: as for :func:`explain`.
        config: how to convert; default :class:`AttnResConfig`.

    Returns:
        ``model`` itself.

    Raises:
        NoStreamError: no residual stream could be converted; ``error.report`` says why.
        AttnResError: an owner of a stream has an attribute of the name that the queries need.
        RejectedStreamError: ``config.strict`` and a stream would be left alone.
        GraphBreakError: tracing stops inside the module that owns a stream.
        AlreadyTransformedError, AlreadyCompiledError: the model is transformed or compiled already.
        InputsError: ``example_inputs`` is of no known form. An error of the model itself is raised as it is.
    """
    config = config or AttnResConfig()
    _refuse_wrapped(model)
    conversions, whole = _study(model, example_inputs, config)
    if config.strict:
        refuse_strict(whole.rejections, whole)
    if not conversions and whole.graph_breaks:
        broken = whole.graph_breaks[0]
        raise GraphBreakError(
            f"tracing stops before a whole residual stream is seen: {broken.reason}",
            where=broken.where,
            remedy="Remove what breaks the graph (TORCH_LOGS=graph_breaks shows all places)",
        )
    if not conversions:
        raise NoStreamError(_no_stream(whole), report=whole, remedy="error.report lists every add with its reason")
    for item in conversions:
        if hasattr(model.get_submodule(item.path), CHILD):
            raise AttnResError(
                f"the module that owns a stream has an attribute {CHILD!r} already",
                module=item.path,
                remedy="Rename it: its name is where the pseudo-queries live",
            )
    for number, item in enumerate(conversions):
        _convert(model.get_submodule(item.path), item, config, _part(whole, item.path, config, first=number == 0))
    return model


def report(model: nn.Module) -> TransformReport:
    """What was done to ``model``, as data.

    Raises:
        NotTransformedError: nothing was.
    """
    parts = [queries.report for _, _, queries in converted(model)]
    parts = parts or [queries.report for queries in late_queries(model)]
    if not parts:
        raise _not_transformed(model)
    result = parts[0]
    for part in parts[1:]:
        result = result.merged(part)
    return result


def pseudo_queries(model: nn.Module) -> dict[str, nn.Parameter]:
    """The pseudo-queries of a converted model by site name, in depth order; each is a parameter of shape ``[d]``.

    Raises:
        NotTransformedError: the model has none.
    """
    found = {
        join(path, site): query for path, _, queries in converted(model) for site, query in queries.queries().items()
    }
    if not found:
        found = {site: query for store in late_queries(model) for site, query in store.queries().items()}
    if not found:
        raise _not_transformed(model)
    return found


def revert(model: nn.Module) -> nn.Module:
    """Take the depth attention away: the original model, its keys and its output, bit for bit.

    Raises:
        NotTransformedError: the model is not transformed.
        AttnResError: something wrapped a converted module's ``forward`` since.
    """
    found = list(converted(model))
    if not found:
        raise _not_transformed(model)
    for path, owner, _ in found:
        if not isinstance(owner.__dict__.get("forward"), ConvertedForward):
            raise AttnResError(
                "the forward of a converted module was wrapped or replaced after transform",
                module=path,
                remedy="Undo that first (accelerate: remove_hook_from_module), then revert",
            )
    for _, owner, _ in found:
        forward = owner.__dict__.pop("forward")
        if forward.previous is not None:
            owner.__dict__["forward"] = forward.previous
        del owner._modules[CHILD]
    return model


def rewrite_graph(
    graph_module: fx.GraphModule | torch.export.ExportedProgram,
    example_inputs: Sequence[Any] | None = None,
    config: AttnResConfig | None = None,
) -> tuple[fx.GraphModule, TransformReport]:
    """The pass itself: rewrite any FX graph.

    Args:
        graph_module: from ``torch.fx.symbolic_trace``, dynamo or ``torch.export`` (ATen; lifted parameters are told
            apart by their names). It is not changed.
        example_inputs: inputs of the graph, by which shapes are found where the graph has none.
        config: how to convert; ``lowering`` is not read. The graph holds one ``attnres::mix`` per site, unless
            ``two_phase="on"`` or ``fuse="on"`` ask for the operators of those passes: ``"auto"`` is for graphs that
            are compiled here.

    Returns:
        A new graph module over the same parameters, with the pseudo-queries in its child ``attnres``, and the report.

    Raises:
        NoStreamError: the graph holds no stream that can be converted.
    """
    config = config or AttnResConfig()
    module = graphs.with_shapes(graph_module, example_inputs)
    regions = open_regions(module)
    detection = detect(module.graph, config)
    plans = plan(detection.streams, config)
    whole = build_report(detection, plans, config)
    if config.strict:
        refuse_strict(whole.rejections, whole)
    if not plans:
        raise NoStreamError(_no_stream(whole), report=whole, remedy="error.report lists every add with its reason")
    result = graphs.rewritten(module, plans, config, whole)
    close_regions(result, regions)
    return result, graphs.forced(result, config, whole)


# ------------------------------------------------------------------ how


def _study(model: nn.Module, example_inputs: Any, config: AttnResConfig) -> tuple[list[_Conversion], TransformReport]:
    """Trace, detect and plan; nothing is changed."""
    inputs = as_inputs(example_inputs)
    traced = capture(model, inputs)
    if traced.breaks:
        return _study_owners(model, inputs, config, traced)
    (graph,) = traced.graphs
    open_regions(graph)
    detection = detect(graph.graph, config)
    conversions = _conversions(model, detection, config)
    extra: tuple[LeftAlone, ...] = ()
    doubtful = [item.path for item in conversions if _writes_in_place(item)]
    if doubtful:
        # What such a module writes into may be its caller's, which only its own graph tells.
        for path, (item, rejected) in _own_conversions(model, inputs, config, doubtful).items():
            at = next(i for i, each in enumerate(conversions) if each.path == path)
            if Declaration.of(item.plans, config) != Declaration.of(conversions[at].plans, config):
                conversions[at] = item
                extra += tuple(r for r in rejected if r.reason == Reason.MUTATED)
        conversions = [item for item in conversions if item.plans]
    plans = [each for item in conversions for each in item.plans]
    prefixes = [item.path for item in conversions for _ in item.plans]
    whole = build_report(detection, plans, config, prefixes)
    return conversions, replace(whole, rejections=whole.rejections + extra)


def _conversions(model: nn.Module, detection: Detection, config: AttnResConfig) -> list[_Conversion]:
    """The detected streams by the module that owns them."""
    owners: dict[str, list[ResidualStream]] = {}
    for stream in detection.streams:
        owners.setdefault(facts.owner_path(model, [step.node for step in stream.steps]), []).append(stream)
    return [_Conversion(path, plan(tuple(streams), config, path)) for path, streams in owners.items()]


def _writes_in_place(item: _Conversion) -> bool:
    steps = [step for each in item.plans for step in each.stream.steps]
    return any(ops.written_argument(add) for step in steps for add in step.adds)


def _own_conversions(
    model: nn.Module, inputs: Inputs, config: AttnResConfig, paths: Iterable[str]
) -> dict[str, tuple[_Conversion, tuple[LeftAlone, ...]]]:
    """For each module its streams as its own graph shows them, and what that graph leaves alone."""
    found: dict[str, tuple[_Conversion, tuple[LeftAlone, ...]]] = {}
    for path, graph in capture_owners(model, inputs, dict.fromkeys(paths)).items():
        open_regions(graph)
        detection = detect(graph.graph, config)
        found[path] = _Conversion(path, plan(detection.streams, config, path)), left_alone(detection)
    return found


def _study_owners(
    model: nn.Module, inputs: Inputs, config: AttnResConfig, traced: Capture
) -> tuple[list[_Conversion], TransformReport]:
    """The model breaks into pieces; a stream in one piece is converted if its owner can be traced as a whole."""
    for piece in traced.graphs:
        open_regions(piece)
    detections = [detect(piece.graph, config) for piece in traced.graphs]
    paths = [item.path for detection in detections for item in _conversions(model, detection, config)]
    whole = TransformReport(graph_breaks=traced.breaks)
    if not paths:
        # Too short to be streams by themselves, or none at all: what the pieces hold is in the report.
        pieces = [build_report(detection, (), config) for detection in detections]
        return [], functools.reduce(TransformReport.merged, pieces, whole)
    own = _own_conversions(model, inputs, config, paths)
    for item, rejected in own.values():
        part = build_report(Detection((), ()), item.plans, config, [item.path] * len(item.plans))
        whole = whole.merged(replace(part, rejections=rejected))
    return [item for item, _ in own.values() if item.plans], whole


def _convert(owner: nn.Module, item: _Conversion, config: AttnResConfig, part: TransformReport) -> None:
    like = next((p for p in owner.parameters() if p.is_floating_point()), None)
    declaration = Declaration.of(item.plans, config)
    queries = DepthQueries(
        declaration,
        dtype=like.dtype if like is not None else None,
        device=like.device if like is not None else None,
        report=part,
    )
    queries.train(owner.training)
    forward = ConvertedForward(owner)
    owner._modules[CHILD] = queries
    owner.__dict__["forward"] = forward


def _part(whole: TransformReport, path: str, config: AttnResConfig, first: bool) -> TransformReport:
    """One converted module's share of the report; what belongs to none goes to the first."""
    streams = tuple(stream for stream in whole.streams if stream.owner == path)
    queries = sum(stream.feature_dim * sum(site.query is not None for site in stream.sites) for stream in streams)
    names = {stream.name for stream in streams}
    phases = tuple(phase for phase in whole.phases if phase.stream in names)
    share = TransformReport(streams, parameters_added=queries * parameters_per_site(config), phases=phases)
    return replace(share, rejections=whole.rejections, graph_breaks=whole.graph_breaks) if first else share


def _refuse_wrapped(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    for path, module in model.named_modules():
        if isinstance(module, torch._dynamo.eval_frame.OptimizedModule) or module._compiled_call_impl is not None:
            raise AlreadyCompiledError(
                f"{type(module).__name__} is compiled already",
                module=path,
                remedy="Transform the original module first and compile the result",
            )
    for path, _, _ in converted(model):
        raise AlreadyTransformedError(
            "the model is transformed already",
            module=path,
            remedy="Call attnres_compile.revert(model) first to transform it in another way",
        )


def _no_stream(whole: TransformReport) -> str:
    if not whole.rejections:
        return "the model has no residual stream: it adds no two tensors"
    counts: dict[str, int] = {}
    for rejection in whole.rejections:
        counts[rejection.reason] = counts.get(rejection.reason, 0) + 1
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items(), key=lambda c: -c[1]))
    return f"no residual stream could be converted; adds left alone: {reasons}"


def _not_transformed(model: nn.Module) -> NotTransformedError:
    return NotTransformedError(
        f"{type(model).__name__} holds no pseudo-queries",
        remedy="Call attnres_compile.transform(model, example_inputs), or run the compiled model once",
    )


__all__ = ["explain", "pseudo_queries", "report", "revert", "rewrite_graph", "transform"]
