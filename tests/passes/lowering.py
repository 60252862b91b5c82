"""What the tests of the passes behind rewriting share: graphs that claim to be on a GPU, op counts, equal numbers."""

from __future__ import annotations

import operator
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import attnres_compile as ac
from attnres_compile import graphs, kernels
from attnres_compile.kernels import cpu, through
from attnres_compile.passes import sites
from attnres_compile.passes.finish import finish
from tests.evaluate import Captured, by_dynamo
from tests.helpers import TOLERANCE, randomize, randomize_queries, relative_error

_OURS = {through.site_through: "site_through", through.inter_through: "inter_through", cpu.mix_through: "mix_through"}


def counts(module: fx.GraphModule) -> dict[str, int]:
    """How often each operator or function of ours is called, bodies of higher-order operators included."""
    found: Counter[str] = Counter()
    for each in sites.graphs(module):
        for node in each.graph.nodes:
            name = sites.operator_name(node)
            if name.startswith("attnres::"):
                found[name.removeprefix("attnres::")] += 1
            elif node.target in _OURS:
                found[_OURS[node.target]] += 1
    return dict(found)


def calls(module: fx.GraphModule) -> int:
    """Number of all calls in the graph; taking one of several results is none."""
    return sum(
        node.op.startswith("call_") and sites.ops.name_of(node) != "getitem"
        for each in sites.graphs(module)
        for node in each.graph.nodes
    )


@pytest.fixture
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, int, str]]:
    """A launcher that serves all that is asked for on a GPU but float64; what was asked for."""
    asked: list[tuple[torch.dtype, int, str]] = []

    def served(dtype: torch.dtype, dim_size: int, device: torch.device) -> bool:
        asked.append((dtype, dim_size, device.type))
        return dtype != torch.float64

    launch = types.ModuleType("attnres_compile.kernels.launch")
    launch.served = served  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, launch.__name__, launch)
    monkeypatch.setattr(kernels, "launch", launch, raising=False)
    return asked


def on_cuda(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph, whose tensor facts say that everything is on a GPU. Its code can still run on the CPU."""

    def moved(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(moved(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        with value.fake_mode:  # type: ignore[attr-defined]
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="cuda", requires_grad=value.requires_grad
            )

    for each in sites.graphs(module):
        for node in each.graph.nodes:
            for key in ("example_value", "val"):
                if key in node.meta:
                    node.meta[key] = moved(node.meta[key])
    return module


def lowered(
    model: nn.Module, *args: Any, cuda: bool = True, grad: bool = True, **options: Any
) -> tuple[fx.GraphModule, Any, Captured]:
    """A model's graph after all passes as Inductor would get it, what they chose, and the original graph."""
    captured = by_dynamo(model, *args)
    module, _ = ac.rewrite_graph(captured.module, captured.args, ac.AttnResConfig(**options))
    if cuda:
        on_cuda(module)
    with torch.set_grad_enabled(grad):
        choices = finish(module, ac.AttnResConfig())
    check_facts(module)
    randomize_queries(module.attnres.queries())
    return module, choices, captured


def check_facts(module: fx.GraphModule) -> None:
    """The graph is well-formed, and what our nodes make has a fake tensor of its own at every node."""
    for each in sites.graphs(module):
        each.graph.lint()
        values = [node.meta.get("val", node.meta.get("example_value")) for node in each.graph.nodes]
        identities = Counter(id(value) for value in values if isinstance(value, Tensor))
        for node in each.graph.nodes:
            whole = node.args[0] if node.target is operator.getitem else node
            if sites.operator_name(whole).startswith("attnres::") or whole.target in _OURS:
                assert identities[id(node.meta.get("val", node.meta.get("example_value")))] <= 1, node
            for user in node.users:
                assert node < user


def true_facts(module: fx.GraphModule, args: list[Any]) -> None:
    """Every tensor that the graph makes has the shape and dtype that its node claims."""
    claimed = {n.name: n.meta.get("val", n.meta.get("example_value")) for n in module.graph.nodes}

    class Check(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            value = super().run_node(node)
            claim = claimed[node.name]
            pairs = zip(claim, value, strict=True) if isinstance(claim, (list, tuple)) else [(claim, value)]
            for said, real in pairs:
                if isinstance(said, Tensor) and isinstance(real, Tensor):
                    assert (said.shape, said.dtype) == (real.shape, real.dtype), node
            return value

    Check(module).run(*args)


def forms(
    model: nn.Module,
    *args: Any,
    trace: Callable[..., Captured] = by_dynamo,
    tolerance: float | None = None,
    **options: Any,
) -> dict[str, tuple[fx.GraphModule, ac.TransformReport]]:
    """Each form of a converted model (``plain``, ``two``, ``fused``, ``both``), all of equal numbers.

    Queries and key norm weights are random. Outputs are compared, and the gradients of inputs, parameters, queries
    and key norm weights.
    """
    randomize(model)
    captured = trace(model, *args)
    captured = Captured(graphs.with_shapes(captured.module, captured.args), captured.args)
    found: dict[str, tuple[fx.GraphModule, ac.TransformReport]] = {}
    want: tuple[list[Tensor], list[Tensor]] | None = None
    for name, two, fuse in (
        ("plain", "off", "off"),
        ("two", "on", "off"),
        ("fused", "off", "on"),
        ("both", "on", "on"),
    ):
        config = ac.AttnResConfig(two_phase=two, fuse=fuse, **options)
        module, report = ac.rewrite_graph(captured.module, captured.args, config)
        check_facts(module)
        true_facts(module, captured.args)
        randomize_queries(module.attnres.queries())
        randomize_queries(module.attnres.key_norms(), seed=2, std=1.0)
        got = numbers(captured, module)
        assert all(float(gradient.abs().max()) > 0 for gradient in got[1])
        if want is None:
            want = got
        allowed = tolerance or TOLERANCE[got[0][0].dtype]
        assert relative_error(got[0], want[0]) <= allowed, name
        largest = max(float(gradient.abs().max()) for gradient in want[1])
        for mine, theirs in zip(got[1], want[1], strict=True):
            difference = float((mine - theirs).abs().max()) / largest
            assert difference <= allowed, (name, difference)
        found[name] = module, report
    return found


def numbers(captured: Captured, module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of everything that has one: inputs, parameters, queries."""
    inputs = [a for a in captured.args if isinstance(a, Tensor) and a.requires_grad]
    leaves = [*inputs, *module.parameters()]
    outputs = captured.run_raw(module)
    generator = torch.Generator().manual_seed(5)
    loss = sum((o.double() * torch.randn(o.shape, generator=generator, dtype=torch.float64)).sum() for o in outputs)
    assert isinstance(loss, Tensor)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    used = [g for g in gradients if g is not None]
    return [o.detach() for o in outputs], used


# ------------------------------------------------------------------ networks with a norm before each branch

WIDTH = 32


class Handwritten(nn.Module):
    """RMSNorm as Hugging Face's Llama writes it: rounds before it multiplies by its weight."""

    def __init__(self, width: int = WIDTH, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Gemma(Handwritten):
    """One plus the weight, in float32, rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class Net(nn.Module):
    """``count`` pre-norm sublayers on an embedded input, and a final norm.

    Args:
        norm: makes one norm of a width.
        count: number of sublayers.
        cast: branches compute in this dtype, beside a stream of the model's own.
        shared: all sublayers have one norm module.
        read: one more reader of each state, or ``None``.
    """

    def __init__(
        self,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        count: int = 6,
        cast: torch.dtype | None = None,
        shared: bool = False,
        read: Callable[[Tensor], Tensor] | None = None,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        one = norm(width)
        self.norms = nn.ModuleList(one if shared else norm(width) for _ in range(count))
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.norm = norm(width)
        self.cast, self.read = cast, read
        if cast is not None:
            self.branches.to(cast)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, branch in zip(self.norms, self.branches, strict=True):
            h = norm(x)
            h = branch(h if self.cast is None else h.to(self.cast)).tanh()
            if self.read is not None:
                h = h + self.read(x)
            x = x + h
        return self.norm(x)


def inputs(dtype: torch.dtype = torch.float32, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
