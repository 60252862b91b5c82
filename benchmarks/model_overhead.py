"""What a transformed model costs beside its original: time, peak memory and compile time, both compiled.

A Llama of 12 layers and 768 features at 512 tokens in float32, transformed with 8 blocks, two threads. Steps of
the two models alternate in one process, medians are compared. Required: at most 1.05x in inference and in a
training step, and at most 1.6x the compile time. Compile time is measured in fresh processes with empty caches.
Exits 1 where a requirement is not met.

    python benchmarks/model_overhead.py
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

TIME_LIMIT = 1.05
COMPILE_LIMIT = 1.6


def build(layers: int, width: int) -> nn.Module:
    """A Hugging Face Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=width,
            intermediate_size=width * 8 // 3 // 32 * 32,
            num_hidden_layers=layers,
            num_attention_heads=max(width // 64, 1),
            max_position_embeddings=1024,
            use_cache=False,
        )
    )


def prepare(kind: str, options: argparse.Namespace) -> tuple[nn.Module, torch.Tensor]:
    """The original or the transformed model, compiled whole by plain ``torch.compile``."""
    import attnres_compile as ac

    model = build(options.layers, options.width)
    tokens = torch.randint(0, 4096, (1, options.tokens))
    if kind == "transformed":
        ac.transform(model, {"input_ids": tokens}, ac.AttnResConfig(num_blocks=options.blocks))
    return torch.compile(model), tokens  # type: ignore[return-value]


def inference(model: nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    """One forward pass without gradients."""
    model.eval()

    def step() -> None:
        with torch.no_grad():
            model(input_ids=tokens)

    return step


def training(model: nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    """Forward, backward and an SGD step over all parameters."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(input_ids=tokens).logits
        nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
        optimizer.step()

    return step


MODES = {"inference": inference, "training": training}


def child(kind: str, mode: str, options: argparse.Namespace) -> dict[str, float]:
    """In a process of its own: seconds until the first step is done, and peak memory after a few."""
    torch.set_num_threads(options.threads)
    model, tokens = prepare(kind, options)
    step = MODES[mode](model, tokens)
    before = os.times()
    start = time.perf_counter()
    step()
    wall = time.perf_counter() - start
    after = os.times()
    cpu = sum(getattr(after, f) - getattr(before, f) for f in ("user", "system", "children_user", "children_system"))
    for _ in range(3):
        step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"compile_wall": wall, "compile_cpu": cpu, "peak_mib": peak}


def fresh(kind: str, mode: str, options: argparse.Namespace) -> dict[str, float]:
    """Run :func:`child` with an empty compile cache."""
    with tempfile.TemporaryDirectory() as cache:
        # Building the native kernel, which a machine does once, is part of what is measured.
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        arguments = [sys.executable, __file__, "--child", kind, mode, *_repeated(options)]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _repeated(options: argparse.Namespace) -> list[str]:
    names = ("layers", "width", "tokens", "blocks", "threads")
    return [part for name in names for part in (f"--{name}", str(getattr(options, name)))]


def alternate(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Time the steps in turn, the order swapped each round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
        step()
    names = list(steps)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            start = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - start)
    return times


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 12), ("width", 768), ("tokens", 512), ("blocks", 8), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compiles", type=int, default=1, help="fresh compilations of each kind")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(*options.child, options)))
        return 0
    torch.set_num_threads(options.threads)
    console = Console(width=110)
    console.print(
        f"torch {torch.__version__}; Llama {options.layers} x {options.width}, {options.tokens} tokens, "
        f"{options.blocks} blocks, float32, {options.threads} threads"
    )
    table = Table("mode", "", "step ms", "peak MiB", "compile cpu s", "compile wall s")
    holds: dict[str, bool] = {}
    for mode in options.modes:
        compiled: dict[str, list[dict[str, float]]] = {"original": [], "transformed": []}
        for _ in range(options.compiles):
            for kind, runs in compiled.items():
                runs.append(fresh(kind, mode, options))
        torch._dynamo.reset()
        steps = {kind: MODES[mode](*prepare(kind, options)) for kind in compiled}
        times = {kind: statistics.median(values) for kind, values in alternate(steps, options.rounds).items()}
        row: dict[str, dict[str, float]] = {
            kind: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            for kind, runs in compiled.items()
        }
        for kind in compiled:
            _row(table, mode, kind, times[kind] * 1e3, row[kind], "{:.1f}")
        ratio: dict[str, Any] = {key: row["transformed"][key] / row["original"][key] for key in row["original"]}
        time_ratio = times["transformed"] / times["original"]
        _row(table, mode, "ratio", time_ratio, ratio, "{:.3f}")
        holds[f"{mode} time <= {TIME_LIMIT}x"] = time_ratio <= TIME_LIMIT
        holds[f"{mode} compile <= {COMPILE_LIMIT}x"] = ratio["compile_cpu"] <= COMPILE_LIMIT
    console.print(table)
    for name, held in holds.items():
        console.print(f"{name}: {'PASS' if held else 'FAIL'}")
    return 0 if all(holds.values()) else 1


def _row(table: Table, mode: str, kind: str, step: float, run: dict[str, float], form: str) -> None:
    values = (step, run["peak_mib"], run["compile_cpu"], run["compile_wall"])
    table.add_row(mode, kind, *(form.format(value) for value in values))


if __name__ == "__main__":
    sys.exit(main())
