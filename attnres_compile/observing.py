"""A model runs once, and the softmax weights of every site are looked at on the way.

Converted modules run a compiler of ours that keeps the graph as it is: it is rewritten as always, gets a call of an
observer beside each site, and runs op by op. What the observers keep is small: per site a mean, a sum of squares and an
entropy, never the weights of every token.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from attnres_compile.backend import DECLARE, anchor_of, rewrite_declared
from attnres_compile.config import AttnResConfig
from attnres_compile.conversion import compiled_by
from attnres_compile.dynamo_graphs import CompiledCall, copy_graph_module, own_code
from attnres_compile.guarding import Guard, untouched
from attnres_compile.inputs import Inputs
from attnres_compile.kernels.plain import compute_dtype, spread
from attnres_compile.parameters import CHILD, LATE, Declaration, DepthQueries, converted, queries_in
from attnres_compile.passes import facts, sites
from attnres_compile.passes.checkpoint import make_eager, open_regions
from attnres_compile.passes.detect import detect
from attnres_compile.passes.memory import Memory
from attnres_compile.passes.plan import plan
from attnres_compile.passes.rewrite import QueryNodes, rewrite
from attnres_compile.tally import counted

# ------------------------------------------------------------------ what is kept


class Moments:
    """What is known of one site's weights, over all tokens so far.

    Attributes:
        tokens: number of tokens with finite weights.
        broken: number of tokens whose weights are not finite.
        mean: of each source's weight, float64 ``[n]`` on the CPU.
        squares: of each source's weight, sum of the squared distances from the mean, like ``mean``.
        entropy: sum over tokens of the entropy of the token's weights, in nats.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.broken = 0
        self.mean = torch.zeros(0, dtype=torch.float64)
        self.squares = torch.zeros(0, dtype=torch.float64)
        self.entropy = 0.0

    def add(self, weights: Tensor) -> None:
        """Take in the weights of more tokens, float64 ``[n, tokens]``."""
        finite = weights.isfinite().all(0)
        self.broken += int((~finite).sum())
        weights = weights[:, finite]
        count = weights.shape[1]
        if count == 0:
            return
        mean = weights.mean(1)
        squares = (weights - mean[:, None]).square().sum(1).cpu()
        self.entropy += float(torch.special.entr(weights).sum())
        mean = mean.cpu()
        if self.tokens == 0:
            self.mean, self.squares, self.tokens = mean, squares, count
            return
        # Chan's update of a variance by another part's.
        total = self.tokens + count
        apart = mean - self.mean
        self.squares = self.squares + squares + apart.square() * (self.tokens * count / total)
        self.mean = self.mean + apart * (count / total)
        self.tokens = total


def site_weights(query: Tensor, sources: list[Tensor], dim: int, eps: float, scale: float) -> Tensor:
    """``softmax_i(scale * <query, RMSNorm(v_i)>)`` over the sources (docs/method.md).

    Args:
        query: ``[d]``; with a weight of the key norm multiplied in.
        sources: N tensors of one shape, whose dimension ``dim`` holds the features.

    Returns:
        float64 ``[N, tokens]``, of logits in float32 (float64 for float64 sources).
    """
    compute = compute_dtype(sources[0].dtype)
    along = spread(query.to(compute), sources[0], dim)
    logits = []
    for source in sources:
        v = source.to(compute)
        rms = torch.rsqrt((v * v).mean(dim) + eps)
        logits.append(((v * along).sum(dim) * rms * scale).flatten())
    stacked = torch.stack(logits)
    # Not every accelerator has float64.
    wide = stacked.double() if stacked.device.type in ("cpu", "cuda") else stacked.cpu().double()
    return torch.softmax(wide, 0)


class Observer(nn.Module):
    """Stands beside one site of a graph and takes its weights into ``moments``."""

    def __init__(self, moments: Moments) -> None:
        super().__init__()
        self.moments = moments

    def forward(
        self, query: Tensor, sources: list[Tensor], branch: Tensor | None, dim: int, eps: float, scale: float
    ) -> None:
        """As :func:`site_weights`; ``branch`` is still to be added to the last source."""
        with torch.no_grad(), torch.autocast(sources[0].device.type, enabled=False):
            if branch is not None:
                sources = [*sources[:-1], sources[-1] + branch]
            self.moments.add(site_weights(query, sources, dim, eps, scale))


# ------------------------------------------------------------------ graphs with observers in them


@dataclass(frozen=True)
class _Read:
    """One site of a graph: where the observer goes, and what it is told."""

    node: fx.Node
    query: fx.Node
    sources: list[fx.Node]
    branch: fx.Node | None
    options: tuple[int, float, float]


def _reads(graph: fx.Graph) -> Iterator[_Read]:
    """Every site of ``graph``, in whatever form the passes left it."""
    for node in graph.nodes:
        name = sites.operator_name(node)
        if name not in ("attnres::mix", "attnres::merge", "attnres::site", "attnres::inter"):
            continue
        given = sites.arguments(node)
        options = (given["dim"], given["eps"], given["scale"])
        if name == "attnres::inter":
            for index, query in enumerate(given["queries"]):
                if not any(_is_merged(user) for user in node.users if user.args[1] == index):
                    yield _Read(node, query, list(given["sources"]), None, options)
            continue
        own = list(given.get("sources") or [given["partial"]])
        mixed = given.get("mixed")
        finished = list(sites.arguments(mixed.args[0])["sources"]) if mixed is not None else []
        yield _Read(node, given["query"], finished + own, given.get("branch"), options)


def _is_merged(result: fx.Node) -> bool:
    """Whether phase 2 takes this result of phase 1; otherwise it is the site's value already."""
    merging = [user for user in result.users if sites.operator_name(user) in ("attnres::merge", "attnres::site")]
    return any(sites.arguments(user).get("mixed") is result for user in merging)


_Named = dict[Any, list[tuple[DepthQueries, str]]]


class Collector:
    """All moments of one run, by the module that holds the queries and the site's name in it."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.moments: dict[tuple[DepthQueries, str], Moments] = {}

    def watch(self, module: fx.GraphModule, named: _Named) -> None:
        """Put observers into ``module``, a rewritten graph of which this is the only copy.

        Args:
            module: the graph module.
            named: for each node, or target of a node, that brings a query: whose it is and the site's name. A query
                that sites share has several.
        """
        self._keep_written(module.graph)
        for number, read in enumerate(list(_reads(module.graph))):
            origin = read.query
            while origin.all_input_nodes:
                origin = origin.all_input_nodes[0]
            owners = named.get(origin) or named.get(str(origin.target))
            if owners is None:  # Depth attention that the model computes by itself.
                continue
            name = sites.mark(read.node).name
            key = next((each for each in owners if each[1] == name), owners[0])
            observer = Observer(self.moments.setdefault(key, Moments()))
            path = f"attnres_observer_{number}"
            module.add_submodule(path, observer)
            with module.graph.inserting_before(read.node):
                module.graph.call_module(path, (read.query, read.sources, read.branch, *read.options))
        make_eager(module)
        module.recompile()

    def _keep_written(self, graph: fx.Graph) -> None:
        for node in Memory(graph).written_inputs():
            value = getattr(node.meta.get("grapharg"), "example", None)
            if isinstance(value, nn.Parameter):
                self.guard.keep(value)


class _DeclaredObserver:
    """Compiles what a converted module is traced into, instead of :class:`backend.ConvertedBackend`."""

    def __init__(self, collector: Collector, owner: nn.Module) -> None:
        self.collector = collector
        self.owner = owner

    def __call__(self, module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        module = copy_graph_module(module, self.owner)
        named: _Named = {}
        for node in module.graph.nodes:
            if node.op == "call_function" and node.target is DECLARE:
                # A converted module inside this one declares its own queries.
                queries = queries_in(self.owner.get_submodule(facts.module_path(node)))
                assert queries is not None
                for site, query in zip(queries.declaration.sites, node.args[1], strict=False):
                    named.setdefault(query, []).append((queries, site))
        count = rewrite_declared(module.graph, close=False)
        self.collector.watch(module, named)
        return counted(module.forward, count)


class _LateObserver:
    """Compiles what an untouched model is traced into, with the queries that ``backend="attnres"`` made for it."""

    def __init__(self, collector: Collector, stores: list[DepthQueries]) -> None:
        self.collector = collector
        self.configs = list(dict.fromkeys(store.declaration.config for store in stores))

    def __call__(self, module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        module = copy_graph_module(module)
        open_regions(module)
        named: _Named = {}
        for config in self.configs:
            plans = plan(detect(module.graph, config).streams, config)
            declaration = Declaration.of(plans, config)
            if not declaration.sites:
                continue
            stores: dict[str, DepthQueries] = getattr(anchor_of(module.graph, plans[0].stream).like, LATE, {})
            store = stores.get(config.fingerprint())
            if store is None:
                continue
            store.declaration.refuse(declaration, "")
            rewrite(module.graph, plans, _brought(module, store), config)
            named = _by_target(CHILD, store)
            break
        self.collector.watch(module, named)
        call: Callable[..., Any] = module.forward
        return call


def _brought(module: fx.GraphModule, store: DepthQueries) -> dict[str, QueryNodes]:
    """Nodes in front of the graph of ``module`` for the parameters of ``store``, which becomes its child."""
    module.add_submodule(CHILD, store)
    graph = module.graph
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        norms = {site: graph.get_attr(f"{CHILD}.{store.keys[site]}_key_norm") for site in store.key_norms()}
        return {site: QueryNodes(graph.get_attr(f"{CHILD}.{key}"), norms.get(site)) for site, key in store.keys.items()}


def _by_target(child: str, queries: DepthQueries) -> _Named:
    return {f"{child}.{key}": [(queries, site)] for site, key in queries.keys.items()}


# ------------------------------------------------------------------ models


def rewritten_graphs(model: nn.Module) -> Iterator[tuple[str, fx.GraphModule, str, DepthQueries]]:
    """Path, module, and name and queries of its child, of every graph in ``model`` that ``rewrite_graph`` made."""
    for path, module in model.named_modules():
        if isinstance(module, fx.GraphModule) and any(True for _ in _reads(_opened(module).graph)):
            for name, child in module._modules.items():
                if isinstance(child, DepthQueries):
                    yield path, module, name, child


def _opened(module: fx.GraphModule) -> fx.GraphModule:
    copied = copy_graph_module(module)
    copied.graph.set_codegen(copy.deepcopy(module.graph._codegen))
    open_regions(copied)
    return copied


def late_stores(model: nn.Module, config: AttnResConfig | None = None) -> list[DepthQueries]:
    """The queries that the backend made for an untransformed model: those of ``config``, or the latest ones."""
    found: dict[int, DepthQueries] = {}
    for parameter in model.parameters():
        stores: dict[str, DepthQueries] = getattr(parameter, LATE, {})
        wanted = list(stores.values())[-1:] if config is None else [stores.get(config.layout().fingerprint())]
        found.update({id(store): store for store in wanted if store is not None})
    return list(found.values())


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside what ``torch.compile`` returned."""
    inner: Any = model
    while isinstance(inner, torch._dynamo.eval_frame.OptimizedModule):
        inner = inner._orig_mod
    assert isinstance(inner, nn.Module)
    return inner


class _Held:
    """Calls a module through an attribute whose name paths are cleaned of, whatever it is compiled into."""

    def __init__(self, module: nn.Module) -> None:
        setattr(self, facts.OWNER, module)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._attnres_owner._call_impl(*args, **kwargs)  # type: ignore[attr-defined]


def _compiled_apart(module: nn.Module, compiler: Callable[..., Any]) -> Callable[..., Any]:
    """``module``, compiled through a code object of its own."""
    twin = own_code(_Held.call, f"{type(module).__name__}_observed")
    return CompiledCall(types.MethodType(twin, _Held(module)), compiler)


def observe(model: nn.Module, inputs: Inputs, stores: list[DepthQueries]) -> dict[tuple[DepthQueries, str], Moments]:
    """Run ``model`` once, in the mode that it is in and without gradients, and leave it as it was.

    Args:
        model: holds converted modules, or graphs of ``rewrite_graph``; or ``stores`` are its queries.
        inputs: what to call it with. They are copied first, a cache among them included.
        stores: queries that were made for it at compile time.

    Returns:
        The moments of every site that ran, by its queries' module and its name there.

    Raises:
        PlanMismatchError: this run's graphs do not hold the sites that the queries were made for.
        Exception: the model's own.
    """
    with untouched(model) as guard:
        collector = Collector(guard)
        call = _uncompiled(model, collector, stores)
        for _, module, name, queries in rewritten_graphs(model):
            graph = _opened(module)
            collector.watch(graph, _by_target(name, queries))
            module.__dict__["forward"] = graph.forward
        given = inputs.copied()
        with (
            compiled_by(lambda owner: _DeclaredObserver(collector, owner)),
            torch._dynamo.config.patch(suppress_errors=False),
            torch.compiler.set_stance("default"),
        ):
            call(*given.args, **given.kwargs)
    return collector.moments


def _uncompiled(model: nn.Module, collector: Collector, stores: list[DepthQueries]) -> Callable[..., Any]:
    """Take the compiled calls in ``model`` out, until the guard puts them back; late ones are compiled to be observed.

    Returns:
        What to call for ``model``.
    """
    late = _LateObserver(collector, stores)
    seen = False
    for module in list(model.modules()):
        wraps = isinstance(module, torch._dynamo.eval_frame.OptimizedModule)
        if not wraps and module._compiled_call_impl is None:
            continue
        held: Any = module
        inner: nn.Module = held._orig_mod if wraps else module
        observed = bool(stores) and not any(converted(inner)) and bool(late_stores(inner))
        seen = seen or observed
        call = _compiled_apart(inner, late) if observed else inner._call_impl if wraps else None
        module.__dict__["forward" if wraps else "_compiled_call_impl"] = call
    return model if seen or not stores else _compiled_apart(model, late)
