"""Searches for counterexamples: how many networks, how long a small one is looked for, and how it is told."""

from __future__ import annotations

import os
from typing import Any

import hypothesis.internal.conjecture.engine as engine
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import attnres_compile as ac
from tests.properties import against_oracle, compiled, judge
from tests.properties.spec import Spec

# A larger search by hand: ATTNRES_EXAMPLES=5000 pytest tests/properties. Then examples are random too.
SEARCH = int(os.environ.get("ATTNRES_EXAMPLES", "0"))
# Seconds that a counterexample may be made smaller for.
SHRINKING = 300 if SEARCH else 20

JUDGES = {
    "any": judge.judge_any,
    "plain": judge.judge_plain,
    "dynamo": compiled.judge_dynamo,
    "regions": compiled.judge_regions,
    "transform": compiled.judge_transform,
    "breaks": compiled.judge_breaks,
    "oracle": against_oracle.judge_oracle,
}

configs = st.builds(
    lambda layout, **options: ac.AttnResConfig(**layout, min_sublayers=2, lowering="eager", **options),
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
    gain=st.sampled_from(("sum", "sum", "mean")),
)


def search(name: str, specs: st.SearchStrategy[Spec], examples: int, part: int = 0) -> None:
    """Judge random networks; a failure is that of a small one, and says how to run it again.

    Args:
        name: of the judge, in :data:`JUDGES`.
        specs: what to draw from.
        examples: how many networks.
        part: searches of one kind with different numbers see different networks.
    """

    def holds(spec: Spec, config: ac.AttnResConfig) -> None:
        try:
            JUDGES[name](spec, config)
        except Exception as error:
            error.add_note(f"{spec!r}\n{config!r}\nAgain: {command(name, spec, config)}")
            raise

    # Examples derive from the name.
    holds.__qualname__ = f"holds_{name}_{part}"
    profile = settings(
        max_examples=SEARCH or examples,
        derandomize=not SEARCH,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "MAX_SHRINKING_SECONDS", SHRINKING)
        profile(given(specs, configs)(holds))()


def command(name: str, spec: Spec, config: ac.AttnResConfig) -> str:
    """What runs one network again."""
    fields: dict[str, Any] = {k: v for k, v in config.to_dict().items() if v != getattr(_DEFAULT, k)}
    if config.block_size is None:
        fields["num_blocks"] = config.num_blocks
    text = ", ".join(f"{key}={value!r}" for key, value in fields.items())
    return f'python -m tests.properties {name} "{spec!r}" "AttnResConfig({text})"'


_DEFAULT = ac.AttnResConfig()
