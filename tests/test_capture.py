"""Tracing leaves no trace: random state, buffers, gradients, caches and dynamo's own state stay as they were."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile import comparison
from tests.helpers import randomize, relative_error
from tests.models import SITES, SUBLAYERS, WIDTH, Model, build, example

CONFIG = ac.AttnResConfig(num_blocks=2, lowering="eager")


class Recorder(nn.Module):
    """A model with everything that a real run would change: batch statistics, a counter, dropout, a cache."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.inner = Model(dropout=0.3)
        self.register_buffer("calls", torch.zeros(()))
        self.broken = broken

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        cache["last"].add_(1)
        if self.broken:
            torch._dynamo.graph_break()
        return self.inner(self.norm(x.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "in pieces"])
@pytest.mark.parametrize("call", [ac.explain, ac.transform])
def test_nothing_changes(call: Any, broken: bool) -> None:
    model = randomize(Recorder(broken)).train()
    cache = {"last": torch.zeros(3)}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    state = torch.get_rng_state()
    call(model, ac.Inputs((example(), cache)), CONFIG)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(dict(model.named_buffers())[name], value) for name, value in buffers.items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for n, p in model.named_parameters() if "attnres" not in n)
    assert not cache["last"].any()
    assert model.training and model.inner.encoder.layers[0].training


def test_explain_leaves_the_model_alone() -> None:
    model, x = build(), example()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    want = model(x)
    report = ac.explain(model, x, CONFIG)
    assert len(report.streams[0].sublayers) == SUBLAYERS
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert list(model.state_dict()) == keys
    assert torch.equal(model(x), want)


def test_explain_does_not_run_the_model() -> None:
    class Loud(Model):
        ran = False

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            if not torch.compiler.is_compiling():
                Loud.ran = True
            return super().forward(x, scale)

    ac.explain(Loud(), example(), CONFIG)
    assert not Loud.ran


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Model()
        x = torch.empty(2, 3, 5)
    report = ac.explain(model, x, CONFIG)
    assert [len(stream.sublayers) for stream in report.streams] == [SUBLAYERS]
    ac.transform(model, x, config=CONFIG)
    assert {q.device.type for q in ac.pseudo_queries(model).values()} == {"meta"}
    real = build()
    ac.transform(real, example(), config=CONFIG)
    model.load_state_dict(real.state_dict(), assign=True)
    assert relative_error(model(example()), real(example())) < 1e-6


def test_explain_under_no_grad_and_a_stance() -> None:
    model, x = build(), example()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        assert len(ac.explain(model, x, CONFIG).streams) == 1
    with torch._dynamo.config.patch(suppress_errors=True):
        assert len(ac.explain(model, x, CONFIG).streams) == 1


def _break(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


def test_a_break_outside_the_stream_is_reported_and_converted_around() -> None:
    model, x = build(after=_break), example()
    want = model(x)
    report = ac.explain(model, x, CONFIG)
    assert [len(stream.sublayers) for stream in report.streams] == [SUBLAYERS]
    (broken,) = report.graph_breaks
    assert broken.where.split(":")[0].endswith("test_capture.py")
    ac.transform(model, x, config=CONFIG)
    assert list(ac.pseudo_queries(model))[-1] == "encoder.norm"
    assert len(ac.pseudo_queries(model)) == SITES
    assert relative_error(model(x), want) < 1e-6


def _break_and_copy(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x.clone()


@pytest.mark.parametrize("layers", [3, 6], ids=["short pieces", "a piece that is a stream by itself"])
def test_a_break_that_the_stream_cannot_be_followed_through_names_the_place(layers: int) -> None:
    model, x = build(layers=layers, between=_break_and_copy), example()
    with pytest.raises(ac.GraphBreakError) as caught:
        ac.transform(model, x, config=CONFIG)
    file, line = caught.value.where.rsplit(":", 1)
    assert file.endswith("test_capture.py")
    with open(file, encoding="utf-8") as handle:
        assert "graph_break()" in handle.read().splitlines()[int(line) - 1]
    assert "attnres" not in dict(model.encoder.named_children())
    assert "forward" not in vars(model.encoder)


class InPlaceEncoder(nn.Module):
    """Adds into what it is given, or into a copy of it."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone() if self.copies else x
        for layer in self.layers:
            x += layer(x).tanh()
        return x.sin()


@pytest.mark.parametrize("copies", [True, False])
def test_in_place_adds_at_the_edge_of_the_owner(copies: bool) -> None:
    """The whole model's graph shows memory of its own being written; the owner's shows its caller's."""
    model = randomize(nn.ModuleDict({"first": nn.Linear(5, 5), "encoder": InPlaceEncoder(copies)}))
    model.forward = lambda x: model["encoder"](model["first"](x))  # type: ignore[method-assign, index, operator]
    with torch.no_grad():
        want = model(example())
        if copies:
            ac.transform(model, example(), config=CONFIG)
            assert len(ac.report(model).streams[0].sublayers) == 4
            assert ac.report(model).streams[0].sublayers[0].module == "encoder"
            assert relative_error(model(example()), want) < 1e-6
        else:
            with pytest.raises(ac.NoStreamError) as caught:
                ac.transform(model, example(), config=CONFIG)
            assert {r.reason for r in caught.value.report.rejections} == {"mutated"}


def test_a_tensor_with_a_history_as_input() -> None:
    model = build()
    x = example().requires_grad_() * 2
    assert len(ac.explain(model, x, CONFIG).streams) == 1


def test_inputs_are_not_consumed() -> None:
    model, x = build(), example()
    copied = copy.deepcopy(x)
    ac.transform(model, x, config=CONFIG)
    assert torch.equal(x, copied)
    assert model.encoder.norm.weight.numel() == WIDTH


def test_a_failure_of_dynamo_in_a_piece_is_a_capture_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its own error with its own traceback, whatever that may be."""

    def fails(*_: Any) -> Any:
        raise torch._dynamo.exc.InternalTorchDynamoError("a symbol was not found")

    monkeypatch.setattr("attnres_compile.capture._Guarded.in_pieces", fails)

    class Printing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            print(end="")
            return super().forward(x) + 1.0

    with pytest.raises(ac.CaptureError, match=r"could not trace Printing: .*a symbol was not found"):
        ac.transform(Printing(WIDTH, WIDTH), torch.randn(2, WIDTH))


def test_a_buffer_that_a_run_replaces_is_put_back() -> None:
    """Tables of positions that grow: a longer one takes the shorter one's place, and that was another tensor."""

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(2, WIDTH), persistent=False)
            self.inner = build()

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] > self.table.shape[0]:
                self.table = torch.ones(x.shape[1], 5) * 2
            print(end="")
            return self.inner(x * self.table[: x.shape[1]])

    model, x = Growing(), example()
    table, want = model.table, copy.deepcopy(model)(x)
    ac.transform(model, x, config=CONFIG)
    assert model.table is table and torch.equal(table, torch.ones(2, WIDTH))
    assert relative_error(model(x), want) < 1e-6


class Asking(Model):
    """Asks for a gradient of a state while it runs, as Grad-CAM does."""

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = super().forward(ids)
        out.retain_grad()
        self.seen = out
        return out * 2.0


def test_what_needs_gradients_to_run_is_refused_by_type() -> None:
    model = Asking(layers=3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for call in (ac.transform, ac.explain):
        with pytest.raises(ac.CaptureError, match="needs gradients") as caught:
            call(model, example())
        assert "retain_grad" in str(caught.value) and "test_capture.py" in caught.value.where
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not hasattr(model, "seen"), "a tensor with a history would stay"
    copy.deepcopy(model)
    model(example()).sum().backward()


def test_randomness_of_gpus_that_are_not_used_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CUDA, by a stand-in for it: of four GPUs one is current and one holds memory."""
    seen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda at: 512 * (at == 1))

    @contextlib.contextmanager
    def forked(devices: list[int]) -> Iterator[None]:
        seen.extend(devices)
        yield

    monkeypatch.setattr(torch.random, "fork_rng", forked)
    with comparison.same_randomness():
        pass
    assert seen == [1, 2]
