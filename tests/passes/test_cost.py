"""The predicted cost, against counts made by hand with the paper's rules (docs/method.md)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.report import Cost

D, ITEM = 16, 4
ROW = D * ITEM


class Net(nn.Module):
    def __init__(self, sublayers: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(D, D) for _ in range(sublayers))
        self.head = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        for branch in self.branches:
            x = x + branch(x)
        return self.head(x)


def cost(sublayers: int, **options: int | bool | None) -> Cost:
    report = ac.explain(Net(sublayers), torch.randn(3, 5, D), ac.AttnResConfig(lowering="eager", **options))
    (stream,) = report.streams
    assert stream.cost is not None
    assert stream.cost.parameters == report.parameters_added
    return stream.cost


def test_full_form_forward() -> None:
    # 4 sublayers, each a source: sites over 2, 3, 4 and 5 sources move n + 1 rows each, and nothing is added up.
    found = cost(4, num_blocks=None)
    assert found.itemsize == ITEM
    assert found.parameters == 4 * D
    assert found.plain_bytes == 4 * 3 * ROW
    assert found.direct_bytes == (3 + 4 + 5 + 6) * ROW
    # One site per set of finished blocks: no two phases.
    assert found.two_phase_bytes == found.direct_bytes


def test_blocks_forward() -> None:
    # 2 blocks of 2: sites over {root, partial}, {root, b1}, {root, b1, partial}, {root, b1, b2}; one add per block.
    found = cost(4, num_blocks=2)
    assert found.direct_bytes == (3 + 3 + 4 + 4) * ROW + 2 * 3 * ROW


@pytest.mark.parametrize("sublayers", [16, 32])
def test_two_phases_move_fewer_bytes_where_blocks_are_large(sublayers: int) -> None:
    found = cost(sublayers, num_blocks=4)
    assert found.two_phase_bytes < found.direct_bytes
    assert found.two_phase_training_bytes < found.direct_training_bytes
    assert found.plain_training_bytes == 2 * found.plain_bytes


def test_activations() -> None:
    # At the last site root and 4 blocks are alive, where the plain stream holds one row.
    found = cost(8, num_blocks=4)
    assert found.activation_bytes == 4 * ROW
    # Kept for the backward: 4 block sums, 4 sums in progress, and a float32 per token for each of the 8 queries.
    assert found.training_activation_bytes == (4 + 4) * ROW + 8 * 4


def test_half_precision_halves_the_rows() -> None:
    model, inputs = Net(6).to(torch.bfloat16), torch.randn(3, 5, D, dtype=torch.bfloat16)
    (stream,) = ac.explain(model, inputs, ac.AttnResConfig(num_blocks=3, lowering="eager")).streams
    full, half = cost(6, num_blocks=3), stream.cost
    assert half is not None
    for field in dataclasses.fields(Cost):
        if field.name.endswith("_bytes") and "training" not in field.name:
            assert getattr(full, field.name) == 2 * getattr(half, field.name), field.name
    assert cost(6, num_blocks=3, key_norm_weight=True).parameters == 2 * full.parameters
