"""How a converted model attends over its depth: the softmax weights of every site, as data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from torch import nn

from attnres_compile import observing
from attnres_compile.accepting import refuse_strangers
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import AttnResError, ConfigError, NotTransformedError
from attnres_compile.inputs import as_inputs
from attnres_compile.observing import Moments
from attnres_compile.parameters import DepthQueries, converted
from attnres_compile.passes.facts import clean_path
from attnres_compile.report import Site, Stream
from attnres_compile.reporting import join

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

Array = NDArray[np.float64]
Form = Literal["plain", "full", "block", "measured"]
FORMS: tuple[Form, ...] = get_args(Form)
ROOT, PARTIAL = "root", "partial"


@dataclass(frozen=True, eq=False)
class StreamWeights:
    """The softmax weights of one residual stream: ``p_i = softmax_i(scale * <w, RMSNorm(v_i)>)`` at each of its sites
    (arXiv 2603.15031, and docs/method.md), without the gain.

    Attributes:
        name: of the stream, as in the report.
        sites: names of its S sites in depth order, as in the report.
        kinds: for each site what reads it: ``"attention"``, ``"mlp"``, ``"other"``, ``"output"``, or ``""``.
        readers: for each site the paths of the modules that read it.
        sources: names of the C sources: ``"root"``, ``"block 1"``.. and, if any site reads the sum of the block in
            progress, ``"partial"``.
        weights: ``float64[S, C]``, the mean over all tokens; NaN where a source is none of the site's. A site of one
            source has weight 1 on it. Each row adds up to 1.
        std: ``float64[S, C]``, the standard deviation over all tokens (of the population).
        entropy: ``float64[S]``, the mean over all tokens of the entropy of a token's weights, in nats.
        tokens: number of tokens: batch, sequence and space, padding included, over all calls of the owner.
        gain: ``"sum"`` or ``"mean"``: whether the model multiplies the mix by the number of sources.
        blocks: for each block the numbers (from 0) of the L sublayers that it sums.
        index: for each site the number of sublayers behind the value that it reads.
    """

    name: str
    sites: tuple[str, ...]
    kinds: tuple[str, ...]
    readers: tuple[tuple[str, ...], ...]
    sources: tuple[str, ...]
    weights: Array
    std: Array
    entropy: Array
    tokens: int
    gain: str
    blocks: tuple[tuple[int, ...], ...]
    index: tuple[int, ...]

    @property
    def uniform_entropy(self) -> Array:
        """``float64[S]``: the entropy that weights all equal would have, ``log n``, in nats."""
        counts: Array = np.isfinite(self.weights).sum(1)
        return np.log(counts)

    @property
    def entropy_of_mean(self) -> Array:
        """``float64[S]``: the entropy of the mean weights, in nats: at least the mean entropy of a token."""
        p = np.nan_to_num(self.weights)
        entropy: Array = -(p * np.log(np.where(p > 0, p, 1.0))).sum(1)
        return entropy + 0.0  # no minus zero

    def mixing(self, form: Form) -> Array:
        """The depth-mixing matrix: with which weight each sublayer's output enters the value that each site reads.

        Args:
            form: ``"plain"``: the residual sum, 1 for every earlier sublayer; ``"full"``: the full form with zero
                queries, one over the number of them and the root; ``"block"``: the block form of this stream with zero
                queries, one over the site's number of sources for each member of each; ``"measured"``: the weights,
                each spread over the members of its block.

        Returns:
            ``float64[S, 1 + L]``: a column for the root, then one per sublayer; 0 for what is no part of the value.

        Raises:
            ConfigError: ``form`` is none of these.
        """
        if form not in FORMS:
            raise ConfigError(f"form must be one of {', '.join(map(repr, FORMS))}, not {form!r}")
        sublayers = sum(len(block) for block in self.blocks)
        matrix = np.zeros((len(self.sites), 1 + sublayers))
        for row, before in enumerate(self.index):
            if form in ("plain", "full"):
                matrix[row, : 1 + before] = 1.0 if form == "plain" else 1.0 / (1 + before)
                continue
            weights = self.weights[row]
            present = np.isfinite(weights)
            for column in np.flatnonzero(present):
                share = weights[column] if form == "measured" else 1.0 / present.sum()
                matrix[row, self._members(self.sources[column], before)] = share
        return matrix

    def _members(self, source: str, before: int) -> list[int]:
        """Columns of a mixing matrix that a source is the sum of, at a site behind ``before`` sublayers."""
        if source == ROOT:
            return [0]
        if source == PARTIAL:
            running = next(block for block in self.blocks if before - 1 in block)
            return [1 + member for member in running if member < before]
        return [1 + member for member in self.blocks[int(source.removeprefix("block ")) - 1]]

    def to_dict(self) -> dict[str, Any]:
        """The fields, the entropies of equal weights and the mixing matrices as JSON values; NaN is null."""
        return {
            "name": self.name,
            "sites": list(self.sites),
            "kinds": list(self.kinds),
            "readers": [list(readers) for readers in self.readers],
            "sources": list(self.sources),
            "weights": _nullable(self.weights),
            "std": _nullable(self.std),
            "entropy": self.entropy.tolist(),
            "uniform_entropy": self.uniform_entropy.tolist(),
            "tokens": self.tokens,
            "gain": self.gain,
            "blocks": [list(block) for block in self.blocks],
            "index": list(self.index),
            "mixing": {form: self.mixing(form).tolist() for form in FORMS},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StreamWeights:
        """What :meth:`to_dict` was taken from."""
        return cls(
            name=values["name"],
            sites=tuple(values["sites"]),
            kinds=tuple(values["kinds"]),
            readers=tuple(tuple(readers) for readers in values["readers"]),
            sources=tuple(values["sources"]),
            weights=_array(values["weights"]),
            std=_array(values["std"]),
            entropy=_array(values["entropy"]),
            tokens=values["tokens"],
            gain=values["gain"],
            blocks=tuple(tuple(block) for block in values["blocks"]),
            index=tuple(values["index"]),
        )


@dataclass(frozen=True, eq=False)
class DepthWeights:
    """The softmax weights of a converted model's streams.

    Attributes:
        streams: in the order of the report.
    """

    streams: tuple[StreamWeights, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values, described in docs/depth-weights.md."""
        return {"streams": [stream.to_dict() for stream in self.streams]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DepthWeights:
        """What :meth:`to_dict` was taken from."""
        return cls(tuple(StreamWeights.from_dict(stream) for stream in values["streams"]))

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw heat maps, entropies and mixing matrices with matplotlib (the optional extra ``plot``).

        Args:
            path: where to save the figure; its suffix says the format (``.png``, ``.pdf``, ``.svg``).

        Returns:
            The figure, which is not registered with pyplot: nothing has to be closed.

        Raises:
            MissingDependencyError: matplotlib is not installed.
            AttnResError: the file cannot be written.
        """
        from attnres_compile.views.plot import figure

        return figure(self, path)

    def __rich__(self) -> RenderableType:
        """The heat maps in a terminal: ``rich.print(weights)``."""
        from attnres_compile.views import heatmap

        return heatmap.weights(self)

    def _repr_html_(self) -> str:
        """The heat maps in a notebook."""
        from attnres_compile.views import heatmap

        return heatmap.html(self)


def depth_weights(model: nn.Module, example_inputs: Any, config: AttnResConfig | None = None) -> DepthWeights:
    """Run a converted model once and look at the softmax weights of all its sites.

    The model runs in the mode (train or eval) that it is in, without gradients and op by op, and is left as it was:
    parameters, buffers, gradients, random state, its report and what it is compiled into do not change, and the inputs
    are copied. Weights are computed in float32 (float64 where the sources are) and averaged in float64; what is kept
    does not grow with the number of tokens.

    Args:
        model: a transformed model; one that ``torch.compile(model, backend="attnres")`` has run; or a graph module of
            :func:`attnres_compile.rewrite_graph`. What ``torch.compile`` returned is looked through.
        example_inputs: what to call it with, as for :func:`attnres_compile.transform`.
        config: the configuration that the model was converted with. Needed where one model was compiled late with
            several; anything else than what it was converted with is refused.

    Returns:
        Mean, deviation and entropy of the weights per site.

    Raises:
        NotTransformedError: the model has no pseudo-queries.
        PlanMismatchError: this call of the model does not hold the sites that its queries were made for.
        ConfigError: ``config`` is not what the model was converted with.
        AttnResError: a stream or a site did not run on these inputs, its numbers are not finite, or the model is on
            the meta device.
        InputsError: ``example_inputs`` is of no known form. An error of the model itself is raised as by any call.
    """
    refuse_strangers(model)
    inputs = as_inputs(example_inputs)
    model = observing.unwrapped(model)
    holders = [(path, queries) for path, _, queries in converted(model)]
    holders += [(p, q) for p, _, name, q in observing.rewritten_graphs(model) if (p, q) not in holders]
    stores = [] if holders else observing.late_stores(model, config)
    holders += [("", queries) for queries in stores]
    if not holders:
        raise NotTransformedError(
            f"{type(model).__name__} holds no pseudo-queries{' of this configuration' if config else ''}",
            remedy="Call attnres_compile.transform(model, example_inputs), or run the compiled model once",
        )
    for path, queries in holders:
        if config is not None and queries.declaration.config.layout() != config.layout():
            raise ConfigError(
                "the model was converted with another configuration",
                module=path,
                remedy="Leave config out: the model knows its own",
            )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise AttnResError("a model on the meta device has no weights to look at", remedy="Load it on a real device")
    moments = observing.observe(model, inputs, stores)
    streams = [
        _stream(stream, clean_path(path), queries, moments)
        for path, queries in holders
        for stream in queries.report.streams
    ]
    return DepthWeights(tuple(streams))


def _stream(
    stream: Stream, path: str, queries: DepthQueries, moments: dict[tuple[DepthQueries, str], Moments]
) -> StreamWeights:
    """One stream of the report; names are where the module stands in this model."""

    def here(name: str) -> str:
        local = name if not stream.owner else name.removeprefix(f"{stream.owner}.")
        return name if name == "output" else join(path, local)

    found = [_found(site, stream, queries, moments) for site in stream.sites]
    tokens = {each.tokens for each in found if each is not None}
    if len(tokens) > 1:
        raise AttnResError(
            f"the sites of {here(stream.name)} ran on {min(tokens)} to {max(tokens)} tokens: some of them were not "
            "reached at every call of the module",
            module=path,
            remedy="Give inputs that run the whole stream",
        )
    columns = [ROOT, *(f"block {number}" for number in range(1, len(stream.blocks) + 1))]
    if any(_column(source) == PARTIAL for site in stream.sites for source in site.sources):
        columns.append(PARTIAL)
    weights, std = np.full((2, len(stream.sites), len(columns)), math.nan)
    entropy = np.zeros(len(stream.sites))
    for row, (site, each) in enumerate(zip(stream.sites, found, strict=True)):
        at = [columns.index(_column(source)) for source in site.sources]
        weights[row, at] = 1.0 if each is None else each.mean.numpy()
        std[row, at] = 0.0 if each is None else (each.squares / each.tokens).sqrt().numpy()
        entropy[row] = 0.0 if each is None else each.entropy / each.tokens
    return StreamWeights(
        name=here(stream.name),
        sites=tuple(here(site.name) for site in stream.sites),
        kinds=tuple(site.kind for site in stream.sites),
        readers=tuple(tuple(here(reader) for reader in site.readers) for site in stream.sites),
        sources=tuple(columns),
        weights=weights,
        std=std,
        entropy=entropy,
        tokens=max(tokens, default=0),
        gain=queries.declaration.config.gain,
        blocks=stream.blocks,
        index=tuple(site.index for site in stream.sites),
    )


def _found(
    site: Site, stream: Stream, queries: DepthQueries, moments: dict[tuple[DepthQueries, str], Moments]
) -> Moments | None:
    """The moments of a site; ``None`` where it has nothing to choose."""
    if site.query is None:
        return None
    local = site.query if not stream.owner else site.query.removeprefix(f"{stream.owner}.")
    found = moments.get((queries, local))
    if found is None:
        raise AttnResError(
            f"site {site.name} did not run on these inputs",
            module=stream.owner,
            remedy="Give inputs that reach the module; a module compiled from outside, inside a function, is not seen",
        )
    if found.broken or not found.tokens:
        total = found.broken + found.tokens
        raise AttnResError(
            f"the weights of site {site.name} are not finite for {found.broken} of {total} tokens",
            module=stream.owner,
            remedy="Look for infinite or undefined activations" if total else "Give inputs with at least one token",
        )
    return found


def _column(source: str) -> str:
    return PARTIAL if source.startswith(PARTIAL) else source


def _nullable(values: Array) -> list[list[float | None]]:
    return [[None if math.isnan(value) else value for value in row] for row in values.tolist()]


def _array(values: Sequence[Any]) -> Array:
    return np.array([[math.nan if v is None else v for v in row] if isinstance(row, list) else row for row in values])
