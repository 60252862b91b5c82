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
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import gpu_peers
import gpu_timing
import torch
from gpu_peers import EPS, Bound, Case, Implementation, Problem, one_by_one
from gpu_timing import Job, Timing
from rich.console import Console
from rich.table import Table
from torch import Tensor

from attnres_compile.kernels import device_ops, ops, phase_ops, reference
from attnres_compile.ops import depth_attention

assert device_ops and phase_ops  # register the operators
FORWARD_SHARE = 0.95
FORWARD_SOURCES = 5
BOTH_RATIO = 1.15
# Largest relative error (norm of the difference over the norm) of results and of gradients. One rounding of a result to
# bfloat16 is 1.7e-3; some packages round more than once, and gradients hang on the rounded result.
TOLERANCES = {"bfloat16": (5e-3, 1e-2), "float16": (1e-3, 2e-3), "float32": (1e-5, 2e-5)}
OURS = "attnres op"
COPY = "copy"
UNKNOWN = "not measured"
DIRECTIONS = ("forward", "forward + backward")
# Triton's interpreter cuts a float32 off where hardware rounds it: twice the error.
INTERPRETED = 2.0
_LOOSE_TOKENS = 1024
_CHUNK = 2**26
# Bytes per second that turns are laid out for, and what one takes at least.
_GUESS, _LEAST_TURN, _MOST_CALLS = 3e12, 1e-3, 16


# ------------------------------------------------------------------ ours


def _site(query: Tensor, sources: Sequence[Tensor], mixed: Tensor | None = None, lse: Tensor | None = None) -> Tensor:
    keep = torch.is_grad_enabled()
    nothing = (None, None, None)
    found: list[Tensor] = torch.ops.attnres.site.default(
        query, list(sources), mixed, lse, *nothing, "", 0.0, -1, EPS, 1.0, 1.0, False, keep
    )
    return found[0]


def _operators(problem: Problem) -> Bound:
    """The operators themselves: a site; phase 1; phase 1 and a merge for each query."""
    if problem.case.kind == "mix":
        return one_by_one(problem, _site, torch.float32)
    sources, sums = problem.listed(), problem.sums()
    queries = [problem.query(index) for index in range(problem.case.queries)]
    count = len(queries)

    def run() -> list[Tensor]:
        found = torch.ops.attnres.inter.default(queries, sources, -1, EPS, 1.0, False)
        if not sums:
            return list(found[:count])
        return [_site(queries[s], [sums[s]], found[s], found[count + s]) for s in range(count)]

    return Bound(run, queries, [*sources, *sums], list(problem.grad))


def _public(problem: Problem) -> Bound:
    """``attnres_compile.ops.depth_attention``, with all queries at once where there are several."""

    def read(query: Tensor, sources: list[Tensor]) -> Tensor:
        found = depth_attention(query, sources, eps=EPS)
        assert isinstance(found, Tensor)
        return found

    if problem.case.kind != "inter":
        return one_by_one(problem, read, torch.float32)
    sources, queries = problem.listed(), problem.queries.clone().requires_grad_()
    return Bound(lambda: [read(queries, sources)], [queries], sources, [problem.grad])


def _plain(smoke: bool) -> Callable[[Problem], Bound]:
    """The operators' straight-line code, compiled by Inductor: what runs where no kernel serves."""

    def whole(queries: list[Tensor], sources: list[Tensor], sums: list[Tensor]) -> list[Tensor]:
        read = torch.ops.attnres.mix.default
        given = [[*sources, own] for own in sums] or [sources] * len(queries)
        return [read(query, each, -1, EPS, 1.0, 1.0, False) for query, each in zip(queries, given, strict=True)]

    # A smoke test has no time to compile.
    compiled = torch.compile(whole, dynamic=False, backend="eager" if smoke else "inductor")

    def bind(problem: Problem) -> Bound:
        ops.register_decompositions()
        sources, sums = problem.listed(), problem.sums()
        queries = [problem.query(index) for index in range(problem.case.queries)]
        return Bound(lambda: list(compiled(queries, sources, sums)), queries, [*sources, *sums], list(problem.grad))

    return bind


def _stacked(problem: Problem) -> Bound:
    """As the paper lists it, run by PyTorch op by op: sources stacked, ``einsum`` in float32."""

    def read(query: Tensor, sources: list[Tensor]) -> Tensor:
        values = torch.stack(sources).float()
        keys = torch.nn.functional.rms_norm(values, values.shape[-1:], eps=EPS)
        weights = torch.einsum("d,ntd->nt", query, keys).softmax(0)
        return torch.einsum("nt,ntd->td", weights, values).to(sources[0].dtype)

    return one_by_one(problem, read, torch.float32)


def _single(problem: Problem) -> Bound:
    """One site after the other, where the operators above work for all queries at once."""
    return one_by_one(problem, _site, torch.float32)


def implementations(device: torch.device, smoke: bool) -> dict[str, Implementation]:
    """All ways to compute, by name; ours first."""

    def always(case: Case) -> str:
        return ""

    def several(case: Case) -> str:
        return "the same as attnres op" if case.kind == "mix" else ""

    ours = [
        Implementation(OURS, _operators, always),
        Implementation("attnres single reads", _single, several),
        Implementation("attnres depth_attention", _public, always),
        Implementation("plain, compiled", _plain(smoke), always),
        Implementation("stacked, eager", _stacked, always, loose=True),
    ]
    return {each.name: each for each in [*ours, *gpu_peers.peers(device)]}


@contextlib.contextmanager
def interpreted_kernels() -> Iterator[bool]:
    """On the CPU, in Triton's interpreter: give the operators' calls to the generated kernels. Says whether it does."""
    import triton

    if not triton.knobs.runtime.interpret:
        yield False
        return
    from attnres_compile.kernels import launch

    library = torch.library.Library("attnres", "IMPL")
    for name in device_ops.SERVED:
        library.impl(name, getattr(launch, name), "CPU")
    try:
        yield True
    finally:
        library._destroy()


# ------------------------------------------------------------------ correctness


def _kept_rows(tokens: int) -> list[int]:
    """Tokens whose results are compared: both ends, and some between."""
    between = torch.linspace(0, tokens - 1, min(128, tokens)).long().tolist()
    return sorted({*range(min(64, tokens)), *between, *range(max(0, tokens - 64), tokens)})


def expected(problem: Problem) -> dict[str, list[Tensor]]:
    """Results and gradients by ``kernels/reference.py`` in float64, on some tokens; the queries' over all tokens."""
    case = problem.case
    chunk = max(1, min(case.tokens, _CHUNK // (8 * (case.sources + case.queries) * case.dim)))
    kept = _kept_rows(case.tokens)
    queries = [query.double().requires_grad_() for query in problem.queries]
    totals = [torch.zeros_like(query) for query in queries]
    parts: dict[str, list[list[Tensor]]] = {"results": [], "values": []}
    for start in range(0, case.tokens, chunk):
        rows = slice(start, min(start + chunk, case.tokens))
        values = [value[rows].double().requires_grad_() for value in [*problem.stack, *problem.partials]]
        found = _reads(queries, values[: case.sources], values[case.sources :])
        grads = torch.autograd.grad(found, [*queries, *values], [grad[rows].double() for grad in problem.grad])
        for total, grad in zip(totals, grads, strict=False):
            total += grad
        inside = [row - start for row in kept if rows.start <= row < rows.stop]
        parts["results"].append([value.detach()[inside] for value in found])
        parts["values"].append([value[inside] for value in grads[case.queries :]])
    joined = {name: [torch.cat(pieces) for pieces in zip(*found, strict=True)] for name, found in parts.items()}
    return {**joined, "queries": totals}


def _reads(queries: list[Tensor], sources: list[Tensor], sums: list[Tensor]) -> list[Tensor]:
    if not sums:
        return [reference.mix(query, sources, -1, EPS, 1.0) for query in queries]
    # Algorithm 1, and not the direct read that it has to agree with.
    mixes, lses = reference.inter(queries, sources, -1, EPS)
    return [
        reference.merge(q, mix, lse, own, -1, EPS) for q, mix, lse, own in zip(queries, mixes, lses, sums, strict=True)
    ]


def errors(bound: Bound, case: Case, right: Mapping[str, list[Tensor]]) -> dict[str, float]:
    """Largest relative errors of results, and of gradients of queries and values; of the forward alone as well."""
    kept = _kept_rows(case.tokens)

    def rows(values: Iterable[Tensor]) -> list[Tensor]:
        return [row[kept] for value in values for row in value.detach().reshape(-1, case.tokens, case.dim)]

    alone = rows(bound.forward())
    found, grads = bound.both()
    count = len(bound.queries)
    queries = [row for value in grads[:count] for row in value.reshape(-1, case.dim)]
    return {
        "results": max(_worst(alone, right["results"]), _worst(rows(found), right["results"])),
        "queries": _worst(queries, right["queries"]),
        "values": _worst(rows(grads[count:]), right["values"]),
    }


def _worst(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    worst = 0.0
    for value, wanted in zip(found, right, strict=True):
        error = float((value.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def _check(job: Mapping[str, Any], device: torch.device, smoke: bool, say: Callable[[str, Any], None]) -> None:
    """Compare each implementation with the definition; the first call of each compiles it."""
    case = Case(**job["case"])
    known = implementations(device, smoke)
    prepared: dict[int, tuple[Problem, dict[str, list[Tensor]]]] = {}
    torch._dynamo.reset()
    for name in job["parts"]:
        loose = known[name].loose and case.tokens > _LOOSE_TOKENS
        own = Case(**{**job["case"], "tokens": _LOOSE_TOKENS}) if loose else case
        failed = False
        try:
            if own.tokens not in prepared:
                problem = Problem(own, device)
                prepared[own.tokens] = problem, expected(problem)
            problem, right = prepared[own.tokens]
            start = time.perf_counter()
            found = errors(known[name].bind(problem), own, right)
            say(name, {"errors": found, "tokens": own.tokens, "seconds": time.perf_counter() - start})
        except Exception as error:
            failed = True
            say(name, {"raised": _words(error)})
        _let_go(device)
        if failed:
            gpu_timing.end_if_ruined(device)


def _let_go(device: torch.device) -> None:
    """Give memory back: other processes are at work on the same device."""
    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def _words(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]


# ------------------------------------------------------------------ speed


def _clock(job: Mapping[str, Any], device: torch.device, smoke: bool, say: Callable[[str, Any], None]) -> None:
    """Time the job's implementations, and the copy, in turns."""
    case, rounds = Case(**job["case"]), job["rounds"]
    known = implementations(device, smoke)
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    room = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 2**40
    sets = -(-4 * gpu_timing.last_level_cache(device) // (case.sources * case.tensor_bytes))
    sets = max(1, min(sets, _MOST_CALLS))
    problems = [Problem(case, device, seed) for seed in range(sets)]
    bounds: dict[str, list[Bound]] = {}
    result: dict[str, Any] = {"raised": {}, "times": {}, "versions": sets}
    for name in job["names"]:
        try:
            made = [known[name].bind(problem) for problem in problems]
            made[0].forward()
            made[0].both()
            bounds[name] = made
        except Exception as error:
            result["raised"][name] = _words(error)
    for direction in DIRECTIONS:
        both = direction != "forward"
        floor = case.floor(both)
        most = max(1, int(0.15 * room / ((case.sources + case.queries + 1) * case.tensor_bytes)))
        calls = sets if smoke else max(sets, min(math.ceil(_LEAST_TURN * _GUESS / floor), most, _MOST_CALLS))
        actions: dict[str, list[gpu_timing.Action]] = {COPY: _copies(floor, calls, device)}
        for name, made in bounds.items():
            once = [bound.both if both else bound.forward for bound in made]
            actions[name] = [once[call % sets] for call in range(calls)]
        times = gpu_timing.alternate(actions, rounds, device)
        result["times"][direction] = {name: asdict(value) for name, value in times.items()}
        del actions
        gc.collect()
    say("times", result)


def _copies(moved: int, calls: int, device: torch.device) -> list[gpu_timing.Action]:
    """Copies that read and write ``moved`` bytes together; while buffers are small, each has its own."""
    half = max(16, moved // 2 // 16 * 16)
    distinct = max(1, min(calls, -(-4 * gpu_timing.last_level_cache(device) // half)))
    pairs = [
        (
            torch.ones(half // 4, dtype=torch.int32, device=device),
            torch.empty(half // 4, dtype=torch.int32, device=device),
        )
        for _ in range(distinct)
    ]
    return [
        lambda into=into, given=given: into.copy_(given) for given, into in (pairs[i % distinct] for i in range(calls))
    ]


def handle(job: Mapping[str, Any], device: torch.device, smoke: bool, say: Callable[[str, Any], None]) -> None:
    """Do one job of a helper."""
    try:
        (_check if job["do"] == "check" else _clock)(job, device, smoke, say)
    except Exception as error:
        for part in job["parts"]:
            say(part, {"raised": _words(error)})
        gpu_timing.end_if_ruined(device)
    _let_go(device)


def helper(smoke: bool) -> int:
    """A process that does jobs."""
    torch._dynamo.config.recompile_limit = 256
    device = torch.device("cpu" if smoke else "cuda")
    if device.type == "cuda":
        gpu_peers.hurry_autotuning()
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
        environment = {"FLA_CACHE_RESULTS": "0", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        deadline = time.monotonic() + seconds
        yield from gpu_timing.share_out(work, command, helpers, options.patience, deadline, options.memory, environment)
        return
    device = torch.device("cpu" if options.smoke else "cuda")
    for job in work:
        said: list[tuple[str, Any]] = []
        handle(
            {**job.job, "parts": job.parts},
            device,
            options.smoke,
            lambda part, value, said=said: said.append((part, value)),
        )
        for part, value in said:
            yield job, part, value


def measure(options: argparse.Namespace, progress: Callable[[str], None]) -> Results:
    """Check everything, then time what is right.

    Returns:
        For each case ``{"gaps": {name: why}, "wrong": {name: why}, "checks": {name: ...}, "times": {direction: ...}}``.
    """
    began = time.monotonic()
    device = torch.device("cpu" if options.smoke else "cuda")
    known = implementations(device, options.smoke)
    results: Results = {}
    work: list[Job] = []
    for case in cases(options):
        gaps = {name: why for name, each in known.items() if (why := each.gap(case))}
        results[case] = {"gaps": gaps, "wrong": {}, "checks": {}, "times": {}, "raised": {}}
        names = [name for name in known if name not in gaps]
        work.append(Job({"do": "check", "case": asdict(case)}, names, _largest(case)))
    # The longest first: they would otherwise end last, alone.
    work.sort(key=lambda job: -job.bytes)
    share = options.budget * 0.55
    for job, name, value in _perform(work, options, options.helpers, share):
        case = Case(**job.job["case"])
        _note(results[case], known[name], case, value, INTERPRETED if options.interpreted else 1.0)
    progress(f"checked after {time.monotonic() - began:.0f} s")
    left = options.budget - (time.monotonic() - began)
    clocked = []
    for case, result in results.items():
        names = [name for name in known if name in result["checks"] and name not in result["wrong"]]
        clocked.append(Job({"do": "clock", "case": asdict(case), "names": names, "rounds": options.rounds}, ["times"]))
    for job, _, value in _perform(clocked, options, 1 if options.helpers else 0, left):
        result = results[Case(**job.job["case"])]
        result["times"] = value.get("times", {})
        result["raised"] = value.get("raised", {}) if isinstance(value.get("raised"), dict) else {}
        for name in job.job["names"]:
            if name not in result["times"].get(DIRECTIONS[0], {}):
                why = result["raised"].get(name) or value.get("lost") or value.get("raised")
                result["gaps"][name] = f"not measured: {why}"
    progress(f"measured after {time.monotonic() - began:.0f} s")
    return results


def _note(result: dict[str, Any], each: Implementation, case: Case, value: dict[str, Any], slack: float) -> None:
    """Enter what came of a check. What another package cannot do is a gap; of ours it is an error."""
    if "errors" not in value:
        why = value.get("raised") or value.get("lost") or "no result"
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
            # What it cannot do is a gap of its own; what only was not measured is not known.
            able = [
                case for case, result in results.items() if name in result["checks"] and name not in result["wrong"]
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
        "helpers": max(1, min(12, (os.cpu_count() or 2) - 2)),
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
        results = measure(options, lambda text: print(text, file=sys.stderr, flush=True))
    names = implementations(device, options.smoke)
    print_checks(console, results, list(names))
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
