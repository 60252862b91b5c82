"""What a node may write, and what its result may share memory with, in every spelling.

The truth is what running it changes: see :func:`changed`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from attnres_compile import graphs
from attnres_compile.passes.memory import Memory
from attnres_compile.passes.writes import shared, tensors, written
from tests.passes.support import Stream, by_dynamo, check_exact, converted, refused, study
from tests.passes.test_memory import traced


@torch.library.custom_op("attnres_tests::rescale", mutates_args=("x",))
def rescale(x: Tensor, by: float) -> None:
    x.mul_(by)


@torch.library.custom_op("attnres_tests::rescale_all", mutates_args=("many",))
def rescale_all(many: list[Tensor], by: float) -> None:
    for each in many:
        each.mul_(by)


@torch.library.custom_op("attnres_tests::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2.0


for op in (rescale, rescale_all):
    op.register_fake(lambda *args: None)
double.register_fake(lambda x: torch.empty_like(x))

PACKETS: Any = torch.ops.attnres_tests
WRITES: dict[str, Callable[[Tensor], object]] = {
    "a keyword": lambda y: F.relu(input=y, inplace=True),
    "two keywords, the other way round": lambda y: F.leaky_relu(inplace=True, negative_slope=0.1, input=y),
    "a position": lambda y: F.elu(y, 1.0, True),
    "dropout by keyword": lambda y: F.dropout(input=y, p=0.5, training=True, inplace=True),
    "a function with an underscore, by keyword": lambda y: torch.relu_(input=y),
    "a packet of aten": lambda y: torch.ops.aten.mul_(y, 2.0),
    "a packet of aten, by keyword": lambda y: torch.ops.aten.mul_(self=y, other=2.0),
    "a packet": lambda y: PACKETS.rescale(y, 0.5),
    "a packet, by keyword": lambda y: PACKETS.rescale(by=0.5, x=y),
    "an overload": lambda y: PACKETS.rescale.default(y, 0.5),
    "a list": lambda y: PACKETS.rescale_all([y, y], 0.5),
    "a list by keyword": lambda y: PACKETS.rescale_all(many=[y], by=0.5),
    "foreach": lambda y: torch._foreach_mul_([y], 0.5),
    "foreach of two": lambda y: torch._foreach_add_([y], [y]),
    "foreach zero": lambda y: torch._foreach_zero_((y,)),
    "foreach overload": lambda y: torch.ops.aten._foreach_mul_.Scalar([y], 0.5),
    "foreach copy": lambda y: torch._foreach_copy_([y], [torch.zeros(3, 4)]),
    "out": lambda y: torch.add(y, 1.0, out=y),
    "out of a packet": lambda y: torch.ops.aten.add(y, y, out=y),
    "out of two": lambda y: torch.sort(y, out=(y, torch.zeros(3, 4, dtype=torch.int64))),
    "a dunder": lambda y: y.__imul__(2.0),
    "copy_": lambda y: y.copy_(torch.zeros(3, 4)),
    "random numbers": lambda y: y.uniform_(0.0, 1.0),
    "an initialiser": lambda y: nn.init.normal_(y),
    "an initialiser by keyword": lambda y: nn.init.constant_(val=1.0, tensor=y),
    "index_put_": lambda y: torch.index_put_(y, (torch.tensor([0]),), torch.tensor(1.0)),
    "masked_fill_": lambda y: y.masked_fill_(torch.ones(3, 4, dtype=torch.bool), 0.0),
    "running statistics": lambda y: F.batch_norm(torch.zeros(5, 4), y[0], y[1].abs(), training=True),
    "running statistics by position": lambda y: torch.batch_norm(
        torch.randn(5, 4), None, None, y[0], y[1].abs(), True, 0.1, 1e-5, False
    ),
    "a table of bounded norm": lambda y: F.embedding(torch.tensor([0]), y, max_norm=1e-3),
    "through split": lambda y: y.split(2, -1)[1].mul_(2.0),
    "through chunk": lambda y: torch.chunk(y, 2)[0].zero_(),
    "through unbind": lambda y: y.unbind(0)[2].zero_(),
    "through a list of views": lambda y: (
        torch._foreach_mul_(list(y.split([1, 3], -1)[0:1]), 2.0)
        if isinstance(y, Tensor)
        else torch._foreach_mul_([y.split([1, 3], -1)[0]], 2.0)
    ),
    "through data": lambda y: y.data.mul_(2.0),
    "through detach": lambda y: y.detach().mul_(2.0),
    "through dropout that does nothing": lambda y: F.dropout(y, 0.5, False).mul_(2.0),
    "through an einsum": lambda y: torch.einsum("ij->ji", y).mul_(2.0),
    "through a broadcast": lambda y: torch.broadcast_tensors(y, torch.zeros(3, 1))[0].mul_(2.0),
    "through a keyword": lambda y: torch.transpose(input=y, dim0=0, dim1=1).mul_(2.0),
    "through a packet": lambda y: torch.ops.aten.view(y, [12]).mul_(2.0),
    "through type_as": lambda y: y.type_as(torch.zeros(1)).mul_(2.0),
}
HARMLESS: dict[str, Callable[[Tensor], object]] = {
    "relu": lambda y: F.relu(y),
    "relu with inplace=False": lambda y: F.relu(input=y, inplace=False),
    "dropout": lambda y: F.dropout(y, 0.5, True, False),
    "a packet": lambda y: PACKETS.double(y),
    "a packet of aten": lambda y: torch.ops.aten.mul(y, 2.0),
    "foreach": lambda y: torch._foreach_mul([y], 2.0),
    "a copy, written": lambda y: y.clone().mul_(2.0),
    "a packet's result, written": lambda y: PACKETS.rescale(PACKETS.double(y), 0.5),
    "into another": lambda y: torch.zeros(3, 4).copy_(y),
    "into another's list": lambda y: torch._foreach_add_([torch.zeros(3, 4)], [y]),
    "batch norm in evaluation": lambda y: F.batch_norm(torch.zeros(5, 4), y[0], y[1].abs(), training=False),
    "one of two fresh results": lambda y: torch.sort(y)[0].mul_(2.0),
    "sort": lambda y: torch.sort(y),
    "requires_grad_": lambda y: y.requires_grad_(True),
    "a table": lambda y: F.embedding(torch.tensor([0]), y),
    "einsum of two": lambda y: torch.einsum("ij,ij->ij", y, torch.ones(3, 4)).mul_(2.0),
}


def changed(call: Callable[[Tensor], object]) -> bool:
    """Whether running ``call`` changes a number of what it is given."""
    y = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)) * 2.0
    before, seen = y.clone(), y.view(-1)
    with torch.no_grad():
        call(y)
    return not torch.equal(seen.view(3, 4), before) or not torch.equal(y, before)


def _write_after_y(call: Callable[[Tensor], object]) -> fx.Node | None:
    memory, nodes = traced(lambda x, w: (y := (x + w) * 1.0, call(y), y)[0])
    y = nodes["mul"]
    return memory.write_after(y, memory.position[y], frozenset())


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_seen(name: str) -> None:
    assert changed(WRITES[name])
    assert _write_after_y(WRITES[name]) is not None


@pytest.mark.parametrize("name", HARMLESS)
def test_what_writes_nothing_is_no_write(name: str) -> None:
    assert not changed(HARMLESS[name])
    assert _write_after_y(HARMLESS[name]) is None


# ------------------------------------------------------------------ what cannot be answered


def _node(target: Any, op: str = "call_function", inplace_module: nn.Module | None = None) -> fx.Node:
    module = nn.Module()
    if inplace_module is not None:
        module.add_module("inner", inplace_module)
    graph = fx.Graph(owning_module=module)  # type: ignore[arg-type]
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(2, 2)
    number = graph.placeholder("number")
    number.meta["val"] = 3
    call = graph.create_node(op, target, (x, number))
    call.meta["val"] = torch.zeros(2, 2)
    return call


class _Mine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def _mine(x: Tensor, number: int) -> Tensor:
    return x


UNKNOWN: dict[str, Callable[[], fx.Node]] = {
    "somebody's function": lambda: _node(_mine),
    "somebody's lambda": lambda: _node(lambda x, number: x),
    "an autograd function": lambda: _node(torch.autograd.Function.apply),
    "somebody's module": lambda: _node("inner", "call_module", _Mine()),
    "a container with somebody's module": lambda: _node("inner", "call_module", nn.Sequential(nn.ReLU(), _Mine())),
    "a module that is not there": lambda: _node("gone", "call_module"),
    "a method that tensors have not": lambda: _node("absorb", "call_method"),
    "an operator without a body": lambda: _node(torch.ops.higher_order.wrap),
}
KNOWN: dict[str, Callable[[], fx.Node]] = {
    "a linear layer": lambda: _node("inner", "call_module", nn.Linear(2, 2)),
    "a container": lambda: _node("inner", "call_module", nn.Sequential(nn.Linear(2, 2), nn.ReLU())),
    "a function of torch": lambda: _node(torch.nn.functional.normalize),
    "a Python operator": lambda: _node(operator.pow),
    "a method": lambda: _node("pow", "call_method"),
}


DIRECT: dict[str, tuple[Any, str]] = {
    "setitem": (operator.setitem, "call_function"),
    "imul": (operator.imul, "call_function"),
    "ipow": (operator.ipow, "call_function"),
    "imod": (operator.imod, "call_function"),
    "delitem": (operator.delitem, "call_function"),
    "setattr": (setattr, "call_function"),
    "a method as a function": (torch.Tensor.mul_, "call_function"),
    "a slot as a function": (torch.Tensor.__iadd__, "call_function"),
    "a slot of a Python class": (torch.Tensor.__ipow__, "call_function"),
    "a setter": (torch.Tensor.data.__set__, "call_function"),
    "a dunder method": ("__setitem__", "call_method"),
    "set_": ("set_", "call_method"),
    "resize_": ("resize_", "call_method"),
    "a layer in place": ("inner", "call_module"),
}


@pytest.mark.parametrize("name", DIRECT)
def test_targets_that_no_proxy_reaches(name: str) -> None:
    target, op = DIRECT[name]
    node = _node(target, op, nn.ELU(inplace=True) if op == "call_module" else None)
    assert written(node) == (node.args[0],)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_answered_is_a_writer(name: str) -> None:
    node = UNKNOWN[name]()
    x, number = node.args
    assert written(node) == (x,)
    assert x in shared(node)
    assert tensors(node) == [x], "a number holds no memory"
    assert number not in written(node)


@pytest.mark.parametrize("name", KNOWN)
def test_what_can_be_answered_is_none(name: str) -> None:
    assert written(KNOWN[name]()) == ()


# ------------------------------------------------------------------ higher-order operators


class _Higher(nn.Module):
    def __init__(self, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.call = call
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return self.call(self, y), y


def _higher(call: Callable[[nn.Module, Tensor], Any]) -> tuple[fx.Node, list[fx.Node]]:
    """The higher-order call in dynamo's graph of ``call``, and what it may write."""
    module = by_dynamo(_Higher(call), torch.randn(3, 4)).module
    node = next(n for n in module.graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator))
    return node, list(written(node))


def test_a_body_that_writes_nothing() -> None:
    node, found = _higher(lambda net, y: torch.utils.checkpoint.checkpoint(net.b, y, use_reentrant=False))
    assert found == []
    node, found = _higher(lambda net, y: torch.cond(y.sum() > 0, lambda y: net.b(y), lambda y: y * 2.0, (y,)))
    assert found == []
    assert tensors(node)


def test_a_body_that_writes_one_operand() -> None:
    """A checkpointed call that counts its calls writes the buffer, and not what it is called with."""

    def counted(net: nn.Module, y: Tensor) -> Tensor:
        def body(y: Tensor) -> Tensor:
            net.count.view(-1)[:2].add_(1.0)
            return net.b(y)

        return torch.utils.checkpoint.checkpoint(body, y, use_reentrant=False)

    node, found = _higher(counted)
    assert [n.op for n in found] == ["placeholder"]
    assert "count" in found[0].name
    assert len(tensors(node)) > 1


def test_a_body_that_hands_on_what_it_is_given() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(2, 2)
    inner = fx.Graph()
    a, b = inner.placeholder("a"), inner.placeholder("b")
    for each in (a, b):
        each.meta["val"] = torch.zeros(2, 2)
    view = inner.call_method("view", (b, -1))
    inner.output((inner.call_function(torch.add, (a, b)), view))
    root = nn.Module()
    root.body = fx.GraphModule(nn.Module(), inner)
    body = graph.get_attr("body")
    y = graph.call_function(torch.mul, (x, 2.0))
    y.meta["val"] = torch.zeros(2, 2)
    call = graph.call_function(torch.ops.higher_order.wrap, (body, x, y))
    graph.output(call)
    fx.GraphModule(root, graph)
    call = next(n for n in graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator))
    assert shared(call) == (y,)
    assert written(call) == ()


# ------------------------------------------------------------------ streams


def _net(write: Callable[[Stream, Tensor, Tensor], object], count: int = 4) -> Stream:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        f = net.f(i, x)
        y = x + f
        write(net, y, f)
        return y

    return Stream(step, count=count)


STREAM_WRITES: dict[str, Callable[[Stream, Tensor, Tensor], object]] = {
    "a state by keyword": lambda net, y, f: F.relu(input=y, inplace=True),
    "a state by a packet": lambda net, y, f: PACKETS.rescale(y, 0.7),
    "a state in a list": lambda net, y, f: PACKETS.rescale_all([y], 0.7),
    "a state by foreach": lambda net, y, f: torch._foreach_mul_([y], 0.7),
    "a branch by a packet": lambda net, y, f: PACKETS.rescale(f, 0.0),
    "a branch by foreach": lambda net, y, f: torch._foreach_zero_([f]),
    "a branch through split": lambda net, y, f: f.split(3, -1)[1].zero_(),
    "a branch through unbind": lambda net, y, f: torch._foreach_zero_(list(f.unbind(1))),
}


@pytest.mark.parametrize("name", STREAM_WRITES)
def test_streams_with_writes_are_left_alone(name: str) -> None:
    with torch.no_grad():
        reasons = refused(_net(STREAM_WRITES[name]))
    assert set(reasons) == {"mutated"}


def _parallel(scale: Callable[[Stream, int], Tensor], write: Callable[[Tensor], object]) -> Stream:
    """Two branches of one state per pair; a scale between them on the stream, written before the second is added."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        for i in (0, 2):
            f, g = net.f(i, x), net.f(i + 1, x)
            x = x + f
            a = scale(net, i)
            x = x * a
            write(a)
            x = x + g
        return net.head(net.norm(x))

    return Stream(lambda net, i, x: x, whole=whole)


SCALES: dict[str, Callable[[Stream, int], Tensor]] = {
    "made here": lambda net, i: torch.full((1,), 0.7, dtype=torch.float64),
    "a mask": lambda net, i: torch.ones(4, 1, dtype=torch.float64) * 0.5,
    "a buffer": lambda net, i: net.scale,
    "a view of a buffer": lambda net, i: net.scale[i : i + 1],
}


@pytest.mark.parametrize("name", SCALES)
def test_scales_that_are_written_before_they_are_used_again(name: str) -> None:
    def build(write: Callable[[Tensor], object]) -> Stream:
        net = _parallel(SCALES[name], write)
        net.register_buffer("scale", torch.tensor([0.6, 0.7, 0.8, 0.9, 1.1, 1.2], dtype=torch.float64))
        return net

    with torch.no_grad():
        assert "mutated" in refused(build(lambda a: a.mul_(1.5)))
        assert "mutated" in refused(build(lambda a: PACKETS.rescale(a, 1.5)))
    converted(build(lambda a: a.mul(1.5)), sublayers=3)


def test_a_scale_may_be_written_behind_the_stream() -> None:
    """What no source goes through any more may change: a moving average of a scale, kept at the end."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        for i in range(4):
            x = (x + net.f(i, x)) * net.scale
        y = net.head(net.norm(x))
        net.scale.mul_(0.9)
        return y

    net = Stream(lambda net, i, x: x, whole=whole)
    net.register_buffer("scale", torch.ones(1, dtype=torch.float64) * 0.8)
    with torch.no_grad():
        outcome = study(net)
        assert outcome.sublayers == [4]
        check_exact(outcome, gradients=False)


def test_a_branch_written_between_the_two_adds_of_one_step() -> None:
    """``(x + a) + b`` is one step, done at its last add: by then ``a`` must be what it was at the first."""

    def build(write: bool) -> Stream:
        def step(net: Stream, i: int, x: Tensor) -> Tensor:
            a, b = net.f(i, x), net.branches[i](torch.sin(x))
            y = x + a
            if write:
                torch._foreach_mul_([a], 0.5)
            return y + b

        return Stream(step)

    with torch.no_grad():
        assert set(refused(build(True))) == {"mutated"}
    converted(build(False))


def test_memory_knows_list_results() -> None:
    module = graphs.with_shapes(
        fx.symbolic_trace(_Call(lambda x: (p := x.split(2, -1), p[0], p[1].mul_(2.0)))), [torch.randn(3, 4)]
    )
    memory = Memory(module.graph)
    x = next(iter(module.graph.nodes))
    assert memory.write_after(x, 0, frozenset()) is not None
    assert memory.written_inputs() == [x]


class _Call(nn.Module):
    def __init__(self, call: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> object:
        return self.call(x)
