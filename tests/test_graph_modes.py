"""A rewritten graph that calls modules, put into another mode afterwards: what the original computes, or an error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import attnres_compile as ac
from tests.helpers import relative_error

CONFIG = ac.AttnResConfig(num_blocks=3)
X = torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Dropout where ``where`` says: on the stream as one module or one per layer, or in the branch."""

    def __init__(self, where: str, p: float = 0.3) -> None:
        super().__init__()
        self.where = where
        self.embed = nn.Linear(8, 8)
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))
        self.drop = nn.Dropout(p)
        self.drops = nn.ModuleList(nn.Dropout(p) for _ in range(4))
        self.batch = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, linear, drop in zip(self.norms, self.linears, self.drops, strict=True):
            branch = linear(norm(x))
            if self.where == "branch":
                x = x + self.batch(drop(branch))
            elif self.where == "function":
                x = F.dropout(x + branch, 0.3, self.training)
            else:
                x = (drop if self.where == "each" else self.drop)(x + branch)
        return x


def traced(where: str, p: float = 0.3) -> tuple[nn.Module, fx.GraphModule]:
    torch.manual_seed(0)
    model = Net(where, p).double().eval()
    graph = fx.symbolic_trace(model)
    return graph, ac.rewrite_graph(graph, (X,), CONFIG)[0]


def deep(module: fx.GraphModule) -> fx.GraphModule:
    return copy.deepcopy(module)


def pickled(module: fx.GraphModule) -> fx.GraphModule:
    return pickle.loads(pickle.dumps(module))


def as_it_is(module: fx.GraphModule) -> fx.GraphModule:
    return module


@pytest.mark.parametrize("change", [as_it_is, deep, pickled])
@pytest.mark.parametrize("where", ["shared", "each"])
def test_a_mode_that_would_draw_a_mask_per_source_is_refused(
    where: str, change: Callable[[fx.GraphModule], fx.GraphModule]
) -> None:
    original, graph = traced(where)
    graph = change(graph)
    assert relative_error(graph(X), original(X)) <= 1e-12
    graph.train()
    with pytest.raises(ac.PlanMismatchError, match="dropout on a residual stream was in evaluation mode"):
        graph(X)
    graph.eval()
    assert relative_error(graph(X), original.eval()(X)) <= 1e-12


def test_one_module_alone_put_into_training_mode_is_refused() -> None:
    _, graph = traced("each")
    graph.get_submodule("drops.2").train()
    with pytest.raises(ac.PlanMismatchError, match=r"drops\.2"):
        graph(X)


def test_a_probability_that_changes_is_refused() -> None:
    original, graph = traced("shared", p=0.0)
    graph.train()
    assert relative_error(graph(X), original(X)) <= 1e-12
    graph.get_submodule("drop").p = 0.5
    with pytest.raises(ac.PlanMismatchError):
        graph(X)


@pytest.mark.parametrize("where", ["branch", "function"])
def test_what_follows_the_mode_as_the_original_does_may(where: str) -> None:
    original, graph = traced(where)
    for train in (False, True, False):
        results = []
        for each in (original, graph):
            each.train(train)
            torch.manual_seed(1)
            results.append(each(X))
        assert relative_error(results[1], results[0]) <= 1e-12, train
