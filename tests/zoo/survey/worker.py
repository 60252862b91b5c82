"""Each model in a process of its own, with a limit on its time and its memory.

The processes are forked by a server that has imported torch, dynamo and the library, so that each begins in a moment.
A model that hangs, takes too much memory or crashes the interpreter costs its own row and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from tests.zoo.survey.entry import Entry
from tests.zoo.survey.row import Row
from tests.zoo.survey.source import digest

# How often running processes are looked at, in seconds.
INTERVAL = 0.1
GIB = 2**30
# Libraries are told before they are imported: nothing is fetched, and one model takes one core.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True)
class Limits:
    """What one model may take.

    Attributes:
        seconds: wall clock.
        memory: resident bytes of its process and what that starts.
    """

    seconds: float = 240.0
    memory: float = 6.0 * GIB


@dataclass(frozen=True)
class Source:
    """Where a process finds its entry, and how it measures it: names of functions, because these can be sent.

    Attributes:
        entries: ``module:function`` that gives entries by name for a library, as ``catalogue.by_name`` does.
        measure: ``module:function`` that makes the row of an entry.
        preload: modules that the server imports before it forks.
    """

    entries: str = "tests.zoo.survey.catalogue:by_name"
    measure: str = "tests.zoo.survey.measure:measure"
    preload: tuple[str, ...] = ("tests.zoo.survey.warm",)


@dataclass
class Task:
    """A running model."""

    entry: Entry
    process: BaseProcess
    connection: Connection
    log: Path
    begin: float = field(default_factory=time.perf_counter)
    stage: str = "start"
    row: Row | None = None

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begin


def survey(
    entries: Sequence[Entry],
    jobs: int = 1,
    limits: Limits | None = None,
    source: Source | None = None,
    started: Callable[[Entry], None] | None = None,
) -> Iterator[Row]:
    """The rows of these entries, each as soon as it is there.

    Args:
        entries: of one library or several.
        jobs: how many models at a time.
        limits: of each.
        source: where processes find them.
        started: told of each entry that begins.
    """
    limits, source = limits or Limits(), source or Source()
    digest()
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(source.preload))
    # The server's own start is no model's time.
    first = context.Process(target=int, daemon=True)
    first.start()
    first.join()
    waiting, running = deque(entries), list[Task]()
    with TemporaryDirectory(prefix="survey-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    entry = waiting.popleft()
                    if started:
                        started(entry)
                    running.append(_start(context, entry, source, Path(folder)))
                wait([part for task in running for part in (task.connection, task.process.sentinel)], INTERVAL)
                for task in list(running):
                    row = _look(task, limits)
                    if row is not None:
                        running.remove(task)
                        _end(task)
                        # What its process was forked with, even if a source file is another one by now.
                        yield dataclasses.replace(row, source=digest())
        finally:
            for task in running:
                _end(task)


def _start(context: Any, entry: Entry, source: Source, folder: Path) -> Task:
    ours, theirs = context.Pipe(duplex=False)
    log = folder / f"{entry.name.replace('/', '_')}.log"
    process = context.Process(target=_work, args=(entry.name, entry.library, source, theirs, str(log)), daemon=True)
    process.start()
    theirs.close()
    return Task(entry, process, ours, log)


def _look(task: Task, limits: Limits) -> Row | None:
    """The row of a task that is done, or has to be ended; ``None`` while it may go on."""
    from tests.zoo.survey.measure import stopped

    alive = task.process.is_alive()
    _receive(task)
    if task.row is not None:
        return task.row
    if not alive:
        task.process.join()
        return stopped(task.entry, "error", f"{_end_of(task.process)} during: {task.stage}{_last(task)}", task.seconds)
    if task.seconds > limits.seconds:
        return stopped(task.entry, "timeout", f"over {limits.seconds:.0f} s, during: {task.stage}", task.seconds)
    if resident(task.process.pid) > limits.memory:
        text = f"over {limits.memory / GIB:.1f} GiB, during: {task.stage}"
        return stopped(task.entry, "memory", text, task.seconds)
    return None


def _receive(task: Task) -> None:
    with contextlib.suppress(EOFError, OSError):
        while task.connection.poll():
            kind, value = task.connection.recv()
            if kind == "stage":
                task.stage = value
            else:
                task.row = Row.from_dict(value)


def resident(pid: int | None) -> int:
    """Bytes of memory that a process and its children hold."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0
    total = 0
    for each in family:
        with contextlib.suppress(psutil.Error):
            total += each.memory_info().rss
    return total


def _end(task: Task) -> None:
    """Ends a task's process and whatever it started."""
    pid = task.process.pid
    if pid is not None:
        # It leads a group of its own, unless it ended before it came to that.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        task.process.kill()
    task.process.join()
    task.connection.close()


def _end_of(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with status {code}"


def _last(task: Task) -> str:
    """The last line that the process wrote."""
    lines = task.log.read_text(encoding="utf-8", errors="replace").split("\n") if task.log.exists() else []
    spoken = [line.strip() for line in lines if line.strip()]
    return f": {spoken[-1][:200]}" if spoken else ""


# ------------------------------------------------------------------ in the model's own process


def _work(name: str, library: str, source: Source, connection: Connection, log: str) -> None:
    os.setsid()
    os.nice(10)
    _silence(log)
    import torch

    torch.set_num_threads(1)
    entry = _function(source.entries)(library)[name]

    def says(stage: str) -> None:
        connection.send(("stage", stage))

    row = _function(source.measure)(entry, says)
    connection.send(("row", row.to_dict()))
    connection.close()
    # Libraries' clean-up at exit can hang or crash, and the row is out.
    os._exit(0)


def _silence(log: str) -> None:
    """Sends what libraries print, from Python or C++, to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _function(path: str) -> Callable[..., Any]:
    module, name = path.split(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
