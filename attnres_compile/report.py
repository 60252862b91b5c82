"""What was found and what was done, as plain data.

Nothing here prints or draws. ``to_dict`` gives JSON values in a stable shape, described in docs/report.md; the methods
that show a report hand it to :mod:`attnres_compile.views`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import networkx as nx
    from rich.console import RenderableType

    from attnres_compile.depth_weights import DepthWeights


@dataclass(frozen=True)
class Sublayer:
    """One branch of a residual stream.

    Attributes:
        module: dotted path of the module whose code holds the add, relative to the model; ``""`` is the model.
        where: ``file:line`` of the add in the user's code, or ``""``.
        add: name of the graph node of the add (the last one, where several adds make one step).
        adds: names of all add nodes that this step stands for, ``add`` included.
        shape: sizes of the stream behind it on the example inputs; a size that varies is text.
        dtype: its dtype, as ``"float32"``.
    """

    module: str
    where: str
    add: str
    adds: tuple[str, ...] = ()
    shape: tuple[int | str, ...] = field(default=(), compare=False)
    dtype: str = field(default="", compare=False)


@dataclass(frozen=True)
class Site:
    """One place where the stream is read.

    Attributes:
        name: unique in the model; the key in :func:`attnres_compile.pseudo_queries`.
        readers: module paths of what reads it (``"output"`` for a returned value).
        sources: names of its sources in depth order: ``"root"``, ``"block 1"``.., ``"partial 2"``.
        query: name of its pseudo-query: ``name``, or that of the same site in an earlier call of the same network
            (``calls="shared"``); ``None`` for a site with one source (a bypass).
        index: number of sublayers behind the value that it reads; 0 is the root.
        kind: what the sublayer that reads it computes: ``"attention"``, ``"mlp"`` or ``"other"``; ``"output"`` behind
            the last one, ``""`` where that was not asked.
        shape: sizes of the value that it reads on the example inputs; a size that varies is text.
        dtype: its dtype, as ``"float32"``.
    """

    name: str
    readers: tuple[str, ...]
    sources: tuple[str, ...]
    query: str | None
    index: int = field(default=0, compare=False)
    kind: str = field(default="", compare=False)
    shape: tuple[int | str, ...] = field(default=(), compare=False)
    dtype: str = field(default="", compare=False)


@dataclass(frozen=True)
class Cost:
    """What depth attention will cost in one stream, predicted from its plan.

    Bytes are per token of the stream: what is read from memory and written to it for the stream's adds and sites in one
    forward, or one forward and backward; ``activation`` bytes are what is kept more than the plain stream keeps.

    Attributes:
        parameters: scalar parameters added.
        itemsize: bytes per element of the stream.
        plain_bytes: moved by the plain residual's adds, forward: 3 rows of d per sublayer (paper, Table 1).
        direct_bytes: moved where each site reads its sources by itself, forward; the adds inside blocks included.
        two_phase_bytes: the same where two phases are taken per block whenever fewer bytes move.
        plain_training_bytes, direct_training_bytes, two_phase_training_bytes: forward and backward.
        activation_bytes: sources alive at the peak of inference, less the one that the plain stream holds.
        training_activation_bytes: block sums, partial sums and statistics kept for the backward.
    """

    parameters: int
    itemsize: int
    plain_bytes: int
    direct_bytes: int
    two_phase_bytes: int
    plain_training_bytes: int
    direct_training_bytes: int
    two_phase_training_bytes: int
    activation_bytes: int
    training_activation_bytes: int


@dataclass(frozen=True)
class Stream:
    """One converted residual stream.

    Attributes:
        name: unique in the model.
        feature_dim: size d of the features that the key norm runs over.
        sublayers: its branches in depth order.
        blocks: for each block the indices into ``sublayers`` of what it sums.
        sites: its sites in depth order.
        owner: path of the module whose forward holds the whole stream; ``""`` is the model.
        cost: what it will cost; ``None`` where the stream's dtype is not known.
    """

    name: str
    feature_dim: int
    sublayers: tuple[Sublayer, ...]
    blocks: tuple[tuple[int, ...], ...]
    sites: tuple[Site, ...]
    owner: str = ""
    cost: Cost | None = field(default=None, compare=False)


@dataclass(frozen=True)
class LeftAlone:
    """An add, or a stream's worth of adds, that was not converted.

    Attributes:
        reason: value of :class:`attnres_compile.passes.streams.Reason`.
        message: one sentence for a person.
        module: path of the module whose code holds the add.
        where: ``file:line`` of the add, or ``""``.
        node: name of the add's graph node.
    """

    reason: str
    message: str
    module: str
    where: str
    node: str = ""


@dataclass(frozen=True)
class GraphBreak:
    """A place where dynamo could not go on tracing."""

    reason: str
    where: str


@dataclass(frozen=True)
class Phase:
    """How the sites that read the same finished blocks are computed: each by itself, or all in two phases.

    Attributes:
        stream: name of their stream.
        block: number of the block in progress, from 1; one more than there are after the last.
        sites: their names, in depth order.
        sources: number of finished sources that all of them read, the root included.
        direct_bytes: bytes per token moved where each site reads its sources by itself.
        two_phase_bytes: bytes per token moved where the finished sources are read once for all.
        training: whether the backward is counted too.
        chosen: ``"direct"`` or ``"two_phase"``.
        applies: whether that is what runs. ``False`` where the choice holds for generated kernels and the model is
            not where they run: each site then runs by itself.
        reason: why, in words.
    """

    stream: str
    block: int
    sites: tuple[str, ...]
    sources: int
    direct_bytes: int
    two_phase_bytes: int
    training: bool
    chosen: str
    applies: bool
    reason: str


@dataclass(frozen=True)
class Fusion:
    """What was fused into one site's kernel.

    Attributes:
        site: name of the site.
        norm: ``"rmsnorm"`` or ``"layernorm"`` after it, or ``""``.
        add: whether the residual add before it is.
        norm_reason: why no norm is, or ``""``.
        add_reason: why no add is, or ``""``.
    """

    site: str
    norm: str
    add: bool
    norm_reason: str
    add_reason: str


@dataclass(frozen=True)
class TransformReport:
    """Everything that was found and done in one model or graph.

    Two reports are equal when the same was converted; how it runs (``phases``, ``fusions``) is not compared.

    Attributes:
        streams: the converted streams.
        rejections: every add that was considered and left alone, each with its reason.
        graph_breaks: where tracing stopped.
        parameters_added: number of scalar parameters added (queries and key norm weights).
        phases: per set of sites over the same finished blocks, how they are computed: predicted until the model is
            compiled, then what was done.
        fusions: per site, what was fused into its kernel; empty until the model is compiled.
    """

    streams: tuple[Stream, ...] = ()
    rejections: tuple[LeftAlone, ...] = ()
    graph_breaks: tuple[GraphBreak, ...] = ()
    parameters_added: int = 0
    phases: tuple[Phase, ...] = field(default=(), compare=False)
    fusions: tuple[Fusion, ...] = field(default=(), compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values; see docs/report.md for the shape."""
        return {
            "streams": [_plain(stream) for stream in self.streams],
            "rejections": [_plain(rejection) for rejection in self.rejections],
            "graph_breaks": [_plain(graph_break) for graph_break in self.graph_breaks],
            "parameters_added": self.parameters_added,
            "phases": [_plain(phase) for phase in self.phases],
            "fusions": [_plain(fusion) for fusion in self.fusions],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TransformReport:
        """The report that :meth:`to_dict` was taken from."""
        return cls(
            streams=tuple(
                Stream(
                    name=stream["name"],
                    feature_dim=stream["feature_dim"],
                    sublayers=tuple(Sublayer(**_tuples(sub)) for sub in stream["sublayers"]),
                    blocks=tuple(tuple(block) for block in stream["blocks"]),
                    sites=tuple(Site(**_tuples(site)) for site in stream["sites"]),
                    owner=stream["owner"],
                    cost=Cost(**stream["cost"]) if stream.get("cost") else None,
                )
                for stream in values["streams"]
            ),
            rejections=tuple(LeftAlone(**rejection) for rejection in values["rejections"]),
            graph_breaks=tuple(GraphBreak(**graph_break) for graph_break in values["graph_breaks"]),
            parameters_added=values["parameters_added"],
            # Not in reports of version 0.1.
            phases=tuple(Phase(**_tuples(phase)) for phase in values.get("phases", ())),
            fusions=tuple(Fusion(**fusion) for fusion in values.get("fusions", ())),
        )

    def to_networkx(self) -> nx.DiGraph:
        """Sublayers, sources, sites and readers as a graph, see :func:`attnres_compile.depth_graph.depth_graph`."""
        from attnres_compile.depth_graph import depth_graph

        return depth_graph(self)

    def to_html(self, path: str | Path, weights: DepthWeights | None = None, title: str = "") -> None:
        """Write the report as one HTML file that needs nothing else (docs/html-report.md).

        Args:
            path: the file.
            weights: depth-attention weights to draw, from :func:`attnres_compile.depth_weights`.
            title: of the page; the default says what was converted.

        Raises:
            AttnResError: the file cannot be written.
        """
        from attnres_compile.views.html import write_page

        write_page(self, path, weights, title)

    def __rich__(self) -> RenderableType:
        """The report in a terminal: ``rich.print(report)``."""
        from attnres_compile.views import terminal

        return terminal.report(self, "")

    def _repr_html_(self) -> str:
        """The report in a notebook."""
        from attnres_compile.views.html import fragment

        return str(fragment(self))

    def merged(self, other: TransformReport) -> TransformReport:
        """This report followed by another one."""
        return TransformReport(
            self.streams + other.streams,
            self.rejections + other.rejections,
            self.graph_breaks + other.graph_breaks,
            self.parameters_added + other.parameters_added,
            self.phases + other.phases,
            self.fusions + other.fusions,
        )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
