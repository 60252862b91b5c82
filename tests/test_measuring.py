"""What ``bench`` measures: turns by an injected clock, memory against bytes counted by hand. Nothing here is timed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile import measuring
from attnres_compile.measuring import Quantity, alternate, compare, loss_of
from attnres_compile.memory import peak_bytes
from tests import models

CPU = torch.device("cpu")


class Clock:
    """Time that passes when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def step(self, name: str, seconds: Callable[[int], float]) -> Callable[[], None]:
        """A step that takes ``seconds(number of the call)``."""
        count = 0

        def run() -> None:
            nonlocal count
            self.now += seconds(count)
            self.calls.append(name)
            count += 1

        return run


def turns(clock: Clock, a: Callable[[int], float], b: Callable[[int], float], **options: Any) -> Quantity:
    steps = [clock.step("A", a), clock.step("B", b)]
    return alternate("latency", steps, clock=clock, **{"rounds": 8, **options})


def test_the_ratio_is_that_of_the_times() -> None:
    found = turns(Clock(), lambda n: 2.0, lambda n: 3.0)
    assert (found.original, found.converted) == (2.0, 3.0)
    assert (found.ratio, found.low, found.high) == (1.5, 1.5, 1.5)
    assert (found.original_spread, found.converted_spread) == (0.0, 0.0)
    assert (found.rounds, found.repeats, found.unit) == (8, 1, "s")
    assert not found.within_noise


def test_turns_alternate_and_their_order_turns() -> None:
    clock = Clock()
    turns(clock, lambda n: 1.0, lambda n: 1.0, rounds=4)
    # One call of each tells how often a turn repeats its step.
    assert "".join(clock.calls) == "AB" + "ABBAABBA"


def test_a_machine_that_slows_down_hits_both() -> None:
    # Each call takes 1 % more than the one before, whoever makes it; both do the same work.
    clock = Clock()
    count = 0

    def slower(n: int) -> float:
        nonlocal count
        count += 1
        return 1.01**count

    found = turns(clock, slower, slower, rounds=20)
    assert found.converted / found.original == pytest.approx(1.0, abs=0.011)
    assert found.ratio == pytest.approx(1.0, abs=1e-4)  # the drift of 1 % in a turn cancels out
    assert found.within_noise


def test_quartiles_by_hand() -> None:
    # The first call of each is the one that counts repeats. Ratios 1.0, 1.1, 1.2, 1.3, 1.4.
    found = turns(Clock(), lambda n: 10.0, lambda n: 10.0 + max(n - 1, 0), rounds=5)
    assert found.ratio == pytest.approx(1.2)
    assert (found.low, found.high) == (pytest.approx(1.1), pytest.approx(1.3))
    assert found.converted_spread == pytest.approx(2.0)
    assert found.within_noise is False or found.high - found.low > abs(found.ratio - 1)


@pytest.mark.parametrize(
    ("ratio", "low", "high", "noise"), [(1.02, 1.01, 1.02, False), (1.02, 1.0, 1.03, True), (0.9, 0.85, 0.97, True)]
)
def test_what_is_within_the_noise(ratio: float, low: float, high: float, noise: bool) -> None:
    assert Quantity("latency", "s", 1.0, ratio, ratio, low, high, 0.0, 0.0, 9, 1).within_noise is noise


def test_quick_steps_are_repeated_in_a_turn() -> None:
    clock = Clock()
    found = turns(clock, lambda n: 0.001, lambda n: 0.002, rounds=2)
    assert found.repeats == 30
    assert "".join(clock.calls) == "AB" + "A" * 30 + "B" * 60 + "A" * 30
    assert (found.original, found.converted) == (pytest.approx(0.001), pytest.approx(0.002))


def test_a_budget_ends_it_but_not_before_five_rounds() -> None:
    assert turns(Clock(), lambda n: 1.0, lambda n: 1.0, rounds=100, seconds=20.0).rounds == 10
    assert turns(Clock(), lambda n: 1.0, lambda n: 1.0, rounds=100, seconds=1.0).rounds == 5
    assert turns(Clock(), lambda n: 1.0, lambda n: 1.0, rounds=3, seconds=1.0).rounds == 3


def test_the_device_is_waited_for_before_the_clock_is_read() -> None:
    clock, waiting = Clock(), [0.0]

    def asynchronous() -> None:
        waiting[0] += 4.0

    def sync() -> None:
        clock.now += waiting[0]
        waiting[0] = 0.0

    found = alternate("latency", [asynchronous, asynchronous], rounds=4, clock=clock, sync=sync)
    assert (found.original, found.converted, found.ratio) == (4.0, 4.0, 1.0)


# --- memory


def test_peak_of_tensors_by_hand() -> None:
    def action() -> None:
        a = torch.empty(1000)  # 4000
        b = torch.empty(2000)  # 12000: the most
        del a
        c = torch.empty(500)  # 10000
        del b, c

    assert peak_bytes(action, CPU) == 12000
    x, weight = torch.randn(1000, 100), torch.randn(100, 50)
    # sin: 400 000; its product: 200 000 more, before sin goes; the softmax fits below that.
    assert peak_bytes(lambda: torch.softmax(torch.sin(x) @ weight, -1).sum(), CPU) == 600_000


def test_what_is_there_before_does_not_count() -> None:
    held = [torch.empty(5000)]

    assert peak_bytes(lambda: held[0].add_(torch.ones(1)), CPU) == 4
    assert peak_bytes(lambda: held.append(torch.empty(100)), CPU, clear=held.clear) == 400
    assert held == []


def test_the_profiler_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    peak_bytes(lambda: torch.empty(10), CPU)
    assert capfd.readouterr() == ("", "")


def test_an_error_of_the_action_passes_through(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        peak_bytes(fail, CPU)
    assert peak_bytes(lambda: torch.empty(10), CPU) == 40


# --- both models


class Line(nn.Module):
    """``x @ W.T``, and as many bytes of scratch as are asked for."""

    def __init__(self, scratch: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(100, 100, bias=False)
        self.scratch = scratch

    def forward(self, x: Tensor) -> Tensor:
        held = torch.empty(self.scratch, dtype=torch.uint8) if self.scratch else None
        y = self.linear(x)
        del held
        return y


def ticking() -> Callable[[], float]:
    """A clock that goes on by one second at each look."""
    now = iter(range(10**9))
    return lambda: float(next(now))


def test_memory_of_both_by_hand() -> None:
    found = compare(Line(), Line(1000), torch.randn(50, 100), compiled=False, rounds=1, warmup=1, clock=ticking())
    # The output, 50 x 100 floats; and the scratch.
    inference = found["inference memory"]
    assert (inference.original, inference.converted, inference.ratio) == (20000, 21000, 1.05)
    # Squaring's backward holds its operand, the gradient that it gets, and three products: 20 000 each, and scalars.
    training = found["training memory"]
    assert 100_000 <= training.original <= 100_100
    weights = found["weights"]
    assert (weights.original, weights.converted, weights.unit) == (40000, 40000, "bytes")
    assert (found.compiled, found.device.split()[0], found.dtype) == (False, "cpu", "float32")
    assert found.threads == torch.get_num_threads()
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_converted_model_is_measured_with_its_queries() -> None:
    model, x = models.build(), models.example()
    converted = ac.transform(copy.deepcopy(model), x, ac.AttnResConfig(num_blocks=2, lowering="eager"))
    said: list[str] = []
    found = compare(model, converted, x, compiled=False, rounds=2, warmup=1, progress=said.append)
    names = ["latency", "training step", "inference memory", "training memory", "weights"]
    assert [each.name for each in found.quantities] == names
    added = 4 * models.SITES * models.WIDTH + 4  # float32 queries, and the token of the declaration
    assert found["weights"].converted - found["weights"].original == added
    assert found["training memory"].converted > found["training memory"].original
    assert found["latency"].rounds == 2 and found["latency"].original > 0
    assert "warming up the converted model (training step)" in said
    with pytest.raises(KeyError):
        found["speed"]


def test_nothing_of_the_caller_changes() -> None:
    model, x = models.Model(dropout=0.5).eval(), models.example()
    converted = ac.transform(copy.deepcopy(model), x, ac.AttnResConfig(num_blocks=2, lowering="eager"))
    before = {name: tensor.clone() for name, tensor in converted.state_dict().items()}
    states, given = (torch.get_rng_state(), random.getstate()), x.clone()
    compare(model, converted, x, compiled=False, rounds=1, warmup=1)
    assert not converted.training and not model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in converted.state_dict().items())
    assert all(parameter.grad is None for parameter in (*model.parameters(), *converted.parameters()))
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert torch.equal(x, given)


def test_a_step_trains_every_parameter_and_changes_none() -> None:
    side = measuring._Side(models.build(), ac.Inputs((models.example(),)), False)
    before = [parameter.clone() for parameter in side.model.parameters()]
    side.step(True)()
    assert side.model.training
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in side.model.parameters())
    assert all(torch.equal(*pair) for pair in zip(before, side.model.parameters(), strict=True))


def test_what_cannot_be_trained_is_said() -> None:
    class Picks(Line):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).argmax(-1)

    x = torch.randn(2, 100)
    found = compare(Picks(), Picks(), x, compiled=False, rounds=1, warmup=1, clock=ticking())
    assert [each.name for each in found.quantities] == ["latency", "inference memory", "weights"]
    assert found.notes == ("no training step was measured: no output of the model has a gradient",)
    frozen = Line().requires_grad_(False)
    found = compare(frozen, frozen, x, compiled=False, rounds=1, warmup=1, clock=ticking())
    assert found.notes == ("no training step was measured: no parameter of the model requires a gradient",)
    found = compare(Line(), Line(), x, compiled=False, rounds=1, warmup=1, train=False, clock=ticking())
    assert (len(found.quantities), found.notes) == (3, ())


def test_the_loss_by_hand() -> None:
    one = torch.tensor([1.0, 3.0], requires_grad=True)
    two = torch.tensor([2.0], requires_grad=True)
    loss = loss_of({"a": one, "b": [two, torch.ones(3)], "index": torch.arange(3)})
    assert loss is not None and loss.item() == (1.0 + 9.0) / 2 + 4.0
    own = (one * 0 + 7.0).sum()
    assert loss_of({"loss": own, "logits": one}) is own
    assert loss_of({"index": torch.arange(3)}) is None


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"warmup": 0}, {"seconds": 0.0}, {"seconds": float("nan")}])
def test_wrong_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ac.AttnResError, match="must be positive"):
        compare(Line(), Line(), torch.randn(2, 100), compiled=False, **wrong)


def test_a_compiler_that_fails_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: nn.Module) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            raise torch._dynamo.exc.TorchDynamoException("no C++ compiler\n\na long story")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(
        ac.AttnResError, match=r"the original could not be compiled: no C\+\+ compiler. Measure without"
    ):
        compare(Line(), Line(), torch.randn(2, 100))


@pytest.mark.inductor
def test_compiled_code_counts_its_buffers() -> None:
    def sines(x: Tensor, weight: Tensor) -> Tensor:
        return torch.softmax(torch.sin(x) @ weight, -1).sum(0)

    x, weight = torch.randn(1000, 100), torch.randn(100, 50)
    compiled = torch.compile(sines)
    compiled(x, weight)
    # sin and its product; what is made of them is small or takes their place.
    assert 600_000 <= peak_bytes(lambda: compiled(x, weight), CPU) <= 610_000
