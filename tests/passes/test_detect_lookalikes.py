"""Adds that make a new state out of an old one without being a residual step, and what only looks like them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.passes.support import WIDTH, Bag, Stream, converted, refused

# ------------------------------------------------------------------ cut up between the adds


def test_first_token_updated_alone() -> None:
    """Class attention: the first token is updated by all, the others stay as they are."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        first = x[:, :1] + net.f(i, x).mean(1, keepdim=True)
        return torch.cat([first, x[:, 1:]], 1)

    assert refused(Stream(step)) == {"partial_update": 4}


def test_all_but_the_first_token_updated() -> None:
    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        x = x + net.f(i, x)
        rest = x[:, 1:]
        return torch.cat([x[:, :1], rest + net.parts[i](rest)], 1)

    assert refused(Stream(step, parts=lambda i: nn.Linear(WIDTH, WIDTH)))["partial_update"] >= 4


def test_some_channels_updated() -> None:
    """The skip is added to the first channels of a wider branch."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        for i in range(4):
            f = net.parts[i](x)
            x = torch.cat([f[..., : x.shape[-1]] + x, f[..., x.shape[-1] :]], -1)
        return x

    model = Stream(lambda net, i, x: x, whole=whole, parts=lambda i: nn.Linear(WIDTH + i, WIDTH + i + 1))
    assert refused(model) == {"partial_update": 4}


def test_stream_from_a_concatenation_is_converted() -> None:
    """A token put in front before the first step cuts nothing."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        x = torch.cat([x.mean(1, keepdim=True), x], 1)
        for i in range(4):
            x = x + net.f(i, x)
        return net.head(x)

    converted(Stream(lambda net, i, x: x, whole=whole))


def test_stream_behind_a_norm_and_a_concatenation_is_one_of_its_own() -> None:
    """As in an encoder whose normed end goes, with one more token, into a decoder as long."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        for i in range(4):
            x = x + net.f(i, x)
        x = net.norm(x)
        x = torch.cat([x.mean(1, keepdim=True), x], 1)
        for i in range(4, 8):
            x = x + net.f(i, x)
        return net.head(x)

    converted(Stream(lambda net, i, x: x, whole=whole, count=8), sublayers=[4, 4])


# ------------------------------------------------------------------ lanes


class Lanes(nn.Module):
    """Lanes read by weights, written to by others; ``mixed``: a computed matrix mixes them at each write."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(3 * WIDTH, 3), nn.Linear(3 * WIDTH, 3)
        self.mix = nn.Linear(3 * WIDTH, 9) if mixed else None
        self.branch = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        flat = F.layer_norm(x.flatten(-2), (3 * WIDTH,))
        f = self.branch((self.read(flat).sigmoid().unsqueeze(-1) * x).sum(-2))
        written = self.write(flat).sigmoid().unsqueeze(-1) * f.unsqueeze(-2)
        if self.mix is None:
            return written + x
        return written + torch.matmul(self.mix(flat).unflatten(-1, (3, 3)).softmax(-1), x)


def lanes(mixed: bool) -> Stream:
    def whole(net: Stream, x: Tensor) -> Tensor:
        x = x.unsqueeze(-2).expand(-1, -1, 3, -1)
        for part in net.parts:
            x = part(x)
        return net.head(x.sum(-2))

    return Stream(lambda net, i, x: x, whole=whole, parts=lambda i: Lanes(mixed))


def test_lanes_mixed_by_a_computed_matrix() -> None:
    assert refused(lanes(mixed=True)) == {"multi_lane": 4}


def test_lanes_that_are_only_added_to() -> None:
    assert converted(lanes(mixed=False)).report.streams[0].feature_dim == WIDTH


def test_sum_of_attention_and_a_convolution_has_no_lanes() -> None:
    """``attention @ v + conv(v)`` inside a branch multiplies two computed tensors, too."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        v = net.f(i, x)
        return x + net.parts[i][0](v.matmul(v.mT).softmax(-1).matmul(v) + net.parts[i][1](v))

    parts = lambda i: nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])  # noqa: E731
    outcome = converted(Stream(step, parts=parts))
    assert set(outcome.reasons) == {"unrelated_operands"}


def test_lanes_predicted_from_each_other() -> None:
    """``x + matmul(x, m(x))`` over lanes, then a correction by the branch; one router serves both."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        x = torch.stack([x, -x, 2 * x], -1)
        for i, part in enumerate(net.parts):
            mix = part(net.norms[i](x[..., 0])).tanh().unflatten(-1, (3, 3))
            x = x + torch.matmul(x, mix)
            rate = part(net.norms[i](net.f(i, x[..., 0]))).tanh()[..., None, :3]
            x = x + rate * (net.f(i, x[..., 0]) - x[..., 0]).unsqueeze(-1)
        return net.head(x.sum(-1))

    reasons = refused(Stream(lambda net, i, x: x, whole=whole, parts=lambda i: nn.Linear(WIDTH, 9)))
    assert reasons["multi_lane"] == 8, reasons


# ------------------------------------------------------------------ constants on the stream


def test_constant_added_to_the_stream_itself() -> None:
    """``(x + b) * a + f(x)``, with learned vectors a and b."""
    parts = lambda i: Bag(a=torch.ones(WIDTH), b=torch.zeros(WIDTH))  # noqa: E731
    model = Stream(lambda net, i, x: (x + net.parts[i].b) * net.parts[i].a + net.f(i, x), parts=parts)
    assert refused(model) == {"shifted_stream": 4, "constant_operand": 4}


def test_constant_beside_the_branch() -> None:
    parts = lambda i: Bag(b=torch.zeros(WIDTH))  # noqa: E731
    converted(Stream(lambda net, i, x: (x + net.parts[i].b) + net.f(i, x), parts=parts))


# ------------------------------------------------------------------ depth attention


def test_model_that_attends_over_its_depth_already() -> None:
    """Each branch reads a softmax mix of two finished tensors and the running sum."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        done = [net.head(x), net.norm(x)]
        for i in range(4):
            sources = torch.stack([*done, x], -2)
            weights = (F.layer_norm(sources, (WIDTH,)) * net.parts[i].q).sum(-1).softmax(-1)
            x = x + net.f(i, (weights.unsqueeze(-1) * sources).sum(-2))
        return net.head(x)

    model = Stream(lambda net, i, x: x, whole=whole, parts=lambda i: Bag(q=torch.zeros(WIDTH)))
    assert refused(model)["depth_attention"] == 4


def test_hidden_states_stacked_at_the_end_are_no_depth_attention() -> None:
    """A pooling over all states behind the stream weighs them by a softmax, once."""

    def whole(net: Stream, x: Tensor) -> Tensor:
        states = [x]
        for i in range(4):
            x = x + net.f(i, x)
            states.append(x)
        stacked = torch.stack(states, -2)
        return net.head((net.norm(stacked).sum(-1, keepdim=True).softmax(-2) * stacked).sum(-2))

    converted(Stream(lambda net, i, x: x, whole=whole))
