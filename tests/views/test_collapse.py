from __future__ import annotations

import pytest

from attnres_compile.views import collapse


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0..1"),
        ([0, 1, 2, 3], "0..3"),
        ([1, 3], "1, 3"),
        ([1, 3, 5, 7], "1, 3..7"),
        ([0, 1, 2, 7], "0..2, 7"),
        ([5, 5], "5, 5"),
        ([3, 2, 1], "3, 2..1"),
    ],
)
def test_numbers(values: list[int], text: str) -> None:
    assert collapse.numbers(values) == text


@pytest.mark.parametrize(
    ("modules", "short"),
    [
        ([], []),
        ([""], [""]),
        (["layers.0", "layers.1", "layers.2"], ["layers.0..2"]),
        (["layers.0", "layers.2", "layers.5"], ["layers.{0, 2, 5}"]),
        (["a.0.x", "a.0.y", "a.1.x", "a.1.y"], ["a.0..1.x", "a.0..1.y"]),
        (["s.0.b.0", "s.0.b.1", "s.1.b.0", "s.1.b.1"], ["s.0.b.0..1", "s.1.b.0..1"]),
        (["h.0.mlp.1", "h.1.mlp.1"], ["h.0..1.mlp.1"]),
        (["0", "1"], ["0..1"]),
        # Digits inside a name are no layer numbers.
        (["layer1.conv2", "layer2.conv2"], ["layer1.conv2", "layer2.conv2"]),
        (["x", "x"], ["x"]),
    ],
)
def test_paths(modules: list[str], short: list[str]) -> None:
    found = collapse.paths(modules)
    assert [name for name, _ in found] == short
    assert sorted(position for _, positions in found for position in positions) == list(range(len(modules)))
