"""Adds that are no residual steps: alone they make no stream, inside a branch they change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnres_compile as ac
from tests.passes.support import TOKENS, WIDTH, Bag, Stream, by_symbolic_trace, converted, refused, study, tokens

# Of so few steps that anything taken for one would be reported as a stream.
EAGER = ac.AttnResConfig(min_sublayers=1)
Inside = Callable[[Stream, int, Tensor], Tensor]


def inside(branch: Inside, parts: Callable[[int], nn.Module] | None = None, sublayers: int | list[int] = 4) -> None:
    """In the branch of a stream, ``branch`` makes neither steps nor streams of its own."""
    model = Stream(lambda net, i, x: x + branch(net, i, net.norms[i](x)), parts=parts)
    converted(model, sublayers=sublayers, config=EAGER)


class Alone(nn.Module):
    """A function of the input repeated, with nothing around it that is a stream."""

    def __init__(self, call: Callable[[Bag, Tensor], Tensor], **items: object) -> None:
        super().__init__()
        self.call = call
        self.items = nn.ModuleList(Bag(**items) for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for bag in self.items:
            x = self.call(bag, x)
        return x


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def test_tanh_polynomial_of_gelu() -> None:
    inside(lambda net, i, x: net.parts[i](tanh_gelu(net.branches[i](x))), lambda i: nn.Linear(WIDTH, WIDTH))


def test_tanh_polynomial_of_gelu_alone() -> None:
    model = Alone(lambda bag, x: tanh_gelu(bag.linear(x)), linear=nn.Linear(WIDTH, WIDTH))
    assert set(refused(model, tokens(), config=EAGER)) == {"no_learned_branch"}


def rotated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def test_rotary_embedding() -> None:
    angles = torch.outer(torch.arange(TOKENS), torch.tensor([0.5, 1.0, 0.1])).repeat(1, 2).double()

    def attention(net: Stream, i: int, x: Tensor) -> Tensor:
        q = net.branches[i](x)
        q = q * angles.cos() + rotated(q) * angles.sin()
        return F.scaled_dot_product_attention(q, q, x)

    inside(attention)


def test_rotary_embedding_with_a_learned_projection_between() -> None:
    """``q*cos + rotate(q)*sin`` again and again, on values that projections made."""
    model = Alone(
        lambda bag, x: (q := bag.linear(x)) * math.cos(1.0) + rotated(q) * math.sin(1.0), linear=nn.Linear(WIDTH, WIDTH)
    )
    assert set(refused(model, tokens(), config=EAGER)) == {"no_learned_branch"}


class Embeddings(nn.Module):
    """Token + position + type embeddings, then a stream."""

    def __init__(self, learned: bool = True) -> None:
        super().__init__()
        self.token, self.position, self.kind = (nn.Embedding(9, WIDTH) for _ in range(3))
        self.stream = Stream(lambda net, i, x: x + net.f(i, x))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        x = self.token(ids) + self.position(places) + self.kind(torch.zeros_like(ids))
        for i in range(self.stream.count):
            x = x + self.stream.f(i, x)
        return self.stream.head(x)


def test_token_and_position_embeddings() -> None:
    outcome = converted(Embeddings(), torch.arange(8).reshape(2, 4), config=EAGER)
    assert set(outcome.reasons) <= {"unrelated_operands", "constant_operand"} and outcome.reasons.total() == 2


def test_position_table() -> None:
    def whole(net: Stream, x: Tensor) -> Tensor:
        x = x + net.table
        for i in range(net.count):
            x = x + net.f(i, x)
        return net.head(x)

    model = Stream(lambda net, i, x: x, whole=whole)
    model.table = nn.Parameter(torch.zeros(TOKENS, WIDTH, dtype=torch.float64))
    outcome = converted(model, config=EAGER)
    assert dict(outcome.reasons) == {"constant_operand": 1}


def test_bias() -> None:
    inside(lambda net, i, x: net.branches[i](x) + net.parts[i].bias, lambda i: Bag(bias=torch.ones(WIDTH)))


def test_bias_of_full_shape_between_two_steps() -> None:
    """A parameter added to the stream itself is a cut or a source, and in any case exact."""
    model = Stream(
        lambda net, i, x: x + net.parts[i].bias + net.f(i, x), parts=lambda i: Bag(bias=torch.ones(2, TOKENS, WIDTH))
    )
    converted(model)


def test_mask_added_to_scores() -> None:
    mask = torch.full((TOKENS, TOKENS), -1e9, dtype=torch.float64).triu(1)

    def attention(net: Stream, i: int, x: Tensor) -> Tensor:
        q = net.branches[i](x)
        return torch.softmax(q @ x.transpose(1, 2) + mask, -1) @ q

    inside(attention)


def test_lora_inside_a_branch() -> None:
    inside(
        lambda net, i, x: net.branches[i](x) + net.parts[i](x),
        lambda i: nn.Sequential(nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)),
    )


def test_lora_alone() -> None:
    model = Alone(
        lambda bag, x: bag.base(x) + bag.up(bag.down(x)),
        base=nn.Linear(WIDTH, WIDTH),
        down=nn.Linear(WIDTH, 2),
        up=nn.Linear(2, WIDTH),
    )
    assert set(refused(model, tokens(), config=EAGER)) == {"unrelated_operands"}


def test_shared_and_routed_experts() -> None:
    def experts(net: Stream, i: int, x: Tensor) -> Tensor:
        shared, routed, router = net.parts[i].shared, net.parts[i].routed, net.branches[i]
        weights = torch.softmax(router(x), -1)
        total = torch.zeros_like(x)
        for number, expert in enumerate(routed):
            total = total + weights[..., number : number + 1] * expert(x)
        return shared(x) + total

    def parts(i: int) -> nn.Module:
        return Bag(shared=nn.Linear(WIDTH, WIDTH), routed=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)))

    inside(experts, parts)


def shifted(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


def test_token_shift() -> None:
    """``x + (shift(x) - x) * mu`` with mu of shape (1, 1, D): a parameter of three dimensions, no contraction."""
    inside(
        lambda net, i, x: net.branches[i](x + (shifted(x) - x) * net.parts[i].mu),
        lambda i: Bag(mu=torch.ones(1, 1, WIDTH)),
    )


def test_token_shift_alone() -> None:
    model = Alone(lambda bag, x: x + (shifted(x) - x) * bag.mu, mu=torch.ones(1, 1, WIDTH))
    reasons = refused(model, tokens(), config=EAGER)
    assert set(reasons) <= {"no_learned_branch", "gated"}


def test_token_shift_spelled_lerp_alone() -> None:
    model = Alone(lambda bag, x: torch.lerp(x, shifted(x), bag.mu), mu=torch.ones(1, 1, WIDTH))
    assert set(refused(model, tokens(), config=EAGER)) == {"no_learned_branch"}


def test_delta_rule_recurrence() -> None:
    """The state of linear attention: S + k (v - k S) beta, over time."""

    def delta(net: Stream, i: int, x: Tensor) -> Tensor:
        q, k, v = net.branches[i](x), F.normalize(net.parts[i](x), dim=-1), x
        state = torch.zeros(x.shape[0], WIDTH, WIDTH, dtype=x.dtype)
        out = []
        for t in range(TOKENS):
            key = k[:, t]
            error = v[:, t] - torch.einsum("bk,bkv->bv", key, state)
            state = state + torch.einsum("bk,bv->bkv", key, 0.5 * error)
            out.append(torch.einsum("bk,bkv->bv", q[:, t], state))
        return torch.stack(out, 1)

    inside(delta, lambda i: nn.Linear(WIDTH, WIDTH))


def test_decay_recurrence() -> None:
    def decay(net: Stream, i: int, x: Tensor) -> Tensor:
        rate = torch.sigmoid(net.parts[i].rate)
        state, out = torch.zeros_like(x[:, 0]), []
        values = net.branches[i](x)
        for t in range(TOKENS):
            state = rate * state + (1 - rate) * values[:, t]
            out.append(state)
        return torch.stack(out, 1)

    inside(decay, lambda i: Bag(rate=torch.ones(WIDTH)))


def test_recurrence_with_a_learned_cell_shares_its_weights() -> None:
    """h + W tanh(h) over time is a loop over time, not over depth."""

    def cell(net: Stream, i: int, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for t in range(TOKENS):
            state = state + net.branches[i](torch.tanh(state) + x[:, t])
        return state[:, None].expand_as(x)

    outcome = study(Stream(lambda net, i, x: x + cell(net, i, net.norms[i](x))))
    assert outcome.sublayers == [4]
    assert outcome.reasons["shared_weights"] == 4 * TOKENS


def test_newton_iterations() -> None:
    """X <- a X + (b A + c A A) X with A = X X^T, as in Muon: no parameter is in it."""

    def newton(x: Tensor) -> Tensor:
        x = x / (x.norm() + 1e-7)
        for _ in range(4):
            square = x @ x.transpose(-2, -1)
            x = 3.4 * x + (-4.7 * square + 2.0 * square @ square) @ x
        return x

    inside(lambda net, i, x: net.branches[i](newton(x)))
    model = Alone(lambda bag, x: newton(bag.linear(x)), linear=nn.Linear(WIDTH, WIDTH))
    assert set(refused(model, tokens(), config=EAGER)) <= {"no_learned_branch", "gated"}


def squeeze(bag: Bag, x: Tensor) -> Tensor:
    return x * torch.sigmoid(bag.up(F.relu(bag.down(x.mean(1, keepdim=True)))))


def test_squeeze_excite() -> None:
    def parts(i: int) -> nn.Module:
        return Bag(down=nn.Linear(WIDTH, 3), up=nn.Linear(3, WIDTH))

    inside(lambda net, i, x: squeeze(net.parts[i], net.branches[i](x)), parts)


class GlobalResponseNorm(nn.Module):
    """ConvNeXt V2: ``gamma * (x * n) + beta + x``."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.beta = nn.Parameter(torch.zeros(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        g = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        return self.gamma * (x * (g / (g.mean(-1, keepdim=True) + 1e-6))) + self.beta + x


def test_global_response_norm() -> None:
    inside(lambda net, i, x: net.parts[i](net.branches[i](x)), lambda i: GlobalResponseNorm())


def test_global_response_norm_alone() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.Sequential(*(GlobalResponseNorm() for _ in range(4))).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.norms(x)

    assert "no_learned_branch" in refused(Net(), tokens(), config=EAGER)


def test_convolutional_position_codes_are_sublayers() -> None:
    """CvT, Twins, CoAtNet: ``x + dwconv(x)`` is a learned residual branch like any other."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        x = x + net.parts[i](x.transpose(1, 2)).transpose(1, 2)
        return x + net.f(i, x)

    model = Stream(step, parts=lambda i: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH))
    converted(model, sublayers=8)


def test_weightless_branches_alone_are_no_stream() -> None:
    model = Alone(lambda bag, x: x + (F.avg_pool1d(x, 3, 1, 1) - x))
    assert set(refused(model, tokens(), config=EAGER)) <= {"no_learned_branch", "gated"}


@pytest.mark.parametrize("trace", [None, by_symbolic_trace])
def test_hand_written_norm_reads_once(trace: object) -> None:
    """x * rsqrt(mean(x^2) + eps) * w reads the state three times: one site."""

    def rms(net: Stream, i: int, x: Tensor) -> Tensor:
        return net.parts[i].weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) + 0.0 * x

    model = Stream(lambda net, i, x: x + net.branches[i](rms(net, i, x)), parts=lambda i: Bag(weight=torch.ones(WIDTH)))
    options = {"trace": trace} if trace else {}
    outcome = converted(model, **options)
    # One per state: the root, each of the four states.
    assert len(outcome.report.streams[0].sites) == 5
