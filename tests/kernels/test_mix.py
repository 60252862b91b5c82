"""Every implementation of depth attention against the definition in float64, forward and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnres_compile.kernels import cpu, ops, plain, reference

assert ops.LIBRARY

Mix = Callable[..., Tensor]


def _through(query: Tensor, sources: list[Tensor], *options: Any) -> Tensor:
    return cpu.mix_through(query, sources, *options)[0]


IMPLEMENTATIONS: dict[str, Mix] = {
    "operator": torch.ops.attnres.mix.default,
    "plain": plain.mix,
    "compiled": _through,
}
# (shape of a source, its feature dimension)
SHAPES = [((3, 5, 48), -1), ((4, 33), 1), ((2, 40, 3, 4), 1), ((17,), 0), ((70, 2, 3), 0)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(params=IMPLEMENTATIONS)
def mix(request: pytest.FixtureRequest) -> Mix:
    if request.param == "compiled" and cpu.library() is None:
        pytest.fail("the compiled kernels were not built: these tests need a C++ compiler")
    return IMPLEMENTATIONS[request.param]


def tensors(
    count: int, shape: tuple[int, ...], dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, list[Tensor], Tensor]:
    """A query, sources whose scales differ, and a gradient of the mix."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    query = normal(shape[dim]).div(shape[dim] ** 0.5).to(dtype).requires_grad_()
    sources = [normal(*shape).mul(0.5 + index).to(dtype).requires_grad_() for index in range(count)]
    return query, sources, normal(*shape).to(dtype)


def assert_matches(
    mix: Mix, query: Tensor, sources: list[Tensor], grad: Tensor, *options: Any, tolerance: float
) -> None:
    """Value, dtype and all gradients of ``mix`` are the definition's, relative to their largest entry."""
    mixed = mix(query, sources, *options)
    grads = torch.autograd.grad(mixed, [query, *sources], grad)
    exact_query = query.detach().double().requires_grad_()
    exact_sources = [source.detach().double().requires_grad_() for source in sources]
    expected = reference.mix(exact_query, exact_sources, *options)
    exact = torch.autograd.grad(expected, [exact_query, *exact_sources], grad.double())
    assert mixed.dtype == sources[0].dtype
    assert mixed.shape == sources[0].shape
    assert [value.dtype for value in grads] == [query.dtype, *(source.dtype for source in sources)]
    size = max(float(value.abs().max()) for value in exact)
    for value, wanted, scale in ((mixed, expected, None), *((g, e, size) for g, e in zip(grads, exact, strict=True))):
        worst = float((value.double() - wanted).detach().abs().max())
        assert worst <= tolerance * (scale or float(wanted.detach().abs().max()))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_values_and_gradients(mix: Mix, shape: tuple[int, ...], dim: int, normalized: bool, dtype: torch.dtype) -> None:
    for count in (1, 2, 7):
        query, sources, grad = tensors(count, shape, dim, dtype)
        options = (dim, 1e-5, 1.7, 0.8, normalized)
        assert_matches(mix, query, sources, grad, *options, tolerance=TOLERANCE[dtype])


def test_thirty_sources(mix: Mix) -> None:
    query, sources, grad = tensors(30, (6, 24), -1, torch.float64)
    assert_matches(mix, query, sources, grad, -1, 1e-6, 30.0, 1.0, False, tolerance=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_query_gives_the_plain_sum_exactly(mix: Mix, dtype: torch.dtype) -> None:
    """With gain N every coefficient is 1, so the mix has the bits of the sum, and so has each gradient."""
    # 41 and 49 are the first N for which N * (1 / N) is not 1, in float32 and in float64.
    for count in (*range(1, 12), 41, 49):
        _, sources, grad = tensors(count, (5, 3, 40), -1, dtype, seed=count)
        query = torch.zeros(40, dtype=dtype)
        mixed = mix(query, sources, -1, 1e-6, float(count), 1.0, False)
        total = sources[0]
        for source in sources[1:]:
            total = total + source
        assert torch.equal(mixed, total)
        if mixed.requires_grad:
            for value in torch.autograd.grad(mixed, sources, grad):
                assert torch.equal(value, grad)


def test_result_is_a_new_tensor(mix: Mix) -> None:
    source = torch.randn(3, 8)
    mixed = mix(torch.zeros(8), [source], -1, 1e-6, 1.0, 1.0, False)
    assert torch.equal(mixed, source)
    assert mixed.data_ptr() != source.data_ptr()


def test_layouts(mix: Mix) -> None:
    """Slices, transposes, expansions and channels-last sources, mixed; the result is laid out as the first source."""
    base = torch.randn(4, 6, 32, dtype=torch.float64)
    layouts = [
        base,
        torch.randn(6, 4, 32, dtype=torch.float64).transpose(0, 1),
        torch.randn(4, 6, 64, dtype=torch.float64)[..., ::2],
        torch.randn(4, 1, 32, dtype=torch.float64).expand(4, 6, 32),
        torch.randn(32, 4, 6, dtype=torch.float64).permute(1, 2, 0),
    ]
    query, _, grad = tensors(1, (4, 6, 32), -1, torch.float64)
    for turn in range(len(layouts)):
        sources = [value.detach().requires_grad_() for value in layouts[turn:] + layouts[:turn]]
        options = (-1, 1e-6, 2.0, 1.0, False)
        turned = grad.transpose(0, 1).contiguous().transpose(0, 1)
        assert_matches(mix, query, sources, turned, *options, tolerance=1e-12)
        wanted = torch.empty_like(sources[0])
        assert mix(query, sources, *options).stride() == wanted.stride()


def test_channels_last(mix: Mix) -> None:
    query, sources, grad = tensors(3, (2, 40, 3, 4), 1, torch.float64)
    sources = [source.detach().to(memory_format=torch.channels_last).requires_grad_() for source in sources]
    assert_matches(mix, query, sources, grad, 1, 1e-6, 3.0, 1.0, True, tolerance=1e-12)
    assert mix(query, sources, 1, 1e-6, 3.0, 1.0, True).is_contiguous(memory_format=torch.channels_last)


def test_query_in_another_dtype(mix: Mix) -> None:
    query, sources, grad = tensors(4, (3, 5, 64), -1, torch.bfloat16)
    query = query.detach().float().requires_grad_()
    assert_matches(mix, query, sources, grad, -1, 1e-6, 4.0, 1.0, False, tolerance=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(mix: Mix, dtype: torch.dtype) -> None:
    query, sources, grad = tensors(4, (3, 5, 64), -1, torch.float32)

    def both() -> list[Tensor]:
        mixed = mix(query, sources, -1, 1e-6, 4.0, 1.0, False)
        return [mixed, *(torch.autograd.grad(mixed, [query, *sources], grad) if mixed.requires_grad else ())]

    alone = both()
    with torch.autocast("cpu", dtype=dtype):
        cast = both()
    assert all(torch.equal(a, b) for a, b in zip(alone, cast, strict=True))


def test_large_logits_do_not_overflow(mix: Mix) -> None:
    sources = [torch.randn(4, 16) for _ in range(3)]
    query = torch.full((16,), 1e4)
    mixed = mix(query, sources, -1, 1e-6, 1.0, 1.0, False)
    expected = reference.mix(query.double(), [source.double() for source in sources], gain=1.0)
    torch.testing.assert_close(mixed.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broken_values_stay_broken(mix: Mix, value: float, dtype: torch.dtype) -> None:
    """A source that is not finite makes its own token not finite, and no other."""
    sources = [torch.randn(3, 64).to(dtype) for _ in range(3)]
    sources[1][1, 5] = value
    mixed = mix(torch.randn(64).to(dtype), sources, -1, 1e-6, 3.0, 1.0, False)
    assert not mixed[1].isfinite().any()
    assert mixed[[0, 2]].isfinite().all()


def test_rounding_to_bfloat16_keeps_any_nan(mix: Mix) -> None:
    """A NaN whose bits are all set would round up to zero."""
    query = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    for width in (64, 3):
        sources = [torch.ones(2, width, dtype=torch.bfloat16) for _ in range(2)]
        assert mix(query[:width], sources, -1, 1e-6, 2.0, 1.0, False).isnan().all()


def test_no_tokens(mix: Mix) -> None:
    sources = [torch.randn(0, 16, requires_grad=True) for _ in range(2)]
    query = torch.randn(16, requires_grad=True)
    mixed = mix(query, sources, -1, 1e-6, 2.0, 1.0, False)
    assert mixed.shape == (0, 16)
    mixed.sum().backward()
    assert query.grad is not None
    assert torch.equal(query.grad, torch.zeros(16))


def test_some_inputs_without_gradient(mix: Mix) -> None:
    query, sources, grad = tensors(4, (3, 32), -1, torch.float64)
    options = (-1, 1e-6, 4.0, 1.0, False)
    everything = torch.autograd.grad(mix(query, sources, *options), [query, *sources], grad)
    for wanted in ([0], [2], [0, 1, 3], [4]):
        inputs = [value.detach().requires_grad_(index in wanted) for index, value in enumerate([query, *sources])]
        mixed = mix(inputs[0], inputs[1:], *options)
        found = torch.autograd.grad(mixed, [inputs[index] for index in wanted], grad)
        for index, value in zip(wanted, found, strict=True):
            torch.testing.assert_close(value, everything[index], rtol=1e-12, atol=1e-14)
