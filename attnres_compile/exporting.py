"""A converted model as a ``torch.export`` program of plain ATen operators, which runs where this package is not.

``torch.export`` cannot carry a converted module's own way of running, so the *plain* model is exported, and its graph
is rewritten: the queries become parameters of the program and each site plain tensor code.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from attnres_compile import api, graph_models, graphs
from attnres_compile.accepting import refuse_strangers
from attnres_compile.config import AttnResConfig
from attnres_compile.conversion import methods_of
from attnres_compile.errors import AttnResError, CaptureError, ConfigError, LoweringError
from attnres_compile.inputs import Inputs, as_inputs
from attnres_compile.kernels import plain
from attnres_compile.parameters import CHILD, DepthQueries, converted, late_queries
from attnres_compile.passes import facts, sites
from attnres_compile.passes.checkpoint import REGION, close_regions, open_regions
from attnres_compile.passes.detect import detect
from attnres_compile.passes.rewrite import QueryNodes, rewrite
from attnres_compile.reporting import STREAM_REASONS, join
from attnres_compile.study import Conversion, by_owner, refuse, study_graph

_MIX = "attnres::mix"
# What our passes keep in a node's meta; none of it is for a program that leaves this package.
_OURS = (sites.SITE, REGION, "attnres_parameter")


def export(
    model: nn.Module | torch.export.ExportedProgram,
    example_inputs: Any = None,
    config: AttnResConfig | None = None,
    *,
    dynamic: bool = False,
) -> torch.export.ExportedProgram:
    """A program that computes the converted model and holds plain ATen operators only.

    Its parameters are the model's own (they share memory, as with ``torch.export.export``) and the pseudo-queries,
    under the keys that they have in the converted model's state_dict, as ``model.attnres.layers_0_mlp_norm``. It can
    be saved, loaded and run without this package, and trained through ``program.module()``.

    Args:
        model: an untouched model, whose program has zero queries; a transformed one, whose queries are taken over; a
            program that ``torch.export`` made of an untouched one; or an ATen graph module, untouched or from
            :func:`attnres_compile.rewrite_graph`. It is not changed.
        example_inputs: as for :func:`attnres_compile.transform`; not read where ``model`` is a program.
        config: how to convert; default :class:`AttnResConfig`. A transformed model has one already. ``lowering``,
            ``two_phase`` and ``fuse`` are about kernels and not read.
        dynamic: let every dimension of every input vary that the model lets vary. A dimension of size 0 or 1 stays as
            it is, as always with ``torch.export``. Otherwise all shapes are fixed.

    Returns:
        The program, in the mode (train or eval) of the model. A Hugging Face model's returns no key-value cache
        (``use_cache`` counts as false where the inputs do not say otherwise).

    Raises:
        NoStreamError, GraphBreakError, InputsError: as :func:`attnres_compile.transform`.
        CaptureError: ``torch.export`` cannot export the plain model.
        PlanMismatchError: the exported graph does not hold the sites that the queries were made for.
        ConfigError: ``config`` lays a transformed model out in another way than it was transformed.
        AttnResError: the model cannot be copied, or its queries were made by ``backend="attnres"``.
    """
    if isinstance(model, torch.export.ExportedProgram):
        return _of_program(model, config or AttnResConfig())
    refuse_strangers(model)
    inputs = as_inputs(example_inputs)
    if isinstance(model, fx.GraphModule):
        if methods_of(model):
            raise graph_models.refusal()
        return _of_graph(model, inputs, config or AttnResConfig(), dynamic)
    if late_queries(model):
        raise AttnResError(
            'the queries of a model that backend="attnres" converted while compiling cannot be exported',
            remedy="Use attnres_compile.transform before training",
        )
    own = _sharing_copy(model)
    before = [queries.declaration.config for _, _, queries in converted(own)]
    if not before:
        api.transform(own, inputs, config)
    elif config is not None and any(each.layout() != config.layout() for each in before):
        raise ConfigError(
            "the model was transformed with another configuration", remedy="Leave config out, or revert the model first"
        )
    queries = {path: child for path, _, child in converted(own)}
    api.revert(own)
    return _with_queries(_exported(own, inputs, dynamic), own, queries)


def _sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of the modules over the same tensors."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, shared)
    except Exception as error:
        raise AttnResError(f"the model cannot be copied: {type(error).__name__}: {error}") from error


def _exported(model: nn.Module, inputs: Inputs, dynamic: bool) -> torch.export.ExportedProgram:
    _without_cache(model)
    # Copies: a program keeps its example inputs, and a view would bring all that it is a view of.
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (inputs.args, inputs.kwargs))
    shapes: Any = None
    if dynamic:
        shapes = torch.export.ShapesCollection()
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.dim():
                shapes[value] = dict.fromkeys(range(value.dim()), torch.export.Dim.AUTO)
    try:
        return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise CaptureError(
            f"torch.export cannot export the plain model: {type(error).__name__}: {lines[0] if lines else ''}".strip(),
            remedy="torch.export.export(model, args, kwargs, strict=False) on the untransformed model shows all of it",
        ) from error


def _without_cache(model: nn.Module) -> None:
    """Let Hugging Face models return no key-value cache: it is an object, which no program can return."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "use_cache", None) is True:
            with contextlib.suppress(AttributeError):  # a frozen one
                config.use_cache = False


def _of_program(program: torch.export.ExportedProgram, config: AttnResConfig) -> torch.export.ExportedProgram:
    """The program of a program: nobody knows its modules, so the whole of it owns the streams."""
    item, whole, _ = study_graph(program, None, config)
    refuse([item], whole, config)
    values = nn.ParameterList(v for v in program.state_dict.values() if isinstance(v, nn.Parameter))
    return _with_queries(program, None, {"": item.queries(values, config, whole)})


def _of_graph(
    module: fx.GraphModule, inputs: Inputs, config: AttnResConfig, dynamic: bool
) -> torch.export.ExportedProgram:
    """A graph has no module that would have to stay plain: it is rewritten, opened up and exported as it is."""
    with warnings.catch_warnings():
        # torch's own trees of inputs warn of themselves when they are copied.
        warnings.simplefilter("ignore", FutureWarning)
        if not any(isinstance(child, DepthQueries) for child in module.modules()):
            flat = pytree.tree_leaves((inputs.args, inputs.kwargs))
            # Kernels and their neighbours have no place in what leaves this package.
            module, _ = api.rewrite_graph(module, flat, config.layout())
        own = graphs.with_shapes(module, None)
    open_up(own)
    program = _exported(own, inputs, dynamic)
    _refuse_ours(program.graph)
    return program


# ------------------------------------------------------------------ the program


def _with_queries(
    program: torch.export.ExportedProgram, model: nn.Module | None, queries: Mapping[str, DepthQueries]
) -> torch.export.ExportedProgram:
    """The program with its streams rewritten.

    Args:
        program: of the plain model.
        model: that model, by which streams are told apart by their owners; ``None`` where nothing is known of it.
        queries: by path of the module that owns the streams that they are for.
    """
    module = graphs.with_shapes(program, None)
    given = [node for node in module.graph.nodes if node.op == "placeholder"]
    regions = open_regions(module)
    planned: list[tuple[Conversion, DepthQueries]] = []
    for config in {child.declaration.config: None for child in queries.values()}:
        detection = detect(module.graph, config)
        if model is None:
            found = [Conversion.of("", detection.streams, config, module)]
        else:
            found = by_owner(model, detection, config, module)
        by_path = {item.path: item for item in found}
        reasons = [r.reason.value for r in detection.rejections if r.reason in STREAM_REASONS]
        for path, child in queries.items():
            if child.declaration.config == config:
                item = by_path.get(path, Conversion(path, (), module))
                child.declaration.check(item.plans, path, reasons)
                planned.append((item, child))
    specs, state = list(program.graph_signature.input_specs), dict(program.state_dict)
    for item, child in planned:
        nodes = {}
        for key, parameter in child.named_parameters():
            target = _free(join(item.path, f"{CHILD}.{key}"), state)
            node = _parameter(module, given, specs, target, parameter)
            state[target] = parameter
            nodes[key] = node
        pairs = {site: QueryNodes(nodes[key], nodes.get(f"{key}_key_norm")) for site, key in child.keys.items()}
        rewrite(module.graph, item.plans, pairs, child.declaration.config)
    close_regions(module, regions)
    open_up(module)
    module.recompile()
    return _program(program, module, specs, state, given)


def _free(key: str, state: Mapping[str, Any]) -> str:
    while key in state:
        key += "_"
    return key


def _parameter(
    module: fx.GraphModule, given: list[fx.Node], specs: list[InputSpec], target: str, parameter: nn.Parameter
) -> fx.Node:
    """One more parameter of the program, behind those that it has; entered in ``given`` and ``specs``."""
    at = 1 + max((i for i, spec in enumerate(specs) if spec.kind == InputKind.PARAMETER), default=-1)
    graph = module.graph
    with graph.inserting_before(given[at]) if at < len(given) else graph.inserting_after(given[-1]):
        node = graph.placeholder("p_" + "".join(c if c.isalnum() else "_" for c in target))
    mode = graphs.fake_mode(module)
    node.meta["val"] = mode.from_tensor(parameter, static_shapes=True) if mode else parameter
    node.meta["attnres_parameter"] = True
    given.insert(at, node)
    specs.insert(at, InputSpec(InputKind.PARAMETER, TensorArgument(node.name), target, None))
    return node


def _program(
    program: torch.export.ExportedProgram,
    module: fx.GraphModule,
    specs: list[InputSpec],
    state: dict[str, Any],
    given: list[fx.Node],
) -> torch.export.ExportedProgram:
    """A program around the rewritten graph; its signature names the nodes that now stand in the places."""
    for node in module.graph.nodes:
        for key in _OURS:
            node.meta.pop(key, None)
    _refuse_ours(module.graph)
    (results,) = module.graph.output_node().args
    renamed = [_renamed(spec, node) for spec, node in zip(specs, given, strict=True)]
    old = program.graph_signature.output_specs
    outputs = [_renamed(spec, result) for spec, result in zip(old, results, strict=True)]  # type: ignore[arg-type]
    signature = copy.copy(program.graph_signature)
    signature.input_specs, signature.output_specs = renamed, outputs
    names = {a.arg.name: b.arg for a, b in zip(old, outputs, strict=True) if hasattr(a.arg, "name")}
    calls = [copy.copy(entry) for entry in program.module_call_graph]
    for entry in calls:
        if entry.fqn == "" and entry.signature is not None:
            ends = [names.get(getattr(end, "name", ""), end) for end in entry.signature.outputs]
            entry.signature = dataclasses.replace(entry.signature, outputs=ends)
    return torch.export.ExportedProgram(
        module,
        module.graph,
        signature,
        state,
        program.range_constraints,
        calls,
        program.example_inputs,
        program.constants,
        verifiers=program.verifiers,
    )


def _refuse_ours(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if sites.operator_name(node).startswith("attnres::"):
            raise LoweringError(
                f"{sites.operator_name(node)} is left in a program that is to run without this package",
                where=facts.source_line(node),
                remedy='Rewrite the graph with two_phase="off" and fuse="off"',
            )


def _renamed(spec: Any, node: Any) -> Any:
    if isinstance(node, fx.Node) and hasattr(spec.arg, "name"):
        return dataclasses.replace(spec, arg=dataclasses.replace(spec.arg, name=node.name))
    return spec


# ------------------------------------------------------------------ from mixes to plain operators


def open_up(module: fx.GraphModule) -> None:
    """Put plain ATen operators in the place of every ``attnres::mix`` of ``module``, bodies of its regions included.

    Args:
        module: an ATen graph whose nodes know their tensors; edited in place.
    """
    for each in sites.graphs(module):
        for node in list(each.graph.nodes):
            if sites.operator_name(node) == _MIX:
                _open(each.graph, node)
        each.recompile()


def _open(graph: fx.Graph, site: fx.Node) -> None:
    given = sites.arguments(site)
    operands: list[fx.Node] = [given["query"], *given["sources"]]
    options = [given[name] for name in ("dim", "eps", "gain", "scale", "normalized")]

    def mix(query: Tensor, *sources: Tensor) -> Tensor:
        return plain.mix(query, sources, *options)

    with torch.no_grad():
        body = make_fx(mix)(*map(facts.tensor, operands))
    body.graph.eliminate_dead_code()
    values: dict[fx.Node, Any] = {}
    inputs = iter(operands)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "output":
            site.replace_all_uses_with(values[node.args[0]])
        else:
            with graph.inserting_before(site):
                copied = graph.node_copy(node, values.__getitem__)
            copied.meta = {k: v for k, v in site.meta.items() if k not in (*_OURS, "val", "example_value")}
            copied.meta["val"] = node.meta["val"]
            values[node] = copied
    graph.erase_node(site)


__all__ = ["export", "open_up"]
