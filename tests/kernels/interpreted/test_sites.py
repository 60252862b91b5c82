"""Mixes and merges with every fused neighbour, forward and backward, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.interpreted.agreement import Case

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FUSIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "add": {"branch": True},
    "rmsnorm": {"norm": "rmsnorm"},
    "rmsnorm without weight": {"norm": "rmsnorm", "weight": False},
    "layernorm": {"norm": "layernorm"},
    "layernorm without bias": {"norm": "layernorm", "bias": False},
    "layernorm without parameters": {"norm": "layernorm", "weight": False, "bias": False},
    "add and rmsnorm": {"branch": True, "norm": "rmsnorm"},
    "add and layernorm": {"branch": True, "norm": "layernorm"},
}
LAYOUTS = ["as chosen", "tight", "chunked"]


def case(fusion: str, dtype: torch.dtype, **options: Any) -> Case:
    fused = {**FUSIONS[fusion], **options, "dtype": dtype}
    if fused.get("branch") is True:
        fused["branch"] = dtype
    return Case(**fused)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, indirect=True)
@pytest.mark.parametrize("merge", [False, True], ids=["mix", "merge"])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_every_fusion(fusion: str, merge: bool, layout: str, dtype: torch.dtype) -> None:
    case(fusion, dtype, merge=merge, sources=3, dim=72).check()


@pytest.mark.parametrize("layout", LAYOUTS, indirect=True)
@pytest.mark.parametrize("merge", [False, True], ids=["mix", "merge"])
@pytest.mark.parametrize(
    "options",
    [{"normalized": True}, {"scale": 0.125}, {"gain": 1.0}, {"scale": -2.0, "normalized": True, "gain": 0.5}],
    ids=str,
)
def test_every_variant_of_the_method(options: dict[str, Any], merge: bool, layout: str) -> None:
    Case(merge=merge, **options).check()


@pytest.mark.parametrize("sources", [2, 3, 5, 9, 17, 33, 65])
def test_any_number_of_sources(sources: int) -> None:
    Case(sources=sources, dim=16, tokens=2).check()


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 100, 128, 257, 768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_features(dim: int, dtype: torch.dtype) -> None:
    # The gradient of a LayerNorm over one or two features is zero but for its eps: nothing to compare.
    Case(sources=2, dim=dim, tokens=2, norm="layernorm" if dim > 2 else "", branch=dtype, dtype=dtype).check()


@pytest.mark.parametrize("dim", [2048, 5000, 16384])
def test_wide_rows(dim: int) -> None:
    Case(sources=2, dim=dim, tokens=2).check()


@pytest.mark.parametrize("layout", LAYOUTS, indirect=True)
@pytest.mark.parametrize("slots", [[0, 1, 2, 3, 4], [-1, 0, -2, 1, -1], [-2, -2, -2, -2, -2]], ids=str)
def test_later_gradients_are_added_and_unwanted_ones_left_out(slots: list[int], layout: str) -> None:
    Case(sources=5, slots=slots).check()


@pytest.mark.parametrize("slots", [[0], [-2]], ids=str)
def test_a_merge_adds_to_its_partial_sums_gradient(slots: list[int]) -> None:
    Case(merge=True, slots=slots, norm="layernorm").check()


@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("merge", [False, True], ids=["mix", "merge"])
def test_any_number_of_tokens(tokens: int, merge: bool) -> None:
    Case(tokens=tokens, dim=8, merge=merge, norm="rmsnorm").check()


def test_a_residual_stream_in_float32_beside_branches_in_bfloat16() -> None:
    Case(branch=torch.bfloat16, norm="rmsnorm").check()


@pytest.mark.parametrize("layout", LAYOUTS, indirect=True)
def test_magnitudes_of_1e4_in_float16(layout: str) -> None:
    Case(dtype=torch.float16, size=1e4, gain=1.0, sources=5).check()


@pytest.mark.parametrize("layout", LAYOUTS, indirect=True)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_one_source_that_dominates(at: int, layout: str) -> None:
    Case(query_size=40.0, edit={at: lambda row: row * 1e3}).check()


@pytest.mark.parametrize("layout", LAYOUTS, indirect=True)
def test_rows_of_zeros(layout: str) -> None:
    Case(edit={1: torch.zeros_like}).check()
    Case(edit=dict.fromkeys(range(3), torch.zeros_like)).check(backward=False)


@pytest.mark.parametrize("layout", LAYOUTS, indirect=True)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_is_not_finite_stays_in_its_row(at: int, bad: float, layout: str) -> None:
    def spoil(row: torch.Tensor) -> torch.Tensor:
        row = row.clone()
        row[1, 5] = bad
        return row

    Case(edit={at: spoil}).check(backward=False)
