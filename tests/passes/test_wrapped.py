"""Streams whose tensors are no plain ones: inside ``torch.vmap``, or nested. Left alone by name, at once; what only
stands beside them is converted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.helpers import randomize, randomize_queries, relative_error

D = 8
CONFIG = ac.AttnResConfig(num_blocks=None, lowering="eager")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self, body: Callable[[Net, Any], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(D, D)
        self.body = body

    def steps(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x: Any) -> Any:
        return self.body(self, x)


def net(body: Callable[[Net, Any], Any]) -> Net:
    return randomize(Net(body)).double().eval()  # type: ignore[return-value]


def x() -> Tensor:
    return torch.randn(3, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def half_inside(self: Net, x: Tensor) -> Tensor:
    """The first steps of one chain are plain, the last are not."""
    for block in self.blocks[:2]:
        x = x + block(x)

    def rest(p: Tensor) -> Tensor:
        for block in self.blocks[2:]:
            p = p + block(p)
        return p

    return self.last(torch.vmap(rest)(x))


def ensemble(self: Net, x: Tensor) -> Tensor:
    weights = torch.stack([self.first.weight, self.last.weight])

    def one(weight: Tensor) -> Tensor:
        return self.steps(torch.nn.functional.linear(x, weight))  # type: ignore[no-any-return]

    return torch.func.vmap(one)(weights).sum(0)


VMAPPED: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "torch.vmap": lambda self, x: torch.vmap(lambda p: self.last(self.steps(self.first(p))))(x),
    "torch.func.vmap over another dimension": lambda self, x: torch.func.vmap(self.steps, in_dims=1, out_dims=1)(x),
    "in chunks": lambda self, x: torch.vmap(self.steps, chunk_size=2)(x),
    "one inside another": lambda self, x: torch.vmap(torch.vmap(self.steps))(x),
    "over weights": ensemble,
}


@pytest.mark.parametrize("body", VMAPPED)
def test_a_stream_inside_vmap_is_refused_by_name(body: str) -> None:
    model = net(VMAPPED[body])
    with pytest.raises(ac.NoStreamError, match="under_vmap") as caught:
        ac.transform(model, x(), CONFIG)
    assert {str(left.reason) for left in caught.value.report.rejections} >= {"under_vmap"}
    assert {str(left.reason) for left in ac.explain(model, x(), CONFIG).rejections} >= {"under_vmap"}
    with pytest.raises(ac.RejectedStreamError):
        ac.transform(model, x(), ac.AttnResConfig(num_blocks=None, lowering="eager", strict=True))


def test_the_plain_half_of_a_stream() -> None:
    """Whatever is converted of it is right, and the other half is named."""
    model = net(half_inside)
    original = copy.deepcopy(model)
    report = ac.explain(model, x(), ac.AttnResConfig(num_blocks=None, lowering="eager", min_sublayers=2))
    assert {str(left.reason) for left in report.rejections} >= {"under_vmap"}
    if report.streams:
        ac.transform(model, x(), ac.AttnResConfig(num_blocks=None, lowering="eager", min_sublayers=2))
        assert relative_error(model(x()), original(x())) < 1e-12


BESIDE: dict[str, tuple[Callable[[Net, Tensor], Tensor], Callable[[Net, Tensor], Tensor]]] = {
    "a branch": (
        lambda self, x: self.last(step_by_step(self, x, lambda block, h: torch.vmap(lambda p: block(p))(h))),
        lambda self, x: self.last(step_by_step(self, x, lambda block, h: block(h))),
    ),
    "a branch that reads the state from outside": (
        lambda self, x: self.last(
            step_by_step(self, x, lambda block, h: torch.vmap(lambda w: block(h) * w)(h.new_ones(2)).mean(0))
        ),
        lambda self, x: self.last(step_by_step(self, x, lambda block, h: block(h))),
    ),
    "the head": (
        lambda self, x: torch.vmap(self.last)(self.steps(x)),
        lambda self, x: self.last(self.steps(x)),
    ),
    "before it": (
        lambda self, x: self.last(self.steps(torch.vmap(self.first)(x))),
        lambda self, x: self.last(self.steps(self.first(x))),
    ),
}


def step_by_step(self: Net, x: Tensor, branch: Callable[[Block, Tensor], Tensor]) -> Tensor:
    for block in self.blocks:
        x = x + branch(block, x)
    return x


@pytest.mark.parametrize("body", BESIDE)
def test_vmap_beside_a_stream(body: str) -> None:
    """The same as the model that is written without vmap, at random queries, gradients of queries included."""
    results: list[Any] = []
    for spelling in BESIDE[body]:
        model = net(spelling)
        ac.transform(model, x(), CONFIG)
        queries = list(ac.pseudo_queries(model).values())
        randomize_queries(dict(enumerate(queries)))
        made = model(x())
        made.square().sum().backward()
        results.append([made.detach(), *(query.grad for query in queries)])
    assert len(results[0]) == len(results[1]) > 4
    assert all(bool(tensor.any()) for tensor in results[0])
    for got, want in zip(*results, strict=True):
        assert relative_error(got, want) < 1e-12


# ------------------------------------------------------------------ nested tensors


def nested(layout: torch.layout) -> Tensor:
    parts = [torch.randn(length, D, dtype=torch.float64) for length in (3, 5)]
    return torch.nested.nested_tensor(parts, layout=layout)


NESTED: dict[str, Callable[[Net, Any], Any]] = {
    "throughout": lambda self, x: self.last(self.steps(self.first(x))),
    "the values are returned": lambda self, x: self.steps(x).values(),
    "made inside": lambda self, x: self.steps(torch.nested.nested_tensor_from_jagged(x.values(), x.offsets())).values(),
    "x.add": lambda self, x: self.last(self.blocks[1](x := x.add(self.blocks[0](x))).add(x)),
}


@pytest.mark.parametrize("body", NESTED)
@pytest.mark.parametrize("grad", [True, False], ids=["", "no_grad"])
def test_a_stream_of_nested_tensors_is_refused_by_name(body: str, grad: bool) -> None:
    model, given = net(NESTED[body]), nested(torch.jagged)
    with torch.set_grad_enabled(grad):
        model(given)
        with pytest.raises(ac.NoStreamError, match="nested_tensor"):
            ac.transform(model, given, CONFIG)
        assert {str(left.reason) for left in ac.explain(model, given, CONFIG).rejections} >= {"nested_tensor"}


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_behind_a_graph_break_or_of_the_other_layout(layout: torch.layout) -> None:
    def body(self: Net, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.last(self.steps(x))  # type: ignore[no-any-return]

    model, given = net(body), nested(layout)
    with torch.no_grad():
        model(given)
    with pytest.raises(ac.AttnResError):
        ac.transform(model, given, CONFIG)


def test_the_values_of_a_nested_tensor_are_plain() -> None:
    def body(self: Net, x: Tensor) -> Tensor:
        return self.last(self.steps(self.first(x).values()))  # type: ignore[no-any-return]

    model, given = net(body), nested(torch.jagged)
    original = copy.deepcopy(model)
    ac.transform(model, given, CONFIG)
    assert len(ac.report(model).streams[0].sublayers) == 4
    assert relative_error(model(given), original(given)) < 1e-12
