"""Random networks as ``torch.fx`` traces them: converted ones compute what they must, every add is accounted for."""

from __future__ import annotations

import pytest

from tests.properties import drawing
from tests.properties.searching import search


@pytest.mark.parametrize("part", range(2))
def test_any_networks(part: int) -> None:
    search("any", drawing.networks(), 200, part)


def test_plain_networks_are_converted_whole() -> None:
    search("plain", drawing.plain_networks(), 200)


def test_what_cuts_a_stream_is_left_alone() -> None:
    search("any", drawing.cut_networks(), 200, 10)
