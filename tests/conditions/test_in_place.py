"""Writes, views, aliases, lists and buffers on a stream: the original's semantics to the last object, or a refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.helpers import floats, randomize, randomize_queries, relative_error, seeded

WIDTH, LAYERS = 6, 4
Program = Callable[["Net", Tensor], Any]


class Net(nn.Module):
    """Four branches, with a buffer, an attribute and a list that a program may write to."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.kept: Tensor | None = None
        self.log: list[Tensor] = []

    def f(self, i: int, x: Tensor) -> Tensor:
        return self.branches[i](self.norms[i](x))

    def forward(self, x: Tensor) -> Any:
        return self.program(self, x)


def step(change: Callable[[Net, int, Tensor], Tensor], start: Callable[[Net, Tensor], Tensor] | None = None) -> Program:
    """Four times the same, on the embedded input or on ``start`` of the input."""

    def program(net: Net, x: Tensor) -> Tensor:
        x = net.embed(x) if start is None else start(net, x)
        for i in range(LAYERS):
            x = change(net, i, x)
        return net.norm(x)

    return program


def statement(does: Callable[[Net, int, Tensor], object], **options: Any) -> Program:
    """As :func:`step`, for what changes ``x`` and is not its new value."""

    def change(net: Net, i: int, x: Tensor) -> Tensor:
        does(net, i, x)
        return x

    return step(change, **options)


def iadd(net: Net, i: int, x: Tensor) -> Tensor:
    x += net.f(i, x)
    return x


def keeping(store: Callable[[Net, int, Tensor], None]) -> Program:
    """Plain steps, with something done to each new state."""

    def change(net: Net, i: int, x: Tensor) -> Tensor:
        x = x + net.f(i, x)
        store(net, i, x)
        return x

    return step(change)


def listed(
    change: Callable[[Net, int, Tensor], Tensor], after: Callable[[list[Tensor]], object], clone: bool
) -> Program:
    """States are kept in a list, something is done to one of them, and all are returned."""

    def program(net: Net, x: Tensor) -> list[Tensor]:
        x, states = net.embed(x), []
        for i in range(LAYERS):
            states.append(x.clone() if clone else x)
            x = change(net, i, x)
        after(states)
        return [net.norm(x), *states]

    return program


def plain(net: Net, i: int, x: Tensor) -> Tensor:
    return x + net.f(i, x)


def update_buffers(net: Net, i: int, x: Tensor) -> None:
    with torch.no_grad():
        net.seen.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        net.count.add_(1)


def replace_buffer(net: Net, i: int, x: Tensor) -> None:
    net.seen = x.detach().mean((0, 1))


def keep_attribute(net: Net, i: int, x: Tensor) -> None:
    if i == 1:
        net.kept = x


def append(net: Net, i: int, x: Tensor) -> None:
    net.log.append(x.detach())


def add_to_branch(net: Net, i: int, x: Tensor) -> Tensor:
    branch = net.f(i, x)
    branch += x
    return branch


def return_the_input(net: Net, x: Tensor) -> tuple[Tensor, ...]:
    first = x
    for i in range(LAYERS):
        x = plain(net, i, x)
    return net.norm(x), first, first.view(-1)


def itself(net: Net, x: Tensor) -> Tensor:
    return x


KEPT: dict[str, Program] = {
    "x += f": step(iadd),
    "f += x": step(add_to_branch),
    "clones in a list, x += f": listed(iadd, lambda states: None, clone=True),
    "clones in a list, written later": listed(plain, lambda states: states[1].zero_(), clone=True),
    "buffers updated from states": keeping(update_buffers),
    "a buffer replaced by a state's mean": keeping(replace_buffer),
    "a state kept as an attribute": keeping(keep_attribute),
    "states appended to a list of the module": keeping(append),
    "the input is the root": step(plain, itself),
    "the input is returned, and a view of it": return_the_input,
}


def caller_scaled(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x
    for i in range(LAYERS):
        y = plain(net, i, y)
    x.mul_(0.5)
    return net.norm(y), x


def view_first(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    x = net.embed(x)
    view = x.view(-1, WIDTH)
    for i in range(LAYERS):
        x = iadd(net, i, x)
    return net.norm(x), view * 2


def detached_later(net: Net, x: Tensor) -> Tensor:
    x = net.embed(x)
    alias = x.detach()
    for i in range(LAYERS):
        x = plain(net, i, x)
    alias.zero_()
    return net.norm(x)


def write_whole(net: Net, i: int, x: Tensor) -> None:
    x[...] = x + net.f(i, x)


def write_out(net: Net, i: int, x: Tensor) -> None:
    with torch.no_grad():
        torch.add(x, net.f(i, x), out=x)


# Each with the reason that the report gives.
REFUSED: dict[str, tuple[Program, str]] = {
    "x.add_(f), its result unused": (statement(lambda net, i, x: x.add_(net.f(i, x))), "mutated"),
    "the caller's tensor is the sum": (step(iadd, itself), "mutated"),
    "a view of the caller's tensor is the sum": (step(iadd, lambda net, x: x.flatten(0, 1)), "mutated"),
    "the caller's tensor is written afterwards": (caller_scaled, "mutated"),
    "states in a list, x += f": (listed(iadd, lambda states: None, clone=False), "mutated"),
    "a state in a list is written later": (listed(plain, lambda states: states[1].zero_(), clone=False), "mutated"),
    "a part of one is": (listed(plain, lambda states: states[2][:, :1].mul_(2), clone=False), "mutated"),
    "a view from before is read": (view_first, "mutated"),
    "an alias without history is written": (detached_later, "mutated"),
    "x.data": (statement(lambda net, i, x: x.data.add_(net.f(i, x).detach())), "mutated"),
    "out=": (statement(write_out), "unsupported_form"),
    "x[...] = x + f": (statement(write_whole), "too_few_sublayers"),
    "x.copy_(x + f)": (statement(lambda net, i, x: x.copy_(x + net.f(i, x))), "too_few_sublayers"),
}


def tokens(seed: int) -> Tensor:
    return torch.randn(2, 3, WIDTH, generator=seeded(seed), dtype=torch.float64)


def seen_from_outside(net: Net, grad: bool) -> list[Tensor]:
    """All that two calls leave behind: outputs, inputs, buffers, attributes, gradients, and who shares memory."""
    found: list[Tensor] = []
    for seed in (1, 2):
        given = tokens(seed)
        x = given.clone()
        with torch.set_grad_enabled(grad):
            outputs = floats(net(x))
        found += [*(out.detach().clone() for out in outputs), x, net.seen.clone(), net.count.clone(), *net.log]
        found += [net.kept.detach().clone()] if net.kept is not None else []
        found.append(torch.tensor([float(out.data_ptr() == x.data_ptr()) for out in outputs]) + 1)
        if grad:
            loss = sum((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() for out in outputs)
            net.zero_grad()
            loss.backward()
            found += [
                p.grad.clone() for name, p in net.named_parameters() if "attnres" not in name and p.grad is not None
            ]
    return found


@pytest.mark.parametrize("what", KEPT)
def test_kept(what: str) -> None:
    net = randomize(Net(KEPT[what])).double()
    # Where the original writes over what its norms need, it has no gradients.
    grad = "x += f" not in what
    model = copy.deepcopy(net)
    want = seen_from_outside(net, grad)
    x = tokens(1)
    ac.transform(model, x, ac.AttnResConfig(num_blocks=2, lowering="eager"))
    (stream,) = ac.report(model).streams
    assert len(stream.sublayers) == LAYERS
    assert torch.equal(x, tokens(1)) and not model.seen.any() and not model.log and model.kept is None
    twin = copy.deepcopy(model)
    got = seen_from_outside(model, grad)
    assert relative_error(got, want) < 1e-12
    randomize_queries(ac.pseudo_queries(twin), std=1.0)
    moved = seen_from_outside(twin, grad)
    assert relative_error(moved[:1], want[:1]) > 1e-2
    if "state" in what:  # what is kept of a state is its mix
        kept = twin.kept if "attribute" in what else twin.log[1] if "list" in what else twin.seen
        other = net.kept if "attribute" in what else net.log[1] if "list" in what else net.seen
        assert relative_error(kept, other) > 1e-3


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    program, reason = REFUSED[what]
    net = randomize(Net(program)).double()
    model = copy.deepcopy(net)
    x = tokens(1)
    with pytest.raises(ac.NoStreamError) as caught:
        ac.transform(model, x, ac.AttnResConfig(num_blocks=2, lowering="eager"))
    rejections = caught.value.report.rejections
    assert {r.reason for r in rejections} == {reason}
    assert all("test_in_place.py:" in r.where for r in rejections)
    assert torch.equal(x, tokens(1))
    assert relative_error(seen_from_outside(model, False), seen_from_outside(net, False)) == 0.0


def test_a_list_of_the_callers() -> None:
    """What the forward appends to is the caller's, and gets each state once."""

    class Listing(Net):
        def forward(self, x: Tensor, store: list[Tensor]) -> Tensor:
            x = self.embed(x)
            for i in range(LAYERS):
                store.append(x)
                x = plain(self, i, x)
            return self.norm(x)

    net = randomize(Listing(itself)).double()
    model = copy.deepcopy(net)
    given: list[Tensor] = []
    ac.transform(model, (tokens(1), given), ac.AttnResConfig(num_blocks=2, lowering="eager"))
    assert given == []
    stores: tuple[list[Tensor], list[Tensor]] = [], []
    outputs = [each(tokens(1), store) for each, store in zip((net, model), stores, strict=True)]
    assert relative_error([outputs[1], *stores[1]], [outputs[0], *stores[0]]) < 1e-12
    randomize_queries(ac.pseudo_queries(model), std=1.0)
    moved: list[Tensor] = []
    model(tokens(1), moved)
    assert len(moved) == LAYERS and relative_error(moved[0], stores[0][0]) == 0.0
    assert relative_error(moved[2], stores[0][2]) > 1e-2
