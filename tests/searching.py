"""Searches for counterexamples: how many, how long a small one is looked for, and how it is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.internal.conjecture.engine as engine
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import attnres_compile as ac
from tests.properties.spec import Spec

# A larger search by hand: ATTNRES_EXAMPLES=5000 pytest tests/properties. Then examples are random too.
SEARCH = int(os.environ.get("ATTNRES_EXAMPLES", "0"))
# Seconds that a failure may be made smaller for: enough for a handful of instructions.
SHRINKING = 30

Judge = Callable[[Spec, ac.AttnResConfig], Any]

configs = st.builds(
    lambda layout, queries, depth_loops, gain: ac.AttnResConfig(
        **layout, min_sublayers=2, queries=queries, depth_loops=depth_loops, lowering="eager"
    ),
    st.sampled_from(
        (
            {"num_blocks": None},
            {"num_blocks": 1},
            {"num_blocks": 2},
            {"num_blocks": 3},
            {"block_size": 1},
            {"block_size": 2},
        )
    ),
    queries=st.sampled_from(("state", "reader")),
    depth_loops=st.booleans(),
    gain=st.none(),
)
