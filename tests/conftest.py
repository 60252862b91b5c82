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


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist share the cores; more threads than that make small models slower.
    torch.set_num_threads(1)
    # dynamo's structured trace is at debug level and of empty messages: pages of nothing under each failure.
    config.option.log_level = config.option.log_level or "WARNING"
