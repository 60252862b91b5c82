"""Whose parameters these are."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel

from attnres_compile.running.models import copies_of, owner_of


class Model(nn.Module):
    """A body that holds all parameters, and a head that shares one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.head = nn.Linear(3, 3)
        self.head.weight, self.head.bias = self.body[0].weight, self.body[0].bias

    def forward(self, x: object) -> object:
        return self.head(self.body(x))


class Holder(nn.Module):
    """Holds models and is none: it has no forward."""

    def __init__(self, **models: nn.Module) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)


def test_the_smallest_that_holds_them_and_of_equals_the_outermost() -> None:
    model, other = Model(), nn.Linear(2, 2)
    holders = [Holder(model=model), Holder(model=model, other=other), nn.ModuleList([model])]
    assert owner_of(model.parameters()) is model
    assert owner_of(list(model.parameters())[:3]) is model
    assert owner_of(other.parameters()) is other
    assert owner_of([*model.parameters(), *nn.Linear(1, 1).parameters()]) is None
    assert owner_of([]) is None
    del holders


def test_a_model_in_data_parallelism_is_not_converted_behind_its_back() -> None:
    model = Model()
    wrapped = DataParallel(model)
    assert owner_of(model.parameters()) is None
    del wrapped
    assert owner_of(model.parameters()) is model


def test_copies() -> None:
    model = Model()
    twin = nn.Sequential(model)
    assert copies_of(model) == 0
    copies = [Model(), Model()]
    assert copies_of(model) == 2
    del copies, twin
