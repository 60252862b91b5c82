"""The operators for the two phases and for whole sites: values and gradients against the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnres_compile.kernels import reference
from attnres_compile.kernels.plain import FRESH
from tests.kernels.phases import (
    NARROW,
    NORMS,
    OPS,
    SHAPES,
    Read,
    Site,
    assert_close,
    generator,
    gradients,
    site,
    ulps,
    without,
)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_inter(shape: tuple[int, ...], dim: int, normalized: bool) -> None:
    for count, reads in ((1, 1), (2, 3), (5, 2)):
        normal = generator(count)
        queries = [normal(shape[dim]).div(shape[dim] ** 0.5).requires_grad_() for _ in range(reads)]
        sources = [normal(*shape).mul(0.5 + index).requires_grad_() for index in range(count)]
        read = Read(dim=dim, normalized=normalized)
        found = OPS.inter(queries, sources, *read.inter)
        mixes, lses = reference.inter(queries, sources, **read.named(gain=False))
        assert_close(found, [*mixes, *lses])
        assert all(lse.is_contiguous() for lse in found[reads:])
        inputs = [*queries, *sources]
        assert_close(gradients(found, inputs), gradients([*mixes, *lses], inputs))


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_merge(shape: tuple[int, ...], dim: int, normalized: bool) -> None:
    normal = generator()
    read = Read(dim=dim, normalized=normalized)
    inputs = [normal(shape[dim]), normal(*shape), normal(*without(shape, dim)), normal(*shape)]
    inputs = [value.requires_grad_() for value in inputs]
    found = OPS.merge(*inputs, *read.merge)
    expected = reference.merge(*inputs, **read.named())
    assert_close([found], [expected])
    assert_close(gradients([found], inputs), gradients([expected], inputs))


@pytest.mark.parametrize("kind", ["mix", "merge"])
@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize(("norm", "parameters"), NORMS)
@pytest.mark.parametrize("keep", [False, True])
def test_site(kind: str, branch: bool, norm: str, parameters: str, keep: bool) -> None:
    for (shape, dim), normalized in zip(SHAPES[:4], (False, True, False, True), strict=True):
        problem = site(kind, branch, norm, parameters, shape=shape, read=Read(dim=dim, normalized=normalized))
        expected = problem.reference()
        found = problem.operator(keep)
        assert_close(found[: len(expected)], expected)
        kept = found[len(expected) :]
        assert len(kept) == (keep and kind == "mix") * (1 + bool(norm))
        assert not any(value.requires_grad for value in kept)
        assert_close(
            gradients(found[: len(expected)], problem.tensors), gradients(expected, problem.tensors), tolerance=1e-10
        )
        if kept:
            _, (lse,) = reference.inter(
                [problem.query],
                [*problem.sources[:-1], expected[1] if branch else problem.sources[-1]],
                **problem.read.named(gain=False),
            )
            assert_close(kept[-1:], [lse.detach()])
        if kept and norm:
            (h, *_) = replace(problem, norm="", weight=None, bias=None).reference()
            assert_close(kept[:1], [h.detach()])


@pytest.mark.parametrize("count", [2, 17, 65])
def test_many_sources(count: int) -> None:
    problem = site("mix", count=count, shape=(3, 24), norm="rmsnorm", read=Read(gain=float(count)))
    expected = problem.reference()
    assert_close(problem.operator(), expected)
    assert_close(gradients(problem.operator(), problem.tensors), gradients(expected, problem.tensors))


@pytest.mark.parametrize("reads", [1, 32])
def test_many_queries(reads: int) -> None:
    normal = generator()
    queries = [normal(12).requires_grad_() for _ in range(reads)]
    sources = [normal(5, 12).requires_grad_() for _ in range(9)]
    found = OPS.inter(queries, sources, *Read().inter)
    mixes, lses = reference.inter(queries, sources, **Read().named(gain=False))
    assert_close(found, [*mixes, *lses])
    assert_close(gradients(found, [*queries, *sources]), gradients([*mixes, *lses], [*queries, *sources]))


@pytest.mark.parametrize("normalized", [False, True])
def test_two_phases_are_one_mix(normalized: bool) -> None:
    """Phase 1 over the finished blocks and phase 2 with the partial sum, against a mix over all, gradients included."""
    normal = generator()
    read = Read(gain=5.0, normalized=normalized)
    queries = [normal(16).requires_grad_() for _ in range(3)]
    sources = [normal(2, 3, 16).requires_grad_() for _ in range(5)]
    inputs = [*queries, *sources]
    *blocks, partial = sources
    found = OPS.inter(queries, blocks, *read.inter)
    two = [
        OPS.merge(query, mixed, lse, partial, *read.merge)
        for query, mixed, lse in zip(queries, found[:3], found[3:], strict=True)
    ]
    one = [OPS.mix(query, sources, *read.merge) for query in queries]
    assert_close([value.detach() for value in two], [value.detach() for value in one], 1e-12)
    assert_close(gradients(two, inputs), gradients(one, inputs))


def test_zero_query_gives_the_plain_sum() -> None:
    normal = generator()
    for count in (2, 7, 41):
        sources = [normal(4, 16) for _ in range(count)]
        total = torch.stack(sources).sum(0)
        query = torch.zeros(16, dtype=torch.float64)
        options = (-1, 1e-6, float(count), 1.0, False)
        (out,) = OPS.site(query, sources, *[None] * 5, "", 0.0, *options, False)
        torch.testing.assert_close(out, total, rtol=1e-12, atol=1e-12)
        mixed, lse = OPS.inter([query], sources[:-1], -1, 1e-6, 1.0, False)
        merged = OPS.merge(query, mixed, lse, sources[-1], *options)
        torch.testing.assert_close(merged, total, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------ narrow dtypes


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("kind", ["mix", "merge"])
@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize(("norm", "parameters"), NORMS)
def test_site_within_two_ulp(kind: str, branch: bool, norm: str, parameters: str, dtype: torch.dtype) -> None:
    problem = site(kind, branch, norm, parameters, shape=(40, 96)).cast(dtype)
    found = problem.operator()
    assert all(value.dtype == dtype for value in found)
    exact = problem.cast(torch.float64)
    if branch:
        total = (exact.sources[-1] + exact.branch).to(dtype)
        assert torch.equal(found[1], total)
        exact = replace(exact, sources=[*exact.sources[:-1], total.double()], branch=None)
    (out,) = exact.reference()
    # What cancels inside a sum leaves float32's errors of its terms.
    size = torch.full_like(out, max(float(value.abs().max()) for value in exact.sources) * 2.0**-12)
    if norm == "layernorm":
        # The mix is rounded before its norm. That takes a mean away, of the roundings too; the bias cancels more.
        (h,) = replace(exact, norm="", weight=None, bias=None).reference()
        size = (h.abs() + h.abs().amax(-1, keepdim=True) / 16) / h.std(-1, keepdim=True)
        size = size if exact.weight is None else size * exact.weight.abs()
    assert ulps(found[0], out, size) <= 2


@pytest.mark.parametrize("dtype", NARROW)
def test_phases_within_two_ulp(dtype: torch.dtype) -> None:
    normal = generator()
    queries = [normal(96).div(9).to(dtype) for _ in range(3)]
    sources = [normal(40, 96).to(dtype) for _ in range(6)]
    found = OPS.inter(queries, sources, *Read().inter)
    mixes, lses = reference.inter(
        [query.double() for query in queries], [source.double() for source in sources], **Read().named(gain=False)
    )
    floor = torch.full_like(mixes[0], 2.0**-10)
    for value, exact in zip(found[:3], mixes, strict=True):
        assert value.dtype == dtype
        assert ulps(value, exact, floor) <= 2
    for value, exact in zip(found[3:], lses, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)
    merged = OPS.merge(queries[0], found[0], found[3], sources[-1], *Read().merge)
    exact = reference.merge(
        queries[0].double(), found[0].double(), found[3].double(), sources[-1].double(), **Read().named()
    )
    assert merged.dtype == dtype
    assert ulps(merged, exact, floor) <= 2


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize("kind", ["mix", "merge"])
def test_gradients_of_narrow_dtypes(kind: str, dtype: torch.dtype) -> None:
    problem = site(kind, True, "layernorm", "wb", shape=(20, 96)).cast(dtype).leaves()
    exact = problem.cast(torch.float64).leaves()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    found = gradients(problem.operator(True)[:2], problem.tensors)
    assert [value.dtype for value in found] == [value.dtype for value in problem.tensors]
    for value, wanted in zip(found, gradients(exact.reference(), exact.tensors), strict=True):
        assert_close([value], [wanted], tolerance)


def test_stream_in_float32_beside_narrow_branches() -> None:
    normal = generator()
    sources = [normal(6, 32).float().requires_grad_() for _ in range(3)]
    branch = normal(6, 32).bfloat16().requires_grad_()
    query = normal(32).bfloat16().requires_grad_()
    weight = normal(32).bfloat16().requires_grad_()
    problem = Site(query, sources, branch=branch, weight=weight, norm="rmsnorm")
    out, partial = problem.operator(True)[:2]
    assert out.dtype == partial.dtype == torch.float32
    assert torch.equal(partial, sources[-1] + branch)
    found = gradients([out, partial], problem.tensors)
    exact = problem.cast(torch.float64).leaves()
    for value, wanted, tensor in zip(found, gradients(exact.reference(), exact.tensors), problem.tensors, strict=True):
        assert value.dtype == tensor.dtype
        assert_close([value], [wanted], 1e-5 if tensor.dtype == torch.float32 else 1e-2)


# ------------------------------------------------------------------ inputs at the edge


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broken_values_stay_in_their_token(value: float, dtype: torch.dtype) -> None:
    normal = generator()
    sources = [normal(3, 64).to(dtype) for _ in range(3)]
    sources[1][1, 5] = value
    query = normal(64).to(dtype)
    mixed, lse = OPS.inter([query], sources, *Read().inter)
    merged = OPS.merge(query, mixed, lse, sources[0], *Read().merge)
    *_, norm = ops_site = Site(query, sources, norm="layernorm").operator(True)
    for found in (mixed, lse.unsqueeze(-1), merged, ops_site[0], norm.unsqueeze(-1)):
        assert not found[1].isfinite().any()
        assert found[[0, 2]].isfinite().all()
    grads = OPS.site_backward(
        *(torch.ones_like(mixed), query, sources, *[None] * 6, [], [FRESH] * 3, "", 0.0, *Read().merge)
    )
    for found in grads[1:]:
        assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_values(dtype: torch.dtype) -> None:
    """Large sources, one that dominates, and rows of zeros."""
    normal = generator()
    sources = [(normal(6, 64) * 1e4).to(dtype), (normal(6, 64) * 1e-3).to(dtype), torch.zeros(6, 64, dtype=dtype)]
    query = (normal(64) * 10).to(dtype)
    found = OPS.site(query, sources, *[None] * 5, "", 0.0, *Read(gain=1.0).merge, False)[0]
    exact = reference.mix(query.double(), [s.double() for s in sources], **Read(gain=1.0).named())
    assert found.isfinite().all()
    # Logits of some tens, in float32, give weights to 1e-5 or so.
    torch.testing.assert_close(found.double(), exact, rtol=max(2 * torch.finfo(dtype).eps, 1e-4), atol=1e-4)
    for value in OPS.mix_backward(torch.ones_like(found), query, sources, *Read(gain=1.0).merge)[1:]:
        assert not value.isnan().any()


def test_merge_far_from_balance() -> None:
    """A share of nearly nothing keeps its relative accuracy, on either side."""
    normal = generator()
    query, mixed, partial = normal(16), normal(5, 16), normal(5, 16)
    for lse in (-20.0, 20.0):
        inputs = [query, mixed, torch.full((5,), lse, dtype=torch.float64), partial]
        narrow = [value.float().requires_grad_() for value in inputs]
        exact = [value.detach().double().requires_grad_() for value in narrow]
        found = gradients([OPS.merge(*narrow, *Read().merge)], narrow)
        expected = gradients([reference.merge(*exact, **Read().named())], exact)
        for value, wanted in zip(found[1:3], expected[1:3], strict=True):
            torch.testing.assert_close(value.double(), wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", ["mix", "merge"])
def test_no_tokens(kind: str) -> None:
    problem = site(kind, True, "layernorm", "wb", shape=(0, 8))
    out, partial, *_ = problem.operator(True)
    assert out.shape == partial.shape == (0, 8)
    grads = gradients([out, partial], problem.tensors)
    assert [grad.shape for grad in grads] == [value.shape for value in problem.tensors]
    assert torch.equal(grads[0], torch.zeros(8, dtype=torch.float64))


def test_two_runs_give_the_same_bits() -> None:
    problem = site("mix", True, "layernorm", "wb", count=9, shape=(64, 128)).cast(torch.float32).leaves()
    first, second = ([*(out := problem.operator(True)), *gradients(out[:2], problem.tensors)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    problem = site("mix", True, "layernorm", "wb").cast(torch.float32).leaves()
    alone = [*(out := problem.operator(True)), *gradients(out[:2], problem.tensors)]
    with torch.autocast("cpu", dtype=dtype):
        cast = [*(out := problem.operator(True)), *gradients(out[:2], problem.tensors)]
    assert all(torch.equal(a, b) for a, b in zip(alone, cast, strict=True))
