"""Small residual models for the passes' tests, and the checks that every converted one goes through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

import attnres_compile as ac
from attnres_compile import graphs
from tests.evaluate import Captured, by_dynamo, by_symbolic_trace, float_adds
from tests.helpers import randomize, randomize_queries, relative_error, seeded

BATCH, TOKENS, WIDTH = 2, 4, 6
# How a step of a stream is written: network, number of the step, state -> next state.
StepFunction = Callable[["Stream", int, Tensor], Tensor]


class Stream(nn.Module):
    """``count`` steps written by ``step`` on an embedded input, then norm and head; float64."""

    def __init__(
        self,
        step: StepFunction,
        count: int = 4,
        parts: Callable[[int], nn.Module] | None = None,
        whole: Callable[[Stream, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.step, self.count, self.whole = step, count, whole
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(count))
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.parts = nn.ModuleList(parts(i) for i in range(count)) if parts else None
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.double().eval()

    def f(self, i: int, x: Tensor) -> Tensor:
        """The i-th branch: norm and linear."""
        return self.branches[i](self.norms[i](x))

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        if self.whole is not None:
            return self.whole(self, x)
        for i in range(self.count):
            x = self.step(self, i, x)
        return self.head(self.norm(x))


class Bag(nn.Module):
    """Modules and parameters by name, for the parts of a step."""

    def __init__(self, **items: Any) -> None:
        super().__init__()
        for name, item in items.items():
            setattr(self, name, nn.Parameter(item) if isinstance(item, Tensor) else item)


def tokens(seed: int = 3) -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, generator=seeded(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Outcome:
    """What became of a model's graph."""

    captured: Captured
    report: ac.TransformReport
    module: fx.GraphModule | None

    @property
    def sublayers(self) -> list[int]:
        """Number of sublayers of each stream."""
        return [len(stream.sublayers) for stream in self.report.streams]

    @property
    def reasons(self) -> Counter[str]:
        """Reasons of the adds left alone."""
        return Counter(rejection.reason for rejection in self.report.rejections)


def study(
    model: nn.Module,
    *args: Any,
    config: ac.AttnResConfig | None = None,
    trace: Callable[..., Captured] = by_dynamo,
    seed: int = 0,
) -> Outcome:
    """Randomise, capture and rewrite; the report accounts for every add, whatever came out."""
    randomize(model, seed)
    captured = trace(model, *(args or (tokens(),)))
    captured = Captured(graphs.with_shapes(captured.module, captured.args), captured.args)
    try:
        module, report = ac.rewrite_graph(captured.module, captured.args, config)
    except ac.NoStreamError as error:
        module, report = None, error.report
    adds = Counter(add for stream in report.streams for sublayer in stream.sublayers for add in sublayer.adds)
    adds += Counter(rejection.node for rejection in report.rejections)
    assert set(adds.values()) <= {1}, f"counted twice: {adds}"
    assert float_adds(captured.module.graph) <= set(adds), f"silent: {float_adds(captured.module.graph) - set(adds)}"
    return Outcome(captured, report, module)


def check_exact(outcome: Outcome, tolerance: float = 1e-12, gradients: bool = True) -> None:
    """Outputs and gradients at zero queries are the original's; random queries change the output."""
    assert outcome.module is not None, outcome.report
    wanted = outcome.captured.run(grad=gradients)
    found = outcome.captured.run(outcome.module, grad=gradients)
    assert relative_error(found[0], wanted[0]) <= tolerance
    size = max((float(g.abs().max()) for g in wanted[1]), default=0.0)
    assert size > 0.0 or not gradients
    for got, want in zip(found[1], wanted[1], strict=True):
        assert float((got - want).abs().max()) <= tolerance * size
    randomize_queries(outcome.module.attnres.queries())
    moved = outcome.captured.run(outcome.module, grad=False)
    assert relative_error(moved[0], wanted[0]) > 1e-3


def converted(
    model: nn.Module, *args: Any, sublayers: int | list[int] = 4, tolerance: float = 1e-12, **options: Any
) -> Outcome:
    """The outcome of a model that must be converted exactly, with so many sublayers (per stream)."""
    outcome = study(model, *args, **options)
    assert outcome.sublayers == ([sublayers] if isinstance(sublayers, int) else sublayers), outcome.report
    check_exact(outcome, tolerance)
    return outcome


def refused(model: nn.Module, *args: Any, **options: Any) -> Counter[str]:
    """The reasons of a model of which nothing may be converted."""
    outcome = study(model, *args, **options)
    assert outcome.module is None, outcome.report.streams
    return outcome.reasons


__all__ = [
    "BATCH", "TOKENS", "WIDTH", "Bag", "Outcome", "Stream", "by_dynamo", "by_symbolic_trace", "check_exact",
    "converted", "refused", "study", "tokens",
]  # fmt: skip


def between(
    change: StepFunction, parts: Callable[[int], nn.Module] | None = None, tolerance: float = 1e-12, **options: object
) -> None:
    """A stream whose state goes through ``change`` between its adds is converted whole."""

    def step(net: Stream, i: int, x: Tensor) -> Tensor:
        return change(net, i, x + net.f(i, x))

    converted(Stream(step, parts=parts), tolerance=tolerance, **options)
