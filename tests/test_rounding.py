"""What counts as rounding: right conversions of a sensitive network hold whatever its weights, wrong ones never do."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnres_compile as ac
from attnres_compile import api
from attnres_compile.exactness import Exactness, randomise_
from attnres_compile.inputs import Inputs
from attnres_compile.self_check import checked_transform

EAGER = ac.AttnResConfig(lowering="eager", num_blocks=4)


class Block(nn.Module):
    """As in a diffusion transformer: shifts, scales and gates by a condition."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.mixer, self.up, self.down = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(d, 6 * d))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a, b, g, e, f, h = self.condition(c)[:, None].chunk(6, -1)
        x = x + g * self.mixer(F.layer_norm(x, x.shape[-1:]) * (1 + b) + a)
        return x + h * self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:]) * (1 + f) + e)))


class Net(nn.Module):
    def __init__(self, d: int = 8, depth: int = 3, sharpness: float = 1.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.out, self.embed = nn.Linear(d, d), nn.Linear(4, d)
        self.sharpness = sharpness

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        c = self.embed(t)
        for block in self.blocks:
            x = block(x, c)
        # What a small difference becomes is up to this; 1 leaves it as it is.
        return self.out(torch.sin(x * self.sharpness) if self.sharpness != 1.0 else x)


class Single(Net):
    """Computes in float32 whatever it is cast to: only its own rounding tells what is a mistake."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return super().forward(x.float(), t.float())

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        return super()._apply(lambda tensor: fn(tensor).float(), recurse)


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 5, 8, generator=generator), 3 * torch.randn(2, 4, generator=generator)


def usual_(model: nn.Module, seed: int) -> nn.Module:
    """Weights of the size that keeps a layer's output the size of its input."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            size = p[0].numel() ** -0.5 if p.dim() > 1 else 0.3
            p.copy_(torch.randn(p.shape, generator=generator) * size)
    return model


def dropped(model: nn.Module) -> None:
    """One branch does nothing."""
    model.get_submodule("blocks.1.down").register_forward_hook(lambda module, args, out: out * 0)


def scaled(model: nn.Module) -> None:
    """One branch is off by a thousandth."""
    model.get_submodule("blocks.1.mixer").register_forward_hook(lambda module, args, out: out * 1.001)


def across_tokens(model: nn.Module) -> None:
    """One branch has its tokens in another order."""
    model.get_submodule("blocks.1.mixer").register_forward_hook(lambda module, args, out: out.flip(1))


class _OffGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.001


def off_gradient(model: nn.Module) -> None:
    """Right outputs, gradients off by a thousandth."""
    model.get_submodule("blocks.1.mixer").register_forward_hook(lambda module, args, out: _OffGradient.apply(out))


def no_gradient(model: nn.Module) -> None:
    """A weight whose gradient is None, not a number."""
    model.get_submodule("blocks.1.up").requires_grad_(False)


WRONG = [dropped, scaled, across_tokens, off_gradient, no_gradient]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Exactness]:
    """``verify`` with a converter that changes one thing and nothing else, so that only the rule is tried."""
    monkeypatch.setattr(api, "pseudo_queries", lambda model: dict(list(model.named_parameters())[:3]))

    def judge(model: nn.Module, change: Callable[[nn.Module], None], dtype: torch.dtype | None = None) -> Exactness:
        def convert(mine: nn.Module, given: Inputs, config: ac.AttnResConfig) -> nn.Module:
            change(mine)
            return mine

        return ac.verify(model, inputs(0), EAGER, dtype=dtype, convert=convert, keep_weights=True)

    return judge


def another_order(model: nn.Module) -> None:
    """What a conversion does: the same sums in another order."""
    for block in model.get_submodule("blocks"):
        block.forward = types.MethodType(_another_order, block)


def _another_order(self: Block, x: Tensor, c: Tensor) -> Tensor:
    a, b, g, e, f, h = self.condition(c)[:, None].chunk(6, -1)
    third = x / 3
    branch = g * self.mixer(F.layer_norm(x, x.shape[-1:]) * (1 + b) + a)
    y = (third + branch) + third + third
    return (h * self.down(F.gelu(self.up(F.layer_norm(y, y.shape[-1:]) * (1 + f) + e))) + branch) + x


def test_right_conversions_hold_whatever_the_weights() -> None:
    for seed in range(8):
        model = usual_(Net(), seed)
        found = ac.verify(model, inputs(seed), EAGER, seed=seed)
        assert found.holds, (seed, found)


@pytest.mark.parametrize("sharpness", [1.0, 3e3], ids=["calm", "sensitive"])
def test_wrong_conversions_are_caught_where_rounding_is_large_too(
    sharpness: float, judged: Callable[..., Exactness]
) -> None:
    model = usual_(Net(sharpness=sharpness), 0)
    right = judged(model, another_order)
    assert right.holds, right
    assert (right.tolerance > 1e-5) == (sharpness > 1), right  # the rule is tried on both of its sides
    for change in WRONG:
        for dtype in (None, torch.float64):
            assert judged(model, change, dtype).holds is False, (change, dtype)


def test_where_float64_does_not_run_the_originals_own_rounding_decides_or_nothing_does(
    judged: Callable[..., Exactness],
) -> None:
    calm, chaotic = usual_(Single(), 0), usual_(Single(sharpness=3e5), 0)
    assert judged(calm, another_order).holds
    for change in WRONG:
        assert judged(calm, change).holds is False, change
    found = judged(chaotic, another_order)
    assert found.holds is None and "not counted" in found.notes[-1], found
    for change in WRONG:
        assert not judged(chaotic, change).holds, change


def test_transform_says_when_it_cannot_tell() -> None:
    model = usual_(Single(sharpness=3e5), 0)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ac.InexactError, match="cannot be told") as caught:
        ac.transform(model, inputs(0), EAGER, verify=True)
    assert caught.value.exactness.holds is None
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def test_transform_decides_a_sensitive_model_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    model = usual_(Net(sharpness=3e3), 0)
    ac.transform(model, inputs(0), EAGER, verify=True)
    ac.revert(model)
    plain = api.transform

    def wrong(model: nn.Module, *rest: Any, **options: Any) -> nn.Module:
        scaled(model)
        return plain(model, *rest, **options)

    monkeypatch.setattr(api, "transform", wrong)
    with pytest.raises(ac.InexactError, match="in float64 it is off by"):
        checked_transform(model, inputs(0), EAGER)


def test_random_weights_keep_the_scale_of_what_they_move() -> None:
    parts = {"usual": nn.Linear(400, 50), "zero": nn.Linear(400, 50), "large": nn.Embedding(300, 40)}
    model = nn.ModuleDict({**parts, "unit": nn.LayerNorm(500)})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model["usual"].weight.copy_(torch.randn(50, 400, generator=generator) / 20)
        model["zero"].weight.zero_()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    randomise_(model, 3)
    after = {name: p.detach() for name, p in model.named_parameters()}
    for name, size in {"usual.weight": 0.05, "zero.weight": 0.05, "unit.weight": 1.0, "zero.bias": 0.2}.items():
        assert float(after[name].square().mean().sqrt()) == pytest.approx(size, rel=0.3), name
    assert float(after["large.weight"].std()) == pytest.approx(1.0, rel=0.1)
    assert all(not torch.allclose(after[name], before[name], rtol=0.02) for name in before)
