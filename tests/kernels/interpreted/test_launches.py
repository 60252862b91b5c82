"""What launches must keep whatever the spec: layouts, repeatability, and random specs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnres_compile.kernels import launch
from attnres_compile.kernels import rows as launches
from tests.kernels.interpreted.agreement import Case
from tests.kernels.interpreted.test_phase_1 import check as check_phase_1

OPTIONS = ("", 1e-6, -1, 1e-6, 3.0, 1.0, False)


def site(query: Tensor, rows: list[Tensor], dim: int = -1) -> list[Tensor]:
    return launch.site(query, rows, None, None, None, None, None, "", 1e-6, dim, 1e-6, 3.0, 1.0, False, True)


def gradients(query: Tensor, rows: list[Tensor], grad: Tensor, found: list[Tensor], dim: int = -1) -> list[Tensor]:
    options = ("", 1e-6, dim, 1e-6, 3.0, 1.0, False)
    return launch.site_backward(
        grad, query, rows, None, None, None, None, found[0], found[1], [], [-1] * len(rows), *options
    )


def layouts() -> dict[str, list[Tensor]]:
    """Three sources of [2, 6, 16] in memory layouts that all hold the same numbers."""
    torch.manual_seed(0)
    dense = [torch.randn(2, 6, 16) for _ in range(3)]
    wide = [torch.zeros(2, 6, 40) for _ in dense]
    spread = [torch.zeros(2, 12, 16) for _ in dense]
    turned = [value.transpose(0, 1).contiguous().transpose(0, 1) for value in dense]
    broken = [value.movedim(-1, 0).contiguous().movedim(0, -1) for value in dense]
    for value, padded, sparse in zip(dense, wide, spread, strict=True):
        padded[..., 8:24] = value
        sparse[:, ::2] = value
    return {
        "dense": dense,
        "padded rows": [value[..., 8:24] for value in wide],
        "every second row": [value[:, ::2] for value in spread],
        "tokens turned": turned,
        "features not contiguous": broken,
        "mixed": [dense[0], wide[1][..., 8:24], broken[2]],
    }


@pytest.mark.parametrize("name", layouts())
def test_rows_anywhere_in_memory(name: str) -> None:
    dense, rows = layouts()["dense"], layouts()[name]
    query, grad = torch.randn(16), torch.randn(2, 6, 16)
    expected, found = site(query, dense), site(query, rows)
    for value, right in zip(found, expected, strict=True):
        assert torch.equal(value, right)
    for value, right in zip(gradients(query, rows, grad, found), gradients(query, dense, grad, found), strict=True):
        assert torch.equal(value, right)


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_the_feature_dimension_anywhere(dim: int) -> None:
    dense = layouts()["dense"]
    query, grad = torch.randn(16), torch.randn(2, 6, 16)
    moved = [value.movedim(-1, dim).contiguous() for value in dense]
    expected, found = site(query, dense), site(query, moved, dim)
    assert torch.equal(found[0], expected[0].movedim(-1, dim))
    assert found[0].stride() == moved[0].stride()
    assert torch.equal(found[1], expected[1])
    made = gradients(query, moved, grad.movedim(-1, dim), found, dim)
    for value, right in zip(made[1:], gradients(query, dense, grad, expected)[1:], strict=True):
        assert torch.equal(value, right.movedim(-1, dim))


@pytest.mark.parametrize("programs", [1, 3, 7])
def test_two_runs_give_the_same_bits_and_any_number_of_programs_the_same_gradient(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    rows = [torch.randn(23, 32) for _ in range(3)]
    query, grad = torch.randn(32), torch.randn(23, 32)
    found = site(query, rows)
    once = gradients(query, rows, grad, found)
    monkeypatch.setattr(launches, "_programs", lambda *_: programs)
    assert all(torch.equal(a, b) for a, b in zip(site(query, rows), found, strict=True))
    again = gradients(query, rows, grad, found)
    for value, right in zip(gradients(query, rows, grad, found), again, strict=True):
        assert torch.equal(value, right)
    for value, right in zip(again, once, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-5)


def test_zero_queries_give_the_plain_sum_exactly() -> None:
    torch.manual_seed(0)
    rows = [torch.randn(5, 64) for _ in range(3)]
    assert torch.equal(site(torch.zeros(64), rows)[0], rows[0] + rows[1] + rows[2])


def test_operands_are_not_written() -> None:
    rows = layouts()["dense"]
    kept = [value.clone() for value in rows]
    found = site(torch.randn(16), rows)
    gradients(torch.randn(16), rows, torch.randn(2, 6, 16), found)
    assert all(torch.equal(a, b) for a, b in zip(rows, kept, strict=True))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    case=st.builds(
        Case,
        sources=st.integers(2, 12),
        dim=st.integers(3, 300),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        tokens=st.integers(0, 3),
        merge=st.booleans(),
        branch=st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16]),
        norm=st.sampled_from(["", "rmsnorm", "layernorm"]),
        weight=st.booleans(),
        bias=st.booleans(),
        gain=st.sampled_from([None, 1.0, 2.5]),
        scale=st.sampled_from([1.0, 0.1]),
        normalized=st.booleans(),
        seed=st.integers(0, 5),
    )
)
def test_random_sites(case: Case) -> None:
    case.check()


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    sources=st.integers(2, 8),
    queries=st.integers(1, 6),
    dim=st.integers(3, 150),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    tokens=st.integers(0, 3),
    scale=st.sampled_from([1.0, 0.1]),
    normalized=st.booleans(),
)
def test_random_first_phases(
    sources: int, queries: int, dim: int, dtype: torch.dtype, tokens: int, scale: float, normalized: bool
) -> None:
    check_phase_1(sources, queries, dim, dtype, tokens, scale, normalized)
