"""Phase 1, several queries over the finished blocks, forward and backward, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnres_compile.kernels import launch, reference, tuning
from tests.kernels.interpreted.agreement import MANTISSA, agree, query_gradient_size

LAYOUTS = ["as chosen", "tight", "chunked"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(
    sources: int = 3,
    queries: int = 3,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    tokens: int = 3,
    scale: float = 1.0,
    normalized: bool = False,
    slots: list[int] | None = None,
) -> None:
    """Mixes, log-sum-exps and all gradients agree with float64."""
    torch.manual_seed(0)
    rows = [torch.randn(tokens, dim).to(dtype) for _ in range(sources)]
    given = [torch.randn(dim) / dim**0.5 for _ in range(queries)]
    options = (-1, 1e-6, scale, normalized)
    found = launch.inter(given, rows, *options)
    exact_queries = [q.double().requires_grad_() for q in given]
    exact_rows = [row.double().requires_grad_() for row in rows]
    mixes, lses = reference.inter(exact_queries, exact_rows, *options)
    for value, right in zip(found, [*mixes, *lses], strict=True):
        agree(value, right.detach())
    assert all(value.dtype == dtype for value in found[:queries])
    assert all(value.dtype == torch.float32 for value in found[queries:])

    slots = [-1] * sources if slots is None else slots
    there = [torch.randn(tokens, dim).to(dtype) for slot in slots if slot >= 0]
    grads = [torch.randn(tokens, dim).to(dtype) for _ in range(queries)]
    lse_grads = [torch.randn(tokens) for _ in range(queries)]
    made = launch.inter_backward(
        [*grads, *lse_grads], given, rows, found[:queries], found[queries:], there, slots, *options
    )
    # <gradient, mix> is taken of the mix as it is stored.
    off = [
        (g.double() * (right.detach() - value.double())).sum(-1)
        for g, right, value in zip(grads, mixes, found[:queries], strict=True)
    ]
    all_grads = [g.double() for g in (*grads, *(g + o for g, o in zip(lse_grads, off, strict=True)))]
    expected = torch.autograd.grad([*mixes, *lses], [*exact_queries, *exact_rows], all_grads)
    wanted = list(expected[:queries])
    for slot, value in zip(slots, expected[queries:], strict=True):
        if slot >= 0:
            wanted.append(value + there[slot].double())
        elif slot == -1:
            wanted.append(value)
    assert len(made) == len(wanted)
    parts = [
        query_gradient_size(q, rows, g, 1.0, scale, normalized, lse_grad=lse_grad)
        for q, g, lse_grad in zip(given, grads, lse_grads, strict=True)
    ]
    for index, (value, right) in enumerate(zip(made, wanted, strict=True)):
        if index < queries and dtype != torch.float32:
            unit = 2.0 ** -MANTISSA[dtype]
            error, size = (value.double() - right).abs(), right.abs()
            assert not tokens or error.max() <= 2 * unit * size.max()
        elif index < queries:
            agree(value, right, least=parts[index])
        else:
            # Each group of queries adds its part to what the ones before left, rounded as autograd's own adds round.
            agree(value, right, ulps=1.0 + len(tuning.query_groups(queries, dim, True, sources)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, indirect=True)
def test_every_layout(layout: str, dtype: torch.dtype) -> None:
    check(sources=4, queries=3, dim=72, dtype=dtype)


@pytest.mark.parametrize("layout", LAYOUTS, indirect=True)
@pytest.mark.parametrize("options", [{"normalized": True}, {"scale": 0.125}, {"tokens": 0}, {"tokens": 1}], ids=str)
def test_every_variant(options: dict[str, Any], layout: str) -> None:
    check(**options)


@pytest.mark.parametrize("queries", [1, 2, 5, 8, 32])
def test_any_number_of_queries(queries: int) -> None:
    check(queries=queries, dim=16, tokens=2)


@pytest.mark.parametrize("sources", [1, 2, 9, 35, 64])
def test_any_number_of_sources(sources: int) -> None:
    check(sources=sources, queries=2, dim=8, tokens=2)


@pytest.mark.parametrize("layout", LAYOUTS, indirect=True)
@pytest.mark.parametrize("slots", [[0, 1, 2], [-1, 0, -2], [-2, -2, -2]], ids=str)
def test_later_gradients_are_added_and_unwanted_ones_left_out(slots: list[int], layout: str) -> None:
    check(slots=slots)


@pytest.mark.parametrize("layout", LAYOUTS, indirect=True)
def test_two_phases_make_the_one_phase_mix(layout: str) -> None:
    torch.manual_seed(0)
    rows: list[Tensor] = [torch.randn(4, 48) for _ in range(5)]
    queries = [torch.randn(48) / 7 for _ in range(3)]
    found = launch.inter(queries, rows[:4], -1, 1e-6, 1.0, False)
    for s, query in enumerate(queries):
        none = (None, None, None, "", 1e-6, -1, 1e-6, 5.0, 1.0, False, False)
        (merged,) = launch.site(query, rows[4:], found[s], found[3 + s], *none)
        (direct,) = launch.site(query, rows, None, None, *none)
        torch.testing.assert_close(merged, direct, rtol=1e-5, atol=1e-5)
