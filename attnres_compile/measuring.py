"""What a conversion costs on this machine: original and converted model side by side, in time and memory.

Steps of the two take turns in one process, in an order that turns too, so that a clock that drifts or a machine that
gets busy hits both. The figures are medians; the ratio is the median over pairs of neighbouring turns, with quartiles.
"""

from __future__ import annotations

import copy
import dataclasses
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnres_compile.comparison import named_tensors, same_randomness, switch, twin
from attnres_compile.errors import AttnResError
from attnres_compile.inputs import Inputs, as_inputs
from attnres_compile.memory import peak_bytes

# A turn repeats a quick step until it takes this long, in seconds: below, the clock and the caller are measured too.
SHORTEST_TURN = 0.03
MOST_REPEATS = 1000
# Pairs of turns that are timed even where the time is up: fewer have no quartiles to speak of.
FEWEST_ROUNDS = 5

LATENCY, TRAINING = "latency", "training step"
INFERENCE_MEMORY, TRAINING_MEMORY, WEIGHTS = "inference memory", "training memory", "weights"

Step = Callable[[], None]


@dataclass(frozen=True)
class Quantity:
    """One quantity of both models.

    Attributes:
        name: ``"latency"``, ``"training step"``, ``"inference memory"``, ``"training memory"`` or ``"weights"``.
        unit: ``"s"`` or ``"bytes"``.
        original, converted: medians.
        ratio: converted to original: the median over pairs of neighbouring turns.
        low, high: first and last quartile of these ratios; equal to ``ratio`` where one number was taken.
        original_spread, converted_spread: distance between the quartiles of each, in ``unit``.
        rounds: pairs of turns; 1 for bytes, which do not vary.
        repeats: steps in a turn, over which the turn's time is divided.
    """

    name: str
    unit: str
    original: float
    converted: float
    ratio: float
    low: float
    high: float
    original_spread: float
    converted_spread: float
    rounds: int
    repeats: int

    @property
    def within_noise(self) -> bool:
        """The quartiles of the ratio are further apart than the ratio is from 1."""
        return self.high - self.low > abs(self.ratio - 1.0)


@dataclass(frozen=True)
class Measurement:
    """What was measured, and on what.

    Attributes:
        quantities: in the order in which they are shown; what could not be measured is missing, with a note.
        device, threads, torch, dtype: of the run; ``threads`` is of PyTorch's CPU operators.
        compiled: both were compiled by Inductor; otherwise the original ran as it is and the converted model's sites
            op by op.
        rounds: pairs of turns that were asked for.
        notes: what was not measured, and why.
    """

    quantities: tuple[Quantity, ...]
    device: str
    threads: int
    torch: str
    dtype: str
    compiled: bool
    rounds: int
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Quantity:
        """The quantity of that name.

        Raises:
            KeyError: it was not measured.
        """
        for quantity in self.quantities:
            if quantity.name == name:
                return quantity
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values; each quantity also says ``within_noise``."""
        values = dataclasses.asdict(self)
        values["quantities"] = [{**dataclasses.asdict(q), "within_noise": q.within_noise} for q in self.quantities]
        values["notes"] = list(self.notes)
        return values


def compare(
    original: nn.Module,
    converted: nn.Module,
    example_inputs: Any,
    *,
    rounds: int = 30,
    seconds: float = 60.0,
    warmup: int = 3,
    train: bool = True,
    compiled: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] | None = None,
) -> Measurement:
    """Measure a model and its converted copy: latency, training step, and peak memory of both.

    *Latency* is one forward pass in eval mode without gradients. A *training step* is forward, backward and an SGD step
    over all parameters, queries included, in training mode; the loss is the model's own ``loss`` output or else
    the mean square of its floating outputs, and the learning rate is 0, so that the numbers stay the same. *Memory* is
    the most that tensors take during one such step above what was there before it, gradients included; *weights* are
    parameters and buffers. Bytes are those that PyTorch's allocator was asked for (on the CPU, where a library
    that Inductor calls may take more by itself) or had in use (on GPUs).

    Both models and the inputs are copied and stay untouched, as does all random state.

    Args:
        original: the model.
        converted: its converted counterpart, on the same device.
        example_inputs: what to call both with, as for :func:`attnres_compile.transform`.
        rounds: most pairs of timed turns.
        seconds: time after which no further pair of turns begins, per quantity; compiling does not count.
            At least 5 pairs are timed.
        warmup: steps of each before; the first one compiles.
        train: measure training steps too.
        compiled: compile both with Inductor. Otherwise neither is, and ``converted`` should have been converted with
            ``lowering="eager"``.
        clock: seconds.
        progress: told what is being done.

    Raises:
        AttnResError: a model cannot be copied or compiled, or an argument is out of range.
        Exception: the model's own, when it rejects the inputs.
    """
    if rounds < 1 or warmup < 1 or not seconds > 0:
        raise AttnResError(f"rounds={rounds}, warmup={warmup} and seconds={seconds} must be positive")
    inputs = as_inputs(example_inputs)
    says = progress or (lambda text: None)
    found: list[Quantity] = []
    memory: list[Quantity] = []
    notes: list[str] = []
    with same_randomness(), torch.inference_mode(False):
        models = [twin(model) for model in (original, converted)]
        device = next((t.device for t in _held(models[0])), torch.device("cpu"))
        sides = [_Side(model, copy.deepcopy(inputs), compiled) for model in models]
        for name, memory_name, training in ((LATENCY, INFERENCE_MEMORY, False), (TRAINING, TRAINING_MEMORY, True)):
            if training and not train:
                continue
            steps = [side.step(training) for side in sides]
            if training and (reason := sides[0].untrainable()):
                notes.append(reason)
                continue
            for which, step in zip(("original", "converted model"), steps, strict=True):
                says(f"{'compiling' if compiled else 'warming up'} the {which} ({name})")
                _warm_up(step, warmup, which, compiled)
            says(f"timing: {name}")
            sync = _sync(device)
            found.append(alternate(name, steps, rounds=rounds, seconds=seconds, clock=clock, sync=sync))
            says(f"measuring memory: {name}")
            # One side's leftovers, its gradients, are there before and after the other's step.
            memory.append(
                _bytes(
                    memory_name, [peak_bytes(step, device, side.clear) for step, side in zip(steps, sides, strict=True)]
                )
            )
    memory.append(_bytes(WEIGHTS, [sum(t.nbytes for t in _held(model)) for model in models]))
    return Measurement(
        quantities=(*found, *memory),
        device=_device_name(device),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        dtype=_dtype(models[0]),
        compiled=compiled,
        rounds=rounds,
        notes=tuple(notes),
    )


# --- turns


def alternate(
    name: str,
    steps: Sequence[Step],
    *,
    rounds: int,
    seconds: float = float("inf"),
    clock: Callable[[], float] = time.perf_counter,
    sync: Callable[[], None] = lambda: None,
) -> Quantity:
    """Time two warm steps that take turns: A B, then B A, and so on.

    Args:
        name: of the quantity.
        steps: the original's and the converted model's.
        rounds: pairs of turns.
        seconds: no further pair begins after this time, but for the first 5.
        clock: seconds.
        sync: waits until the device has done what it was asked to.
    """
    began = clock()

    def turn(step: Step, repeats: int) -> float:
        sync()
        start = clock()
        for _ in range(repeats):
            step()
        sync()
        return (clock() - start) / repeats

    quickest = max(min(turn(step, 1) for step in steps), SHORTEST_TURN / MOST_REPEATS)
    repeats = max(1, round(SHORTEST_TURN / quickest))
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and clock() - began > seconds:
            break
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            times[which].append(turn(steps[which], repeats))
    ratios = [after / before if before else 1.0 for before, after in zip(*times, strict=True)]
    low, ratio, high = _quartiles(ratios)
    first, second = map(_quartiles, times)
    spreads = first[2] - first[0], second[2] - second[0]
    return Quantity(name, "s", first[1], second[1], ratio, low, high, *spreads, len(ratios), repeats)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, second, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, second, third


def _bytes(name: str, taken: Sequence[int]) -> Quantity:
    before, after = taken
    ratio = after / before if before else 1.0
    return Quantity(name, "bytes", before, after, ratio, ratio, ratio, 0.0, 0.0, 1, 1)


# --- steps


class _Side:
    """One of the two models, as it is measured."""

    def __init__(self, model: nn.Module, inputs: Inputs, compiled: bool) -> None:
        self.model, self.inputs = model, inputs
        # Compiled whole: what lies around a converted part counts in both.
        self.call: Callable[..., Any] = torch.compile(model) if compiled else model
        self.optimizer: torch.optim.Optimizer | None = None

    def step(self, training: bool) -> Step:
        """What is timed. Gradients of the step before go at its beginning."""
        switch(self.model, training)
        if not training:
            return self.infer
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(parameters, lr=0.0) if parameters else None
        return self.train

    def infer(self) -> None:
        with torch.no_grad():
            self.call(*self.inputs.args, **self.inputs.kwargs)

    def train(self) -> None:
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_of(self.call(*self.inputs.args, **self.inputs.kwargs))
        assert loss is not None
        torch.autograd.backward(loss)
        self.optimizer.step()

    def clear(self) -> None:
        """Drops the gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def untrainable(self) -> str:
        """Why no training step can be made, or ``""``."""
        if self.optimizer is None:
            return "no training step was measured: no parameter of the model requires a gradient"
        with torch.enable_grad():
            loss = loss_of(self.model(*self.inputs.args, **self.inputs.kwargs))
        return "" if loss is not None else "no training step was measured: no output of the model has a gradient"


def loss_of(result: Any) -> Tensor | None:
    """The scalar output named ``loss``, or else the sum of the mean squares of all floating outputs with a gradient."""
    outputs = {name: t for name, t in named_tensors(result) if t.requires_grad and t.is_floating_point()}
    own = outputs.get("loss")
    if own is not None and own.ndim == 0:
        return own
    parts = [t.float().square().mean() for t in outputs.values()]
    return torch.stack(parts).sum() if parts else None


def _warm_up(step: Step, times: int, which: str, compiled: bool) -> None:
    try:
        for _ in range(times):
            step()
    except torch._dynamo.exc.TorchDynamoException as error:
        text = " ".join(str(error).split("\n\n")[0].split())
        remedy = "Measure without compiling (--eager, compiled=False)" if compiled else ""
        raise AttnResError(f"the {which} could not be compiled: {text}", remedy=remedy) from error


def _held(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


# --- the machine


def _sync(device: torch.device) -> Callable[[], None]:
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.processor() or platform.machine()})"


def _dtype(model: nn.Module) -> str:
    found = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()}
    return ", ".join(sorted(found)) or "none"
