"""Imported by the server that models' processes are forked from: whatever takes long and is the same for all."""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings

import torch

import tests.zoo.survey.measure
from tests.zoo.survey.catalogue import PACKAGES, SOURCES, by_name

torch.set_num_threads(1)


warnings.simplefilter("ignore")


def _warm(libraries: list[str]) -> None:
    for library in libraries:
        # A process that cannot import it either will say so in its row.
        with contextlib.suppress(ImportError):
            importlib.import_module(PACKAGES.get(library, library))
            by_name(library)


# Which libraries: by the environment, because the server is told nothing else.
_warm([library for library in os.environ.get("SURVEY_LIBRARIES", "").split(",") if library in SOURCES])
# The first capture of a process imports much of torch; no backward here, since threads do not survive a fork.
torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
torch._dynamo.reset()

__all__ = ["tests"]
