"""The graph of a model before and after the rewriting, side by side, with the nodes of each site in both.

What :func:`attnres_compile.transform` does happens inside the compiler at the model's first call. Here the same
steps are taken on graphs that are kept, so that people and tools can look at them; the model is not touched.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from attnres_compile import graphs
from attnres_compile.config import AttnResConfig
from attnres_compile.inputs import as_inputs
from attnres_compile.parameters import CHILD, DepthQueries
from attnres_compile.passes import facts, sites
from attnres_compile.passes.checkpoint import Region, close_regions
from attnres_compile.passes.fuse_norm import fuse_norm
from attnres_compile.passes.modes import fix_modes
from attnres_compile.passes.plan import BlockPlan
from attnres_compile.passes.rewrite import QueryNodes, rewrite
from attnres_compile.passes.two_phase import two_phase
from attnres_compile.report import Site, Stream, TransformReport
from attnres_compile.reporting import join
from attnres_compile.study import Conversion, refuse, refuse_wrapped, study, study_graph


@dataclass(frozen=True)
class SiteNodes:
    """One site in both graphs, by names of nodes.

    Attributes:
        site: as the report has it.
        stream: name of its stream.
        where: ``file:line`` of the add that makes the value that is read, or ``""`` for the root.
        state: node of ``before`` whose value is read.
        adds: nodes of ``before``: the adds of the sublayer whose result is read; none for the root.
        readers: the nodes that read it, in both graphs; a node that is only in one of them is in that one.
        mixed: node of ``after`` whose value is read instead; the state itself where there is nothing to mix.
    """

    site: Site
    stream: str
    where: str
    state: str
    adds: tuple[str, ...]
    readers: tuple[str, ...]
    mixed: str


@dataclass(frozen=True)
class Rewriting:
    """One graph before and after.

    Attributes:
        path: of the module whose graph it is; ``""`` is the model itself.
        before: the graph as it was traced. Parameters and buffers are the model's own, under their names; the inputs
            are the graph's placeholders, in the order of the module's arguments.
        after: the same with ``attnres::mix`` at the sites. Nodes that are in both have one name. The queries are
            parameters of it, under the keys that they have in a transformed model's state_dict.
        report: what is converted in this graph.
        sites: every site, in depth order, stream by stream.
        queries: pseudo-queries of ``after`` by name of the site, each ``[d]`` and zero.
    """

    path: str
    before: fx.GraphModule
    after: fx.GraphModule
    report: TransformReport
    sites: tuple[SiteNodes, ...]
    queries: dict[str, nn.Parameter]


def rewritings(model: nn.Module, example_inputs: Any, config: AttnResConfig | None = None) -> tuple[Rewriting, ...]:
    """The graphs that :func:`attnres_compile.transform` would rewrite, before and after.

    Args:
        model: any module; a graph module is taken as the graph that it is (:func:`attnres_compile.rewrite_graph`). It
            is not changed and not copied: the graphs hold its parameters.
        example_inputs: as for :func:`attnres_compile.transform`.
        config: how to convert; default :class:`AttnResConfig`. ``lowering`` is not read; ``two_phase`` and ``fuse``
            show in ``after`` where they are ``"on"``.

    Returns:
        One, as a rule. Where tracing the whole model breaks, one per module that owns a stream. Checkpointed regions
        are open in both graphs.

    Raises:
        NoStreamError, GraphBreakError, AlreadyTransformedError, InputsError: as :func:`attnres_compile.transform`.
    """
    config = config or AttnResConfig()
    inputs = as_inputs(example_inputs)
    if isinstance(model, fx.GraphModule):
        flat = pytree.tree_leaves((inputs.args, inputs.kwargs))
        with warnings.catch_warnings():
            # torch's own trees of inputs warn of themselves when they are copied.
            warnings.simplefilter("ignore", FutureWarning)
            item, whole, regions = study_graph(model, flat, config)
            refuse([item], whole, config)
            return (_rewriting(model, [item], whole, config, regions),)
    refuse_wrapped(model)
    # Sizes that differ between two calls of this function are no reason to make them symbols.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        conversions, whole = study(model, inputs, config, follow=False)
    refuse(conversions, whole, config)
    groups: dict[int, list[Conversion]] = {}
    for item in conversions:
        groups.setdefault(id(item.graph), []).append(item)
    return tuple(_rewriting(model, items, whole, config) for items in groups.values())


# ------------------------------------------------------------------ one graph


def _rewriting(
    model: nn.Module,
    items: list[Conversion],
    whole: TransformReport,
    config: AttnResConfig,
    regions: list[Region] | None = None,
) -> Rewriting:
    """Rewrite the graph that ``items`` share. It is theirs alone, so it is edited in place."""
    module, traced = items[0].graph, items[0].traced
    copies = _Copies(module, model, model.get_submodule(traced))
    before = copies.make("Before")
    queries: dict[str, nn.Parameter] = {}
    for item in items:
        child = item.queries(model.get_submodule(item.path), config, TransformReport())
        pairs = _bring(copies, child, item, queries)
        nodes = list(module.graph.nodes)
        rewrite(module.graph, item.plans, pairs, config)
        if isinstance(model, fx.GraphModule):
            fix_modes(module, nodes)
        copies.name_new(item)
    close_regions(module, regions or [])
    if "on" in (config.two_phase, config.fuse):
        forced = replace(config, lowering="eager")
        two_phase(module, forced)
        fuse_norm(module, forced)
    after = copies.make("After")
    streams = {stream.name: stream for stream in whole.streams}
    own = [(plan, streams[join(item.path, plan.name)]) for item in items for plan in item.plans]
    report = replace(whole, streams=tuple(stream for _, stream in own))
    return Rewriting(traced, before, after, report, _site_nodes(own, after), queries)


def _bring(
    copies: _Copies, child: DepthQueries, item: Conversion, queries: dict[str, nn.Parameter]
) -> dict[str, QueryNodes]:
    """Nodes for the parameters of ``child``, which the graph's module gets; enters them in ``queries``."""
    module = item.graph
    path = join(item.path, CHILD)
    while isinstance(module, fx.GraphModule) and _has(module, path):
        path += "_"
    module.add_submodule(path, child)
    mode = graphs.fake_mode(module)
    key = "example_value" if "example_value" in item.plans[0].stream.root.meta else "val"
    first = next(node for node in module.graph.nodes if node.op != "placeholder")

    def bring(name: str) -> fx.Node:
        parameter = child.get_parameter(name)
        with module.graph.inserting_before(first):
            node = module.graph.get_attr(f"{path}.{name}")
        node.meta[key] = mode.from_tensor(parameter, static_shapes=True) if mode else parameter
        copies.tensors[node] = (f"{path}.{name}", parameter)
        return node

    queries.update({join(item.path, site): query for site, query in child.queries().items()})
    weighted = child.declaration.config.key_norm_weight
    return {
        site: QueryNodes(bring(name), bring(f"{name}_key_norm") if weighted else None)
        for site, name in child.keys.items()
    }


def _has(module: nn.Module, path: str) -> bool:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value is not None


def _site_nodes(own: Iterable[tuple[BlockPlan, Stream]], after: fx.GraphModule) -> tuple[SiteNodes, ...]:
    marked: dict[str, str] = {}
    for graph in sites.graphs(after):
        for node in graph.graph.nodes:
            found = node.meta.get(sites.SITE)
            if isinstance(found, sites.Mark):
                marked[found.name] = node.name
    found_sites: list[SiteNodes] = []
    for plan, stream in own:
        for planned, site in zip(plan.sites, stream.sites, strict=True):
            step = plan.stream.steps[planned.index - 1] if planned.index else None
            state = plan.stream.state(planned.index).name
            found_sites.append(
                SiteNodes(
                    site=site,
                    stream=stream.name,
                    where=facts.source_line(step.node) if step else "",
                    state=state,
                    adds=tuple(add.name for add in step.adds) if step else (),
                    readers=tuple(reader.name for reader in planned.readers),
                    mixed=marked.get(site.name, state),
                )
            )
    # The root of a stream inside another one is a state of the outer one.
    mixed = {each.state: each.mixed for each in found_sites if each.mixed != each.state}
    return tuple(replace(each, mixed=mixed.get(each.state, each.mixed)) for each in found_sites)


# ------------------------------------------------------------------ copies with readable names

_INPUT = re.compile(r"L\['(args|kwargs)'\]\[(?:(?P<number>\d+)|'(?P<key>[^']+)')\](?P<rest>.*)")


class _Copies:
    """Makes copies of a graph in which tensors of the model stand under their own names.

    Attributes:
        tensors: nodes that bring a tensor of the model, with its path; it is fetched where it is first used.
    """

    def __init__(self, module: fx.GraphModule, model: nn.Module, called: nn.Module) -> None:
        self.module = module
        self.tensors: dict[fx.Node, tuple[str, Any]] = {}
        self._names: dict[fx.Node, str] = {}
        self._taken = {node.name for node in module.graph.nodes}
        self._known = set(self._taken)
        paths = {id(t): p for p, t in (*model.named_buffers(), *model.named_parameters())}
        arguments = list(inspect.signature(called.forward).parameters.values())
        order: list[tuple[int, fx.Node]] = []
        for node in module.graph.nodes:
            if node.op != "placeholder":
                continue
            source = getattr(node, "_dynamo_source", None)
            text = "" if source is None else source.name if isinstance(source.name, str) else source.name()
            value = getattr(node.meta.get("grapharg"), "example", None)
            given = _INPUT.match(text)
            if given:
                place, name = _argument(given, arguments)
                # Values of the model's code may have the name of the argument that they began as.
                self._names[node] = self._free(f"{name}_input" if _words(name) in self._taken else name)
                order.append((place, node))
            elif text and isinstance(value, Tensor):
                path = paths.get(id(value)) or _words(facts.clean_path(text)) or node.name
                self.tensors[node] = (path, value)
            else:
                order.append((0, node))
        self._inputs = [node for _, node in sorted(order, key=lambda item: item[0])]

    def _free(self, name: str) -> str:
        """``name``, or with a number where another node has it; it is taken from now on."""
        name = _words(name)
        number, candidate = 1, name
        while candidate in self._taken:
            number += 1
            candidate = f"{name}__{number}"
        self._taken.add(candidate)
        return candidate

    def name_new(self, item: Conversion) -> None:
        """Name what rewriting ``item`` made, and make its marks unique among the items of the graph."""
        for node in self.module.graph.nodes:
            mark = node.meta.get(sites.SITE)
            if node.name in self._known or node in self._names or not isinstance(mark, sites.Mark):
                continue
            self._names[node] = self._free(f"mix_{mark.name}")
            names = ["root", *(f"block_{n}" for n in range(1, mark.blocks + 1)), f"partial_{mark.blocks + 1}"]
            for name, source in zip(names, sites.arguments(node)["sources"], strict=False):
                if source.name not in self._known and source not in self._names:
                    self._names[source] = self._free(name)
            full = replace(mark, name=join(item.path, mark.name), stream=join(item.path, mark.stream))
            node.meta[sites.SITE] = full

    def make(self, name: str) -> fx.GraphModule:
        """A copy of the graph as it is now, in a module of its own over the same tensors."""
        graph, root = fx.Graph(), dict[str, Any]()
        made: dict[fx.Node, fx.Node] = {}

        def get(node: fx.Node) -> fx.Node:
            if node not in made:
                target, root[target] = self.tensors[node]
                if node not in self._names:
                    self._names[node] = self._free(target)
                put(node, graph.create_node("get_attr", target, name=self._names[node]))
            return made[node]

        def put(node: fx.Node, new: fx.Node) -> None:
            new.meta = {key: value for key, value in node.meta.items() if key != "grapharg"}
            made[node] = new

        for node in self._inputs:
            called = self._names.get(node)
            put(node, graph.create_node("placeholder", called or node.target, node.args, name=called or node.name))
        for node in self.module.graph.nodes:
            if node.op == "placeholder" or node in self.tensors:
                continue
            if node.op == "output":
                put(node, graph.output(fx.map_arg(node.args[0], get)))
                continue
            if node.op in ("get_attr", "call_module"):
                root[str(node.target)] = _attribute(self.module, str(node.target))
            arguments = fx.map_arg((node.args, node.kwargs), get)
            put(node, graph.create_node(node.op, node.target, *arguments, name=self._names.get(node, node.name)))
        graph.set_codegen(copy.deepcopy(self.module.graph._codegen))
        return fx.GraphModule(root, graph, name)


def _argument(given: re.Match[str], arguments: list[inspect.Parameter]) -> tuple[int, str]:
    """Where an input of a graph stands among the arguments of its module, and what it is called there."""
    if given["key"] is not None:
        name = given["key"]
        place = next((i for i, each in enumerate(arguments) if each.name == name), len(arguments))
    else:
        place = int(given["number"])
        several = next((i for i, each in enumerate(arguments) if each.kind == each.VAR_POSITIONAL), len(arguments))
        name = arguments[place].name if place < several else f"{arguments[several].name}_{place - several}"
    inside = re.sub(r"\W+", "_", given["rest"]).strip("_")
    return place, f"{name}_{inside}" if inside else name


def _words(text: str) -> str:
    """``text`` as a Python name."""
    name = re.sub(r"\W+", "_", text).strip("_")
    return f"n_{name}" if not name or name[0].isdigit() else name


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


__all__ = ["Rewriting", "SiteNodes", "rewritings"]
