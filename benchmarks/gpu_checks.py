"""What the helpers of ``gpu_kernels.py`` do: compare implementations with the definition, and time them."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import gpu_cases
import gpu_peers
import gpu_timing
import torch
from gpu_cases import EPS, Bound, Case, Implementation, Problem
from torch import Tensor

from attnres_compile.kernels import reference

COPY = "copy"
DIRECTIONS = ("forward", "forward + backward")
_LOOSE_TOKENS = 1024
# Bytes of float64 that the definition works on at a time.
_CHUNK = 2**28
# Bytes per second that turns are laid out for, and what one takes at least.
_GUESS, _LEAST_TURN, _MOST_CALLS = 3e12, 1e-3, 16


def implementations(device: torch.device, smoke: bool) -> dict[str, Implementation]:
    """All ways to compute, by name; ours first."""
    return {each.name: each for each in [*gpu_cases.ours(smoke), *gpu_peers.peers(device)]}


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
    return [functools.partial(into.copy_, given) for given, into in (pairs[call % distinct] for call in range(calls))]


def handle(job: Mapping[str, Any], device: torch.device, smoke: bool, say: Callable[[str, Any], None]) -> None:
    """Do one job of a helper."""
    try:
        (_check if job["do"] == "check" else _clock)(job, device, smoke, say)
    except Exception as error:
        for part in job["parts"]:
            say(part, {"raised": _words(error)})
        gpu_timing.end_if_ruined(device)
    _let_go(device)
