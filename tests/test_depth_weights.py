"""``depth_weights`` in numbers, against a walk by hand; mixing matrices."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.observing import Moments
from tests.depth_by_hand import Picture, build, check, converted, parameters, pixels, tokens, walk

LAYOUTS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "full": ({"num_blocks": None}, [1] * 6),
    "two blocks": ({"num_blocks": 2}, [3, 3]),
    "a remainder": ({"num_blocks": 4}, [1, 1, 1, 3]),
    "one block": ({"num_blocks": 1}, [6]),
    "blocks of two": ({"block_size": 2}, [2, 2, 2]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_layouts_by_hand(layout: str, dtype: torch.dtype) -> None:
    options, sizes = LAYOUTS[layout]
    x = tokens(dtype=dtype)
    net = converted(build(dtype=dtype), x, **options)
    (found,) = ac.depth_weights(net, x).streams
    queries, keys = parameters(net)
    wanted = walk(build(), x.double(), sizes, [query.double() for query in queries], keys)
    check(found, wanted, 1e-12 if dtype == torch.float64 else 3e-6)
    assert ("partial" in found.sources) == any(size > 1 for size in sizes)
    # The numbers are worth comparing: far from uniform, and different from token to token.
    assert np.nanmin(found.weights) < 0.1 and np.nanmax(found.std) > 0.1


@pytest.mark.parametrize(
    "options",
    [
        {"key_norm_weight": True},
        {"logit_scale": 0.4},
        {"logit_scale": "rsqrt_dim"},
        {"eps": 0.3},
        {"gain": "mean"},
        {"value": "normalized"},
        {"key_norm_weight": True, "logit_scale": -0.7, "eps": 0.05, "gain": "mean", "value": "normalized"},
    ],
    ids=lambda options: ", ".join(options),
)
def test_options_by_hand(options: dict[str, Any]) -> None:
    x = tokens()
    net = converted(build(), x, num_blocks=3, **options)
    (found,) = ac.depth_weights(net, x).streams
    queries, keys = parameters(net)
    by_hand = {
        "eps": options.get("eps", 1e-6),
        "gain": options.get("gain", "sum"),
        "value": options.get("value", "raw"),
    }
    scale = options.get("logit_scale", 1.0)
    scale = 6**-0.5 if scale == "rsqrt_dim" else scale
    assert (keys is not None) == bool(options.get("key_norm_weight"))
    check(found, walk(build(), x, [2, 2, 2], queries, keys, scale=scale, **by_hand), 1e-12)
    assert found.gain == by_hand["gain"]


@pytest.mark.parametrize("channels_last", [False, True])
def test_features_that_are_not_last(channels_last: bool) -> None:
    x = pixels()
    net = converted(build(Picture), x, num_blocks=2)
    given = x.to(memory_format=torch.channels_last) if channels_last else x
    (found,) = ac.depth_weights(net, given).streams
    check(found, walk(build(Picture), x, [2, 3], parameters(net)[0], dim=1), 1e-12)
    assert found.tokens == 2 * 4 * 5


def test_a_query_per_reader() -> None:
    """Two modules read each state: one site each, with the sources of the state and weights of its own query."""

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.ModuleList(nn.LayerNorm(4) for _ in range(4))
            self.b = nn.ModuleList(nn.LayerNorm(4) for _ in range(4))
            self.mix = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for n in range(4):
                x = x + self.mix[2 * n](self.a[n](x)) + self.mix[2 * n + 1](self.b[n](x))
            return x

    x = tokens()
    net = converted(build(Parallel), x, num_blocks=2, queries="reader")
    (found,) = ac.depth_weights(net, x).streams
    assert found.index == (0, 0, 1, 1, 2, 2, 3, 3, 4)
    assert found.readers[2:4] == (("a.1",), ("b.1",))
    assert not np.allclose(found.weights[2], found.weights[3], equal_nan=True)
    assert np.allclose(np.nansum(found.weights, 1), 1.0, atol=1e-12)


def test_zero_queries_are_uniform_and_have_the_entropy_of_it() -> None:
    x = tokens(dtype=torch.float32)
    net = ac.transform(build(dtype=torch.float32), x, ac.AttnResConfig(num_blocks=3, lowering="eager"))
    (found,) = ac.depth_weights(net, x).streams
    counts = np.isfinite(found.weights).sum(1, keepdims=True)
    assert np.nanmax(np.abs(found.weights - 1.0 / counts)) <= 2e-16
    assert np.nanmax(found.std) <= 2e-16
    assert np.abs(found.entropy - np.log(counts[:, 0])).max() <= 1e-14
    assert np.abs(found.mixing("measured") - found.mixing("block")).max() <= 2e-16


def test_a_bypass_has_one_weight() -> None:
    x = tokens()
    (found,) = ac.depth_weights(converted(build(), x, num_blocks=2), x).streams
    assert found.weights[0, 0] == 1.0 and np.isnan(found.weights[0, 1:]).all()
    assert found.std[0, 0] == found.entropy[0] == found.uniform_entropy[0] == 0.0


def test_parts_add_up_to_the_whole() -> None:
    p = torch.softmax(torch.randn(4, 70, dtype=torch.float64), 0)
    whole, parts = Moments(), Moments()
    whole.add(p)
    for part in p.split([1, 30, 39], 1):
        parts.add(part)
    parts.add(p[:, :0])
    assert parts.tokens == whole.tokens == 70
    for name in ("mean", "squares"):
        assert torch.allclose(getattr(parts, name), getattr(whole, name), rtol=1e-13, atol=0)
    assert parts.entropy == pytest.approx(whole.entropy, rel=1e-13)
    assert torch.allclose((whole.squares / 70).sqrt(), p.std(1, correction=0), rtol=1e-13, atol=0)


# ------------------------------------------------------------------ mixing matrices


def test_mixing_matrices_by_hand() -> None:
    nan = math.nan
    stream = ac.StreamWeights(
        name="s",
        sites=("a", "b", "c", "d"),
        kinds=("attention", "mlp", "attention", "output"),
        readers=(("a",), ("b",), ("c",), ("d",)),
        sources=("root", "block 1", "block 2", "partial"),
        weights=np.array([[1, nan, nan, nan], [0.9, nan, nan, 0.1], [0.3, 0.7, nan, nan], [0.2, 0.3, 0.5, nan]]),
        std=np.zeros((4, 4)),
        entropy=np.zeros(4),
        tokens=1,
        gain="sum",
        blocks=((0, 1), (2, 3)),
        index=(0, 1, 2, 4),
    )
    third = 1 / 3
    wanted = {
        "plain": [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
        "full": [[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0], [third] * 3 + [0, 0], [0.2] * 5],
        "block": [[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0], [0.5, 0.5, 0.5, 0, 0], [third] * 5],
        "measured": [[1, 0, 0, 0, 0], [0.9, 0.1, 0, 0, 0], [0.3, 0.7, 0.7, 0, 0], [0.2, 0.3, 0.3, 0.5, 0.5]],
    }
    for form, matrix in wanted.items():
        assert np.array_equal(stream.mixing(form), np.array(matrix, dtype=float)), form
    with pytest.raises(ac.ConfigError, match="form must be one of"):
        stream.mixing("half")


def test_a_partial_sum_of_a_later_block_is_spread_over_its_members_so_far() -> None:
    x = tokens()
    (found,) = ac.depth_weights(converted(build(), x, num_blocks=2), x).streams
    row = found.index.index(5)  # behind 5 sublayers: root, block 1 (0..2), partial sum of 3 and 4
    root, block, partial = found.weights[row, [0, 1, 3]]
    assert np.array_equal(found.mixing("measured")[row], [root, block, block, block, partial, partial, 0.0])


def test_the_measured_matrix_of_the_full_form_is_the_weights() -> None:
    x = tokens()
    (found,) = ac.depth_weights(converted(build(), x, num_blocks=None), x).streams
    assert np.array_equal(found.mixing("measured"), np.nan_to_num(found.weights))


def test_as_json_and_back() -> None:
    x = tokens()
    found = ac.depth_weights(converted(build(), x, num_blocks=2), x)
    values = found.to_dict()
    text = json.dumps(values, allow_nan=False)
    (stream,) = values["streams"]
    assert set(stream) >= {
        *("name", "sites", "kinds", "readers", "sources", "weights", "std", "entropy", "uniform_entropy"),
        *("tokens", "mixing"),
    }
    assert set(stream["mixing"]) == {"plain", "full", "block", "measured"}
    assert stream["weights"][0] == [1.0, None, None, None]
    again = ac.DepthWeights.from_dict(json.loads(text))
    assert again.to_dict() == values
    assert np.array_equal(again.streams[0].weights, found.streams[0].weights, equal_nan=True)
    assert again.streams[0].blocks == found.streams[0].blocks
