"""A stream that is followed through graph breaks, compared with the same stream rewritten whole.

The recording holds all of it in one graph, which the ordinary passes rewrite. With the same random queries the model
in pieces must compute the same numbers; if anything between two graphs does something to the stream that nobody saw,
it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn

from attnres_compile.comparison import compare, named_tensors
from attnres_compile.config import AttnResConfig
from attnres_compile.conversion import ConvertedForward
from attnres_compile.crossing.recording import Recording
from attnres_compile.crossing.route import Route
from attnres_compile.errors import AttnResError, GraphBreakError, is_out_of_memory
from attnres_compile.guarding import untouched
from attnres_compile.inputs import Inputs
from attnres_compile.parameters import CHILD, Declaration, DepthQueries
from attnres_compile.passes.plan import BlockPlan
from attnres_compile.passes.rewrite import QueryNodes, rewrite

_SEED = 20_160
_REMOVE = "Remove what breaks the graph (TORCH_LOGS=graph_breaks shows all places)"
# Largest difference of two results, in units of the larger one. Both run op by op, in the same order; a source at the
# wrong place moves a result by a tenth or more.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# Sizes of the random queries, tried in this order. Other numbers take other ways through code that data decides (to
# which expert a token goes), and the recording knows one way only: small queries leave the numbers near the recorded.
_SIZES = (1.0, 0.03, 0.001)
# Small queries change results by little. A difference of so many times the tolerance must remain to be seen.
_SEEN = 30.0


@dataclass(frozen=True)
class Candidate:
    """A module whose stream would be followed in pieces.

    Attributes:
        path: of the module.
        plans: of its stream, in the recording.
        route: of its stream.
        broken: where tracing it stops, ``file:line``.
        regions: paths, relative to it, of the modules that are compiled on their own.
    """

    path: str
    plans: tuple[BlockPlan, ...]
    route: Route
    broken: str = ""
    regions: tuple[str, ...] = ()


def prove(
    model: nn.Module, inputs: Inputs, candidates: Sequence[Candidate], recording: Recording, config: AttnResConfig
) -> None:
    """Run ``model`` in pieces with random queries, and compare with the rewritten recording, which is used up.

    Nothing of the model is changed when this returns or raises.

    Raises:
        GraphBreakError: the numbers differ, or the stream is lost on the way.
    """
    trial = replace(config, lowering="eager", two_phase="off", fuse="off")
    where = next((item.broken for item in candidates if item.broken), "")
    if any(value.is_meta for value in recording.given):
        raise GraphBreakError(
            "a graph break inside a residual stream of a model on the meta device: whether it can be followed is "
            "shown by numbers",
            module=candidates[0].path,
            where=where,
            remedy="Transform the model on a device with memory, or remove what breaks the graph",
        )
    with untouched(model):
        queries = {item.path: _random_queries(model.get_submodule(item.path), item, trial) for item in candidates}
        whole = _Whole(recording, candidates, queries, trial)
        for item in candidates:
            owner = model.get_submodule(item.path)
            owner._modules[CHILD] = queries[item.path]
            owner.__dict__["forward"] = ConvertedForward(owner, item.route, item.regions)
        failures: list[GraphBreakError] = []
        for size in _SIZES:
            try:
                _compare(model, inputs, whole, size, candidates[0].path, where)
                return
            except GraphBreakError as error:
                failures.append(error)
    raise failures[0]


def _compare(model: nn.Module, inputs: Inputs, whole: _Whole, size: float, path: str, where: str) -> None:
    """One run in pieces against one of the rewritten recording, with queries of that size.

    Raises:
        GraphBreakError: the numbers differ, or are too near those of zero queries to tell, or one of the two fails.
    """
    try:
        plain = {} if size == max(_SIZES) else whole(0.0)
        want = whole(size)
    except AttnResError:
        raise
    except Exception as error:  # It ran when it was recorded: this comes of the other numbers.
        if is_out_of_memory(error):
            raise
        raise GraphBreakError(
            "a graph break inside a residual stream that cannot be followed: data decides what is computed, and "
            f"decides otherwise as soon as a query is not zero ({type(error).__name__} in what was recorded)",
            module=path,
            where=where,
            remedy=_REMOVE,
        ) from error
    torch.manual_seed(_SEED)
    try:
        given = inputs.copied()
        returned = model(*given.args, **given.kwargs)
    except AttnResError as error:
        found = f"{error.what} ({error.where})" if error.where and where else error.what
        raise GraphBreakError(
            f"a graph break inside a residual stream that cannot be followed: {found}",
            module=path,
            where=where or error.where,
            remedy=error.remedy,
        ) from error
    except torch._dynamo.exc.InternalTorchDynamoError as error:
        if is_out_of_memory(error):
            raise
        lines = str(error).splitlines() or [""]
        raise GraphBreakError(
            "a graph break inside a residual stream that cannot be followed: dynamo itself fails behind it, with or "
            f"without this package ({lines[0]})",
            module=path,
            where=where,
            remedy='Change the statement there until torch.compile(model, backend="eager") runs, or use another torch',
        ) from error
    except Exception as error:  # The recording ran: this comes of running in pieces.
        if is_out_of_memory(error):
            raise
        raise GraphBreakError(
            f"a graph break inside a residual stream that cannot be followed: in pieces the model fails with "
            f"{type(error).__name__}",
            module=path,
            where=where,
            remedy=_REMOVE,
        ) from error
    got = {name: value.detach() for name, value in named_tensors(returned) if name in want}
    difference = compare(want, got, floor=1e-3)
    tolerance = max(_tolerance(value.dtype, size) for value in want.values()) if want else 0.0
    told = not plain or (compare(plain, want, floor=1e-3).error or 0.0) >= _SEEN * tolerance
    if not told or not want or not difference.equal or (difference.error or 0.0) > tolerance:
        raise GraphBreakError(
            "a residual stream in pieces computes something else than the whole one: what runs between its graphs "
            f"changes it in a way that was not seen ({difference.worst or 'no result'}: {difference.error})",
            module=path,
            where=where,
            remedy=_REMOVE,
        )


def _tolerance(dtype: torch.dtype, size: float) -> float:
    if dtype not in _TOLERANCE:
        return 5e-2
    return max(_TOLERANCE[dtype] * size, 16 * torch.finfo(dtype).eps)


def _random_queries(owner: nn.Module, item: Candidate, config: AttnResConfig) -> DepthQueries:
    like = next((p for p in owner.parameters() if p.is_floating_point()), None)
    made = DepthQueries(
        Declaration.of(item.plans, config),
        dtype=like.dtype if like is not None else None,
        device=like.device if like is not None else None,
    )
    generator = torch.Generator().manual_seed(_SEED)
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return made


class _Whole:
    """What the recorded call returns with depth attention, computed by its one graph."""

    def __init__(
        self,
        recording: Recording,
        candidates: Sequence[Candidate],
        queries: dict[str, DepthQueries],
        config: AttnResConfig,
    ) -> None:
        self.recording = recording
        # Copies of buffers and inputs: what a run writes into them, the next one must not find.
        self.given = [(value, value.clone()) for value in recording.given if not isinstance(value, nn.Parameter)]
        module = recording.module
        graph = module.graph
        first = next(node for node in graph.nodes if node.op != "placeholder")
        self.queries: list[tuple[Tensor, Tensor]] = []
        for number, item in enumerate(candidates):
            made = queries[item.path]
            module.add_submodule(f"{CHILD}_{number}", made)

            def bring(key: str, made: DepthQueries = made, number: int = number) -> fx.Node:
                with graph.inserting_before(first):
                    node = graph.get_attr(f"{CHILD}_{number}.{key}")
                node.meta["val"] = getattr(made, key).detach().to("meta")
                return node

            norms = made.key_norms()
            nodes = {
                site: QueryNodes(bring(key), bring(f"{key}_key_norm") if norms else None)
                for site, key in made.keys.items()
            }
            own = [getattr(made, key).data for key in made.keys.values()]
            self.queries += [(query, query.clone()) for query in own]
            rewrite(graph, item.plans, nodes, config)
        module.recompile()

    def __call__(self, size: float) -> dict[str, Tensor]:
        """The results with queries of that size, which they keep."""
        for value, numbers in self.given:
            value.copy_(numbers)
        for query, unit in self.queries:
            query.copy_(unit * size)
        torch.manual_seed(_SEED)
        results = self.recording.module(*self.recording.given)
        return {name: results[place].detach().clone() for name, place in self.recording.results.items()}
