"""Whole models at random queries against the oracle: outputs and all gradients, those of the queries included."""

from __future__ import annotations

from collections import Counter

import torch

import attnres_compile as ac
from attnres_compile.errors import PlanMismatchError
from attnres_compile.inputs import as_inputs
from attnres_compile.oracle import DISAGREES, HOLDS, NOT_JUDGED
from attnres_compile.random_queries import against_oracle
from tests.properties.judge import SEED, tolerance
from tests.properties.network import Network, inputs
from tests.properties.spec import Spec

REFUSED = "refused"


def judge_oracle(spec: Spec, config: ac.AttnResConfig, verdicts: Counter[str] | None = None) -> None:
    """A model that is converted computes what the equations give, by an interpreter that knows the report alone.

    Args:
        verdicts: counts what became of it.
    """
    torch._dynamo.reset()
    verdicts = verdicts if verdicts is not None else Counter()
    try:
        found = against_oracle(Network(spec), as_inputs(inputs()), config, seed=SEED)
    except (ac.NoStreamError, PlanMismatchError):
        verdicts[REFUSED] += 1
        return
    verdicts[found.status] += 1
    assert found.status != DISAGREES, found
    assert found.status == NOT_JUDGED or (found.error or 0.0) <= 100 * tolerance(spec), found
    assert found.status in (HOLDS, NOT_JUDGED)
