"""What the GPU benchmarks share: clocks, helpers in processes of their own, and what is printed about the machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch

# Cycles per second that `torch.cuda._sleep` is taken to count; a slower clock only means a longer head start.
_CYCLES = 2.0e9
_LONGEST_SLEEP = 0.05
Action = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds of one call.

    Attributes:
        median: over the turns.
        low, high: first and last quartile of the turns.
        host: seconds that the CPU needs to ask for one call, median.
    """

    median: float
    low: float
    high: float
    host: float

    @property
    def spread(self) -> float:
        """Distance of the quartiles, as a share of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


def describe(device: torch.device) -> dict[str, str]:
    """Date, device and versions, for the head of a table."""
    import triton

    known = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": platform.processor() or platform.machine(),
        "driver": "-",
        "torch": torch.__version__,
        "triton": str(triton.__version__),
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        known["device"] = torch.cuda.get_device_name(device)
        known["driver"] = _driver()
        known["cuda"] = str(torch.version.cuda or torch.version.hip)
    return known


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip().splitlines()[0] if found.returncode == 0 and found.stdout.strip() else "unknown"


def heading(known: Mapping[str, str]) -> str:
    """One line of :func:`describe`."""
    return ", ".join(value if name in ("date", "device") else f"{name} {value}" for name, value in known.items())


def last_level_cache(device: torch.device) -> int:
    """Bytes of the device's L2 cache; 1 where nothing is to be kept out of a cache."""
    if device.type != "cuda":
        return 1
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 * 2**20)


def alternate(actions: Mapping[str, Sequence[Action]], rounds: int, device: torch.device) -> dict[str, Timing]:
    """Time actions that take turns, in an order that turns too.

    A turn calls each of an action's versions once, one after the other, between two events. The versions work on
    tensors of their own, together larger than the cache, and what they return is kept until the turn is over: so no
    call finds its operands, or writes its results, where the one before left them in the cache. The device is kept
    busy before the first event for as long as the CPU needs to ask for the whole turn.

    Args:
        actions: for each name its versions.
        rounds: timed turns of each; two more come before and do not count.
        device: CUDA, or the CPU, where the clock is the CPU's.
    """
    names = list(actions)
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    cover = dict.fromkeys(names, 0.0)
    for number in range(rounds + 2):
        at = number % len(names)
        for name in names[at:] + names[:at]:
            seconds, host = _turn(actions[name], cover[name], device)
            calls = len(actions[name])
            # The first turn compiles.
            if number > 0:
                cover[name] = max(cover[name], 1.3 * host)
            if number > 1:
                spent[name].append((seconds / calls, host / calls))
    found = {}
    for name, values in spent.items():
        times = [seconds for seconds, _ in values]
        quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
        host = statistics.median(seconds for _, seconds in values)
        found[name] = Timing(statistics.median(times), quartiles[0], quartiles[2], host)
    return found


def _turn(versions: Sequence[Action], cover: float, device: torch.device) -> tuple[float, float]:
    """Seconds of a whole turn on the device, and of asking for it on the CPU."""
    kept: list[object] = []
    if device.type != "cuda":
        start = time.perf_counter()
        for version in versions:
            kept.append(version())
        seconds = time.perf_counter() - start
        return seconds, seconds
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    if cover:
        torch.cuda._sleep(int(_CYCLES * min(cover, _LONGEST_SLEEP)))
    first.record()
    start = time.perf_counter()
    for version in versions:
        kept.append(version())
    host = time.perf_counter() - start
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last) / 1e3, host


# ------------------------------------------------------------------ helpers in processes of their own


@dataclass
class Job:
    """Work for a helper: named parts, each of which gives one result.

    Attributes:
        job: plain values that tell the helper what to do.
        parts: names, in order.
        bytes: of device memory that it needs at most.
    """

    job: dict[str, Any]
    parts: list[str]
    bytes: int = 0


@dataclass
class _Helper:
    """A running process: a job's line goes in, one line per part comes out."""

    command: list[str]
    environment: dict[str, str]
    job: Job | None = None
    left: list[str] = field(default_factory=list)
    since: float = 0.0
    greeted: bool = False

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment},
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.errors: list[str] = []
        assert self.process.stdout is not None and self.process.stderr is not None
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()
        threading.Thread(target=self._complain, args=(self.process.stderr,), daemon=True).start()
        self.since = time.monotonic()

    def _read(self, stream: TextIO) -> None:
        for line in stream:
            self.lines.put(line)
        self.lines.put(None)

    def _complain(self, stream: TextIO) -> None:
        for line in stream:
            self.errors = [*self.errors[-20:], line]

    def give(self, job: Job, parts: list[str]) -> None:
        self.job, self.left, self.since = job, list(parts), time.monotonic()
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({**job.job, "parts": parts}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # It died: its output ends, which is where that is noticed.
            pass

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


PREFIX = "@@ "
LATE = "the time was up"
# Exit code of a helper whose device is of no more use to it: after an error on a GPU every later call fails as well.
RUINED = 75


def answer(part: str, value: Any) -> None:
    """In a helper: the result of one part."""
    print(PREFIX + json.dumps([part, value]), flush=True)


def end_if_ruined(device: torch.device) -> None:
    """In a helper, after a part that raised and was answered: leave where the device no longer works."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.zeros(1, device=device).item()
    except Exception:
        os._exit(RUINED)


def jobs() -> Iterator[dict[str, Any]]:
    """In a helper: the jobs that it is given; says first that it is there."""
    answer("", None)
    for line in sys.stdin:
        yield json.loads(line)


def share_out(
    work: Sequence[Job],
    command: list[str],
    helpers: int,
    patience: float,
    deadline: float,
    memory: int = 0,
    environment: Mapping[str, str] | None = None,
    progress: Callable[[Job, str, Any], None] | None = None,
) -> Iterator[tuple[Job, str, Any]]:
    """Let helpers do jobs side by side; what hangs or dies costs its own part alone.

    Args:
        work: the jobs.
        command: starts a helper, which reads jobs by :func:`jobs` and gives results by :func:`answer`.
        helpers: most processes at a time.
        patience: seconds that a part may take before its process is ended.
        deadline: when, by ``time.monotonic``, all that is left is given up.
        memory: bytes that the jobs at work may need together; 0 is any.
        environment: variables for the helpers.
        progress: told of each result.

    Yields:
        Job, part, and its result, or ``{"lost": why}``.
    """
    waiting: list[tuple[Job, list[str]]] = [(job, list(job.parts)) for job in work if job.parts]
    running: list[_Helper] = []
    results: list[tuple[Job, str, Any]] = []

    def give_up(helper: _Helper, why: str) -> None:
        """End a helper; the part that it was at is lost where there is a reason, and what is left goes to another."""
        helper.end()
        running.remove(helper)
        left, helper.left = helper.left, []
        if helper.job is not None and left:
            if why:
                results.append((helper.job, left.pop(0), {"lost": why}))
            if left:
                waiting.insert(0, (helper.job, left))

    try:
        while waiting or any(helper.left for helper in running):
            if time.monotonic() > deadline:
                for job, parts in [*((h.job, h.left) for h in running if h.job is not None), *waiting]:
                    results += [(job, part, {"lost": LATE}) for part in parts]
                waiting.clear()
                for helper in running:
                    helper.left = []
            busy = [helper for helper in running if helper.left]
            for job, parts in list(waiting):
                taken = sum(helper.job.bytes for helper in busy if helper.job is not None)
                fits = not memory or not busy or taken + job.bytes <= memory
                idle = next((helper for helper in running if not helper.left), None)
                if not fits or (idle is None and len(running) >= helpers):
                    continue
                if idle is None:
                    idle = _Helper(command, dict(environment or {}))
                    running.append(idle)
                waiting.remove((job, parts))
                idle.give(job, parts)
                busy.append(idle)
            for helper in list(running):
                _listen(helper, results, patience, give_up)
            for result in results:
                if progress is not None:
                    progress(*result)
                yield result
            results.clear()
            time.sleep(0.005)
    finally:
        for helper in running:
            helper.end()


def _listen(
    helper: _Helper, results: list[tuple[Job, str, Any]], patience: float, give_up: Callable[[_Helper, str], None]
) -> None:
    while True:
        try:
            line = helper.lines.get_nowait()
        except queue.Empty:
            break
        if line is None:
            code = helper.process.wait()
            said = "".join(helper.errors).strip().splitlines()
            why = f"the process ended: {said[-1] if said else f'code {code}'}"[:300]
            give_up(helper, "" if code == RUINED else why)
            return
        if not line.startswith(PREFIX):
            continue
        part, value = json.loads(line[len(PREFIX) :])
        helper.since = time.monotonic()
        if not part:
            helper.greeted = True
        elif helper.job is not None and part in helper.left:
            helper.left.remove(part)
            results.append((helper.job, part, value))
    # Starting takes its time too, and is no part's fault.
    allowed = patience if helper.greeted else patience + 120
    if helper.left and time.monotonic() - helper.since > allowed:
        give_up(helper, f"took more than {patience:.0f} s")
