"""From ``attnres::mix`` to what runs: the last of this package's passes.

``lowering="eager"`` leaves the operator to its default implementation. ``lowering="inductor"`` gives each site whose
sources lie on the CPU to the compiled kernels of :mod:`attnres_compile.kernels.cpu`, and leaves the rest for Inductor
to open up into plain tensor code.

Native sites hand their sources on (:func:`~attnres_compile.kernels.cpu.mix_through`), and every later reader in the
graph takes what the last site handed on. The values are the same; in training the gradients of a source that many
sites read then pass from site to site, and each site's backward adds its own to them in the same sweep.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from attnres_compile.config import AttnResConfig
from attnres_compile.errors import LoweringError
from attnres_compile.kernels import cpu, ops

_MIX = torch.ops.attnres.mix.default
# What a lowered graph may hold of ours besides the calls that this pass makes.
_SERVED = frozenset({"attnres::mix", "attnres::mix_backward", "attnres::mix_cpu", "attnres::mix_cpu_backward"})


@dataclass(frozen=True)
class LoweringReport:
    """How many sites of a graph, bodies of its higher-order operators included, run which way.

    Attributes:
        native: by the compiled CPU kernels.
        decomposed: as plain tensor code that Inductor opens up and fuses.
        eager: by the operator's default implementation.
    """

    native: int = 0
    decomposed: int = 0
    eager: int = 0

    @property
    def sites(self) -> int:
        """All sites."""
        return self.native + self.decomposed + self.eager


def lower(gm: fx.GraphModule, config: AttnResConfig) -> LoweringReport:
    """Choose what runs at each ``attnres::mix`` of ``gm``, editing it in place.

    Args:
        gm: a graph of torch-level or ATen calls, whose tensors are in ``node.meta["example_value"]`` or
            ``node.meta["val"]``. A site without them is not given to a kernel.
        config: says which lowering.

    Raises:
        LoweringError: an operator of this package is left that the lowering does not serve.
    """
    native = decomposed = eager = 0
    for module in _graphs(gm):
        sites = [node for node in module.graph.nodes if _operator(node) == "attnres::mix"]
        if config.lowering == "eager":
            eager += len(sites)
        elif sites:
            taken = [site for site in sites if _native(site)]
            _thread(module.graph, taken)
            native += len(taken)
            decomposed += len(sites) - len(taken)
            module.recompile()
        _check(module.graph)
    if decomposed:
        ops.register_decompositions()
    return LoweringReport(native, decomposed, eager)


def _graphs(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """``gm`` and the bodies of its higher-order operators."""
    return [module for module in gm.modules() if isinstance(module, fx.GraphModule)]


def _operator(node: fx.Node) -> str:
    """``namespace::name`` of the operator that a node calls, of any overload, or ``""``."""
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return node.target._qualified_op_name
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def _native(site: fx.Node) -> bool:
    """Whether the compiled kernels take this site: CPU, a served dtype, features last in memory."""
    query, sources, dim, *_ = _arguments(site)
    values = [_value(node) for node in (query, *sources)]
    if not all(value is not None and value.is_cpu for value in values):
        return False
    first = values[1]
    # Anything else about the layout is for the kernels to put right; asking here would add guards on sizes.
    return first is not None and first.stride(dim) == 1 and cpu.served(first.dtype)


def _thread(graph: fx.Graph, sites: list[fx.Node]) -> None:
    """Make ``sites`` native, and let every later reader take a source from the last site that had it."""
    chosen = set(sites)
    latest: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        # A result stays the tensor that it was: an alias of another is more work for AOTAutograd.
        if node.op == "output":
            continue
        if node in chosen:
            _replace(graph, node, latest)
        elif any(source in latest for source in node.all_input_nodes):
            node.args = fx.node.map_arg(node.args, lambda source: latest.get(source, source))
            node.kwargs = fx.node.map_arg(node.kwargs, lambda source: latest.get(source, source))


def _replace(graph: fx.Graph, site: fx.Node, latest: dict[fx.Node, fx.Node]) -> None:
    """Put a native call in the place of ``site``; enter the sources that it hands on in ``latest``."""
    query, sources, *options = _arguments(site)
    taken = [latest.get(source, source) for source in sources]
    with graph.inserting_before(site):
        call = graph.call_function(cpu.mix_through, (query, taken, *options))
        results = [graph.call_function(operator.getitem, (call, index)) for index in range(len(sources) + 1)]
    key = "example_value" if "example_value" in site.meta else "val"
    values = (site.meta.get(key), *(_alias(source) for source in sources))
    for node, value in ((call, values), *zip(results, values, strict=True)):
        node.meta.update(site.meta)
        node.meta[key] = value
    # What AOTAutograd's cache asks of a function that it does not know.
    call.meta.update(is_wrapped=True, user_cache_hash=cpu.fingerprint())
    mixed, *handed_on = results
    latest.update(zip(sources, handed_on, strict=True))
    site.replace_all_uses_with(mixed)
    graph.erase_node(site)


def _arguments(site: fx.Node) -> tuple[Any, ...]:
    """The arguments of ``attnres::mix`` in the schema's order, however the node spells them."""
    names = [argument.name for argument in _MIX._schema.arguments]
    return tuple({**dict(zip(names, site.args, strict=False)), **site.kwargs}[name] for name in names)


def _value(node: fx.Node) -> Tensor | None:
    value = node.meta.get("example_value", node.meta.get("val"))
    return value if isinstance(value, Tensor) else None


def _alias(source: fx.Node) -> Tensor | None:
    # A tensor of its own: one fake tensor at two nodes reads as one value.
    value = _value(source)
    return None if value is None else value.view_as(value)


def _check(graph: fx.Graph) -> None:
    for node in graph.nodes:
        name = _operator(node)
        if name.startswith("attnres::") and name not in _SERVED:
            raise LoweringError(
                f"{name} is left in a graph that is about to be compiled, as node {node.name!r}",
                where=_where(node),
                remedy="Only a graph rewritten by attnres_compile.rewrite_graph can be lowered",
            )


def _where(node: fx.Node) -> str:
    """``file:line`` of the innermost frame of the user's code that the node remembers, or ``""``."""
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "(.+?)", line (\d+)', trace)
    return ":".join(frames[-1]) if frames else ""
