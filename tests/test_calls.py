"""One network that is called several times in one forward: one set of queries, whatever makes the calls.

References are written by hand: the sum of what each call gives, and forces as the gradient of the energy.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.helpers import relative_error

EAGER = ac.AttnResConfig(num_blocks=None, lowering="eager")
DEPTH, WIDTH = 4, 6


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, p: Tensor) -> Tensor:
        x = self.embed(p)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.out(x)


class Forces(nn.Module):
    """The energy, and minus the forces, by ``way``."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.encoder, self.way = Encoder(), way

    def energy(self, p: Tensor) -> Tensor:
        return self.encoder(p).sum()

    def forward(self, p: Tensor) -> tuple[Tensor, Tensor]:
        if self.way == "grad":
            return self.energy(p), torch.func.grad(self.energy)(p)
        gradient, _ = torch.func.grad_and_value(self.energy)(p)
        return self.energy(p), gradient


class Siamese(nn.Module):
    """Two calls, or a teacher's call without gradients, or steps that feed the next one; or two networks."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.encoder, self.way = Encoder(), way
        self.other = Encoder() if way == "two networks" else None
        self.back = nn.Linear(2, 3)

    def run(self, encoder: nn.Module, p: Tensor) -> Tensor:
        x = encoder.embed(p)
        for layer in encoder.layers:
            x = x + torch.tanh(layer(x))
        return encoder.out(x)

    def forward(self, p: Tensor) -> tuple[Tensor, Tensor]:
        if self.way == "steps":
            first = self.encoder(p)
            return first, self.encoder(self.back(first))
        if self.way in ("function", "two networks"):
            return self.run(self.encoder, p), self.run(self.other or self.encoder, 2 * p)
        return self.encoder(p), self.encoder(2 * p)


def points() -> Tensor:
    return torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def transformed(model: nn.Module, config: ac.AttnResConfig = EAGER) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / WIDTH**0.5)
    model = ac.transform(model.double(), points(), config)
    with torch.no_grad():
        for query in ac.pseudo_queries(model).values():
            query.normal_()
    return model


def by_hand(encoder: nn.Module, queries: list[Tensor], p: Tensor) -> Tensor:
    """The encoder with depth attention in its full form, by the method's equations."""
    sources = [encoder.embed(p)]

    def mixed(query: Tensor) -> Tensor:
        keys = [v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() for v in sources]
        weights = torch.stack([(key * query).sum(-1) for key in keys]).softmax(0)
        return len(sources) * sum(w[:, None] * v for w, v in zip(weights, sources, strict=True))

    for number, layer in enumerate(encoder.layers):
        sources.append(torch.tanh(layer(mixed(queries[number - 1]) if number else sources[0])))
    return encoder.out(mixed(queries[-1]))


@pytest.mark.parametrize("way", ["grad", "grad and value"])
def test_forces_are_the_gradient_of_the_energy(way: str) -> None:
    model = transformed(Forces(way))
    p = points().requires_grad_()
    energy, gradient = model(p)
    (wanted,) = torch.autograd.grad(energy, p)
    assert relative_error(gradient, wanted) <= 1e-12
    assert len(ac.pseudo_queries(model)) == DEPTH
    separate = transformed(Forces(way), ac.AttnResConfig(num_blocks=None, lowering="eager", calls="separate"))
    energy, gradient = separate(p)
    (wanted,) = torch.autograd.grad(energy, p)
    assert relative_error(gradient, wanted) > 1e-3, "queries of their own"
    assert len(ac.pseudo_queries(separate)) == 2 * DEPTH


@pytest.mark.parametrize("way", ["modules", "steps", "function"])
def test_calls_are_one_network_with_one_set_of_queries(way: str) -> None:
    model = transformed(Siamese(way))
    queries = list(ac.pseudo_queries(model).values())
    assert len(queries) == DEPTH
    p = points()
    first = by_hand(model.encoder, queries, p)
    second = by_hand(model.encoder, queries, model.back(first) if way == "steps" else 2 * p)
    wanted = torch.autograd.grad((first.sin().sum() + second.cos().sum()), [*queries, model.encoder.embed.weight])
    got = model(p)
    assert relative_error(got[0], first) <= 1e-12 and relative_error(got[1], second) <= 1e-12
    gradients = torch.autograd.grad(got[0].sin().sum() + got[1].cos().sum(), [*queries, model.encoder.embed.weight])
    assert all(relative_error(a, b) <= 1e-10 for a, b in zip(gradients, wanted, strict=True))


def test_two_networks_in_one_function_have_queries_of_their_own() -> None:
    model = transformed(Siamese("two networks"))
    assert len(ac.pseudo_queries(model)) == 2 * DEPTH
    assert all(site.query in (None, site.name) for stream in ac.report(model).streams for site in stream.sites)


def test_the_report_names_the_query_that_a_site_uses() -> None:
    model = transformed(Siamese("function"))
    first, second = ac.report(model).streams
    assert [site.query for site in first.sites] == [site.query for site in second.sites]
    assert {site.query for site in first.sites} - {None} == set(ac.pseudo_queries(model))
    assert not {site.name for site in first.sites} & {site.name for site in second.sites}
    assert ac.report(model).parameters_added == DEPTH * WIDTH
    assert ac.TransformReport.from_dict(ac.report(model).to_dict()) == ac.report(model)


def test_copies_checkpoints_weights_and_programs_go_on() -> None:
    model = transformed(Siamese("function"))
    p = points()
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(a, b) for a, b in zip(made(p), model(p), strict=True))
    other = transformed(Siamese("function"))
    other.load_state_dict(model.state_dict())
    assert all(relative_error(a, b) <= 1e-12 for a, b in zip(other(p), model(p), strict=True))
    weights = ac.depth_weights(model, p)
    assert len(weights.streams) == 2
    program = ac.export_program(model, (p,))
    assert all(relative_error(a, b) <= 1e-12 for a, b in zip(program.module()(p), model(p), strict=True))


def test_late_queries_are_shared_too() -> None:
    torch.manual_seed(0)
    model = Siamese("function").double()
    compiled = torch.compile(model, backend="attnres", options={"lowering": "eager", "num_blocks": None})
    with pytest.warns(UserWarning, match="while compiling"):
        compiled(points())
    assert len(ac.pseudo_queries(model)) == DEPTH


@pytest.mark.parametrize("changes", [{"two_phase": "on"}, {"fuse": "on"}])
def test_other_ways_to_run_share_them_too(changes: dict[str, str]) -> None:
    p = points()
    want = transformed(Siamese("function"), ac.AttnResConfig(num_blocks=2, lowering="eager"))(p)
    got = transformed(Siamese("function"), ac.AttnResConfig(num_blocks=2, lowering="eager", **changes))(p)  # type: ignore[arg-type]
    assert all(relative_error(a, b) <= 1e-12 for a, b in zip(got, want, strict=True))
