"""Which modules of a model would be converted, and how: everything before anything is changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from attnres_compile import backend, owners
from attnres_compile.accepting import refuse_strangers
from attnres_compile.capture import capture, capture_owners, capture_pieces
from attnres_compile.config import AttnResConfig
from attnres_compile.conversion import ConvertedForward
from attnres_compile.crossing.recording import record
from attnres_compile.crossing.regions import compiled, is_inside
from attnres_compile.crossing.route import Route, route_of
from attnres_compile.crossing.trial import Candidate, prove
from attnres_compile.errors import (
    AlreadyCompiledError,
    AlreadyTransformedError,
    AttnResError,
    GraphBreakError,
    ModelError,
    NoStreamError,
    is_out_of_memory,
)
from attnres_compile.graphs import with_shapes
from attnres_compile.guarding import untouched
from attnres_compile.inputs import Inputs, as_inputs
from attnres_compile.parameters import CHILD, Declaration, DepthQueries, converted
from attnres_compile.passes import facts
from attnres_compile.passes.checkpoint import Region, open_regions
from attnres_compile.passes.detect import detect
from attnres_compile.passes.plan import BlockPlan, plan
from attnres_compile.passes.streams import Detection, Reason, ResidualStream
from attnres_compile.passes.writes import written
from attnres_compile.report import GraphBreak, LeftAlone, TransformReport
from attnres_compile.reporting import STREAM_REASONS, build_report, left_alone, parameters_per_site, refuse_strict
from attnres_compile.steps import Place, places


@dataclass(frozen=True)
class Conversion:
    """A module to convert.

    Attributes:
        path: of the module in the model.
        plans: of its streams, named relative to it.
        graph: the graph whose nodes the plans hold; checkpointed regions are opened in it.
        traced: path of the module that the graph is of; ``""`` is the model itself.
        route: of its stream, where that runs through graph breaks.
        regions: paths, relative to it, of modules that are compiled on their own.
        left: what :class:`Declaration` says of it.
        method: name of the method that runs all of it.
        guarded: modules of the model that hold its steps.
    """

    path: str
    plans: tuple[BlockPlan, ...]
    graph: fx.GraphModule
    traced: str = ""
    route: Route | None = None
    regions: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    method: str = "forward"
    guarded: tuple[Place, ...] = ()

    @classmethod
    def of(
        cls,
        path: str,
        streams: tuple[ResidualStream, ...],
        config: AttnResConfig,
        graph: fx.GraphModule,
        method: str = "forward",
    ) -> Conversion:
        """Plan ``streams`` of ``graph`` for a method of the module at ``path``."""
        return cls(path, plan(streams, config, path, method), graph, method=method)

    def declaration(self, config: AttnResConfig) -> Declaration:
        """What the module says of itself."""
        return Declaration.of(self.plans, config, self.left, self.method)

    def limited(self, to: Conversion) -> Conversion:
        """This, what the module's own graph shows, without the streams that ``to``, what the whole model's shows, does
        not know: they are left alone.
        """
        known = {line for each in to.plans for line in _lines(each)}
        kept = [each for each in self.plans if known & _lines(each)]
        left = [*self.left, *(name for each in self.plans if each not in kept for name in each.queries)]
        return replace(self, plans=tuple(kept), left=tuple(left))

    def queries(self, owner: nn.Module, config: AttnResConfig, report: TransformReport) -> DepthQueries:
        """New parameters for the module ``owner``, queries zero, in its dtype and on its device."""
        like = next((p for p in owner.parameters() if p.is_floating_point()), None)
        made = DepthQueries(
            self.declaration(config),
            dtype=like.dtype if like is not None else None,
            device=like.device if like is not None else None,
            report=report,
        )
        return made.train(owner.training)


def study(
    model: nn.Module, example_inputs: Any, config: AttnResConfig, follow: bool = True
) -> tuple[list[Conversion], TransformReport]:
    """Trace, detect and plan; nothing is changed.

    Args:
        model: the model.
        example_inputs: inputs of it.
        config: how to convert.
        follow: whether streams may be followed through graph breaks and modules that are compiled on their own.

    Returns:
        One conversion per module that owns a stream, and the report on the whole model.

    Raises:
        GraphBreakError: tracing breaks inside a stream that cannot be followed.
        AlreadyCompiledError: a module is compiled that owns a stream, or only parts of a stream are in such modules.
    """
    inputs = as_inputs(example_inputs)
    regions = compiled(model)
    if regions:
        if not follow:
            raise _already_compiled(model, regions[0])
        return _study_recording(model, inputs, config, (), regions)
    traced = capture(model, inputs)
    graph = traced.graph
    if graph is None:
        study_broken = _study_recording if follow else _study_owners
        return study_broken(model, inputs, config, traced.breaks)
    open_regions(graph)
    detection = owners.agreeing(model, detect(graph.graph, config))
    conversions = _with_unrecorded(model, by_owner(model, detection, config, graph), detection, config, graph)
    extra: tuple[LeftAlone, ...] = ()
    doubtful = [item.path for item in conversions if _writes_in_place(item) or _is_seen_otherwise(item, detection)]
    if doubtful:
        # Only its own graph tells what such a module does by itself, and that one runs.
        everyone = [item.path for item in conversions]
        for path, (item, rejected) in _own_conversions(model, inputs, config, doubtful, everyone).items():
            at = next(i for i, each in enumerate(conversions) if each.path == path)
            item = item.limited(conversions[at])
            if item.declaration(config) != conversions[at].declaration(config):
                conversions[at] = item
                extra += tuple(r for r in rejected if r.reason == Reason.MUTATED)
        conversions = [item for item in conversions if item.plans]
    conversions = by_method(model, inputs, conversions, doubtful, config)
    plans = [each for item in conversions for each in item.plans]
    prefixes = [item.path for item in conversions for _ in item.plans]
    whole = build_report(detection, plans, config, prefixes)
    return guarded(model, conversions), replace(whole, rejections=whole.rejections + extra)


def study_graph(
    graph_module: fx.GraphModule | torch.export.ExportedProgram,
    example_inputs: Sequence[Any] | None,
    config: AttnResConfig,
) -> tuple[Conversion, TransformReport, list[Region]]:
    """Detect and plan in a copy of a graph that comes as it is; see :func:`attnres_compile.rewrite_graph`.

    Returns:
        What to convert, with the copy as its graph; the report; and the checkpointed regions that were opened.
    """
    module = with_shapes(graph_module, example_inputs)
    regions = open_regions(module)
    detection = detect(module.graph, config)
    item = Conversion.of("", detection.streams, config, module)
    return item, build_report(detection, item.plans, config), regions


def by_owner(model: nn.Module, detection: Detection, config: AttnResConfig, graph: fx.GraphModule) -> list[Conversion]:
    """The detected streams of ``graph`` by the module of ``model`` that owns them."""
    return [
        Conversion.of(path, streams, config, graph) for path, streams in owners.streams_of(model, detection).items()
    ]


def _switches(detection: Detection) -> bool:
    return any(left.reason is Reason.GRADIENT_MODE for left in detection.rejections)


def _with_unrecorded(
    model: nn.Module, conversions: list[Conversion], detection: Detection, config: AttnResConfig, graph: fx.GraphModule
) -> list[Conversion]:
    """``conversions``, which name the streams that are left alone for their gradients: a graph that is traced under
    somebody's ``no_grad`` does not show why.
    """
    if not _switches(detection):
        return conversions
    everything = owners.agreeing(model, detect(graph.graph, config, gradients=False))
    found = {item.path: item for item in by_owner(model, everything, config, graph)}
    return [found[item.path].limited(item) if item.path in found else item for item in conversions]


def guarded(model: nn.Module, conversions: Sequence[Conversion]) -> list[Conversion]:
    """``conversions`` with the modules that may not run outside of them."""
    return [
        replace(item, guarded=places(model, item.path, item.method, streams, item.graph.graph, item.route is not None))
        for item, streams in ((item, [each.stream for each in item.plans]) for item in conversions)
    ]


def by_method(
    model: nn.Module, inputs: Inputs, conversions: Sequence[Conversion], doubtful: Sequence[str], config: AttnResConfig
) -> list[Conversion]:
    """``conversions``, each by the method that runs its streams, where the model gets to them by that method.

    Whether it does is seen by tracing once more, with the declarations in it: a method can also be called around the
    instance (``super().encode(x)``), or several times in one call of ``forward``.
    """
    found: list[Conversion] = []
    changed = False
    for item in conversions:
        path, method = owners.method_of(model, item.path, [each.stream for each in item.plans])
        if (path, method) == (item.path, "forward") or item.path in doubtful or item.left:
            found.append(item)
            continue
        streams = tuple(each.stream for each in item.plans)
        found.append(Conversion.of(path, streams, config, item.graph, method))
        changed = True
    if not changed:
        return list(conversions)
    with contextlib.ExitStack() as stack:
        for item in found:
            stack.enter_context(declared(model, item, config))
        try:
            again = capture(model, inputs).graph
            if again is not None and len({item.path for item in found}) == len(found):
                names = sorted(facts.module_path(n) for n in again.graph.nodes if n.target is backend.DECLARE)
                backend.rewrite_declared(again.graph)
                if names and set(names) == {item.path for item in found}:
                    return found
        except AttnResError:
            pass
    return list(conversions)


@contextlib.contextmanager
def declared(model: nn.Module, item: Conversion, config: AttnResConfig) -> Iterator[None]:
    """While open, the module of ``item`` is converted as it says."""
    owner = model.get_submodule(item.path)
    before = owner.__dict__.get(item.method)
    owner._modules[CHILD] = item.queries(owner, config, TransformReport())
    owner.__dict__[item.method] = ConvertedForward(owner, item.route, item.regions, item.method)
    try:
        yield
    finally:
        del owner._modules[CHILD], owner.__dict__[item.method]
        if before is not None:
            owner.__dict__[item.method] = before


def _writes_in_place(item: Conversion) -> bool:
    steps = [step for each in item.plans for step in each.stream.steps]
    return any(written(add) for step in steps for add in step.adds)


def _is_seen_otherwise(item: Conversion, detection: Detection) -> bool:
    """Whether the module's own graph may show other streams than the whole model's: where an add was left alone for a
    constant that its caller computes, or a stream of it was left alone, perhaps for what happens outside of it.
    """

    def inside(node: fx.Node) -> bool:
        path = facts.module_path(node)
        return path == item.path or is_inside(path, item.path)

    for left in detection.rejections:
        if not inside(left.node):
            continue
        if left.reason in STREAM_REASONS:
            return True
        handed = (operand for operand in left.node.all_input_nodes if not inside(operand))
        if left.reason == Reason.CONSTANT_OPERAND and any(map(facts.is_computed_constant, handed)):
            return True
    return False


def _lines(plan: BlockPlan) -> set[owners.Line]:
    """Where the steps of a stream are: the same in every graph that holds them."""
    return {owners.line_of(step.node) for step in plan.stream.steps}


def _own_conversions(
    model: nn.Module, inputs: Inputs, config: AttnResConfig, paths: Iterable[str], everyone: Iterable[str]
) -> dict[str, tuple[Conversion, tuple[LeftAlone, ...]]]:
    """For each module its streams as its own graph shows them, and what that graph leaves alone.

    Args:
        paths: the modules.
        everyone: all modules that own a stream. One inside another keeps its own: the other's graph shows it, too.
    """
    others = set(everyone)
    found: dict[str, tuple[Conversion, tuple[LeftAlone, ...]]] = {}
    for path, graph in capture_owners(model, inputs, dict.fromkeys(paths)).items():
        open_regions(graph)
        detection = detect(graph.graph, config)

        def own(detection: Detection, path: str = path, graph: fx.GraphModule = graph) -> Conversion:
            mine = (stream for stream in detection.streams if owners.path_of(model, [stream]) not in others - {path})
            return Conversion.of(path, tuple(mine), config, graph)

        item = own(detection)
        if _switches(detection):
            item = own(detect(graph.graph, config, gradients=False)).limited(item)
        found[path] = replace(item, traced=path), left_alone(detection)
    return found


def _study_owners(
    model: nn.Module, inputs: Inputs, config: AttnResConfig, breaks: tuple[GraphBreak, ...]
) -> tuple[list[Conversion], TransformReport]:
    """The model breaks into pieces; a stream in one piece is converted if its owner can be traced as a whole."""
    graphs = capture_pieces(model, inputs)
    for piece in graphs:
        open_regions(piece)
    detections = [owners.agreeing(model, detect(piece.graph, config)) for piece in graphs]
    paths = [
        item.path
        for piece, detection in zip(graphs, detections, strict=True)
        for item in by_owner(model, detection, config, piece)
    ]
    whole = TransformReport(graph_breaks=breaks)
    if not paths:
        # Too short to be streams by themselves, or none at all.
        raise GraphBreakError(
            f"tracing stops before a whole residual stream is seen: {breaks[0].reason}",
            where=breaks[0].where,
            remedy=_REMOVE,
        )
    own = _own_conversions(model, inputs, config, paths, paths)
    for item, rejected in own.values():
        part = build_report(Detection((), ()), item.plans, config, [item.path] * len(item.plans))
        whole = whole.merged(replace(part, rejections=rejected))
    return guarded(model, [item for item, _ in own.values() if item.plans]), whole


def _study_recording(
    model: nn.Module,
    inputs: Inputs,
    config: AttnResConfig,
    breaks: tuple[GraphBreak, ...],
    regions: tuple[str, ...] = (),
) -> tuple[list[Conversion], TransformReport]:
    """dynamo does not see the whole model, or is not to: its call is recorded, and shows every stream whole.

    A stream whose owner can be traced as a whole is converted as any other; all others are followed from piece to
    piece.
    """
    try:
        with untouched(model):
            recording = record(model, inputs.copied())
    except Exception as error:  # The model runs: there is something in it that cannot be recorded.
        if regions or is_out_of_memory(error):
            raise
        try:
            return _study_owners(model, inputs, config, breaks)
        except AttnResError as less:  # Less is seen without the recording; both say why.
            raise less from (less.__cause__ or error)
    detection = owners.agreeing(model, detect(recording.module.graph, config))
    if not detection.streams and not regions:
        try:
            return _study_owners(model, inputs, config, breaks)
        except GraphBreakError:  # The recording shows more: why no add is a stream's.
            pass
    conversions: list[Conversion] = []
    candidates: list[Candidate] = []
    owned = by_owner(model, detection, config, recording.module)
    for item in owned:
        inside = tuple(path for path in regions if is_inside(path, item.path))
        around = next((path for path in regions if path == item.path or is_inside(item.path, path)), None)
        if around is not None:
            raise _already_compiled(model, around)
        found, broken = None, None
        if not inside:
            try:
                everyone = [each.path for each in owned]
                found = _own_conversions(model, inputs, config, [item.path], everyone)[item.path][0]
            except GraphBreakError as error:
                broken = error
        if found is not None:
            conversions += [found] if found.plans else []
            continue
        route = route_of(item.plans)
        where = broken.where if broken is not None else ""
        if isinstance(route, str):
            what = broken.what if broken is not None else "modules inside a residual stream are compiled on their own"
            raise GraphBreakError(f"{what}; {route}", module=item.path, where=where, remedy=_REMOVE)
        relative = tuple(path.removeprefix(item.path).removeprefix(".") for path in inside)
        candidates.append(Candidate(item.path, item.plans, route, where, relative))
        conversions.append(replace(item, route=route, regions=relative))
    plans = [each for item in conversions for each in item.plans]
    prefixes = [item.path for item in conversions for _ in item.plans]
    whole = build_report(detection, plans, config, prefixes, breaks)
    if candidates and all(not hasattr(model.get_submodule(item.path), CHILD) for item in candidates):
        try:
            prove(model, inputs, candidates, recording, config)
        except GraphBreakError as error:
            if not regions:
                raise
            raise _already_compiled(model, regions[0], f": {error.what}", error.where) from error
    return guarded(model, conversions), whole


_REMOVE = "Remove what breaks the graph (TORCH_LOGS=graph_breaks shows all places)"


def _already_compiled(model: nn.Module, path: str, why: str = "", where: str = "") -> AlreadyCompiledError:
    return AlreadyCompiledError(
        f"{type(model.get_submodule(path)).__name__} is compiled already{why}",
        module=path,
        where=where,
        remedy="Transform the original module first and compile the result",
    )


def refuse_wrapped(model: nn.Module) -> None:
    """Raise where ``model`` is no plain module.

    Raises:
        ModelError: see :func:`refuse_strangers`; or its parameters are inference tensors.
        AlreadyTransformedError: it, or a part of it, is transformed already.
        AlreadyCompiledError: it is compiled already. A part of it may be, see :func:`study`.
    """
    refuse_strangers(model)
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ModelError(
            f"the parameters of {type(model).__name__} are inference tensors, which nothing can be trained beside",
            remedy="Make or load the model outside of torch.inference_mode(), or make a copy.deepcopy outside",
        )
    if "" in compiled(model):
        raise _already_compiled(model, "")
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
    """
    if config.strict:
        refuse_strict(whole.rejections, whole)
    if not any(item.plans for item in conversions):
        where = next((broken.where for broken in whole.graph_breaks), "")
        remedy = "error.report lists every add with its reason"
        raise NoStreamError(no_stream(whole), report=whole, where=where, remedy=remedy)


def share(whole: TransformReport, path: str, config: AttnResConfig, first: bool) -> TransformReport:
    """One converted module's share of the report; what belongs to none goes to the first."""
    streams = tuple(stream for stream in whole.streams if stream.owner == path)
    queries = sum(stream.feature_dim * sum(site.query == site.name for site in stream.sites) for stream in streams)
    names = {stream.name for stream in streams}
    phases = tuple(phase for phase in whole.phases if phase.stream in names)
    part = TransformReport(streams, parameters_added=queries * parameters_per_site(config), phases=phases)
    return replace(part, rejections=whole.rejections, graph_breaks=whole.graph_breaks) if first else part


def no_stream(whole: TransformReport) -> str:
    """Why nothing could be converted, in one sentence."""
    if not whole.rejections:
        return "no residual stream was found: the traced graph adds no two tensors of one shape"
    counts: dict[str, int] = {}
    for rejection in whole.rejections:
        counts[rejection.reason] = counts.get(rejection.reason, 0) + 1
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items(), key=lambda c: -c[1]))
    return f"no residual stream could be converted; adds left alone: {reasons}"
