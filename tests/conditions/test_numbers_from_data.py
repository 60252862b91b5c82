"""Numbers that a model reads from its tensors: dynamo traces them as one graph only when it is told to."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.helpers import randomize, relative_error

WIDTH = 8


class Counted(nn.Module):
    """Pre-norm branches, each divided by a number that is read from the data."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, branch in zip(self.norms, self.branches, strict=True):
            f = branch(norm(x))
            x = x + f / (1.0 + (f > 0).sum().item())
        return x


def test_numbers_read_between_the_adds() -> None:
    model = randomize(Counted().double())
    plain = copy.deepcopy(model)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    ac.transform(model, (x,), config=ac.AttnResConfig(num_blocks=2, lowering="eager"))
    assert len(ac.report(model).streams[0].sublayers) == 4
    for data in (x, torch.randn(2, 3, WIDTH, dtype=torch.float64)):
        assert relative_error([model(data)], [plain(data)]) <= 1e-12
        assert relative_error([model(data)], [plain(data)]) <= 1e-12
    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.grad = None
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    own = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if name in own:
            assert relative_error([parameter.grad], [own[name].grad]) <= 1e-11, name
    assert all(query.grad is not None and query.grad.any() for query in list(ac.pseudo_queries(model).values())[1:])
