"""Depth attention on a GPU: correctness first, then speed beside a copy of the same bytes and beside other packages.

    python benchmarks/gpu_kernels.py

One read of N sources, forward and forward + backward, for several N and feature dims d; S reads of the same sources
at once (phase 1); and a block in two phases, phase 1 and S merges. Every implementation first has to agree with the
method in float64; the speed of one that does not is not shown, and makes the exit code 1. Then all take turns, beside
a device copy that moves as many bytes as the operation has to (its floor): milliseconds, and in percent the copy's
time over the implementation's, which is the share of the copy's rate. Sources that a package wants stacked are
stacked beforehand. Required, of "attnres op":

- forward: at least 95% of the copy's rate for one read of N >= 5 sources;
- forward + backward: at most 1.15x the copy's time for one read;
- faster than every other package, in every case that this can do.

Processes of their own compile and check case by case, side by side, so that nothing compiles while the clock runs,
and what hangs or dies is lost alone. Exit codes: 0 all holds, 1 not so, 2 no GPU. ``--smoke`` runs the same program
on the CPU with tiny tensors (with TRITON_INTERPRET=1 through the generated kernels): it measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import gpu_peers
import gpu_timing
import torch
from gpu_cases import OURS, Case, Implementation, interpreted_kernels
from gpu_checks import COPY, DIRECTIONS, handle, implementations
from gpu_timing import Job, Timing
from rich.console import Console
from rich.table import Table

FORWARD_SHARE = 0.95
FORWARD_SOURCES = 5
BOTH_RATIO = 1.15
# Largest relative error (norm of the difference over the norm) of results and of gradients. One rounding of a result to
# bfloat16 is 1.7e-3; some packages round more than once, and gradients hang on the rounded result.
TOLERANCES = {"bfloat16": (5e-3, 1e-2), "float16": (1e-3, 2e-3), "float32": (1e-5, 2e-5)}
UNKNOWN = "not measured"
# Share of the time that is for compiling and checking.
CHECKING = 0.6
# Triton's interpreter cuts a float32 off where hardware rounds it: twice the error.
INTERPRETED = 2.0


def helper(smoke: bool) -> int:
    """A process that does jobs."""
    torch._dynamo.config.recompile_limit = 256
    device = torch.device("cpu" if smoke else "cuda")
    if device.type == "cuda":
        gpu_peers.hurry_autotuning()
    with interpreted_kernels() if smoke else contextlib.nullcontext(False):
        for job in gpu_timing.jobs():
            handle(job, device, smoke, gpu_timing.answer)
    return 0


# ------------------------------------------------------------------ the whole run


Results = dict[Case, dict[str, Any]]


def cases(options: argparse.Namespace) -> list[Case]:
    """What is computed, in the table's order."""
    shape = {"tokens": options.tokens, "dtype": options.dtype}
    found = [Case("mix", n, d, **shape) for n in options.sources for d in options.dims]
    for kind in ("inter", "block"):
        found += [
            Case(kind, n, d, **shape, queries=options.queries) for n in options.batched_sources for d in options.dims
        ]
    return found


def _largest(case: Case) -> int:
    """Bytes of device memory that a check needs at most: sources, gradients, stacks, and float32 copies of them."""
    return (8 * case.sources + 12 * case.queries) * case.tensor_bytes + 4 * 2**30


def _perform(
    work: list[Job], options: argparse.Namespace, helpers: int, seconds: float
) -> Iterator[tuple[Job, str, Any]]:
    """Have jobs done, by helpers or, where there are to be none, here."""
    if helpers:
        command = [sys.executable, os.path.abspath(__file__), "--helper", *(["--smoke"] if options.smoke else [])]
        # fla-core would keep what its autotuner chose while other processes were at work.
        environment = {"FLA_CACHE_RESULTS": "0", "OMP_NUM_THREADS": "1"}
        # One graph is one kernel: compiling it needs no processes beside the helpers.
        environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        deadline = time.monotonic() + seconds
        yield from gpu_timing.share_out(work, command, helpers, options.patience, deadline, options.memory, environment)
        return
    device = torch.device("cpu" if options.smoke else "cuda")
    for job in work:
        said: list[tuple[str, Any]] = []
        handle({**job.job, "parts": job.parts}, device, options.smoke, lambda *pair: said.append(pair))  # noqa: B023
        for part, value in said:
            yield job, part, value


def check_all(options: argparse.Namespace) -> Results:
    """Compile everything and compare it with the definition.

    Returns:
        For each case ``{"gaps": {name: why}, "wrong": {name: why}, "checks": {name: ...}, "times": {}}``.
    """
    device = torch.device("cpu" if options.smoke else "cuda")
    known = implementations(device, options.smoke)
    results: Results = {}
    work: list[Job] = []
    for case in cases(options):
        gaps = {name: why for name, each in known.items() if (why := each.gap(case))}
        results[case] = {"gaps": gaps, "wrong": {}, "checks": {}, "times": {}, "late": []}
        names = [name for name in known if name not in gaps]
        work.append(Job({"do": "check", "case": asdict(case)}, names, _largest(case)))
    # The longest first: they would otherwise end last, alone.
    work.sort(key=lambda job: -job.bytes)
    for job, name, value in _perform(work, options, options.helpers, options.budget * CHECKING):
        case = Case(**job.job["case"])
        _note(results[case], known[name], case, value, INTERPRETED if options.interpreted else 1.0)
    return results


def clock_all(results: Results, options: argparse.Namespace, seconds: float) -> None:
    """Time what is right, case by case, and enter it."""
    work = []
    for case, result in results.items():
        names = [name for name in result["checks"] if name not in result["wrong"]]
        work.append(Job({"do": "clock", "case": asdict(case), "names": names, "rounds": options.rounds}, ["times"]))
    for job, _, value in _perform(work, options, 1 if options.helpers else 0, seconds):
        result = results[Case(**job.job["case"])]
        result["times"] = value.get("times", {})
        raised = value.get("raised", {})
        for name in job.job["names"]:
            if name not in result["times"].get(DIRECTIONS[0], {}):
                why = raised.get(name) if isinstance(raised, dict) else raised
                result["gaps"][name] = f"not measured: {why or value.get('lost') or 'no result'}"


def _note(result: dict[str, Any], each: Implementation, case: Case, value: dict[str, Any], slack: float) -> None:
    """Enter what came of a check. What another package cannot do is a gap; of ours it is an error."""
    if "errors" not in value:
        why = value.get("raised") or value.get("lost") or "no result"
        if value.get("lost") == gpu_timing.LATE:
            result["late"].append(each.name)
        if each.peer or "lost" in value:
            result["gaps"][each.name] = why
        else:
            result["wrong"][each.name] = why
        return
    result["checks"][each.name] = value
    of_results, of_gradients = (slack * limit for limit in TOLERANCES[case.dtype])
    limits = {"results": of_results, "queries": of_gradients, "values": of_gradients}
    off = [f"{what} off by {value['errors'][what]:.1e}, allowed {limit:.0e}" for what, limit in limits.items()
           if not value["errors"][what] <= limit]  # fmt: skip
    if off:
        result["wrong"][each.name] = "; ".join(off)


# ------------------------------------------------------------------ what is printed


def print_checks(console: Console, results: Results, names: Sequence[str]) -> None:
    """The worst errors of each implementation, then each failure and each gap."""
    table = Table("implementation", "cases", "results", "gradients: queries", "of sources", title="Against float64")
    for name in names:
        found = [result["checks"][name]["errors"] for result in results.values() if name in result["checks"]]
        if not found:
            table.add_row(name, "0", "-", "-", "-")
            continue
        worst = {what: max(each[what] for each in found) for what in ("results", "queries", "values")}
        table.add_row(name, str(len(found)), *(f"{worst[what]:.1e}" for what in ("results", "queries", "values")))
    console.print(table)
    for case, result in results.items():
        for name, why in result["wrong"].items():
            console.print(f"WRONG  {name}, {case}: {why}", soft_wrap=True)
    console.print()


def print_speed(console: Console, results: Results, names: Sequence[str]) -> None:
    """One line per case and direction; what is missing is a letter, explained below."""
    letters: dict[str, str] = {}

    def letter(why: str) -> str:
        if why not in letters:
            letters[why] = chr(ord("a") + len(letters) % 26) + ("" if len(letters) < 26 else str(len(letters) // 26))
        return f"no ({letters[why]})"

    table = Table("case", "direction", "copy\nGB/s", "ours\nGB/s")
    for name in names:
        table.add_column(name.replace(" ", "\n", 1), overflow="fold")
    for case, result in results.items():
        for direction in DIRECTIONS:
            times = result["times"].get(direction, {})
            floor = case.floor(direction != DIRECTIONS[0])
            rates = [f"{floor / times[name]['median'] / 1e9:.0f}" if name in times else "-" for name in (COPY, OURS)]
            cells = []
            for name in names:
                if name in result["wrong"]:
                    cells.append("wrong")
                elif name in times:
                    one = times[name]
                    share = times[COPY]["median"] / one["median"]
                    spread = Timing(**one).spread
                    cells.append(f"{one['median'] * 1e3:.3f} ±{spread:.0%}\n{share:.0%}, host {one['host'] * 1e6:.0f}")
                else:
                    cells.append(letter(result["gaps"].get(name, "no result")))
            table.add_row(str(case), direction, *rates, *cells)
    console.print(table)
    console.print(
        "Cells: milliseconds, distance of the quartiles; share of the copy's rate; microseconds of the CPU to ask.",
        soft_wrap=True,
    )
    for why, sign in letters.items():
        console.print(f"({sign}) {why}", soft_wrap=True)
    console.print()


def requirements(results: Results, names: Mapping[str, Implementation]) -> list[tuple[str, str]]:
    """What has to hold, and a verdict: a case that was not measured counts as not held.

    A package that could do no case at all, or is not there, gives no verdict.
    """

    def ratio(case: Case, direction: str, over: str) -> float:
        times = results[case]["times"].get(direction, {})
        return times[OURS]["median"] / times[over]["median"] if OURS in times and over in times else math.nan

    reads = [case for case in results if case.kind == "mix"]
    many = [case for case in reads if case.sources >= FORWARD_SOURCES]
    shares = {case: 1 / ratio(case, DIRECTIONS[0], COPY) for case in many}
    costs = {case: ratio(case, DIRECTIONS[1], COPY) for case in reads}
    lines = [
        _line(
            {case: share >= FORWARD_SHARE for case, share in shares.items()},
            shares,
            f"forward, N >= {FORWARD_SOURCES}: share of the copy's rate, required at least {FORWARD_SHARE:.0%}",
            least=True,
        ),
        _line(
            {case: cost <= BOTH_RATIO for case, cost in costs.items()},
            costs,
            f"forward + backward: times its floor at the copy's rate, required at most {BOTH_RATIO:g}x",
            least=False,
        ),
    ]
    for name, each in names.items():
        if not each.peer:
            continue
        for direction in DIRECTIONS:
            # What it cannot do is a gap of its own; where the time was up, who is ahead is not known.
            able = [
                case
                for case, result in results.items()
                if name in result["late"] or (name in result["checks"] and name not in result["wrong"])
            ]
            leads = {case: 1 / ratio(case, direction, name) for case in able}
            text = f"{direction}: faster than {name}, times faster, required more than 1x"
            if able:
                lines.append(_line({case: lead > 1 for case, lead in leads.items()}, leads, text, least=True))
            else:
                lines.append((UNKNOWN, f"{text}: nothing to compare with"))
    return lines


def _line(holds: Mapping[Case, bool], figures: Mapping[Case, float], text: str, least: bool) -> tuple[str, str]:
    known = {case: figure for case, figure in figures.items() if not math.isnan(figure)}
    missing = len(figures) - len(known)
    parts = [f"{sum(holds[case] for case in known)} of {len(figures)} cases hold"]
    if known:
        worst = (min if least else max)(known, key=lambda case: known[case])
        parts.append(f"worst {known[worst]:.3f} at {worst}")
    if missing:
        parts.append(f"{missing} not measured")
    if not figures:
        return UNKNOWN, f"{text}: no such case"
    return "FAIL" if missing or not all(holds.values()) else "PASS", f"{text}: {', '.join(parts)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, nargs="+", help="N, default 2 5 9 17 33")
    parser.add_argument("--dims", type=int, nargs="+", help="d, default 1024 2048 4096 7168")
    parser.add_argument("--batched-sources", type=int, nargs="*", help="N of the reads with S queries, default 9")
    parser.add_argument("--queries", type=int, help="S, default 8")
    parser.add_argument("--tokens", type=int, help="default 8192")
    parser.add_argument("--dtype", choices=list(TOLERANCES), default="bfloat16")
    parser.add_argument("--rounds", type=int, help="timed turns, default 11")
    parser.add_argument("--quick", action="store_true", help="N 2 9 33 and d 2048 7168 only, 7 turns")
    parser.add_argument("--budget", type=float, default=285, help="seconds after which nothing new begins")
    parser.add_argument("--patience", type=float, default=90, help="seconds that one compilation may take")
    parser.add_argument("--helpers", type=int, help="processes that compile side by side; 0: all in this one")
    parser.add_argument("--json", help="also write everything to this file")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU; measures nothing")
    parser.add_argument("--helper", action="store_true", help=argparse.SUPPRESS)
    return parser


def _settle(options: argparse.Namespace) -> None:
    """Fill in what was left unsaid."""
    usual: dict[str, Any] = {
        "sources": [2, 5, 9, 17, 33],
        "dims": [1024, 2048, 4096, 7168],
        "batched_sources": [9],
        "queries": 8,
        "tokens": 8192,
        "rounds": 11,
        "helpers": max(1, min(14, (os.cpu_count() or 2) - 2)),
    }
    if options.quick:
        usual |= {"sources": [2, 9, 33], "dims": [2048, 7168], "rounds": 7}
    if options.smoke:
        usual = {"sources": [2, 5], "dims": [32, 40], "batched_sources": [3], "queries": 2, "tokens": 24}
        usual |= {"rounds": 2, "helpers": 0}
    for name, value in usual.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.memory = 0 if options.smoke else int(0.8 * torch.cuda.mem_get_info()[1])


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if not options.smoke and not torch.cuda.is_available():
        print(
            "no CUDA or ROCm device is available, and this program measures one; --smoke tries it out", file=sys.stderr
        )
        return 2
    if options.helper:
        return helper(options.smoke)
    began = time.monotonic()
    _settle(options)
    console = Console(width=210, highlight=False)
    device = torch.device("cpu" if options.smoke else "cuda")
    known = gpu_timing.describe(device)
    console.print(gpu_timing.heading(known), soft_wrap=True)
    packages = [
        f"{package.title}{' (not installed)' if not gpu_peers.installed(package) else ''}"
        for package in gpu_peers.PACKAGES
    ]
    console.print(f"{options.tokens} tokens, {options.dtype}; beside {', '.join(packages)}", soft_wrap=True)
    with interpreted_kernels() if options.smoke else contextlib.nullcontext(False) as interpreted:
        options.interpreted = interpreted
        if options.smoke:
            console.print(f"smoke test on the CPU, {'generated kernels interpreted' if interpreted else 'plain code'}")
        names = implementations(device, options.smoke)
        results = check_all(options)
        print_checks(console, results, list(names))
        console.print(f"checked after {time.monotonic() - began:.0f} s")
        clock_all(results, options, options.budget - (time.monotonic() - began))
        console.print(f"measured after {time.monotonic() - began:.0f} s\n")
    print_speed(console, results, list(names))
    lines = requirements(results, names)
    if options.smoke:
        # What is required, without the figures of this machine.
        lines = [(UNKNOWN, text.rpartition(":")[0]) for _, text in lines]
    for verdict, text in lines:
        console.print(f"{verdict}  {text}", soft_wrap=True)
    if options.json:
        _write(options, known, results, lines)
    wrong = any(result["wrong"] for result in results.values())
    return 1 if wrong or any(verdict == "FAIL" for verdict, _ in lines) else 0


def _write(options: argparse.Namespace, known: Mapping[str, str], results: Results, lines: Any) -> None:
    listed = [{"case": asdict(case), "floor_bytes": [case.floor(False), case.floor(True)], **result}
              for case, result in results.items()]  # fmt: skip
    content = {"about": known, "smoke": options.smoke, "results": listed, "requirements": lines}
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    sys.exit(main())
