"""A block form written by hand, and a backend that lowers it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from attnres_compile.config import AttnResConfig
from attnres_compile.passes.lower import lower

MIX = torch.ops.attnres.mix.default
WIDTH = 32


class Blocks(nn.Module):
    """A block form written by hand: six sublayers in blocks of two, a site before each and one at the end."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.queries = nn.ParameterList(nn.Parameter(torch.randn(WIDTH) / WIDTH**0.5) for _ in range(7))

    def mix(self, query: Tensor, sources: list[Tensor]) -> Tensor:
        mixed: Tensor = MIX(query, sources, self.dim, 1e-6, float(len(sources)), 1.0, False)
        return mixed

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        blocks, partial = [x * 0.5], []
        for index, branch in enumerate(self.branches):
            h = self.mix(self.queries[index], blocks + partial)
            value = branch(h.movedim(self.dim, -1)).tanh().movedim(-1, self.dim)
            partial = [partial[0] + value] if partial else [value]
            if index % 2:
                blocks, partial = blocks + partial, []
        # A reader of a source that is no site.
        return self.mix(self.queries[6], blocks), blocks[1].exp()


def captured(
    model: nn.Module, *inputs: Tensor, run: Callable[[fx.GraphModule, Sequence[Any]], Any] | None = None, **options: Any
) -> tuple[Callable[..., Any], list[fx.GraphModule]]:
    """``model`` compiled with a backend that lowers, and the list that its lowered graphs appear in."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example: Sequence[Any]) -> Any:
        gm = copy.deepcopy(gm)
        gm.report = lower(gm, AttnResConfig())
        gm.graph.lint()
        graphs.append(gm)
        return run(gm, example) if run else gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True, **options)
    return compiled, graphs


def gradients(call: Callable[..., Any], model: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs, and gradients of the input and all parameters that need one."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    outputs = call(x)
    torch.manual_seed(5)
    torch.autograd.backward(outputs, [torch.randn(out.shape, dtype=out.dtype) for out in outputs])
    assert x.grad is not None
    grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return [*(out.detach() for out in outputs), x.grad, *grads]


def assert_equal(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(found) == len(expected)
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=tolerance, atol=tolerance)


def targets(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def captured_graph(model: nn.Module, x: Tensor) -> fx.GraphModule:
    """dynamo's graph of ``model``, not lowered."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Any:
        graphs.append(copy.deepcopy(gm))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(x)
    return graphs[0]
