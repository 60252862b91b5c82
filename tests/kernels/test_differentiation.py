"""Derivatives beyond the ordinary gradient: second ones, forward mode, and the transforms of ``torch.func``.

What they are compared with: finite differences, and the reference, which PyTorch differentiates by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import attnres_compile as ac
from attnres_compile.kernels import cpu, reference, through
from tests.kernels.phases import NORMS, OPS, Read, assert_close, generator, site

READ = Read(eps=1e-2)
Call = Callable[..., tuple[Tensor, ...]]


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    normal = generator()
    return [normal(*shape).requires_grad_() for shape in shapes]


def _mix(*tensors: Tensor) -> tuple[Tensor, ...]:
    return (OPS.mix(tensors[0], list(tensors[1:]), *READ.merge),)


def _native(*tensors: Tensor) -> tuple[Tensor, ...]:
    return cpu.mix_through(tensors[0], tensors[1:], *READ.merge)


def _inter(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(OPS.inter(list(tensors[:2]), list(tensors[2:]), *READ.inter))


def _inter_through(*tensors: Tensor) -> tuple[Tensor, ...]:
    return through.inter_through(tensors[:2], tensors[2:], *READ.inter)


def _merge(*tensors: Tensor) -> tuple[Tensor, ...]:
    return (OPS.merge(*tensors, *READ.merge),)


ROW, PAIR = (3,), (2, 3)
CALLS: dict[str, tuple[Call, list[tuple[int, ...]]]] = {
    "mix": (_mix, [ROW, PAIR, PAIR]),
    "mix_cpu": (_native, [ROW, PAIR, PAIR]),
    "inter": (_inter, [ROW, ROW, PAIR, PAIR]),
    "inter_through": (_inter_through, [ROW, ROW, PAIR, PAIR]),
    "merge": (_merge, [ROW, PAIR, (2,), PAIR]),
}


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives(name: str) -> None:
    call, shapes = CALLS[name]
    assert torch.autograd.gradgradcheck(call, leaves(*shapes))


@pytest.mark.parametrize("kind", ["mix", "merge"])
@pytest.mark.parametrize(("norm", "parameters"), [NORMS[0], NORMS[2], NORMS[5]])
@pytest.mark.parametrize("handed_on", [False, True])
def test_second_derivatives_of_sites(kind: str, norm: str, parameters: str, handed_on: bool) -> None:
    problem = site(kind, True, norm, parameters, shape=(2, 3), read=READ)

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = problem.with_tensors(tensors)
        if not handed_on:
            return tuple(given.operator(True)[:2])
        between = (given.mixed, given.lse, given.branch, given.weight, given.bias)
        return through.site_through(given.query, given.sources, *between, norm, given.norm_eps, *READ.merge)

    assert torch.autograd.gradgradcheck(call, tuple(problem.tensors))


def test_third_derivatives() -> None:
    """A gradient of a gradient of a gradient: nothing on the way is cut off."""

    def thrice(mix: Callable[[Tensor], Tensor], query: Tensor) -> Tensor:
        value = mix(query).square().sum()
        for _ in range(3):
            (slope,) = torch.autograd.grad(value, query, create_graph=True)
            value = slope.square().sum()
        return slope

    query, *sources = leaves(ROW, PAIR, PAIR)
    got = thrice(lambda q: OPS.mix(q, sources, *READ.merge), query)
    assert_close([got], [thrice(lambda q: reference.mix(q, sources, **READ.named()), query)], 1e-10)


@pytest.mark.parametrize("name", ["mix", "inter", "merge"])
def test_forward_mode(name: str) -> None:
    """A tangent that an operator drops is zero without a word."""
    call, shapes = CALLS[name]
    assert torch.autograd.gradcheck(call, leaves(*shapes), check_forward_ad=True, check_backward_ad=False)
    with torch.no_grad(), forward_ad.dual_level():
        given = [tensor.detach() for tensor in leaves(*shapes)]
        given[0] = forward_ad.make_dual(given[0], torch.ones_like(given[0]))
        tangent = forward_ad.unpack_dual(call(*given)[0]).tangent
        assert tangent is not None and tangent.abs().min() > 0


@pytest.mark.parametrize("name", ["mix", "inter", "merge"])
@pytest.mark.parametrize("batched", [(0,), (-1,), "all"])
def test_vmap_is_a_loop(name: str, batched: tuple[int, ...] | str) -> None:
    """Over the first argument alone, the last one alone, and all of them."""
    call, shapes = CALLS[name]
    places = range(len(shapes)) if batched == "all" else [at % len(shapes) for at in batched]
    normal = generator()
    given = [normal(4, *shape) if at in places else normal(*shape) for at, shape in enumerate(shapes)]
    axes = tuple(0 if at in places else None for at in range(len(shapes)))
    want = [call(*(value[row] if at in places else value for at, value in enumerate(given))) for row in range(4)]
    got = torch.func.vmap(call, axes)(*given)
    assert_close(got, [torch.stack(values) for values in zip(*want, strict=True)], 1e-12)


def test_vmap_of_permuted_features() -> None:
    """NCHW: the result has its source's strides in every row, whether a transform is at work or not."""
    normal = generator()
    query, sources = normal(4), [normal(5, 2, 3, 3, 4).movedim(-1, 2) for _ in range(2)]
    options = Read(dim=1).merge
    got = torch.func.vmap(lambda *rows: OPS.mix(query, list(rows), *options))(*sources)
    want = torch.stack([OPS.mix(query, [source[row] for source in sources], *options) for row in range(5)])
    assert_close([got], [want], 1e-12)
    assert got[0].stride() == sources[0][0].stride()


@pytest.mark.parametrize("name", ["mix", "inter", "merge"])
def test_gradients_per_sample(name: str) -> None:
    call, shapes = CALLS[name]
    normal = generator()
    query, given = normal(*shapes[0]), [normal(4, *shape) for shape in shapes[1:]]

    def loss(query: Tensor, *rest: Tensor) -> Tensor:
        return sum((value.square().sum() for value in call(query, *rest)), torch.zeros(()))

    got = torch.func.vmap(torch.func.grad(loss), (None, *[0] * len(given)))(query, *given)
    leaf = query.clone().requires_grad_()
    want = [torch.autograd.grad(loss(leaf, *(value[row] for value in given)), leaf)[0] for row in range(4)]
    assert_close([got], [torch.stack(want)], 1e-12)


@pytest.mark.parametrize("reads", [None, 2])
def test_the_public_operation(reads: int | None) -> None:
    """A Hessian, in each way that PyTorch makes one, of ``ac.ops.depth_attention``."""
    normal = generator()
    query = normal(3) if reads is None else normal(reads, 3)
    sources = [normal(2, 3) for _ in range(3)]

    def loss(query: Tensor) -> Tensor:
        return ac.ops.depth_attention(query, sources).square().sum()

    want = torch.autograd.functional.hessian(loss, query)
    step, size = 1e-5, query.numel()
    numeric = torch.zeros(size, size, dtype=torch.float64)
    for at in range(size):
        moved = [query.clone().requires_grad_() for _ in range(2)]
        for value, sign in zip(moved, (1, -1), strict=True):
            value.data.view(-1)[at] += sign * step
        slopes = [torch.autograd.grad(loss(value), value)[0] for value in moved]
        numeric[at] = (slopes[0] - slopes[1]).flatten() / (2 * step)
    assert_close([want.reshape(size, size)], [numeric], 1e-6)
    assert_close([torch.func.hessian(loss)(query)], [want], 1e-10)
    assert_close([torch.func.jacrev(torch.func.jacrev(loss))(query)], [want], 1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_have_second_derivatives_too(dtype: torch.dtype) -> None:
    wide = leaves(ROW, PAIR, PAIR)
    results = []
    for tensors in (wide, [value.detach().to(dtype).requires_grad_() for value in wide]):
        (first,) = torch.autograd.grad(_mix(*tensors)[0].square().sum(), tensors[:1], create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), tensors))
    for got, want in zip(results[1], results[0], strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).abs().max() < 0.1 * want.abs().max()
