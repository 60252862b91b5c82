"""From the operators of this package to what runs: the last of its passes.

``lowering="eager"`` leaves the operators to their default implementations. ``lowering="inductor"`` gives sites on CUDA
and ROCm devices to the generated kernels (:mod:`attnres_compile.kernels.through`) and ``attnres::mix`` on the CPU to
the compiled one (:mod:`attnres_compile.kernels.cpu`). What neither serves - float64 on a GPU, features that are not
last in memory (NCHW), ``meta`` - Inductor opens up into plain tensor code.

Sites that kernels run hand their sources on, and every later reader in the graph takes what the last site handed on.
The values are the same; in training the gradients of a source that many sites read then pass from site to site, and
each site's backward adds its own to them in the same sweep.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from attnres_compile.config import AttnResConfig
from attnres_compile.errors import LoweringError
from attnres_compile.kernels import cpu, ops, through
from attnres_compile.passes import facts, sites
from attnres_compile.passes.record import watched

# What a lowered graph may hold of ours besides the calls that this pass makes.
_SERVED = frozenset(
    f"attnres::{name}{direction}"
    for name in ("mix", "mix_cpu", "inter", "merge", "site")
    for direction in ("", "_backward")
)
_SITES = ("attnres::mix", "attnres::merge", "attnres::site")
_INTER = "attnres::inter"


@dataclass(frozen=True)
class LoweringReport:
    """How many sites of a graph, bodies of its higher-order operators included, run which way.

    Attributes:
        native: by the compiled CPU kernels.
        decomposed: as plain tensor code that Inductor opens up and fuses.
        eager: by the operators' default implementations.
        kernels: by generated kernels.
        phase1: as a result of phase 1 alone, which is no call of its own.
        fused: of the others, those with a norm or an add fused in.
        merge: those that are phase 2.
        inter: number of phases 1; these are no sites.
        unlowered: what stays an operator, and why: ``name of the site: operator, reason``. Empty under ``"eager"``.
    """

    native: int = 0
    decomposed: int = 0
    eager: int = 0
    kernels: int = 0
    phase1: int = 0
    fused: int = 0
    merge: int = 0
    inter: int = 0
    unlowered: tuple[str, ...] = ()

    @property
    def sites(self) -> int:
        """All sites."""
        return self.native + self.decomposed + self.eager + self.kernels + self.phase1

    def __add__(self, other: LoweringReport) -> LoweringReport:
        return LoweringReport(**{name: value + getattr(other, name) for name, value in self.__dict__.items()})


@watched("lower")
def lower(gm: fx.GraphModule, config: AttnResConfig) -> LoweringReport:
    """Choose what runs at each site of ``gm``, editing it in place.

    Args:
        gm: a graph of torch-level or ATen calls, whose tensors are in ``node.meta["example_value"]`` or
            ``node.meta["val"]``. A site without them is not given to a kernel.
        config: says which lowering.

    Raises:
        LoweringError: an operator of this package is left that the lowering does not serve.
    """
    report = LoweringReport()
    for module in sites.graphs(gm):
        report += _lower(module, config)
        _check(module.graph)
    if report.decomposed or (report.unlowered and config.lowering == "inductor"):
        ops.register_decompositions()
    return report


def _lower(module: fx.GraphModule, config: AttnResConfig) -> LoweringReport:
    nodes = [node for node in module.graph.nodes if sites.operator_name(node) in (*_SITES, _INTER)]
    report = LoweringReport(
        phase1=sum(map(_is_phase1, module.graph.nodes)),
        fused=sum(sites.operator_name(node) == "attnres::site" for node in nodes),
        merge=sum(_merges(node) for node in nodes),
        inter=sum(sites.operator_name(node) == _INTER for node in nodes),
    )
    calls: dict[fx.Node, _MakeCall] = {}
    for node in nodes:
        is_site = sites.operator_name(node) != _INTER
        if config.lowering == "eager":
            report = replace(report, eager=report.eager + is_site)
        elif sites.served_by_kernels(node, config):
            calls[node] = _INTO[sites.operator_name(node)]
            report = replace(report, kernels=report.kernels + is_site)
        elif _native(node):
            calls[node] = _native_call
            report = replace(report, native=report.native + is_site)
        else:
            left = f"{sites.mark(node).name}: {sites.operator_name(node)}, {_why(node)}"
            report = replace(report, decomposed=report.decomposed + is_site, unlowered=(*report.unlowered, left))
    if calls:
        _thread(module.graph, calls)
        module.recompile()
    return report


def _is_phase1(node: fx.Node) -> bool:
    """Whether a site's value is what phase 1 gave it, maybe times its gain."""
    if not isinstance(node.meta.get(sites.SITE), sites.Mark) or node.op != "call_function":
        return False
    part = node if node.target is operator.getitem else node.args[0]
    if not isinstance(part, fx.Node) or part.target is not operator.getitem:
        return False
    whole = part.args[0]
    return isinstance(whole, fx.Node) and sites.operator_name(whole) == _INTER


def _merges(node: fx.Node) -> bool:
    name = sites.operator_name(node)
    return name == "attnres::merge" or (name == "attnres::site" and sites.arguments(node)["mixed"] is not None)


def _native(site: fx.Node) -> bool:
    """Whether the compiled CPU kernels take this site: CPU, a served dtype, features last in memory."""
    if sites.operator_name(site) != "attnres::mix":
        return False
    given = sites.arguments(site)
    values = [facts.tensor(node) for node in (given["query"], *given["sources"])]
    if not all(value is not None and value.is_cpu for value in values):
        return False
    first = values[1]
    # Anything else about the layout is for the kernels to put right; asking here would add guards on sizes.
    return first is not None and first.stride(given["dim"]) == 1 and cpu.served(first.dtype)


def _why(node: fx.Node) -> str:
    """Why no kernel takes a site."""
    given = sites.arguments(node)
    value = facts.tensor((given.get("sources") or [given["partial"]])[0])
    if value is None:
        return "no shape is known"
    if value.device.type == "cpu" and sites.operator_name(node) != "attnres::mix":
        return "the CPU kernel works in one phase and fuses nothing"
    if value.device.type not in ("cpu", "cuda"):
        return f"no kernel for {value.device.type}"
    if value.stride(given["dim"]) != 1:
        return "the features are not last in memory"
    return f"no kernel for {value.dtype} on {value.device.type}"


# ------------------------------------------------------------------ calls that hand their sources on


@dataclass(frozen=True)
class _Call:
    """What stands in the place of an operator.

    Attributes:
        function: what to call; returns the operator's results, then its sources handed on.
        arguments: makes its arguments, given the sources to read.
        sources: what is read, as the graph knows it.
        single: the operator's result is a tensor and not a list of results.
        results: number of results that are not handed on.
        branch: the last source that is handed on is the new partial sum, the operator's second result.
    """

    function: Callable[..., Any]
    arguments: Callable[[list[fx.Node]], tuple[Any, ...]]
    sources: list[fx.Node]
    single: bool
    results: int = 1
    branch: bool = False


def _native_call(given: Mapping[str, Any]) -> _Call:
    options = tuple(given[name] for name in ("dim", "eps", "gain", "scale", "normalized"))
    query, sources = given["query"], list(given["sources"])
    return _Call(cpu.mix_through, lambda taken: (query, taken, *options), sources, single=True)


def _site_call(given: Mapping[str, Any]) -> _Call:
    """For ``mix``, ``merge`` and ``site`` alike."""
    sources = list(given.get("sources") or [given["partial"]])
    between = tuple(given.get(name) for name in ("mixed", "lse", "branch", "norm_weight", "norm_bias"))
    norm = (given.get("norm", ""), given.get("norm_eps", 0.0))
    options = tuple(given[name] for name in ("dim", "eps", "gain", "scale", "normalized"))
    query, branch = given["query"], given.get("branch") is not None
    return _Call(
        through.site_through,
        lambda taken: (query, taken, *between, *norm, *options),
        sources,
        single="norm" not in given,
        branch=branch,
    )


def _inter_call(given: Mapping[str, Any]) -> _Call:
    queries, sources = list(given["queries"]), list(given["sources"])
    options = tuple(given[name] for name in ("dim", "eps", "scale", "normalized"))
    return _Call(
        through.inter_through,
        lambda taken: (queries, taken, *options),
        sources,
        single=False,
        results=2 * len(queries),
    )


_MakeCall = Callable[[Mapping[str, Any]], _Call]
_INTO: dict[str, _MakeCall] = {
    "attnres::mix": _site_call,
    "attnres::merge": _site_call,
    "attnres::site": _site_call,
    _INTER: _inter_call,
}


def _thread(graph: fx.Graph, calls: dict[fx.Node, _MakeCall]) -> None:
    """Put ``calls`` in the places of their nodes; every later reader takes a source from the last that had it."""
    latest: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        # A result stays the tensor that it was: an alias of another is more work for AOTAutograd.
        if node.op == "output":
            continue
        if node in calls:
            _replace(graph, node, calls[node](sites.arguments(node)), latest)
        elif any(source in latest for source in node.all_input_nodes):
            node.args = fx.node.map_arg(node.args, lambda source: latest.get(source, source))
            node.kwargs = fx.node.map_arg(node.kwargs, lambda source: latest.get(source, source))


def _replace(graph: fx.Graph, node: fx.Node, call: _Call, latest: dict[fx.Node, fx.Node]) -> None:
    """Put one call in the place of ``node``; enter the sources that it hands on in ``latest``."""
    arguments = fx.node.map_arg(
        call.arguments([latest.get(source, source) for source in call.sources]),
        lambda operand: latest.get(operand, operand),
    )
    parts: dict[int, fx.Node] = {} if call.single else {int(str(user.args[1])): user for user in node.users}
    values = [facts.tensor(parts[index]) if index in parts else None for index in range(call.results)]
    if call.single:
        values = [facts.tensor(node)]
    handed_on = [_alias(source) for source in call.sources]
    if call.branch:
        handed_on[-1] = facts.tensor(parts[1]) if 1 in parts else sites.fresh(call.sources[-1])
    with graph.inserting_before(node):
        new = sites.emit(graph, call.function, arguments, node, None)
        results = sites.items(graph, new, [*values, *handed_on], new)
    for result in results:
        result.meta.pop(sites.SITE, None)
    # What AOTAutograd's cache asks of a function that it does not know.
    new.meta.update(is_wrapped=True, user_cache_hash=through.fingerprint())
    if call.single:
        node.replace_all_uses_with(results[0])
    for index, part in parts.items():
        # The new partial sum is what is handed on in the place of the old one.
        part.replace_all_uses_with(results[-1] if call.branch and index == 1 else results[index])
        if sites.SITE in part.meta:
            results[index].meta[sites.SITE] = part.meta[sites.SITE]
        graph.erase_node(part)
    graph.erase_node(node)
    read = call.sources[:-1] if call.branch else call.sources
    latest.update(zip(read, results[call.results :], strict=False))


def _alias(source: fx.Node) -> Tensor | None:
    # A tensor of its own: one fake tensor at two nodes reads as one value. A fact needs no history.
    value = facts.tensor(source)
    return None if value is None else value.detach()


def _check(graph: fx.Graph) -> None:
    for node in graph.nodes:
        name = sites.operator_name(node)
        if name == "attnres::outside":  # it says by itself what is wrong, when it runs
            continue
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
