"""Residual streams that are left alone, each under its own name, and streams of the same looks that are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import attnres_compile as ac
from tests.passes.support import WIDTH, Bag, Stream, by_symbolic_trace, converted, refused, study, tokens

Step = Callable[[Stream, int, Tensor], Tensor]


def rejected(step: Step, reason: str, beside: frozenset[str] = frozenset(), **options: object) -> None:
    """All adds of the stream are left alone for ``reason``; others may be left alone for those ``beside`` it."""
    reasons = refused(Stream(step, **options))
    assert reasons[reason] >= min(options.get("count", 4), 4) and set(reasons) - beside == {reason}


# ``f - x`` inside of a gate is an add too, and none that could be a step.
DIFFERENCE = frozenset({"unsupported_form"})


# ------------------------------------------------------------------ post-norm


def test_post_norm() -> None:
    rejected(lambda net, i, x: net.norms[i](x + net.branches[i](x)), "post_norm")


def test_post_norm_two_branches_per_layer() -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        x = net.norms[i](x + net.branches[i](x))
        return net.parts[i][1](x + net.parts[i][0](x))

    rejected(step, "post_norm", parts=lambda i: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)))


def test_post_norm_by_hand() -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        x = x + net.branches[i](x)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * net.norms[i].weight

    rejected(step, "post_norm")


def test_post_norm_of_a_conformer() -> None:
    """Four pre-norm branches per layer and a norm at its end: too many steps to be told by length."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        for part in net.parts[i]:
            x = x + 0.5 * part(F.layer_norm(x, (WIDTH,)))
        return net.norms[i](x)

    rejected(step, "post_norm", parts=lambda i: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


@pytest.mark.parametrize("root", [lambda x: x**-0.5, lambda x: 1 / x**0.5, lambda x: 1 / x.sqrt()])
def test_post_norm_by_powers_behind_a_clamp(root: Callable[[Tensor], Tensor]) -> None:
    """A norm without the name of a root, behind a guard whose bounds are tensors."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        for part in net.parts[i]:
            x = x + 0.5 * part(F.layer_norm(x, (WIDTH,)))
        x = torch.clamp(x, -net.bound, net.bound)
        return x * root(x.pow(2).mean(-1, keepdim=True) + 1e-6) * net.norms[i].weight

    model = Stream(step, parts=lambda i: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model.register_buffer("bound", torch.tensor(1e10))
    assert set(refused(model)) == {"post_norm"}


def test_squares_on_the_stream_are_no_norm() -> None:
    """What takes no root does not normalise: two streams with an op of the network between them."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        for i in range(8):
            x = x + net.f(i, x)
            if i == 3:
                x = x * x.pow(2.0).mean(-1, keepdim=True)
        return net.head(x)

    converted(Stream(lambda net, i, x: x, whole=whole, count=8), sublayers=[4, 4])


def test_final_norm_before_a_short_residual_head() -> None:
    """A long pre-norm stream whose normalised end feeds a head with skips of its own is no post-norm stream."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        for i in range(7):
            x = x + net.f(i, x)
        x = net.norm(x)
        x = x + net.f(7, x)
        return net.head(x)

    outcome = converted(Stream(lambda net, i, x: x, whole=whole, count=8), sublayers=7)
    assert outcome.reasons.total() == 1


# ------------------------------------------------------------------ what acts on the stream


def test_post_activation() -> None:
    rejected(lambda net, i, x: F.relu(x + net.f(i, x)), "post_activation")


def test_post_activation_module() -> None:
    model = Stream(lambda net, i, x: net.act(x + net.f(i, x)))
    model.act = nn.SiLU()
    assert set(refused(model, trace=by_symbolic_trace)) == {"post_activation"}


def test_dropout_in_training_on_the_stream() -> None:
    model = Stream(lambda net, i, x: F.dropout(x + net.f(i, x), 0.3, net.training)).train()
    assert set(refused(model)) == {"dropout_on_stream"}
    converted(model.eval())


def test_clamp_on_the_stream() -> None:
    rejected(lambda net, i, x: (x + net.f(i, x)).clamp(-3.0, 3.0), "clamp_on_stream")


def test_post_activation_behind_projected_skips() -> None:
    """One block per stage with a skip of its own, after one whose skip is projected, as in a small ResNet."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        for i in range(0, 4, 2):
            x = F.relu(net.branches[i](x) + net.parts[i](x))
            x = F.relu(x + net.branches[i + 1](x))
        return net.head(x)

    model = Stream(lambda net, i, x: x, whole=whole, parts=lambda i: nn.Linear(WIDTH, WIDTH))
    assert refused(model) == {"post_activation": 2, "unrelated_operands": 2}


# ------------------------------------------------------------------ gates


def test_interpolated_residual() -> None:
    rejected(lambda net, i, x: x + 0.3 * (net.f(i, x) - x), "gated", DIFFERENCE)


def test_interpolated_residual_with_a_learned_gate() -> None:
    rejected(
        lambda net, i, x: x + torch.sigmoid(net.parts[i](x)) * (net.f(i, x) - x),
        "gated",
        DIFFERENCE,
        parts=lambda i: nn.Linear(WIDTH, 1),
    )


def test_highway() -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        t = torch.sigmoid(net.parts[i](x))
        return t * net.f(i, x) + (1 - t) * x

    rejected(step, "gated", parts=lambda i: nn.Linear(WIDTH, WIDTH))


def test_gated_branch_is_no_gated_stream() -> None:
    """``x + g(x) * f(x)`` adds to the stream like any other branch."""
    model = Stream(
        lambda net, i, x: x + torch.sigmoid(net.parts[i](x)) * net.f(i, x), parts=lambda i: nn.Linear(WIDTH, WIDTH)
    )
    converted(model)


def test_difference_from_a_pool_is_no_gate() -> None:
    """``x + t * (pool(x) - x)``, a weightless mixer, stands in the stream like any weightless branch."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        if i % 2:
            return x + 0.5 * (F.avg_pool1d(x, 3, 1, 1) - x)
        return x + net.f(i, x)

    converted(Stream(step, count=5), sublayers=5)


# ------------------------------------------------------------------ loops


def test_loop_over_shared_weights() -> None:
    rejected(lambda net, i, x: x + net.f(0, x), "shared_weights")


def test_depth_loops_are_converted_on_demand() -> None:
    converted(Stream(lambda net, i, x: x + net.f(0, x)), config=ac.AttnResConfig(depth_loops=True))


def test_a_few_shared_layers_do_no_harm() -> None:
    converted(Stream(lambda net, i, x: x + net.f(min(i, 4), x), count=6), sublayers=6)


def test_loop_over_one_module_is_seen_in_graphs_that_call_modules() -> None:
    assert set(refused(Stream(lambda net, i, x: x + net.f(0, x)), trace=by_symbolic_trace)) == {"shared_weights"}


def test_one_head_behind_every_step_is_no_loop() -> None:
    """Deep supervision: a norm and a head that all states share are read beside the stream."""

    def whole(net: Stream, x: Tensor) -> tuple[Tensor, ...]:
        heads = []
        for i in range(4):
            x = x + net.f(i, x)
            heads.append(net.head(net.norm(x)))
        return tuple(heads)

    converted(Stream(lambda net, i, x: x, whole=whole))


# ------------------------------------------------------------------ writes


def test_write_of_some_tokens_through_a_contiguous_alias() -> None:
    """As in Gemma 3n: ``contiguous`` may or may not copy, a part is written, and the state is read again."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        x = x + net.f(i, x)
        part = x.contiguous()
        part[:, 1:] += net.parts[i](part[:, :-1])
        return x

    rejected(step, "mutated", parts=lambda i: nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x[:, 0].mul_(0.5),
        lambda x: x[..., :2].zero_(),
        lambda x: x.__setitem__((slice(None), 0), 1.0),
        lambda x: x.view(-1).add_(1.0),
        lambda x: x.transpose(0, 1)[0].neg_(),
        lambda x: x.unsqueeze(0).copy_(x.detach() * 2.0),
        lambda x: torch.mul(x.detach(), 0.5, out=x.detach()),
        lambda x: F.relu(x.detach(), inplace=True),
        lambda x: x.detach().index_fill_(1, torch.tensor([0]), 0.0),
        lambda x: x.narrow(-1, 2, 2).sin_(),
    ],
)
def test_writes_into_a_state(write: Callable[[Tensor], object]) -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        x = x + net.f(i, x * 1.0)
        write(x)
        return x

    rejected(step, "mutated")


def test_write_into_a_branch_before_it_is_added() -> None:
    """The branch's own memory may be written as long as it is no source yet."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        f = net.f(i, x)
        f[:, 0] = 0.0
        return x + f

    converted(Stream(step))


def test_write_into_a_branch_after_it_was_added() -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        f = net.f(i, x)
        x = x + f
        f.zero_()
        return x

    rejected(step, "mutated")


def test_write_into_the_input() -> None:
    """``x += f`` on the caller's tensor is seen by the caller."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stream = Stream(lambda net, i, x: x)

        def forward(self, x: Tensor) -> Tensor:
            for i in range(4):
                x += self.stream.f(i, x * 1.0)
            return self.stream.head(x)

    assert set(refused(Net(), tokens())) == {"mutated"}


def test_write_into_a_state_that_was_returned() -> None:
    def whole(net: Stream, x: Tensor) -> list[Tensor]:
        states = []
        for i in range(net.count):
            x = x.add_(net.f(i, x * 1.0))
            states.append(x)
        return [net.head(x * 1.0), *states]

    model = Stream(lambda net, i, x: x, whole=whole).requires_grad_(False)
    # The last state is written by nothing, so that its add alone would be sound.
    assert dict(refused(model)) == {"mutated": 3, "too_few_sublayers": 1}


# ------------------------------------------------------------------ cuts


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
        lambda x: torch.stack([x, x], -1).mean(-1),
        lambda x: F.avg_pool1d(x, 3, 1, 1),
        lambda x: torch.cat([x[..., :3] * 2.0, x[..., 3:]], -1),
        lambda x: torch.cumsum(x, 1),
    ],
)
def test_what_is_no_layout_cuts_the_stream(cut: Callable[[Tensor], Tensor]) -> None:
    def whole(net: Stream, x: Tensor) -> Tensor:
        for i in range(4):
            x = x + net.f(i, x)
        x = cut(x)
        for i in range(4, 7):
            x = x + net.f(i, x)
        return net.head(net.norm(x))

    converted(Stream(lambda net, i, x: x, whole=whole, count=7), sublayers=[4, 3])


def test_partial_token_update_by_cat() -> None:
    """A class token that is updated on its own: every layer is a cut."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        x = x + net.f(i, x)
        first = x[:, :1] + net.parts[i](x[:, :1])
        return torch.cat([first, x[:, 1:]], 1)

    outcome = study(Stream(step, parts=lambda i: nn.Linear(WIDTH, WIDTH)))
    assert outcome.module is None


# ------------------------------------------------------------------ the rest


def test_too_few_sublayers() -> None:
    rejected(lambda net, i, x: x + net.f(i, x), "too_few_sublayers", count=2)
    converted(Stream(lambda net, i, x: x + net.f(i, x), count=3), sublayers=3)
    converted(Stream(lambda net, i, x: x + net.f(i, x), count=1), sublayers=1, config=ac.AttnResConfig(min_sublayers=1))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions_are_looked_into(reentrant: bool) -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        return checkpoint(lambda y: y + net.f(i, y), x, use_reentrant=reentrant)

    converted(Stream(step))


def test_unrelated_operands_is_no_reason_beside_a_state() -> None:
    """A state of a stream among the operands joins the add to the stream or is rejected for another reason."""

    def whole(net: Stream, x: Tensor) -> tuple[Tensor, Tensor]:
        other = net.head(x)
        states = []
        for i in range(net.count):
            x = x + net.f(i, x)
            states.append(x)
        side = states[1] + other
        return net.head(net.norm(x)), net.norm(side)

    outcome = converted(Stream(lambda net, i, x: x, whole=whole))
    assert "unrelated_operands" not in outcome.reasons and outcome.reasons.total() == 1


def test_strict_raises_for_a_rejected_stream() -> None:
    model = Stream(lambda net, i, x: net.norms[i](x + net.branches[i](x)))
    with pytest.raises(ac.RejectedStreamError, match="post-norm"):
        ac.rewrite_graph(by_symbolic_trace(model).module, [tokens()], ac.AttnResConfig(strict=True))


def test_strict_does_not_mind_other_adds() -> None:
    model = Stream(
        lambda net, i, x: x + net.branches[i](net.norms[i](x) + net.parts[i].bias),
        parts=lambda i: Bag(bias=torch.ones(WIDTH)),
    )
    converted(model, config=ac.AttnResConfig(strict=True))
