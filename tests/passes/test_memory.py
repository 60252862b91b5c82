"""Which nodes share memory, and what is written when."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from attnres_compile import graphs
from attnres_compile.passes.memory import Memory


class _Call(nn.Module):
    def __init__(self, call: Callable[..., object]) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> object:
        return self.call(x, self.weight)


def traced(call: Callable[..., object]) -> tuple[Memory, dict[str, fx.Node]]:
    """The memory of a function's graph, and its nodes by name. Nodes know shapes but share no fake storage."""
    module = graphs.with_shapes(fx.symbolic_trace(_Call(call)), [torch.randn(3, 4)])
    return Memory(module.graph), {node.name: node for node in module.graph.nodes}


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(4, 3),
    "transpose": lambda x: x.transpose(0, 1),
    "slice": lambda x: x[1:],
    "select": lambda x: x[:, 0],
    "contiguous": lambda x: x.contiguous(),
    "a cast to its own dtype": lambda x: x.to(torch.float32),
    "detach": lambda x: x.detach(),
    "split": lambda x: x.split(2, -1)[0],
    "chunk": lambda x: x.chunk(2, -1)[1],
    "expand": lambda x: x.expand(2, 3, 4),
    "a view of a view": lambda x: x.view(-1)[2:].unsqueeze(0),
}
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda x: x.clone(),
    "a cast": lambda x: x.to(torch.float64),
    "mul": lambda x: x * 1.0,
}


@pytest.mark.parametrize("alias", ALIASES)
def test_write_through_an_alias_is_a_write(alias: str) -> None:
    memory, nodes = traced(lambda x, w: (y := x + w, ALIASES[alias](y).mul_(2.0), y)[0])
    y = nodes["add"]
    assert memory.write_after(y, memory.position[y], frozenset()) is nodes["mul_"]


@pytest.mark.parametrize("copy", COPIES)
def test_write_into_a_copy_is_none(copy: str) -> None:
    memory, nodes = traced(lambda x, w: (y := x + w, COPIES[copy](y).mul_(2.0), y)[0])
    y = nodes["add"]
    assert memory.write_after(y, memory.position[y], frozenset()) is None


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.add_(1.0),
        lambda y: torch.relu_(y),
        lambda y: torch.nn.functional.relu(y, inplace=True),
        lambda y: torch.nn.functional.relu(y, True),
        lambda y: torch.nn.functional.dropout(y, 0.5, True, True),
        lambda y: torch.mul(y, 2.0, out=y),
        lambda y: torch.ops.aten.mul_.Tensor(y, 2.0),
        lambda y: torch.ops.aten.add.out(y, y, out=y),
        lambda y: y.zero_(),
        lambda y: y.copy_(y),
        lambda y: y.index_fill_(0, torch.tensor([0]), 1.0),
    ],
)
def test_spellings_of_a_write(write: Callable[[Tensor], object]) -> None:
    memory, nodes = traced(lambda x, w: (y := x + w, write(y), y)[0])
    y = nodes["add"]
    assert memory.write_after(y, memory.position[y], frozenset()) is not None


def test_a_write_before_is_no_write_after() -> None:
    memory, nodes = traced(lambda x, w: (y := x + w, y.mul_(2.0), y * 3.0)[2])
    at = memory.position[nodes["mul_"]]
    assert memory.write_after(nodes["add"], at, frozenset()) is None


def test_writes_that_go_away_do_not_count() -> None:
    memory, nodes = traced(lambda x, w: (y := x + w, y.mul_(2.0), y)[0])
    y = nodes["add"]
    assert memory.write_after(y, memory.position[y], {nodes["mul_"]}) is None


def test_requires_grad_writes_nothing() -> None:
    memory, nodes = traced(lambda x, w: (y := x + w, y.requires_grad_(True), y)[0])
    assert memory.write_after(nodes["add"], 0, frozenset()) is None


def test_module_in_place() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    module = graphs.with_shapes(fx.symbolic_trace(net), [torch.randn(3, 4)])
    memory = Memory(module.graph)
    first = next(node for node in module.graph.nodes if node.op == "call_module")
    assert memory.write_after(first, memory.position[first], frozenset()) is not None


FUNCTIONAL: dict[str, tuple[Callable[[Tensor, Tensor], object], bool]] = {
    "own memory, not read again": (lambda x, w: (x * 2.0).add_(w), True),
    "own memory, read before": (lambda x, w: (y := x * 2.0, z := y.sin(), y.add_(w) * z)[2], True),
    "own memory, the old value read later": (lambda x, w: (y := x * 2.0, z := y.add_(w), y + z)[2], False),
    "own memory, a view read later": (lambda x, w: (y := x * 2.0, v := y[0], y.add_(w) * 1.0, v)[3], False),
    "an input": (lambda x, w: x.add_(w), False),
    "a view of an input": (lambda x, w: x.view(-1)[:4].add_(w), False),
    "a parameter": (lambda x, w: w.add_(1.0) + x, False),
    "no write": (lambda x, w: x.add(w), True),
}


@pytest.mark.parametrize("case", FUNCTIONAL)
def test_is_functional(case: str) -> None:
    call, functional = FUNCTIONAL[case]
    memory, nodes = traced(call)
    write = next((node for name, node in nodes.items() if name.startswith("add_")), None) or nodes["add"]
    assert memory.is_functional(write) is functional


def test_a_swap_of_data_is_a_write() -> None:
    """``set_`` and ``data`` assignments end in an underscore like every other write."""
    memory, nodes = traced(lambda x, w: (y := x + w, y.set_(x), y)[0])
    y = nodes["add"]
    assert memory.write_after(y, memory.position[y], frozenset()) is nodes["set_"]
