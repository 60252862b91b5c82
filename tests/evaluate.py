"""Captured graphs, and depth attention evaluated node by node from the paper's equations.

Nothing here uses the rewriting or its kernels: :func:`evaluate` walks the *original* graph. It knows only which adds
form a step, how steps form blocks, and who reads which state. A branch's value is what its adds give when the stream
is zero, and a source is carried along the stream by running the stream's own ops on it.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from attnres_compile import AttnResConfig
from attnres_compile.passes.plan import BlockPlan, SitePlan
from attnres_compile.passes.streams import Step
from tests.helpers import random_state, seeded


@dataclass
class Captured:
    """A graph and the values that it is run on.

    Attributes:
        module: the graph; parameters are its own (``symbolic_trace``) or among ``args`` (dynamo).
        args: real inputs, in order.
    """

    module: fx.GraphModule
    args: list[Any]

    def leaves(self) -> list[Tensor]:
        """What gradients are taken of."""
        found = [a for a in self.args if isinstance(a, Tensor) and a.requires_grad]
        return found + [p for p in self.module.parameters() if p.requires_grad]

    def run(self, module: Any = None, seed: int = 5, grad: bool = True) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and gradients of ``module`` (this one's graph by default) on copies of the inputs."""
        module = self.module if module is None else module
        leaves = self.leaves()
        with random_state(seed), torch.set_grad_enabled(grad):
            outputs = flat(module(*[_copied(a) for a in self.args]))
        outputs = [o for o in outputs if o.is_floating_point()]
        if not grad:
            return [o.clone() for o in outputs], []
        generator = seeded(seed)
        loss = sum(
            (o.double() * torch.randn(o.shape, generator=generator, dtype=torch.float64)).sum()
            for o in outputs
            if o.requires_grad
        )
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if isinstance(loss, Tensor) else ()
        return [o.detach() for o in outputs], [
            torch.zeros_like(leaf) if g is None else g for g, leaf in zip(gradients, leaves, strict=False)
        ]

    def run_raw(self, module: Any) -> list[Tensor]:
        """Floating outputs of ``module``, still attached to their history."""
        return [o for o in flat(module(*[_copied(a) for a in self.args])) if o.is_floating_point()]


def _copied(value: Any) -> Any:
    # A leaf that wants a gradient cannot be written in place, and must stay the leaf that it is.
    return value.clone() if isinstance(value, Tensor) and not value.requires_grad else value


def flat(values: Any) -> list[Tensor]:
    """All tensors of a nested result, in order."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = list(values.values())
    return [leaf for value in values for leaf in flat(value)] if isinstance(values, (tuple, list)) else []


def by_dynamo(model: nn.Module, *args: Any, **kwargs: Any) -> Captured:
    """dynamo's graph of a call, with the real tensors that it is called on."""
    found: list[Captured] = []

    def backend(module: fx.GraphModule, _: Sequence[Any]) -> Any:
        kept = fx.GraphModule(module, copy.deepcopy(module.graph))

        def call(*real: Any) -> Any:
            found.append(Captured(kept, [_copied(a) for a in real]))
            return module(*real)

        return call

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*args, **kwargs)
    torch._dynamo.reset()
    return found[-1]


def interpret(module: fx.GraphModule, args: Sequence[Any], keep: bool = False) -> Any:
    """The result of a graph, node by node: for graphs that run a few times at most, writing code takes longer.

    Args:
        module: the graph.
        args: its inputs, copied before they are used.
        keep: leave each node's tensor in its ``meta["val"]``, as a fact for detection.
    """
    env: dict[fx.Node, Any] = {}
    given = iter([_copied(a) for a in args])
    for node in module.graph.nodes:
        if node.op == "placeholder":
            value = next(given)
        elif node.op == "output":
            return fx.map_arg(node.args[0], env.__getitem__)
        else:
            value = call(module, node, fx.map_arg(node.args, env.__getitem__), fx.map_arg(node.kwargs, env.__getitem__))
        env[node] = value
        if keep:
            node.meta["val"] = value.detach() if isinstance(value, Tensor) else value
    raise AssertionError("no output")


def call(module: nn.Module, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What one node of ``module`` computes from these arguments."""
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(module)
    if node.op == "call_module":
        return module.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def by_symbolic_trace(model: nn.Module, *args: Any) -> Captured:
    """``torch.fx.symbolic_trace``'s graph: module calls, no shapes."""
    return Captured(fx.symbolic_trace(model), list(args))


# ------------------------------------------------------------------ the adds of a graph

_ADD_TARGETS = {
    operator.add, operator.iadd, operator.sub, operator.isub, torch.add, torch.sub, torch.subtract, torch.lerp,
    torch.addcmul, torch.addmm, torch.baddbmm, torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor,
    torch.ops.aten.sub.Tensor, torch.ops.aten.sub_.Tensor,
}  # fmt: skip
_ADD_METHODS = {"add", "add_", "sub", "sub_", "lerp", "lerp_", "addcmul", "addmm", "baddbmm", "__add__", "__iadd__"}


def float_adds(graph: fx.Graph) -> set[str]:
    """Names of all nodes that add (or subtract, or interpolate) two floating tensors."""
    names: set[str] = set()
    for node in graph.nodes:
        is_add = node.target in _ADD_METHODS if node.op == "call_method" else node.target in _ADD_TARGETS
        operands = [*node.args, *(node.kwargs[k] for k in ("input", "other") if k in node.kwargs)]
        tensors = [a for a in operands if isinstance(a, fx.Node) and _is_float(a)]
        if is_add and _is_float(node) and len(tensors) >= 2:
            names.add(node.name)
    return names


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("example_value", node.meta.get("val"))
    return isinstance(value, Tensor) and value.is_floating_point()


# ------------------------------------------------------------------ the paper's equations


def attend(query: Tensor, sources: list[Tensor], axis: int, config: AttnResConfig) -> Tensor:
    """One read: softmax over the sources of <query, RMSNorm(source)>, times the raw sources."""
    logits = []
    for source in sources:
        v = source.movedim(axis, -1)
        logits.append((v / torch.sqrt((v * v).mean(-1, keepdim=True) + config.eps) @ query.to(v.dtype))[..., None])
    weights = torch.softmax(torch.cat(logits, -1), -1)
    total = sum(weights[..., i, None] * source.movedim(axis, -1) for i, source in enumerate(sources))
    assert isinstance(total, Tensor)
    return (total * (len(sources) if config.gain == "sum" else 1)).movedim(-1, axis)


def evaluate(
    captured: Captured,
    plans: Sequence[BlockPlan],
    queries: Mapping[str, Tensor],
    config: AttnResConfig,
    seed: int = 5,
) -> list[Tensor]:
    """Outputs of a graph under depth attention, without rewriting it."""
    with random_state(seed), torch.no_grad():
        return _Evaluator(captured, plans, queries, config).outputs()


class _Stream:
    """Where one stream is: every branch's value so far (the root first), as the stream has it now."""

    def __init__(self, plan: BlockPlan) -> None:
        self.plan = plan
        self.values: list[Tensor] = []

    def sources(self) -> list[Tensor]:
        """The root, a sum per complete block, and the sum of the block in progress."""
        found = [self.values[0]]
        done = len(self.values) - 1
        for block in self.plan.blocks:
            members = [self.values[i + 1] for i in block if i < done]
            if members:
                found.append(torch.stack(members).sum(0))
        return found


class _Evaluator:
    def __init__(
        self, captured: Captured, plans: Sequence[BlockPlan], queries: Mapping[str, Tensor], config: AttnResConfig
    ) -> None:
        self.captured, self.queries, self.config = captured, queries, config
        self.env: dict[fx.Node, Any] = {}
        # What one reader sees where readers have queries of their own.
        self.seen: dict[tuple[fx.Node, fx.Node], Any] = {}
        self.steps = {s.node: (_of, i) for _of in map(_Stream, plans) for i, s in enumerate(_of.plan.stream.steps)}
        self.gone = {add for stream, i in self.steps.values() for add in stream.plan.stream.steps[i].adds}
        self.carriers: dict[fx.Node, list[tuple[_Stream, int]]] = {}
        for stream, i in self.steps.values():
            for carrier in stream.plan.stream.steps[i].passes:
                self.carriers.setdefault(carrier, []).append((stream, i))
        self.written = {node for plan in plans for node in plan.stream.written}
        self.mixed: dict[tuple[SitePlan, fx.Node], Any] = {}

    def outputs(self) -> list[Tensor]:
        args = iter([_copied(a) for a in self.captured.args])
        for node in self.captured.module.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = next(args)
            elif node.op == "output":
                found = fx.map_arg(node.args[0], lambda n, reader=node: self._read(reader, n))
                return [o for o in flat(found) if o.is_floating_point()]
            elif node in self.steps:
                self._step(*self.steps[node])
            elif node not in self.gone:
                self._plain(node)
        raise AssertionError("no output")

    def _read(self, reader: fx.Node, node: fx.Node) -> Any:
        return self.seen.get((reader, node), self.env.get(node))

    def _plain(self, node: fx.Node) -> None:
        carried = self.carriers.get(node, ())
        # A carrier of a state that nobody reads has nothing to carry; a node without inputs is always there.
        if not carried or all(n in self.env or (node, n) in self.seen for n in node.all_input_nodes):
            self.env[node] = self._call(node, lambda n: self._read(node, n))
        for stream, i in carried:
            path = (stream.plan.stream.state(i), *stream.plan.stream.steps[i].passes)
            before = path[path.index(node) - 1]
            for site in stream.plan.sites:
                if site.index == i and (site, before) in self.mixed:
                    self._hand(site, node, self._along(node, before, self.mixed[site, before]))

    def _hand(self, site: SitePlan, node: fx.Node, value: Any) -> None:
        self.mixed[site, node] = value
        for reader in site.readers:
            self.seen[reader, node] = value

    def _along(self, carrier: fx.Node, before: fx.Node, value: Tensor) -> Any:
        return self._call(carrier, lambda n: value if n is before else self._read(carrier, n))

    def _step(self, stream: _Stream, index: int) -> None:
        plan, steps = stream.plan.stream, stream.plan.stream.steps
        step = steps[index]
        if index == 0:
            reader = next(add for add in step.adds if plan.root in add.all_input_nodes)
            stream.values = [self._read(reader, plan.root)]
        before = plan.state(index)
        for carrier in step.passes:
            stream.values = [self._along(carrier, before, value) for value in stream.values]
            before = carrier
        zeros = torch.zeros_like(stream.values[0])
        branch = self._summed(step, {step.skip: zeros}, self._read)
        if sum(step.skip in add.all_input_nodes for add in step.adds) > 1 or len(step.adds[0].all_input_nodes) == 1:
            # The state is the branch's, too (x + x): whatever its weight is beyond the one that carries it on.
            weight = self._summed(step, {step.skip: torch.ones_like(zeros)}, self._read) - branch
            reader = next(add for add in step.adds if step.skip in add.all_input_nodes)
            branch = branch + (weight - 1) * self._read(reader, step.skip)
        stream.values = [value.to(branch.dtype) for value in stream.values] + [branch]
        sites = [site for site in stream.plan.sites if site.index == index + 1]
        for site in sites:
            sources = stream.sources()
            assert len(sources) == site.num_sources, f"{site.name} says {site.sources}"
            mixed = attend(self.queries[site.name], sources, plan.axes[index + 1], self.config)
            # Laid out in memory as its sources are: dropout draws in that order.
            mixed = torch.empty_like(sources[0]).copy_(mixed)
            self.env.setdefault(step.node, mixed)
            self._hand(site, step.node, mixed)
        # Of a state that nobody reads only the shape may be asked for.
        self.env.setdefault(step.node, branch)

    def _summed(self, step: Step, local: dict[fx.Node, Any], read: Callable[[fx.Node, fx.Node], Any]) -> Any:
        """What the adds of a step give, with the values of ``local`` in place of the nodes' own."""
        for add in step.adds:
            local[add] = self._call(add, lambda n, add=add: local[n] if n in local else read(add, n), True)
        return local[step.node]

    def _call(self, node: fx.Node, read: Any, fresh: bool = False) -> Any:
        args, kwargs = fx.map_arg(node.args, read), fx.map_arg(node.kwargs, read)
        if fresh or node in self.carriers or node in self.written:  # these may be spelled in place
            args = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
        return call(self.captured.module, node, args, kwargs)
