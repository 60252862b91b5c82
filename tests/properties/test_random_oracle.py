"""Random networks at random queries: every number and every gradient by an interpreter that shares no code."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from attnres_compile.oracle import HOLDS, NOT_JUDGED
from tests.properties import drawing
from tests.properties.against_oracle import verdicts
from tests.properties.searching import SEARCH, search
from tests.properties.spec import Spec

# Of each kind; 10,000 in all with ATTNRES_EXAMPLES=3333.
NETWORKS = 80


@pytest.mark.parametrize(
    ("name", "networks"),
    [("plain", drawing.plain_networks()), ("cut", drawing.cut_networks()), ("any", drawing.networks())],
)
def test_random_networks_compute_the_equations(name: str, networks: st.SearchStrategy[Spec]) -> None:
    verdicts.clear()
    search("oracle", networks, NETWORKS, ("plain", "cut", "any").index(name))
    judged = verdicts[HOLDS] + verdicts[NOT_JUDGED]
    assert sum(verdicts.values()) >= (SEARCH or NETWORKS) // 2
    # The oracle tells where the sums of a report are by their lines, and says so where it cannot.
    assert verdicts[NOT_JUDGED] <= judged / 5, verdicts
    assert verdicts[HOLDS] >= judged / 2 > 0, verdicts
