"""What users call: explain, transform, report, pseudo_queries, plain, revert, rewrite_graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from attnres_compile import calls, data_parallel, graph_models, graphs, steps
from attnres_compile.accepting import refuse_no_graph, refuse_strangers
from attnres_compile.config import AttnResConfig
from attnres_compile.conversion import ConvertedForward, methods_of
from attnres_compile.crossing.regions import unwrap
from attnres_compile.errors import (
    AttnResError,
    GraphBreakError,
    NotTransformedError,
)
from attnres_compile.guarding import outside_inference_mode
from attnres_compile.parameters import CHILD, converted, late_queries
from attnres_compile.passes.checkpoint import close_regions
from attnres_compile.report import GraphBreak, TransformReport
from attnres_compile.reporting import join
from attnres_compile.study import Conversion, refuse, refuse_wrapped, share, study, study_graph


@outside_inference_mode()
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
        ModelError, AlreadyTransformedError, AlreadyCompiledError, InputsError: see :func:`transform`.
    """
    config = config or AttnResConfig()
    refuse_wrapped(model)
    try:
        return study(model, example_inputs, config)[1]
    except GraphBreakError as error:
        return TransformReport(graph_breaks=(GraphBreak(error.what, error.where),))


# The queries are trained: they must be no inference tensors, whatever the caller's mode.
@outside_inference_mode()
def transform(
    model: nn.Module, example_inputs: Any, config: AttnResConfig | None = None, *, verify: bool = False
) -> nn.Module:
    """Convert ``model`` into a Block AttnRes model, in place.

    The module that owns each residual stream gets a child module ``attnres`` with its pseudo-queries, and runs
    compiled from then on. Class, methods, hooks and state_dict keys stay; with ``gain="sum"`` the output stays too
    until the queries move (docs/method.md).

    Args:
        model: the model, in the mode (train or eval) and dtype that it will run in.
        example_inputs: as for :func:`explain`.
        config: how to convert; default :class:`AttnResConfig`.
        verify: also run copies of the model before and after on ``example_inputs``, with its own weights, modes and
            dtypes, and compare outputs and gradients (:class:`Exactness` has the tolerances). Takes the memory of
            two copies of the parameters, and a compilation of its own where ``config.lowering`` compiles. The model,
            its gradients and random state stay as they are; what its forward does to other objects happens.

    Returns:
        ``model`` itself.

    Raises:
        ModelError: ``model`` is no module, or TorchScript, or its parameters are inference tensors.
        InexactError: ``verify``, and the two differ. The model is the original again.
        ConfigError: ``verify``, and ``config`` has a gain or values that are not exact by construction.
        NoStreamError: no residual stream could be converted; ``error.report`` says why.
        AttnResError: an owner of a stream has an attribute of the name that the queries need.
        RejectedStreamError: ``config.strict`` and a stream would be left alone.
        GraphBreakError: a stream runs through a graph break and cannot be followed there (docs/design.md).
        AlreadyTransformedError: the model is transformed already.
        AlreadyCompiledError: the model, or a module that owns a stream, is compiled already; or parts of a stream are.
            Layers that are compiled on their own, all of them, are converted with the rest.
        AlreadyDistributedError: a ``DistributedDataParallel`` holds the model's parameters: transform first, then wrap.
        InputsError: ``example_inputs`` is of no known form. An error of the model itself is raised as it is.
    """
    config = config or AttnResConfig()
    if verify:
        from attnres_compile.self_check import checked_transform  # it transforms, too

        return checked_transform(model, example_inputs, config)
    refuse_wrapped(model)
    data_parallel.refuse(model)
    conversions, whole = study(model, example_inputs, config)
    refuse(conversions, whole, config)
    for item in conversions:
        if hasattr(model.get_submodule(item.path), CHILD):
            raise AttnResError(
                f"the module that owns a stream has an attribute {CHILD!r} already",
                module=item.path,
                remedy="Rename it: its name is where the pseudo-queries live",
            )
    for number, item in enumerate(conversions):
        _convert(model, item, config, share(whole, item.path, config, first=number == 0))
    return model


def report(model: nn.Module) -> TransformReport:
    """What was done to ``model``, as data.

    Raises:
        ModelError: ``model`` is no module, or TorchScript.
        NotTransformedError: nothing was.
    """
    refuse_strangers(model)
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
        ModelError: ``model`` is no module, or TorchScript.
        NotTransformedError: the model has none.
    """
    refuse_strangers(model)
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
        ModelError: ``model`` is no module, or TorchScript.
        NotTransformedError: the model is not transformed.
        AttnResError: something wrapped a converted module's ``forward`` since.
    """
    refuse_strangers(model)
    found = list(converted(model))
    if not found:
        raise _not_transformed(model)
    for path, owner, _ in found:
        if not methods_of(owner):
            raise AttnResError(
                "the converted method of a module was wrapped or replaced after transform",
                module=path,
                remedy="Undo that first (accelerate: remove_hook_from_module), then revert",
            )
    for _, owner, _ in found:
        methods = methods_of(owner)
        steps.release(model, [method.key for method in methods])
        for method in methods:
            del owner.__dict__[method.name]
            unwrap(owner, method.regions)
            if method.previous is not None:
                owner.__dict__[method.name] = method.previous
        del owner._modules[CHILD]
        graph_models.revert(owner, [method.name for method in methods])
    return model


@contextlib.contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """While open, ``model`` and all parts of it run as the originals in this thread, without depth attention.

    For those who want the plain sum of a transformed model, or call its layers one by one: outside of this, that
    raises :class:`PlainExecutionError`. ``torch.compile`` around a model knows nothing of it: what is compiled inside
    raises, and what was compiled before runs as it was compiled.

    Raises:
        NotTransformedError: the model is not transformed.
    """
    refuse_strangers(model)
    keys = frozenset(method.key for _, owner, _ in converted(model) for method in methods_of(owner))
    if not keys:
        raise _not_transformed(model)
    with calls.plainly(keys):
        yield


@outside_inference_mode()
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
        ModelError: ``graph_module`` is neither a graph module nor a program of ``torch.export``.
        NoStreamError: the graph holds no stream that can be converted.
    """
    config = config or AttnResConfig()
    refuse_no_graph(graph_module)
    item, whole, regions = study_graph(graph_module, example_inputs, config)
    refuse([item], whole, config)
    result = graphs.rewritten(item.graph, item.plans, config, whole)
    close_regions(result, regions)
    return result, graphs.forced(result, config, whole)


# ------------------------------------------------------------------ how


def _convert(model: nn.Module, item: Conversion, config: AttnResConfig, part: TransformReport) -> None:
    owner = model.get_submodule(item.path)
    queries = item.queries(owner, config, part)
    method = ConvertedForward(owner, item.route, item.regions, item.method)
    owner._modules[CHILD] = queries
    owner.__dict__[item.method] = method
    graph_models.convert(owner, method)
    steps.guard(model, method.key, item.guarded)


def _not_transformed(model: nn.Module) -> NotTransformedError:
    return NotTransformedError(
        f"{type(model).__name__} holds no pseudo-queries",
        remedy="Call attnres_compile.transform(model, example_inputs), or run the compiled model once",
    )


__all__ = ["explain", "plain", "pseudo_queries", "report", "revert", "rewrite_graph", "transform"]
