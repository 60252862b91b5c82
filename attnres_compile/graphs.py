"""Graph modules as they are given: shapes where there are none, and the rewritten module around the result."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from attnres_compile.config import AttnResConfig
from attnres_compile.dynamo_graphs import copy_graph_module
from attnres_compile.errors import CaptureError
from attnres_compile.parameters import CHILD, Declaration, DepthQueries
from attnres_compile.passes import facts
from attnres_compile.passes.fuse_norm import fuse_norm
from attnres_compile.passes.modes import fix_modes
from attnres_compile.passes.plan import BlockPlan
from attnres_compile.passes.rewrite import QueryNodes, rewrite
from attnres_compile.passes.two_phase import two_phase
from attnres_compile.report import TransformReport
from attnres_compile.reporting import with_choices


def with_shapes(
    graph_module: fx.GraphModule | torch.export.ExportedProgram, example_inputs: Sequence[Any] | None
) -> fx.GraphModule:
    """A copy of a graph module whose nodes know their tensors.

    Raises:
        CaptureError: the graph has no shapes, and no inputs were given to find them.
    """
    parameters: set[str] = set()
    if isinstance(graph_module, torch.export.ExportedProgram):
        parameters = _lifted(graph_module)
        given: fx.GraphModule = graph_module.graph_module
    else:
        given = graph_module
    module = copy_graph_module(given)
    for node in module.graph.nodes:
        if node.op == "placeholder" and parameters:
            node.meta["attnres_parameter"] = node.target in parameters
        if isinstance(node.type, str):
            # An annotation that was never evaluated; a graph module with one cannot be pickled.
            node.type = None
    _add_shapes(module, example_inputs)
    # How inputs and results are packed (torch.export, concrete_args); until here the graph is flat.
    module.graph.set_codegen(copy.deepcopy(given.graph._codegen))
    module.recompile()
    return module


def _add_shapes(module: fx.GraphModule, example_inputs: Sequence[Any] | None) -> None:
    if any(facts.tensor(node) is not None for node in module.graph.nodes if node.op.startswith("call_")):
        _fill_constants(module)
        return
    inputs = _flat_inputs(module, example_inputs)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(i, static_shapes=True) if isinstance(i, torch.Tensor) else i for i in inputs]
    # Without gradients: a graph that is only ever run so may write where autograd would not let it.
    with torch.no_grad():
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*fakes)
    for node, value in zip((n for n in module.graph.nodes if n.op == "placeholder"), inputs, strict=False):
        if isinstance(value, nn.Parameter):
            node.meta["attnres_parameter"] = True


def _lifted(program: torch.export.ExportedProgram) -> set[str]:
    signature = program.graph_signature
    return {*signature.inputs_to_parameters, *signature.inputs_to_buffers}


def _flat_inputs(module: fx.GraphModule, example_inputs: Sequence[Any] | None) -> list[Any]:
    wanted = [node for node in module.graph.nodes if node.op == "placeholder"]
    given = (
        []
        if example_inputs is None
        else [example_inputs]
        if isinstance(example_inputs, torch.Tensor)
        else list(example_inputs)
    )
    needed = sum(not node.args for node in wanted)
    if not needed <= len(given) <= len(wanted):
        raise CaptureError(
            f"the graph has no shapes and takes {len(wanted)} inputs; {len(given)} example inputs were given",
            remedy="Pass example_inputs in the order of the graph's placeholders",
        )
    return given + [node.args[0] for node in wanted[len(given) :]]


def _fill_constants(module: fx.GraphModule) -> None:
    """Constants of an exported graph may lack what all other nodes have."""
    mode = fake_mode(module)
    for node in module.graph.nodes:
        if node.op == "get_attr" and facts.tensor(node) is None:
            value = _attribute(module, str(node.target))
            if isinstance(value, torch.Tensor):
                node.meta["val"] = mode.from_tensor(value) if mode else value


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def fake_mode(module: fx.GraphModule) -> FakeTensorMode | None:
    """What the graph's tensor facts belong to, if they belong to anything."""
    for node in module.graph.nodes:
        value = facts.tensor(node)
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def rewritten(
    module: fx.GraphModule, plans: tuple[BlockPlan, ...], config: AttnResConfig, report: TransformReport
) -> fx.GraphModule:
    """Rewrite the graph of ``module`` (a copy of the user's) with queries that the module itself holds."""
    like = next((p for p in module.parameters() if p.is_floating_point()), None)
    root = facts.tensor(plans[0].stream.root)
    assert root is not None
    queries = DepthQueries(
        Declaration.of(plans, config),
        dtype=like.dtype if like is not None else root.dtype,
        device=like.device if like is not None else root.device,
        report=report,
    )
    child = CHILD
    while hasattr(module, child):
        child += "_"
    module.add_submodule(child, queries)
    mode = fake_mode(module)
    graph = module.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    dialect = "example_value" if "example_value" in plans[0].stream.root.meta else "val"

    def bring(name: str, parameter: nn.Parameter) -> fx.Node:
        node = graph.get_attr(f"{child}.{name}")
        node.meta[dialect] = mode.from_tensor(parameter) if mode else parameter
        return node

    with graph.inserting_before(first):
        nodes = {site: bring(queries.keys[site], q) for site, q in queries.queries().items()}
        norms = {site: bring(f"{queries.keys[site]}_key_norm", k) for site, k in queries.key_norms().items()}
    before = list(graph.nodes)
    rewrite(graph, plans, {site: QueryNodes(node, norms.get(site)) for site, node in nodes.items()}, config)
    fix_modes(module, before)
    module.recompile()
    return module


def forced(module: fx.GraphModule, config: AttnResConfig, report: TransformReport) -> TransformReport:
    """Carry out the passes behind rewriting that ``config`` forces; ``"auto"`` is decided where a graph is compiled.

    Returns:
        The report, with what was done if anything was forced.
    """
    if "on" not in (config.two_phase, config.fuse):
        return report
    config = dataclasses.replace(config, lowering="eager")
    report = with_choices(report, two_phase(module, config), fuse_norm(module, config))
    queries = next(child for child in module.children() if isinstance(child, DepthQueries))
    queries.report = report
    return report
