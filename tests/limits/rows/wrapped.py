"""Streams whose tensors are no plain ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests import models
from tests.limits.condition import Condition, Holds, Limit


class _PerSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = models.build()

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: self.inner(row[None])[0])(x)


def _under_vmap() -> None:
    ac.transform(_PerSample(), models.example(), ac.AttnResConfig(lowering="eager"))


class _Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = x + linear(x)
        return x.values()


def _nested() -> None:
    x = torch.nested.nested_tensor([torch.randn(3, 5), torch.randn(2, 5)], layout=torch.jagged)
    ac.transform(_Jagged(), x, ac.AttnResConfig(lowering="eager"))


CONDITION = Condition(
    order=26,
    title="Batched and nested tensors",
    holds=(
        Holds(
            "`torch.vmap` in a branch, before a stream or behind it",
            ("tests/passes/test_wrapped.py::test_vmap_beside_a_stream",),
        ),
        Holds(
            "A stream on the `values()` of a nested tensor",
            ("tests/passes/test_wrapped.py::test_the_values_of_a_nested_tensor_are_plain",),
        ),
    ),
    limits=(
        Limit(
            what="A model whose own code runs a residual stream inside `torch.vmap`",
            program=_under_vmap,
            error=ac.NoStreamError,
            reason="under_vmap",
            why="The operators of depth attention have no rule for batching inside a graph.",
            instead="Write the batch as a dimension of the stream; or transform the module that is called under "
            "`torch.vmap` by itself: a converted module can be.",
        ),
        Limit(
            what="A residual stream of nested tensors",
            program=_nested,
            error=ac.NoStreamError,
            reason="nested_tensor",
            why="The operators of depth attention take plain tensors.",
            instead="Run the stream on a padded tensor, or on `values()`.",
        ),
    ),
)
