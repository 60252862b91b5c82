"""Detection and plans -> the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from attnres_compile.config import AttnResConfig
from attnres_compile.errors import RejectedStreamError
from attnres_compile.passes import facts
from attnres_compile.passes.cost import predict_cost
from attnres_compile.passes.kinds import reader_kind
from attnres_compile.passes.plan import BlockPlan, SitePlan
from attnres_compile.passes.streams import Detection, Reason, Step
from attnres_compile.passes.two_phase import predict
from attnres_compile.report import Fusion, GraphBreak, LeftAlone, Phase, Site, Stream, Sublayer, TransformReport

# Reasons that mean: here is a residual stream, and it was not converted.
STREAM_REASONS = frozenset(
    {
        Reason.POST_NORM,
        Reason.POST_ACTIVATION,
        Reason.GATED,
        Reason.MULTI_LANE,
        Reason.DEPTH_ATTENTION,
        Reason.SHIFTED_STREAM,
        Reason.MUTATED,
        Reason.GRADIENT_MODE,
        Reason.UNDER_VMAP,
        Reason.NESTED_TENSOR,
        Reason.SHARED_WEIGHTS,
        Reason.DROPOUT_ON_STREAM,
        Reason.CLAMP_ON_STREAM,
        Reason.PARTIAL_UPDATE,
        Reason.OPAQUE_STEP,
        Reason.CHECKPOINTED,
        Reason.UNKNOWN_FEATURES,
    }
)


def build_report(
    detection: Detection,
    plans: Sequence[BlockPlan],
    config: AttnResConfig,
    prefixes: Sequence[str] | None = None,
    breaks: tuple[GraphBreak, ...] = (),
) -> TransformReport:
    """The report of one graph.

    Args:
        detection: what was found.
        plans: one per converted stream.
        config: tells how many parameters a site has.
        prefixes: for each plan the path of the module that owns the stream.
        breaks: graph breaks met on the way.
    """
    prefixes = prefixes if prefixes is not None else [""] * len(plans)
    streams = tuple(_stream(plan, prefix, config) for plan, prefix in zip(plans, prefixes, strict=True))
    added = sum(len(plan.queries) * plan.stream.feature_dim for plan in plans) * parameters_per_site(config)
    phases = tuple(
        _phase(phase, prefix) for plan, prefix in zip(plans, prefixes, strict=True) for phase in predict(plan, config)
    )
    return TransformReport(streams, left_alone(detection), breaks, added, phases)


def with_choices(
    report: TransformReport, phases: Sequence[Phase], fusions: Sequence[Fusion], prefix: str = ""
) -> TransformReport:
    """The report of a module with what the passes behind rewriting chose, in the place of what was predicted.

    Args:
        report: the module's.
        phases, fusions: what was chosen, with names relative to the module.
        prefix: its path in the model.
    """
    return replace(
        report,
        phases=tuple(_phase(phase, prefix) for phase in phases),
        fusions=tuple(replace(fusion, site=join(prefix, fusion.site)) for fusion in fusions),
    )


def _phase(phase: Phase, prefix: str) -> Phase:
    names = tuple(join(prefix, name) for name in phase.sites)
    return replace(phase, stream=join(prefix, phase.stream), sites=names)


def parameters_per_site(config: AttnResConfig) -> int:
    """Parameters of size ``[d]`` that each site has: its query, and a key norm weight where asked for."""
    return 2 if config.key_norm_weight else 1


def left_alone(detection: Detection) -> tuple[LeftAlone, ...]:
    """The rejections of one graph as report entries."""
    return tuple(
        LeftAlone(r.reason.value, r.message, facts.module_path(r.node), facts.source_line(r.node), r.node.name)
        for r in detection.rejections
    )


def _stream(plan: BlockPlan, prefix: str, config: AttnResConfig) -> Stream:
    return Stream(
        name=join(prefix, plan.name),
        feature_dim=plan.stream.feature_dim,
        sublayers=tuple(_sublayer(step) for step in plan.stream.steps),
        blocks=tuple(tuple(block) for block in plan.blocks),
        sites=tuple(_site(site, plan, prefix) for site in plan.sites),
        owner=prefix,
        cost=predict_cost(plan, config),
    )


def _site(site: SitePlan, plan: BlockPlan, prefix: str) -> Site:
    return Site(
        name=join(prefix, site.name),
        readers=tuple(label if label == "output" else join(prefix, label) for label in site.label),
        sources=site.sources,
        query=join(prefix, site.query) if site.num_sources > 1 else None,
        index=site.index,
        kind=reader_kind(plan.stream, site.index, site.readers),
        **_facts(plan.stream.state(site.index)),
    )


def _sublayer(step: Step) -> Sublayer:
    return Sublayer(
        module=facts.module_path(step.node),
        where=facts.source_line(step.node),
        add=step.node.name,
        adds=tuple(node.name for node in (*step.inner, *step.adds)),
        **_facts(step.node),
    )


def _facts(node: fx.Node) -> dict[str, Any]:
    value = facts.tensor(node)
    if value is None:
        return {}
    shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
    return {"shape": shape, "dtype": str(value.dtype).removeprefix("torch.")}


def join(prefix: str, name: str) -> str:
    """``prefix.name``, or ``name`` where there is no prefix."""
    return f"{prefix}.{name}" if prefix else name


def refuse_strict(rejections: Sequence[LeftAlone], report: TransformReport) -> None:
    """Raise where ``strict`` forbids what was left alone.

    Raises:
        RejectedStreamError: a residual stream is among ``rejections``.
    """
    for rejection in rejections:
        if rejection.reason in STREAM_REASONS:
            raise RejectedStreamError(
                f"strict: a residual stream would be left alone: {rejection.message}",
                report=report,
                module=rejection.module,
                where=rejection.where,
                remedy="Set strict=False to convert the rest",
            )
