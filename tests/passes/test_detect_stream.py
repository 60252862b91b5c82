"""What may stand on a stream between its adds, and what joins it: looked through, and exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.passes.support import (
    BATCH,
    TOKENS,
    WIDTH,
    Bag,
    Stream,
    between,
    converted,
    tokens,
)

# ------------------------------------------------------------------ casts


def test_cast_to_float32_and_back() -> None:
    """The casts are done where they stand, so only their own rounding may differ."""
    between(lambda net, i, x: x.float().double(), tolerance=1e-6)


def test_residual_in_float32_with_branches_in_bfloat16() -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        return x + net.branches[i](net.norms[i](x).bfloat16()).float()

    model = Stream(step)
    model.norms.float(), model.branches.bfloat16(), model.embed.float(), model.head.float(), model.norm.float()
    converted(model, tokens().float(), tolerance=2e-2)


def test_type_promotion_in_the_add() -> None:
    """float32 + float64: the stream is wider from there on."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        return x + net.f(i, x.double())

    def whole(net: Stream, x: Tensor) -> Tensor:
        x = x.float()
        for i in range(net.count):
            x = step(net, i, x)
        return net.head(net.norm(x))

    converted(Stream(step, whole=whole), tolerance=1e-6)


def test_wider_branch_cast_to_the_stream() -> None:
    def whole(net: Stream, x: Tensor) -> Tensor:
        x = x.float()
        for i in range(net.count):
            x = x + net.f(i, x.double()).to(x.dtype)
        return net.head(net.norm(x.double()))

    converted(Stream(lambda net, i, x: x, whole=whole), tolerance=1e-5)


# ------------------------------------------------------------------ layouts

LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "flat": (lambda x: x.view(-1, WIDTH), lambda x: x.view(BATCH, TOKENS, WIDTH)),
    "reshape": (lambda x: x.reshape(-1, WIDTH), lambda x: x.reshape(BATCH, TOKENS, WIDTH)),
    "flatten": (lambda x: x.flatten(0, 1), lambda x: x.unflatten(0, (BATCH, TOKENS))),
    "transpose": (lambda x: x.transpose(0, 1), lambda x: x.transpose(0, 1)),
    "permute, made contiguous": (lambda x: x.permute(1, 0, 2).contiguous(), lambda x: x.movedim(0, 1)),
    "channels first": (lambda x: x.transpose(1, 2), lambda x: x.swapaxes(1, 2)),
    "roll": (lambda x: x.roll(1, 1), lambda x: torch.roll(x, shifts=(-1,), dims=(1,))),
    "flip": (lambda x: x.flip(1), lambda x: torch.flip(x, (1,))),
    "extra dimension": (lambda x: x.unsqueeze(1), lambda x: x.squeeze(1)),
    "windows": (
        lambda x: x.view(BATCH, 2, TOKENS // 2, WIDTH).transpose(1, 2).reshape(-1, TOKENS // 2, WIDTH),
        lambda x: x.view(BATCH, TOKENS // 2, 2, WIDTH).transpose(1, 2).reshape(BATCH, TOKENS, WIDTH),
    ),
    "windows, rolled": (
        lambda x: torch.roll(x, 1, 1).view(BATCH, 2, TOKENS // 2, WIDTH).contiguous(),
        lambda x: torch.roll(x.view(BATCH, TOKENS, WIDTH), -1, 1),
    ),
    "clone": (lambda x: x.clone(), lambda x: x.contiguous()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_between_adds(layout: str) -> None:
    there, back = LAYOUTS[layout]
    between(lambda net, i, x: back(there(x)))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "channels first"])
def test_stream_that_stays_in_a_layout(layout: str) -> None:
    """Two adds in one layout, two in the other."""
    there, back = LAYOUTS[layout]

    def whole(net: Stream, x: Tensor) -> Tensor:
        x = x + net.f(0, x)
        x = there(x)
        x = x + net.f(1, x)
        x = x + net.f(2, x)
        x = back(x)
        x = x + net.f(3, x)
        return net.head(net.norm(x))

    converted(Stream(lambda net, i, x: x, whole=whole))


def test_channels_first_stream() -> None:
    """Features are where the branches make them: dimension 1 of a convolution's result."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for i in range(net.count):
            x = x + net.parts[i](x)
        return net.head(x.transpose(1, 2))

    outcome = converted(Stream(lambda net, i, x: x, whole=whole, parts=lambda i: nn.Conv1d(WIDTH, WIDTH, 3, padding=1)))
    assert outcome.report.streams[0].feature_dim == WIDTH


def test_channels_first_branches_joined_from_pieces() -> None:
    """The branch ends in a concatenation of channels, cut to size, and a slice of a split."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for i in range(net.count):
            f = net.parts[i](x)
            left, right = f.chunk(2, dim=1)
            x = x + torch.cat([left, right.sigmoid(), left], 1)[:, :WIDTH] if i % 2 else x + f[:, :WIDTH]
        return net.head(x.transpose(1, 2))

    model = Stream(lambda net, i, x: x, whole=whole, parts=lambda i: nn.Conv1d(WIDTH, WIDTH + 2, 3, padding=1))
    assert converted(model).report.streams[0].feature_dim == WIDTH


def test_features_move_along_the_stream() -> None:
    """Two adds channels-last, two channels-first."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        x = x + net.f(0, x)
        x = x + net.f(1, x)
        x = x.transpose(1, 2)
        x = x + net.parts[2](x)
        x = x + net.parts[3](x)
        return net.head(x.transpose(1, 2))

    converted(Stream(lambda net, i, x: x, whole=whole, parts=lambda i: nn.Conv1d(WIDTH, WIDTH, 1)))


# ------------------------------------------------------------------ what joins a stream


def test_x0_is_added_again() -> None:
    def whole(net: Stream, x: Tensor) -> Tensor:
        x0 = x
        for i in range(net.count):
            x = x + net.f(i, x)
            if i in (0, 2):
                x = x + x0
        return net.head(net.norm(x))

    converted(Stream(lambda net, i, x: x, whole=whole), sublayers=4)


def test_x0_in_one_step_with_a_branch() -> None:
    def whole(net: Stream, x: Tensor) -> Tensor:
        x0 = x
        for i in range(net.count):
            x = x + net.f(i, x) + 0.5 * x0
        return net.head(net.norm(x))

    converted(Stream(lambda net, i, x: x, whole=whole))


def test_older_state_is_added_again() -> None:
    def whole(net: Stream, x: Tensor) -> Tensor:
        states = [x]
        for i in range(net.count):
            x = x + net.f(i, x)
            if i == 2:
                x = x + states[1]
            states.append(x)
        return net.head(net.norm(x))

    converted(Stream(lambda net, i, x: x, whole=whole), sublayers=4)


def test_long_skips_of_a_u_net() -> None:
    def whole(net: Stream, x: Tensor) -> Tensor:
        down = []
        for i in range(4):
            x = x + net.f(i, x)
            down.append(x)
        for i in range(4, 8):
            # The first one adds the state to itself.
            x = x + net.parts[i].weight * down.pop()
            x = x + net.f(i, x)
        return net.head(net.norm(x))

    # The skips of the later layers join the branch before them.
    converted(
        Stream(lambda net, i, x: x, whole=whole, count=8, parts=lambda i: Bag(weight=torch.ones(()))), sublayers=9
    )


def test_independent_addend_between_steps() -> None:
    """ControlNet, DeepStack: another input's projection is added to the stream."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stream = Stream(lambda net, i, x: x, parts=lambda i: nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            net = self.stream
            x = net.embed(x)
            for i in range(4):
                x = x + net.f(i, x)
                x = x + net.parts[i](y)
            return net.head(net.norm(x))

    # Nothing reads the state between a branch and its addend: they are one step.
    outcome = converted(Net(), tokens(), tokens(4))
    assert outcome.reasons.total() == 0


def test_constant_addend_between_steps() -> None:
    """A position table that is added to the stream again in every layer is part of it."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        for i in range(net.count):
            x = x + net.f(i, x)
            x = x + net.parts[i].table
        return net.head(net.norm(x))

    converted(Stream(lambda net, i, x: x, whole=whole, parts=lambda i: Bag(table=torch.ones(TOKENS, WIDTH))))


@pytest.mark.parametrize("form", ["x + p + f", "p + x + f", "f + (x + p)"])
def test_constant_addend_before_the_branch(form: str) -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        f, p = net.f(i, x), net.parts[i].table
        return x + p + f if form == "x + p + f" else p + x + f if form == "p + x + f" else f + (x + p)

    converted(Stream(step, parts=lambda i: Bag(table=torch.ones(TOKENS, WIDTH))))


def test_weightless_branch_between_learned_ones() -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        x = x + (torch.fft.fft(net.norms[i](x), dim=1).real if i == 1 else net.f(i, x))
        return x

    converted(Stream(step), sublayers=4)


def test_weightless_branches_at_both_ends_are_left_out() -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        return x + (net.norms[i](x).roll(1, 1) if i in (0, 5) else net.f(i, x))

    outcome = converted(Stream(step, count=6), sublayers=4)
    assert dict(outcome.reasons) == {"no_learned_branch": 2}


# ------------------------------------------------------------------ several streams


def test_two_streams_that_never_meet() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (Stream(lambda net, i, x: x + net.f(i, x)) for _ in range(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(x), self.right(x)

    converted(Net(), sublayers=[4, 4])


def test_stream_inside_a_branch() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = Stream(lambda net, i, x: x + net.parts[i](net.norms[i](x)), parts=lambda i: inner())

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(x)

    def inner() -> nn.Module:
        return Stream(lambda net, i, x: x + net.f(i, x), count=3)

    converted(Net(), sublayers=[3, 4, 3, 3, 3])


def test_groups_with_a_global_skip() -> None:
    """Swin2SR: blocks in groups, each group with a convolution and a skip, and one skip around all."""

    class Group(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = Stream(lambda net, i, x: x + net.f(i, x), count=3)
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1).double()

        def forward(self, x: Tensor) -> Tensor:
            y = x
            for i in range(3):
                y = y + self.blocks.f(i, y)
            return self.conv(y.transpose(1, 2)).transpose(1, 2) + x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.groups = nn.ModuleList(Group() for _ in range(3))
            self.conv = nn.Linear(WIDTH, WIDTH)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y = x
            for group in self.groups:
                y = group(y)
            return self.last(x + self.conv(y))

    outcome = converted(Net(), sublayers=[3, 3, 3, 3])
    assert dict(outcome.reasons) == {"outer_skip": 1}


def test_states_that_are_returned_are_read() -> None:
    def whole(net: Stream, x: Tensor) -> tuple[Tensor, ...]:
        states = [x]
        for i in range(net.count):
            x = x + net.f(i, x)
            states.append(x)
        return (net.head(net.norm(x)), *states)

    outcome = converted(Stream(lambda net, i, x: x, whole=whole))
    assert [site.name for site in outcome.report.streams[0].sites].count("output") <= 1
    assert any("output" in site.readers for site in outcome.report.streams[0].sites)


def test_same_plan_for_reader_queries() -> None:
    config = ac.AttnResConfig(queries="reader", num_blocks=2)

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        h = net.norms[i](x)
        return x + net.branches[i](h) * torch.sigmoid(net.parts[i](x))

    outcome = converted(Stream(step, parts=lambda i: nn.Linear(WIDTH, WIDTH)), config=config)
    stream = outcome.report.streams[0]
    # The first state is the root alone, which needs no query; norm and gate read each of the next three.
    assert len([site for site in stream.sites if site.query]) == 2 * 3 + 1
