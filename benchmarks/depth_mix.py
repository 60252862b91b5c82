"""Depth attention of one site on the CPU against a copy of the same bytes and against other ways to write it.

    python benchmarks/depth_mix.py [--sources 9 --tokens 4096 --width 1024 --threads 1 --rounds 9]

All variants take turns, so that a busy machine slows them alike; figures are medians in milliseconds. Each variant's
numbers are first checked against the definition in float64. Exit code 1: a required ratio does not hold.

- copy: the sources copied into tensors that are there already; for forward + backward 3N + 3 tensors of that size,
  which is the least that the two directions must move (docs/method.md).
- stacked: the sources stacked into one tensor and contracted with ``einsum``, as the paper lists it and as models that
  use the method are written.
- stacked sums: the same with products and sums instead of ``einsum``, which Inductor fuses better; for comparison.
- straight line: ``attnres::mix`` opened up by Inductor into code over the list of sources.
- native: ``attnres::mix`` lowered to the compiled kernels, run by Inductor.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx

from attnres_compile.config import AttnResConfig
from attnres_compile.kernels import ops, reference
from attnres_compile.passes.lower import lower

EPS, SCALE = 1e-6, 1.0
TOLERANCE = 1e-5
# (direction, what native is compared with, whether the limit is the most or the least, limit)
LIMITS = (
    ("forward", "copy", "at most", 2.0),
    ("forward", "stacked, compiled", "at least", 5.0),
    ("forward + backward", "copy", "at most", 2.5),
    ("forward + backward", "stacked, compiled", "at least", 4.0),
)
Mix = Callable[[Tensor, list[Tensor]], Tensor]


@dataclass(frozen=True)
class Problem:
    """One site's tensors: sources ``[tokens, width]`` and the gradient of the mix in float32."""

    query: Tensor
    sources: list[Tensor]
    grad: Tensor

    @classmethod
    def make(cls, sources: int, tokens: int, width: int) -> Problem:
        torch.manual_seed(0)
        return cls(
            torch.randn(width).div_(width**0.5).requires_grad_(),
            [torch.randn(tokens, width).requires_grad_() for _ in range(sources)],
            torch.randn(tokens, width),
        )


def variants(problem: Problem) -> dict[str, Mix]:
    """The ways to compute the mix, by name."""
    gain = float(len(problem.sources))

    def stacked(query: Tensor, sources: list[Tensor]) -> Tensor:
        values = torch.stack(sources)
        keys = torch.nn.functional.rms_norm(values, values.shape[-1:], eps=EPS)
        weights = torch.einsum("d,ntd->nt", query, keys).mul(SCALE).softmax(0)
        return gain * torch.einsum("nt,ntd->td", weights, values)

    def stacked_sums(query: Tensor, sources: list[Tensor]) -> Tensor:
        return reference.mix(query, sources, -1, EPS, gain, SCALE)

    def operator(query: Tensor, sources: list[Tensor]) -> Tensor:
        mixed: Tensor = torch.ops.attnres.mix(query, sources, -1, EPS, gain, SCALE, False)
        return mixed

    def native(gm: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
        if lower(gm, AttnResConfig()).native != 1:
            raise SystemExit("the compiled CPU kernels could not be built: is there a C++ compiler?")
        compiled: Callable[..., object] = compile_fx(gm, inputs)
        return compiled

    ops.register_decompositions()
    return {
        "stacked, eager": stacked,
        "stacked, compiled": torch.compile(stacked, dynamic=False),
        "stacked sums, compiled": torch.compile(stacked_sums, dynamic=False),
        "straight line, compiled": torch.compile(operator, dynamic=False),
        "native": torch.compile(operator, dynamic=False, backend=native),
    }


def both_ways(mix: Mix, problem: Problem) -> list[Tensor]:
    """The mix, and the gradients of the query and of every source."""
    mixed = mix(problem.query, problem.sources)
    return [mixed.detach(), *torch.autograd.grad(mixed, [problem.query, *problem.sources], problem.grad)]


def check(mixes: dict[str, Mix], problem: Problem) -> None:
    """Exit with a message when a variant is not the definition, computed in float64."""
    exact = Problem(
        problem.query.detach().double().requires_grad_(),
        [source.detach().double().requires_grad_() for source in problem.sources],
        problem.grad.double(),
    )
    gain = float(len(problem.sources))
    expected = both_ways(lambda query, sources: reference.mix(query, sources, -1, EPS, gain, SCALE), exact)
    for name, mix in mixes.items():
        errors = [
            float((value - wanted).abs().max() / wanted.abs().max())
            for value, wanted in zip(both_ways(mix, problem), expected, strict=True)
        ]
        print(f"{name:<26} largest relative error against float64: {max(errors):.1e}")
        if max(errors) > TOLERANCE:
            raise SystemExit(f"{name} is wrong: {max(errors):.1e} is more than {TOLERANCE:.0e}")


def measure(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each action; the actions take turns.

    Each turn is two runs, of which the second counts: otherwise an action would pay for the state that the one before
    it left caches and free memory in. The first turn does not count.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds + 1):
        for name, action in actions.items():
            # The results are freed outside the clock.
            result = action()
            del result
            start = time.perf_counter()
            result = action()
            times[name].append(1e3 * (time.perf_counter() - start))
            del result
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def copies(problem: Problem, count: int) -> Callable[[], object]:
    """Copy ``count`` tensors of the sources' shape into tensors that exist."""
    given = [problem.sources[0].detach().clone() for _ in range(count)]
    taken = [torch.empty_like(value) for value in given]

    def copy() -> None:
        for into, value in zip(taken, given, strict=True):
            into.copy_(value)

    return copy


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sources", type=int, default=9, help="number of sources")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per source")
    parser.add_argument("--width", type=int, default=1024, help="features per token")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds; the median counts")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    problem = Problem.make(options.sources, options.tokens, options.width)
    mixes = variants(problem)
    print(
        f"{options.sources} sources of {options.tokens} x {options.width} float32, {options.threads} thread(s), "
        f"torch {torch.__version__}\n"
    )
    check(mixes, problem)
    times = {
        "forward": measure(
            {
                "copy": copies(problem, options.sources),
                **{name: lambda mix=mix: _forward(mix, problem) for name, mix in mixes.items()},
            },
            options.rounds,
        ),
        "forward + backward": measure(
            {
                "copy": copies(problem, 3 * options.sources + 3),
                **{name: lambda mix=mix: both_ways(mix, problem) for name, mix in mixes.items()},
            },
            options.rounds,
        ),
    }
    for direction, figures in times.items():
        print(f"\n{direction:<26} {'ms':>8} {'x copy':>8} {'native is':>10}")
        for name, figure in figures.items():
            print(
                f"{name:<26} {figure:>8.1f} {figure / figures['copy']:>8.2f} {figure / figures['native']:>9.2f}x faster"
            )
    print()
    failed = 0
    for direction, other, kind, limit in LIMITS:
        figures = times[direction]
        ratio = figures["native"] / figures[other] if kind == "at most" else figures[other] / figures["native"]
        holds = ratio <= limit if kind == "at most" else ratio >= limit
        failed += not holds
        what = f"{direction}: native takes" if kind == "at most" else f"{direction}: native is faster by"
        print(f"{'PASS' if holds else 'FAIL'}  {what} {ratio:.2f}x of {other}, required {kind} {limit:g}x")
    return 1 if failed else 0


def _forward(mix: Mix, problem: Problem) -> Tensor:
    with torch.no_grad():
        return mix(problem.query, problem.sources)


if __name__ == "__main__":
    sys.exit(main())
