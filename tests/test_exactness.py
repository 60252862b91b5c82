"""The judge itself: it must see wrong rewritings, and hold right ones harmless. The rewriting is faked here."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attnres_compile import api
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import AttnResError
from attnres_compile.exactness import randomise_, verify

verification = sys.modules["attnres_compile.exactness"]

Change = Callable[[nn.Module], None]


class Net(nn.Module):
    def __init__(self, width: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)
        for linear in (self.first, self.second):
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.first(self.norm(x)))
        return x + self.drop(self.second(x))


@pytest.fixture
def rewrite(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Makes ``transform`` apply a change to the model instead."""

    def install(change: Change) -> None:
        def transform(model: nn.Module, inputs: Any, config: AttnResConfig) -> nn.Module:
            change(model)
            return model

        monkeypatch.setattr(api, "transform", transform)
        monkeypatch.setattr(api, "pseudo_queries", lambda model: dict(list(model.named_parameters())[:3]))

    return install


def nothing(model: nn.Module) -> None:
    pass


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def test_a_right_rewriting_holds(rewrite: Callable[[Change], None]) -> None:
    rewrite(nothing)
    found = verify(Net(), X)
    assert found.holds
    assert found.output_error == 0.0
    assert found.gradient_error == 0.0
    assert found.tolerance == 1e-5
    assert found.dtype == "float32"
    assert found.queries == 3
    assert found.gradients == 6 + 1  # two weights, two biases, two of the norm; the input
    assert found.mode == "eval"
    assert found.randomised
    assert found.notes == ()


def test_depth_attention_that_does_not_run_is_not_exact(
    monkeypatch: pytest.MonkeyPatch, rewrite: Callable[[Change], None]
) -> None:
    rewrite(nothing)
    idle, zero = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))
    zero.grad = torch.zeros(6)
    monkeypatch.setattr(api, "pseudo_queries", lambda model: {"a": idle, "b": zero})
    found = verify(Net(), X)
    assert found.output_error == found.gradient_error == 0.0
    assert not found.holds
    assert found.notes == ("2 of 2 queries got no gradient: a, b",)
    monkeypatch.setattr(api, "pseudo_queries", lambda model: {"a": idle, "b": model.first.weight})
    found = verify(Net(), X)
    assert found.holds
    assert found.notes == ("1 of 2 queries got no gradient: a",)


def test_rounding_is_measured_and_allowed(rewrite: Callable[[Change], None]) -> None:
    def other_order(model: Net) -> None:
        model.forward = lambda x: (model.second(x + model.first(model.norm(x))) + model.first(model.norm(x))) + x

    rewrite(other_order)
    found = verify(Net(), X)
    assert found.holds
    assert found.output_error is not None
    assert 0 < found.output_error < 1e-6


def drop_bias(model: nn.Module) -> None:
    model.second.bias.data.zero_()


def test_default_weights_hide_what_random_ones_show(rewrite: Callable[[Change], None]) -> None:
    rewrite(drop_bias)
    assert verify(Net(), X, keep_weights=True).holds
    found = verify(Net(), X)
    assert not found.holds
    assert found.output_error is not None
    assert found.output_error > 0.01
    assert found.worst_output == "output"


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.001


def test_wrong_gradients_alone_are_seen(rewrite: Callable[[Change], None]) -> None:
    def change(model: nn.Module) -> None:
        model.first.register_forward_hook(lambda module, args, output: _WrongGradient.apply(output))

    rewrite(change)
    found = verify(Net(), X)
    assert found.output_error == 0.0
    assert not found.holds
    assert found.gradient_error == pytest.approx(1e-3, rel=0.9)
    assert found.worst_gradient.startswith(("first.", "norm."))


def test_a_lost_gradient_is_seen(rewrite: Callable[[Change], None]) -> None:
    rewrite(lambda model: model.first.requires_grad_(False))
    found = verify(Net(), X)
    assert not found.holds
    assert "first.bias exists in only one of the two" in found.notes


def test_gradients_that_are_zero_but_for_rounding_do_not_count(
    monkeypatch: pytest.MonkeyPatch, rewrite: Callable[[Change], None]
) -> None:
    class Softmaxed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.shift = nn.Parameter(torch.zeros(()))  # softmax does not see it: its gradient is 0 but for rounding

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.linear(x) + self.shift, -1)

    def other_softmax(model: nn.Module) -> None:
        def forward(x: Tensor) -> Tensor:
            return torch.log_softmax(model.linear(x) + model.shift, -1).exp()

        model.forward = forward

    rewrite(other_softmax)
    x = torch.randn(512, 6)
    assert verify(Softmaxed(), x).holds
    monkeypatch.setattr(verification, "GRADIENT_FLOOR", 0.0)
    found = verify(Softmaxed(), x)
    assert not found.holds
    assert found.worst_gradient == "shift"


def test_nothing_of_the_user_changes(rewrite: Callable[[Change], None]) -> None:
    rewrite(drop_bias)
    model = Net(dropout=0.5).train()
    model.first.bias.grad = torch.ones(6)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    x = X.clone()
    verify(model, x, train=True)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model.first.bias.grad, torch.ones(6))
    assert model.second.bias.grad is None
    assert torch.equal(x, X)
    assert not x.requires_grad
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == np.random.get_state()[1]).all()


def test_training_mode_draws_equal_dropout(rewrite: Callable[[Change], None]) -> None:
    rewrite(nothing)
    found = verify(Net(dropout=0.5), X, train=True)
    assert found.holds
    assert found.mode == "train"
    rewrite(lambda model: model.drop.eval())
    assert verify(Net(dropout=0.5), X).holds
    assert not verify(Net(dropout=0.5), X, train=True).holds


def test_grad_mode_of_the_caller_does_not_matter(rewrite: Callable[[Change], None]) -> None:
    rewrite(nothing)
    with torch.no_grad():
        assert verify(Net(), X).gradients == 7
    with torch.inference_mode():
        assert verify(Net(), X).gradients == 7


def test_tolerance_is_that_of_the_lowest_precision(rewrite: Callable[[Change], None]) -> None:
    rewrite(nothing)
    assert verify(Net().double(), X.double()).tolerance == 1e-12

    class Upcast(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.norm(x).float().to(x.dtype)

    found = verify(Upcast().double(), X.double())
    assert (found.dtype, found.tolerance) == ("float32", 1e-5)
    found = verify(Net().bfloat16(), X.bfloat16())
    assert found.dtype == "bfloat16"
    assert found.tolerance == pytest.approx(3 * 2**-7 * 3**0.5)  # three queries


class Wrapped(nn.Module):
    """Returns whatever a function makes of the stream."""

    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net = Net()
        self.result = result

    def forward(self, x: Tensor) -> Any:
        return self.result(self.net(x))


def test_integer_outputs_are_compared_and_said_to_have_no_gradient(rewrite: Callable[[Change], None]) -> None:
    rewrite(nothing)
    found = verify(Wrapped(lambda h: h.argmax(-1)), X)
    assert found.holds
    assert (found.output_error, found.gradient_error, found.gradients) == (None, None, 0)
    assert "gradients were not compared" in found.notes[0]
    rewrite(lambda model: setattr(model, "result", lambda h: h.argmin(-1)))
    found = verify(Wrapped(lambda h: h.argmax(-1)), X)
    assert not found.holds
    assert "output (torch.int64) differs in" in found.notes[1]


def test_outputs_are_found_in_any_nesting(rewrite: Callable[[Change], None]) -> None:
    from transformers import DynamicCache
    from transformers.modeling_outputs import BaseModelOutput

    def result(h: Tensor) -> Any:
        cache = DynamicCache()
        cache.update(h[None, None], 2 * h[None, None], 0)
        return BaseModelOutput(last_hidden_state=h), [{"deep": (h, h.argmax()), "cache": cache}]

    def wrong_cache(model: nn.Module) -> None:
        def changed(h: Tensor) -> Any:
            made = result(h)
            made[1][0]["cache"].layers[0].values *= 1.5
            return made

        model.result = changed

    rewrite(nothing)
    assert verify(Wrapped(result), X).holds
    rewrite(wrong_cache)
    found = verify(Wrapped(result), X)
    assert not found.holds
    assert found.worst_output == "[1][0].cache.layers[0].values"
    assert found.output_error == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_where_there_were_none(rewrite: Callable[[Change], None], bad: float) -> None:
    rewrite(lambda model: model.first.bias.data.fill_(bad))
    found = verify(Net(), X)
    assert not found.holds
    assert found.output_error == float("inf")
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["output_error"] > 1e300


def test_equal_infinities_are_equal(rewrite: Callable[[Change], None]) -> None:
    rewrite(nothing)
    found = verify(Wrapped(lambda h: h.masked_fill(h < 0, float("-inf"))), X)
    assert found.holds
    assert found.gradients == 7


def test_shape_and_missing_outputs(rewrite: Callable[[Change], None]) -> None:
    rewrite(lambda model: setattr(model, "result", lambda h: {"a": h[:1]}))
    found = verify(Wrapped(lambda h: {"a": h, "b": h}), X)
    assert not found.holds
    assert "b exists in only one of the two" in found.notes
    assert any("a was torch.float32 [4, 6] and is torch.float32 [1, 6]" in note for note in found.notes)


def test_what_cannot_be_verified_is_said(rewrite: Callable[[Change], None]) -> None:
    rewrite(nothing)
    with pytest.raises(AttnResError, match="returns no tensors to compare, but str"):
        verify(Wrapped(lambda h: "text"), X)
    with pytest.raises(AttnResError, match="meta device"):
        verify(Net().to("meta"), X)
    with pytest.raises(RuntimeError, match="normalized_shape"):  # the model's own words
        verify(Net(), torch.randn(4, 5))
    model = Net()
    model.state = nn.Parameter(torch.ones(2)) * 2
    with pytest.raises(AttnResError, match="cannot be copied"):
        verify(model, X)


def test_inexact_options_are_noted(rewrite: Callable[[Change], None]) -> None:
    rewrite(nothing)
    found = verify(Net(), X, AttnResConfig(gain="mean", value="normalized", lowering="eager"))
    assert len(found.notes) == 2
    assert "gain='mean'" in found.notes[0]
    assert "value='normalized'" in found.notes[1]


def test_default_lowering_is_eager(monkeypatch: pytest.MonkeyPatch, rewrite: Callable[[Change], None]) -> None:
    rewrite(nothing)
    seen = []

    def transform(model: nn.Module, inputs: Any, config: AttnResConfig) -> nn.Module:
        seen.append(config)
        return model

    monkeypatch.setattr(api, "transform", transform)
    verify(Net(), X)
    assert seen == [AttnResConfig(lowering="eager")]


def test_a_model_that_writes_into_its_input(rewrite: Callable[[Change], None]) -> None:
    class Writes(Net):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return super().forward(x)

    rewrite(nothing)
    x = X.clone()
    assert verify(Writes(), x).holds
    assert torch.equal(x, X)


# --- the weights that hide nothing


class Varied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(8)
        self.layer_scale = nn.Parameter(torch.full((8,), 1e-6))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), 1.0]))
        self.register_buffer("inv_freq", torch.ones(8), persistent=False)
        self.register_buffer("wide", torch.ones(1).expand(8))
        self.register_buffer("index", torch.arange(4))
        self.register_buffer("absent", None)


def test_randomise() -> None:
    model = Varied()
    plain = copy.deepcopy(model)
    randomise_(model)
    assert model.head.weight is model.embed.weight
    assert not torch.equal(model.embed.weight, plain.embed.weight)
    assert model.layer_scale.abs().mean() > 0.05
    assert (model.norm.weight - 1).abs().mean() > 0.05
    assert model.norm.bias.abs().mean() > 0.05
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.abs().mean() > 0.05
    assert model.norm.running_var is not None
    assert (model.norm.running_var > 0).all()
    assert (model.norm.running_var - 1).abs().mean() > 0.05
    assert model.mask[:2].tolist() == [0.0, float("-inf")]
    assert model.mask[2] not in (0.0, 1.0)
    for name in ("inv_freq", "wide", "index"):
        assert torch.equal(getattr(model, name), getattr(plain, name))
    assert model.norm.num_batches_tracked == 0


def test_randomise_is_the_same_for_one_seed() -> None:
    plain = Net()
    made = []
    for seed in (0, 0, 1):
        made.append(copy.deepcopy(plain))
        randomise_(made[-1], seed)
    first, second, third = (model.first.weight for model in made)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
