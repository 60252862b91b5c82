"""Linears whose weights are no floating matrices: as torchao, bitsandbytes, GPTQ and AWQ have them, made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnres_compile as ac
from tests.conditions.depth_stream import DepthStream
from tests.helpers import gradient_error, outputs_and_gradients, randomize, randomize_queries, relative_error, seeded

WIDTH, LAYERS = 8, 4


class Linear8bit(nn.Module):
    """An int8 matrix and a scale per row; the forward makes the matrix and multiplies."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale[:, None], self.bias)


class ScaledBehind(Linear8bit):
    """The scale acts on the product."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype)) * self.scale + self.bias


class DynamicActivations(Linear8bit):
    """The tokens are rounded to int8, too, and multiplied as integers; no gradient passes."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.detach().abs().amax(-1, keepdim=True) / 127
        tokens = (x / scale).round().to(torch.int8).flatten(0, -2)
        product = torch._int_mm(tokens, self.weight.t().contiguous()).view(*x.shape[:-1], -1)
        return product.to(x.dtype) * scale * self.scale + self.bias


def unpacked(packed: Tensor, scale: Tensor) -> Tensor:
    """Two four-bit numbers per byte."""
    pairs = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    return (pairs.to(scale.dtype) - 8) * scale[:, None]


@torch.library.custom_op("attnres_test_conditions::linear4bit", mutates_args=())
def linear4bit(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    return x @ unpacked(packed, scale).t()


@linear4bit.register_fake
def _(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return gradient @ unpacked(*ctx.saved_tensors), None, None


linear4bit.register_autograd(_backward, setup_context=_keep)


class Linear4bit(nn.Module):
    """Packed weights, and an operator of the library's own."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        packed = torch.randint(0, 256, (WIDTH, WIDTH // 2), generator=seeded(WIDTH), dtype=torch.uint8)
        self.register_buffer("packed", packed)
        self.register_buffer("scale", linear.weight.detach().abs().amax(1) / 8)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear4bit(x, self.packed, self.scale) + self.bias


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return x @ (weight.to(x.dtype) * scale[:, None]).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        return gradient @ (weight.to(gradient.dtype) * scale[:, None]), None, None


class OwnBackward(Linear8bit):
    """An ``autograd.Function`` around the product."""

    def forward(self, x: Tensor) -> Tensor:
        return _Multiply.apply(x, self.weight, self.scale) + self.bias


class QuantisedTensor(torch.Tensor):
    """A tensor subclass that looks like its matrix and holds integers."""

    integers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, integers: Tensor, scale: Tensor) -> QuantisedTensor:
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype, requires_grad=False)

    def __init__(self, integers: Tensor, scale: Tensor) -> None:
        self.integers, self.scale = integers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> QuantisedTensor:
        return cls(inner["integers"], inner["scale"])

    def matrix(self) -> Tensor:
        return self.integers.to(self.scale.dtype) * self.scale[:, None]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].integers, args[0].scale)
        given = [each.matrix() if isinstance(each, cls) else each for each in args]
        return func(*given, **(kwargs or {}))


class Subclass(nn.Module):
    """``nn.Linear`` with such a tensor for its weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        made = Linear8bit(linear)
        self.weight = nn.Parameter(QuantisedTensor(made.weight, made.scale), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Net(nn.Module):
    def __init__(self, kind: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        randomize(self)
        self.branches = nn.ModuleList(kind(branch) for branch in self.branches)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, branch in zip(self.norms, self.branches, strict=True):
            x = x + branch(norm(x))
        return self.norm(x)

    def by_hand(self, x: Tensor, queries: list[Tensor]) -> Tensor:
        stream = DepthStream(self.embed(x), [2, 2], queries)
        for norm, branch in zip(self.norms, self.branches, strict=True):
            stream.add(branch(norm(stream.read())))
        return self.norm(stream.read())


@pytest.mark.parametrize(
    "kind", [Linear8bit, ScaledBehind, DynamicActivations, Linear4bit, OwnBackward, Subclass], ids=lambda k: k.__name__
)
def test_quantised_branches_are_sublayers(kind: Callable[[nn.Linear], nn.Module]) -> None:
    model, x = Net(kind), torch.randn(3, 8, WIDTH, generator=seeded(1))
    names = dict(model.named_parameters())
    plain = outputs_and_gradients(model, names, (x,))
    ac.transform(model, x, ac.AttnResConfig(num_blocks=2, lowering="eager"))
    (stream,) = ac.report(model).streams
    assert len(stream.sublayers) == LAYERS
    got = outputs_and_gradients(model, names, (x,))
    assert relative_error(got.outputs, plain.outputs) < 1e-5
    assert gradient_error(got.gradients, plain.gradients) < 1e-5
    queries = ac.pseudo_queries(model)
    assert len(queries) == LAYERS and all(query.dtype == torch.float32 for query in queries.values())
    randomize_queries(queries)
    if kind is DynamicActivations:
        return  # rounding tokens makes a step of any difference
    everything = dict(model.named_parameters())
    got = outputs_and_gradients(model, everything, (x,))
    want = outputs_and_gradients(lambda x: model.by_hand(x, list(queries.values())), everything, (x,))
    assert relative_error(want.outputs, plain.outputs) > 1e-2
    assert relative_error(got.outputs, want.outputs) < 1e-5
    assert gradient_error(got.gradients, want.gradients) < 1e-5
