"""Graph modules as models: converted as any other, and what reads their graph in another way refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import attnres_compile as ac
from tests.helpers import randomize, randomize_queries, relative_error

D = 8
CONFIG = ac.AttnResConfig(num_blocks=None, lowering="eager")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(4))
        self.linears = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + self.drop(linear(norm(x)))
        return x


def plain() -> nn.Module:
    return randomize(Net()).double().eval()


def x() -> Tensor:
    return torch.randn(2, 3, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * 2) / 2  # type: ignore[no-any-return]


MAKES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "symbolic_trace": fx.symbolic_trace,
    "torch.export": lambda model: torch.export.export(model, (x(),)).module(),
    "by hand": lambda model: fx.GraphModule(model, fx.Tracer().trace(model)),
    "inside another module": lambda model: Around(fx.symbolic_trace(model)),
}


def converted(make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = ac.transform(make(plain()), x(), CONFIG)
    randomize_queries(ac.pseudo_queries(model))
    return model


@pytest.mark.parametrize("name", MAKES)
def test_a_graph_module_computes_what_its_module_does(name: str) -> None:
    make = MAKES[name]
    original = make(plain())
    assert relative_error(ac.transform(make(plain()), x(), CONFIG)(x()), original(x())) < 1e-12
    model = converted(make)
    reference = (Around if name.startswith("inside") else lambda m: m)(plain())
    ac.transform(reference, x(), CONFIG)
    randomize_queries(ac.pseudo_queries(reference))
    got, want = model(x()), reference(x())
    assert relative_error(got, want) < 1e-12
    assert relative_error(got, original(x())) > 1e-3
    got.square().sum().backward()
    want.square().sum().backward()
    queries = zip(ac.pseudo_queries(model).values(), ac.pseudo_queries(reference).values(), strict=True)
    for one, other in queries:
        assert relative_error(one.grad, other.grad) < 1e-10


@pytest.mark.parametrize("name", MAKES)
def test_verified_compiled_copied_and_reverted(name: str) -> None:
    make = MAKES[name]
    ac.transform(make(plain()), x(), CONFIG, verify=True)
    model = converted(make)
    want = model(x())
    assert relative_error(copy.deepcopy(model)(x()), want) == 0
    twice = copy.deepcopy(copy.deepcopy(model))
    assert relative_error(twice(x()), want) == 0
    assert twice.state_dict().keys() == model.state_dict().keys()
    original = make(plain())
    for each in (model, twice):
        ac.revert(each)
        assert torch.equal(each(x()), original(x()))
        assert each.state_dict().keys() == original.state_dict().keys()
        assert torch.equal(copy.deepcopy(each)(x()), original(x()))
        fx_module = each.inner if isinstance(each, Around) else each
        assert isinstance(fx_module, fx.GraphModule)
        assert "attnres" not in fx_module.code
        assert not any("attnres" in str(key) for key in fx_module.meta)


def test_plain_is_the_original() -> None:
    model = converted(fx.symbolic_trace)
    with ac.plain(model):
        assert torch.equal(model(x()), plain()(x()))
    assert not torch.equal(model(x()), plain()(x()))


OTHERWISE: dict[str, Callable[[Any], Any]] = {
    "copy.copy": lambda model: copy.copy(model)(x()),
    "an interpreter": lambda model: fx.Interpreter(model).run(x()),
    "its class": lambda model: type(model).forward(model, x()),
    "a graph module of its graph": lambda model: fx.GraphModule(model, model.graph)(x()),
    "compiled": lambda model: torch.compile(copy.copy(model), backend="eager")(x()),
    "pickle": lambda model: pickle.loads(pickle.dumps(model))(x()),
    "traced again": lambda model: fx.symbolic_trace(model)(x()),
    "torch.export": lambda model: torch.export.export(model, (x(),), strict=False).module()(x()),
    "torch.export, strict": lambda model: torch.export.export(model, (x(),), strict=True).module()(x()),
    "rewrite_graph": lambda model: ac.rewrite_graph(model, (x(),), CONFIG)[0](x()),
    "export_program": lambda model: ac.export_program(model, x()).module()(x()),
}


@pytest.mark.parametrize("way", OTHERWISE)
def test_its_graph_runs_in_no_other_way(way: str) -> None:
    model = converted(fx.symbolic_trace)
    want = model(x())
    with pytest.raises(ac.PlainExecutionError) as caught:
        OTHERWISE[way](model)
    assert "revert" in caught.value.remedy or "state_dict" in caught.value.remedy
    assert torch.equal(model(x()), want)


def test_a_state_dict_of_a_graph_module_is_loaded() -> None:
    model = converted(fx.symbolic_trace)
    other = ac.transform(fx.symbolic_trace(plain()), x(), CONFIG)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x()), model(x()))
