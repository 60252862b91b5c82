"""A converted language model on a GPU beside its original: exactness first, then time, memory and compilation.

    python benchmarks/gpu_models.py

A Llama of 1.3 billion parameters from a configuration, with random weights made on the GPU in bfloat16: no download.
One sequence of 2048 tokens; a training step (forward, loss, backward, AdamW) and inference (the forward of the whole
sequence). Three variants share their weights: the original; converted without the kernels, each site read by itself
as the plain code that Inductor fuses ("unfused"); and converted as it is by default ("fused"). All are compiled by
plain ``torch.compile``. Required of the fused one: at most 3% more time for a training step and 1% more for inference.

First, correctness: a small float32 copy must be exact to 1e-5 in outputs and gradients (``attnres_compile.verify``);
the large model in float32, run op by op, must give the original's output to 1e-5 with zero queries. It is then what
the bfloat16 variants are measured against, with zero and with random queries: the fused one may be at most 1.5x as far
from it as what it replaces, which is the original for zero queries and the unfused one for random ones.

Each variant is compiled in a process of its own with empty caches, side by side; compile seconds and peak memory are
those processes'. Then the variants take turns in one process; medians are compared. Exit codes: 0 all holds, 1 not so,
2 no GPU. ``--quick`` has 12 layers instead of 24 and fewer turns. ``--smoke`` runs the program on the CPU with a tiny
model, op by op: it measures nothing.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any
from unittest import mock

import gpu_timing
import torch
from gpu_timing import Job
from gpu_variants import (
    EXACT,
    FUSED,
    MODES,
    ORIGINAL,
    UNFUSED,
    VARIANTS,
    build,
    compiled,
    handle,
    kernels,
    loss_of,
    randomise_queries,
    sample,
    step_of,
    variant_of,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import attnres_compile as ac

LIMITS = {"inference": 1.01, "training": 1.03}
# How much further from float32 than what it replaces the fused variant may be.
SLACK = 1.5
UNKNOWN = "not measured"


# ------------------------------------------------------------------ correctness


def distance(value: Tensor, right: Tensor) -> float:
    """Norm of the difference over the norm."""
    error = float((value.double() - right.double()).norm() / right.double().norm())
    return error if math.isfinite(error) else math.inf


def logits_of(call: Any, variant: str, tokens: Tensor) -> Tensor:
    with torch.no_grad(), kernels(variant):
        found: Tensor = call(input_ids=tokens).logits
    return found


def gradients_of(model: nn.Module, call: Any, variant: str, tokens: Tensor) -> Tensor:
    """The gradients of all queries, one after the other."""
    with kernels(variant):
        loss_of(call(input_ids=tokens).logits, tokens).backward()
    found = torch.cat([query.grad.float() for query in ac.pseudo_queries(model).values() if query.grad is not None])
    for parameter in model.parameters():
        parameter.grad = None
    return found


Check = tuple[str, float, float]


def correctness(
    base: nn.Module,
    models: Mapping[str, Any],
    calls: Mapping[str, Any],
    tokens: Tensor,
    options: argparse.Namespace,
    gradients: bool,
) -> list[Check]:
    """What was compared, the figure, and the most that is allowed. Leaves random queries in the converted variants."""
    checks: list[Check] = []
    wide = copy.deepcopy(base).float()
    original = logits_of(wide, ORIGINAL, tokens)
    wide_converted = ac.transform(
        wide, {"input_ids": tokens}, ac.AttnResConfig(num_blocks=options.blocks, lowering="eager")
    )
    found = logits_of(wide_converted, FUSED, tokens)
    what = "zero queries, float32 op by op: logits, converted against original"
    checks.append((what, distance(found, original), EXACT))
    off = {name: distance(logits_of(calls[name], name, tokens), original) for name in VARIANTS}
    for name in (UNFUSED, FUSED):
        what = f"zero queries, bfloat16: logits against float32, {name} (limit: {SLACK:g}x the original's)"
        checks.append((what, off[name], SLACK * off[ORIGINAL]))
    randomise_queries([wide_converted, models[UNFUSED], models[FUSED]], options.width)
    right = logits_of(wide_converted, FUSED, tokens)
    off = {name: distance(logits_of(calls[name], name, tokens), right) for name in (UNFUSED, FUSED)}
    what = f"random queries, bfloat16: logits against float32, fused (limit: {SLACK:g}x the unfused's)"
    checks.append((what, off[FUSED], SLACK * off[UNFUSED]))
    moved = distance(right, original)
    checks.append(("random queries move the logits: 1 / relative change", 1 / moved if moved else math.inf, 1e3))
    if not gradients:
        return checks
    right = gradients_of(wide_converted, wide_converted, FUSED, tokens)
    del wide, wide_converted
    gc.collect()
    for name in (UNFUSED, FUSED):
        models[name].train()
    off = {name: distance(gradients_of(models[name], calls[name], name, tokens), right) for name in (UNFUSED, FUSED)}
    what = f"random queries, bfloat16: queries' gradients against float32, fused (limit: {SLACK:g}x the unfused's)"
    checks.append((what, off[FUSED], SLACK * off[UNFUSED]))
    return checks


# ------------------------------------------------------------------ the whole run


def _prepare(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Compile everything in helpers, and verify the small copy: results by job and part."""
    work = [Job({"do": "compile", "variant": name}, list(MODES)) for name in VARIANTS]
    work.append(Job({"do": "verify", "variant": "verify"}, ["verify"]))
    results: dict[str, dict[str, Any]] = {job.job["variant"]: {} for job in work}
    if options.helpers:
        plain = {name: value for name, value in vars(options).items() if name not in ("json", "helper")}
        command = [sys.executable, os.path.abspath(__file__), "--helper", json.dumps(plain)]
        deadline = time.monotonic() + options.budget * 0.65
        for job, part, value in gpu_timing.share_out(work, command, options.helpers, options.patience, deadline):
            results[job.job["variant"]][part] = value
        return results
    for job in work:
        into = results[job.job["variant"]]
        handle({**job.job, "parts": job.parts}, options, into.__setitem__)
    return results


def _measure(options: argparse.Namespace, console: Console, modes: Sequence[str]) -> dict[str, Any]:
    """Correctness, printed, and then times of the modes that have been compiled."""
    tokens = sample(options)
    base = build(options, torch.bfloat16)
    models = {name: variant_of(base, name, options) for name in VARIANTS}
    calls = {name: compiled(models[name], name, options) for name in VARIANTS}
    checks = correctness(base, models, calls, tokens, options, "training" in modes)
    print_checks(console, checks)
    times: dict[str, dict[str, Any]] = {}
    for mode in modes:
        for model in models.values():
            model.train(mode == "training")
        steps = {name: step_of(models[name], calls[name], name, mode, tokens, options) for name in VARIANTS}
        actions = {name: [step] * options.steps for name, step in steps.items()}
        found = gpu_timing.alternate(actions, options.rounds, torch.device(options.device))
        times[mode] = {name: asdict(value) for name, value in found.items()}
        del steps, actions
        for parameter in base.parameters():
            parameter.grad = None
        gc.collect()
    count = sum(parameter.numel() for parameter in base.parameters())
    return {"checks": checks, "times": times, "parameters": count}


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """One line each."""
    for what, figure, limit in checks:
        verdict = "right" if figure <= limit else "WRONG"
        console.print(f"{verdict}  {what}: {figure:.1e}, allowed {limit:.1e}", soft_wrap=True)


def print_table(console: Console, times: Mapping[str, Any], prepared: Mapping[str, Any]) -> None:
    """Steps, ratios, peak memory and compile seconds."""
    headings = ("mode", "variant", "step ms", "quartiles", "x original", "host ms", "peak GiB", "compile s")
    table = Table(*headings)
    for mode in times:
        for name in VARIANTS:
            one, own = times[mode][name], prepared[name].get(mode, {})
            spread = gpu_timing.Timing(**one).spread
            table.add_row(
                mode,
                name,
                f"{one['median'] * 1e3:.2f}",
                f"±{spread:.1%}",
                f"{one['median'] / times[mode][ORIGINAL]['median']:.3f}",
                f"{one['host'] * 1e3:.1f}",
                f"{own['peak'] / 2**30:.2f}" if own.get("peak") else "-",
                f"{own['seconds']:.1f}" if "seconds" in own else "-",
            )
    console.print(table)


def requirements(times: Mapping[str, Any], smoke: bool) -> list[tuple[str, str]]:
    """What has to hold, and a verdict."""
    lines = []
    for mode, limit in LIMITS.items():
        if mode not in times:
            lines.append(("FAIL", f"{mode}: {UNKNOWN}"))
            continue
        ratio = times[mode][FUSED]["median"] / times[mode][ORIGINAL]["median"]
        text = f"{mode}: fused takes at most {limit:g}x the original's time"
        verdict = UNKNOWN if smoke else "PASS" if ratio <= limit else "FAIL"
        lines.append((verdict, text if smoke else f"{text}: {ratio:.3f}x"))
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="default 24")
    parser.add_argument("--width", type=int, help="features, default 2048")
    parser.add_argument("--vocabulary", type=int, help="default 32000")
    parser.add_argument("--tokens", type=int, help="default 2048")
    parser.add_argument("--blocks", type=int, help="blocks of the conversion, default 8")
    parser.add_argument("--rounds", type=int, help="timed turns, default 15")
    parser.add_argument("--steps", type=int, help="steps per turn, default 3")
    parser.add_argument("--helpers", type=int, help="processes that compile side by side, default 4; 0: none")
    parser.add_argument("--budget", type=float, default=285, help="seconds; 65%% of it are for compiling")
    parser.add_argument("--patience", type=float, default=170, help="seconds that one compilation may take")
    parser.add_argument("--quick", action="store_true", help="12 layers, fewer turns")
    parser.add_argument("--json", help="also write everything to this file")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU, op by op; measures nothing")
    parser.add_argument("--helper", help=argparse.SUPPRESS)
    return parser


def _settle(options: argparse.Namespace) -> None:
    """Fill in what was left unsaid."""
    usual = {"layers": 24, "width": 2048, "vocabulary": 32000, "tokens": 2048, "blocks": 8}
    usual |= {"rounds": 15, "steps": 3, "helpers": 4}
    if options.quick:
        usual |= {"layers": 12, "rounds": 9}
    if options.smoke:
        usual = {"layers": 3, "width": 32, "vocabulary": 64, "tokens": 16, "blocks": 3}
        usual |= {"rounds": 2, "steps": 1, "helpers": 0}
    for name, value in usual.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.device = "cpu" if options.smoke else "cuda"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    # Three variants in two modes come from the same code objects.
    torch._dynamo.config.recompile_limit = 64
    if options.helper:
        settled = argparse.Namespace(**json.loads(options.helper))
        for job in gpu_timing.jobs():
            handle(job, settled, gpu_timing.answer)
        return 0
    if not options.smoke and not torch.cuda.is_available():
        print(
            "no CUDA or ROCm device is available, and this program measures one; --smoke tries it out", file=sys.stderr
        )
        return 2
    _settle(options)
    console = Console(width=120, highlight=False)
    known = gpu_timing.describe(torch.device(options.device))
    console.print(gpu_timing.heading(known), soft_wrap=True)
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, {} if options.smoke else _caches(cache)):
        prepared = _prepare(options)
        small = prepared["verify"].get("verify", {})
        exact = bool(small.get("holds"))
        figures = (
            f"outputs {small['outputs']:.1e}, {small['compared']} gradients {small['gradients']:.1e}, "
            f"allowed {EXACT:.0e}"
            if "outputs" in small
            else str(small.get("raised") or small.get("lost") or "no result")
        )
        console.print(
            f"{'right' if exact else 'WRONG'}  a small float32 model, converted against original: {figures}",
            soft_wrap=True,
        )
        lost = [
            f"{name}, {mode}: {own.get('raised') or own.get('lost') or 'no result'}"
            for name in VARIANTS
            for mode in MODES
            if "seconds" not in (own := prepared[name].get(mode, {}))
        ]
        for line in lost:
            console.print(f"not compiled  {line}", soft_wrap=True)
        # What is not in the caches now would take minutes here.
        modes = [mode for mode in MODES if all("seconds" in prepared[name].get(mode, {}) for name in VARIANTS)]
        if "inference" not in modes:
            return 1
        found = _measure(options, console, modes)
    right = exact and all(figure <= limit for _, figure, limit in found["checks"])
    about = [
        f"Llama {options.layers} x {options.width}",
        f"{found['parameters'] / 1e9:.2f}e9 parameters",
        f"{options.tokens} tokens",
        f"bfloat16, {options.blocks} blocks",
        *(["smoke test: the figures mean nothing"] if options.smoke else []),
    ]
    console.print(f"\n{', '.join(about)}", soft_wrap=True)
    lines: list[tuple[str, str]] = []
    if right:
        print_table(console, found["times"], prepared)
        lines = requirements(found["times"], options.smoke)
    else:
        console.print("the converted model is wrong, so its speed is not shown")
    for verdict, text in lines:
        console.print(f"{verdict}  {text}", soft_wrap=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {"about": known, "smoke": options.smoke, "prepared": prepared, **found, "requirements": lines}, file
            )
            file.write("\n")
    return 0 if right and not any(verdict == "FAIL" for verdict, _ in lines) else 1


def _caches(folder: str) -> dict[str, str]:
    """Caches of this run alone, which its processes share."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor"),
        "TRITON_CACHE_DIR": os.path.join(folder, "triton"),
    }


if __name__ == "__main__":
    sys.exit(main())
