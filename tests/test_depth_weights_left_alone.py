"""``depth_weights`` changes nothing of a model, and says what it cannot measure."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.depth_by_hand import Net, Picture, build, converted, pixels, tokens
from tests.helpers import randomize_queries


class Eventful(nn.Module):
    """Batch norm, dropout, a counter, a list, and Python's and torch's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Picture()
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self.kept: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        self.calls += 1
        self.kept.append(self.calls)
        return self.net(self.drop(x))


def test_nothing_of_the_model_changes() -> None:
    x = pixels()
    model = build(Eventful).train()
    ac.transform(model, x, ac.AttnResConfig(num_blocks=2, lowering="eager"))
    randomize_queries(ac.pseudo_queries(model))
    model(x).square().sum().backward()
    forward = model.net.__dict__["forward"]
    compiled, report, variants = forward._compiled, ac.report(model), len(ac.pseudo_queries(model))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    objects = {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())}
    versions = {name: p._version for name, p in model.named_parameters()}
    random = torch.get_rng_state()
    calls, kept = model.calls, model.kept
    phases = model.net.attnres.report.phases

    found = ac.depth_weights(model, x)

    assert torch.equal(torch.get_rng_state(), random)
    assert model.training and model.calls == calls and model.kept is kept and kept == list(range(1, calls + 1))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {name: id(v) for name, v in (*model.named_parameters(), *model.named_buffers())} == objects
    assert {name: p._version for name, p in model.named_parameters()} == versions
    assert {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}.keys() == grads.keys()
    assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters() if name in grads)
    assert model.net.__dict__["forward"] is forward and forward._compiled is compiled
    assert ac.report(model) == report and model.net.attnres.report.phases is phases and variants
    assert found.streams[0].tokens == 40


def test_the_same_random_numbers_are_drawn_afterwards() -> None:
    x = pixels()
    model = build(Eventful).train()
    ac.transform(model, x, ac.AttnResConfig(num_blocks=2, lowering="eager"))
    torch.manual_seed(4)
    wanted = torch.rand(3)
    torch.manual_seed(4)
    ac.depth_weights(model, x)
    assert torch.equal(torch.rand(3), wanted)


def test_an_open_backward_still_runs() -> None:
    x = tokens()
    net = converted(build(), x, num_blocks=2)
    loss = net(x).square().sum()
    ac.depth_weights(net, x)
    loss.backward()
    assert all(query.grad is not None for query in ac.pseudo_queries(net).values())


class SelfWriting(Net):
    """Normalises a weight of its own whenever it runs in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.branches[0][0].weight.mul_(0.5)
        return super().forward(x)


def test_a_parameter_that_the_model_writes_is_put_back() -> None:
    x = tokens()
    net = converted(build(SelfWriting), x, num_blocks=2).train()
    before = net.branches[0][0].weight.detach().clone()
    (found,) = ac.depth_weights(net, x).streams
    assert torch.equal(net.branches[0][0].weight, before)
    assert found.tokens == 15


def test_a_parameter_that_is_written_where_nobody_sees_it_is_an_error() -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.head = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.head.weight.mul_(0.5)
            return self.head(self.net(x))

    x = tokens()
    model = build(Outside)
    converted(model.net, x, num_blocks=2)
    with pytest.raises(ac.AttnResError, match=r"its own parameter 'head\.weight'.*deepcopy"):
        ac.depth_weights(model, x)


def test_inputs_are_not_written_into() -> None:
    class Caching(Net):
        def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
            cache.append(x)
            return super().forward(x)

    x, cache = tokens(), [torch.zeros(1)]
    net = converted(build(Caching), (x, []), num_blocks=2)
    ac.depth_weights(net, (x, cache))
    assert len(cache) == 1


# ------------------------------------------------------------------ errors


def test_a_model_without_queries() -> None:
    with pytest.raises(ac.NotTransformedError, match=r"holds no pseudo-queries.*transform"):
        ac.depth_weights(build(), tokens())


def test_another_configuration() -> None:
    x = tokens()
    net = converted(build(), x, num_blocks=2)
    assert ac.depth_weights(net, x, ac.AttnResConfig(num_blocks=2)).streams
    with pytest.raises(ac.ConfigError, match="another configuration"):
        ac.depth_weights(net, x, ac.AttnResConfig(num_blocks=3))


def test_a_stream_that_does_not_run() -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Net(3), Net(3)

        def forward(self, x: Tensor, first: bool = True) -> Tensor:
            return self.a(x) if first else self.b(x)

    x = tokens()
    model = build(Choice)
    for net in (model.a, model.b):
        converted(net, x, num_blocks=2)
    with pytest.raises(ac.AttnResError, match=r"site .* did not run on these inputs"):
        ac.depth_weights(model, x)


def test_sites_that_another_path_skips() -> None:
    class Early(Net):
        def forward(self, x: Tensor, stop: bool = False) -> Tensor:
            x = self.root(x)
            for norm, branch in list(zip(self.norms, self.branches, strict=True))[: 4 if stop else None]:
                x = x + branch(norm(x))
            return self.last(x)

    x = tokens()
    net = converted(build(Early), x, num_blocks=2)
    with pytest.raises(ac.PlanMismatchError, match="sites"):
        ac.depth_weights(net, ac.Inputs((x,), {"stop": True}))


def test_numbers_that_are_not_finite() -> None:
    x = tokens()
    net = converted(build(), x, num_blocks=2)
    x[0, 0] = math.nan
    with pytest.raises(ac.AttnResError, match=r"not finite for 1 of 15 tokens"):
        ac.depth_weights(net, x)
    with pytest.raises(ac.AttnResError, match="at least one token"):
        ac.depth_weights(net, tokens(batch=0))


def test_a_model_without_numbers() -> None:
    with torch.device("meta"):
        net = Net()
    x = torch.empty(2, 3, 4, device="meta")
    ac.transform(net, x, ac.AttnResConfig(num_blocks=2, lowering="eager"))
    with pytest.raises(ac.AttnResError, match="meta device"):
        ac.depth_weights(net, x)


def test_the_models_own_error_is_raised_and_nothing_stays() -> None:
    x = tokens()
    net = converted(build(), x, num_blocks=2)
    wanted = net(x)
    with pytest.raises(Exception, match="reduction dim"):
        ac.depth_weights(net, torch.randn(2, 3, 5, dtype=torch.float64))
    with pytest.raises(ac.InputsError):
        ac.depth_weights(net, 3)
    assert torch.equal(net(x), wanted)
