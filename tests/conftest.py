"""Settings for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from attnres_compile.report import TransformReport
from tests import reports


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Each test starts with an empty compile cache and one seed, so that none leans on another's graphs or luck."""
    torch._dynamo.reset()
    torch.manual_seed(0)
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
    """The longest first, then what compiles with Inductor; else as they come."""

    def place(item: pytest.Item) -> int:
        if any(name in item.nodeid for name in LONG):
            return 0
        return 1 if item.get_closest_marker("inductor") else 2

    items.sort(key=place)


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist share the cores; more threads than that make small models slower.
    torch.set_num_threads(1)
    # And take work from one another at the end. (In the ini file this would be an error where xdist is switched off.)
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist = "worksteal"
    # dynamo's structured trace is at debug level and of empty messages: pages of nothing under each failure.
    config.option.log_level = config.option.log_level or "WARNING"
