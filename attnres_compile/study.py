"""Which modules of a model would be converted, and how: everything before anything is changed."""

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
from attnres_compile.errors import AlreadyCompiledError, AlreadyTransformedError, GraphBreakError, NoStreamError
from attnres_compile.inputs import Inputs, as_inputs
from attnres_compile.parameters import Declaration, DepthQueries, converted
from attnres_compile.passes import facts, ops
from attnres_compile.passes.checkpoint import Region, open_regions
from attnres_compile.passes.detect import detect
from attnres_compile.passes.plan import BlockPlan, plan
from attnres_compile.passes.streams import Detection, Reason, ResidualStream
from attnres_compile.report import LeftAlone, TransformReport
from attnres_compile.reporting import build_report, left_alone, parameters_per_site, refuse_strict


@dataclass(frozen=True)
class Conversion:
    """A module to convert.

    Attributes:
        path: of the module in the model.
        plans: of its streams, named relative to it.
        graph: the graph whose nodes the plans hold; checkpointed regions are opened in it.
        traced: path of the module that the graph is of; ``""`` is the model itself.
    """

    path: str
    plans: tuple[BlockPlan, ...]
    graph: fx.GraphModule
    traced: str = ""

    @classmethod
    def of(
        cls, path: str, streams: tuple[ResidualStream, ...], config: AttnResConfig, graph: fx.GraphModule
    ) -> Conversion:
        """Plan ``streams`` of ``graph`` for the module at ``path``."""
        return cls(path, plan(streams, config, path), graph)

    def queries(self, owner: nn.Module, config: AttnResConfig, report: TransformReport) -> DepthQueries:
        """New parameters for the module ``owner``, queries zero, in its dtype and on its device."""
        like = next((p for p in owner.parameters() if p.is_floating_point()), None)
        made = DepthQueries(
            Declaration.of(self.plans, config),
            dtype=like.dtype if like is not None else None,
            device=like.device if like is not None else None,
            report=report,
        )
        return made.train(owner.training)


def study(model: nn.Module, example_inputs: Any, config: AttnResConfig) -> tuple[list[Conversion], TransformReport]:
    """Trace, detect and plan; nothing is changed.

    Returns:
        One conversion per module that owns a stream, and the report on the whole model.
    """
    inputs = as_inputs(example_inputs)
    traced = capture(model, inputs)
    if traced.breaks:
        return _study_owners(model, inputs, config, traced)
    (graph,) = traced.graphs
    open_regions(graph)
    detection = detect(graph.graph, config)
    conversions = by_owner(model, detection, config, graph)
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


def study_graph(
    graph_module: fx.GraphModule | torch.export.ExportedProgram,
    example_inputs: Sequence[Any] | None,
    config: AttnResConfig,
) -> tuple[Conversion, TransformReport, list[Region]]:
    """Detect and plan in a copy of a graph that comes as it is; see :func:`attnres_compile.rewrite_graph`.

    Returns:
        What to convert, with the copy as its graph; the report; and the checkpointed regions that were opened.
    """
    module = graphs.with_shapes(graph_module, example_inputs)
    regions = open_regions(module)
    detection = detect(module.graph, config)
    item = Conversion.of("", detection.streams, config, module)
    return item, build_report(detection, item.plans, config), regions


def by_owner(model: nn.Module, detection: Detection, config: AttnResConfig, graph: fx.GraphModule) -> list[Conversion]:
    """The detected streams of ``graph`` by the module of ``model`` that owns them."""
    owners: dict[str, list[ResidualStream]] = {}
    for stream in detection.streams:
        owners.setdefault(facts.owner_path(model, [step.node for step in stream.steps]), []).append(stream)
    return [Conversion.of(path, tuple(streams), config, graph) for path, streams in owners.items()]


def _writes_in_place(item: Conversion) -> bool:
    steps = [step for each in item.plans for step in each.stream.steps]
    return any(ops.written_argument(add) for step in steps for add in step.adds)


def _own_conversions(
    model: nn.Module, inputs: Inputs, config: AttnResConfig, paths: Iterable[str]
) -> dict[str, tuple[Conversion, tuple[LeftAlone, ...]]]:
    """For each module its streams as its own graph shows them, and what that graph leaves alone."""
    found: dict[str, tuple[Conversion, tuple[LeftAlone, ...]]] = {}
    for path, graph in capture_owners(model, inputs, dict.fromkeys(paths)).items():
        open_regions(graph)
        detection = detect(graph.graph, config)
        item = Conversion.of(path, detection.streams, config, graph)
        found[path] = replace(item, traced=path), left_alone(detection)
    return found


def _study_owners(
    model: nn.Module, inputs: Inputs, config: AttnResConfig, traced: Capture
) -> tuple[list[Conversion], TransformReport]:
    """The model breaks into pieces; a stream in one piece is converted if its owner can be traced as a whole."""
    for piece in traced.graphs:
        open_regions(piece)
    detections = [detect(piece.graph, config) for piece in traced.graphs]
    paths = [
        item.path
        for piece, detection in zip(traced.graphs, detections, strict=True)
        for item in by_owner(model, detection, config, piece)
    ]
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


def refuse_wrapped(model: nn.Module) -> None:
    """Raise where ``model`` is no plain module.

    Raises:
        AlreadyTransformedError, AlreadyCompiledError: it, or a part of it, is transformed or compiled already.
    """
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


def refuse(conversions: Sequence[Conversion], whole: TransformReport, config: AttnResConfig) -> None:
    """Raise where a model cannot be converted, or not as ``config.strict`` wants it.

    Raises:
        NoStreamError: there is nothing to convert.
        RejectedStreamError: ``config.strict`` and a stream would be left alone.
        GraphBreakError: tracing stops before a whole stream is seen.
    """
    if config.strict:
        refuse_strict(whole.rejections, whole)
    found = any(item.plans for item in conversions)
    if not found and whole.graph_breaks:
        broken = whole.graph_breaks[0]
        raise GraphBreakError(
            f"tracing stops before a whole residual stream is seen: {broken.reason}",
            where=broken.where,
            remedy="Remove what breaks the graph (TORCH_LOGS=graph_breaks shows all places)",
        )
    if not found:
        raise NoStreamError(no_stream(whole), report=whole, remedy="error.report lists every add with its reason")


def share(whole: TransformReport, path: str, config: AttnResConfig, first: bool) -> TransformReport:
    """One converted module's share of the report; what belongs to none goes to the first."""
    streams = tuple(stream for stream in whole.streams if stream.owner == path)
    queries = sum(stream.feature_dim * sum(site.query is not None for site in stream.sites) for stream in streams)
    names = {stream.name for stream in streams}
    phases = tuple(phase for phase in whole.phases if phase.stream in names)
    part = TransformReport(streams, parameters_added=queries * parameters_per_site(config), phases=phases)
    return replace(part, rejections=whole.rejections, graph_breaks=whole.graph_breaks) if first else part


def no_stream(whole: TransformReport) -> str:
    """Why nothing could be converted, in one sentence."""
    if not whole.rejections:
        return "the model has no residual stream: it adds no two tensors"
    counts: dict[str, int] = {}
    for rejection in whole.rejections:
        counts[rejection.reason] = counts.get(rejection.reason, 0) + 1
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items(), key=lambda c: -c[1]))
    return f"no residual stream could be converted; adds left alone: {reasons}"
