"""Settings for all tests."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator

import pytest
import torch

from attnres_compile.report import TransformReport
from tests import reports, sampling


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Each test starts with an empty compile cache and one seed, so that none leans on another's graphs or luck."""
    torch._dynamo.reset()
    torch.default_generator.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def make_report() -> Callable[..., TransformReport]:
    return reports.make_report


@pytest.fixture
def report() -> TransformReport:
    """As a 24-layer decoder gives it."""
    return reports.make_report()


# Tests of a minute or so, which two workers must not begin last: parts of their names.
LONG = (
    "test_kernels_in_the_interpreter",
    "test_kernels_in_helpers_and_interpreted",
    "test_kernels_from_end_to_end",
    "test_models_from_end_to_end",
    "examples",
    "properties",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, then what compiles with Inductor; else as they come. Of some tests a few cases."""
    sampling.leave_to_the_long_run(items)

    def place(item: pytest.Item) -> int:
        if any(name in item.nodeid for name in LONG):
            return 0
        return 1 if item.get_closest_marker("inductor") else 2

    items.sort(key=place)


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist share the cores; more threads than that make small models slower, and so do more
    # processes of Inductor's, each of which imports torch: here, and in what is started from here.
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # And take work from one another at the end. (In the ini file this would be an error where xdist is switched off.)
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist = "worksteal"
    spare_dynamo()


def spare_dynamo() -> None:
    """Leave out what dynamo only measures and writes down for nobody: half of the time of a small model's compiling."""
    # How long the guards of each graph take, after 0.1 s of flushing the processor's caches.
    torch._dynamo.guards.profile_guard_manager = lambda *arguments: 0.0
    # The structured trace, for which pytest has a handler as long as the logger does not propagate.
    logging.getLogger("torch.__trace").propagate = True


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now stays: collect it no more, and new garbage less often than every 700 objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
