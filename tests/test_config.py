"""The configuration: what is taken, what is refused with which words, and that no two configurations are confused."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from typing import Any

import pytest

import attnres_compile as ac

FIELDS: dict[str, Any] = {
    "num_blocks": 8,
    "block_size": None,
    "gain": "sum",
    "eps": 1e-6,
    "key_norm_weight": False,
    "value": "raw",
    "logit_scale": 1.0,
    "queries": "state",
    "calls": "shared",
    "min_sublayers": 3,
    "depth_loops": False,
    "strict": False,
    "lowering": "inductor",
    "two_phase": "auto",
    "fuse": "auto",
}
# One value of each field that is not its default.
OTHERS: dict[str, Any] = {
    "num_blocks": 4,
    "block_size": 2,
    "gain": "mean",
    "eps": 1e-5,
    "key_norm_weight": True,
    "value": "normalized",
    "logit_scale": "rsqrt_dim",
    "queries": "reader",
    "calls": "separate",
    "min_sublayers": 1,
    "depth_loops": True,
    "strict": True,
    "lowering": "eager",
    "two_phase": "on",
    "fuse": "off",
}


def test_defaults() -> None:
    assert dataclasses.asdict(ac.AttnResConfig()) == FIELDS
    assert OTHERS.keys() == FIELDS.keys()


def test_every_field_is_documented() -> None:
    documented = [line.strip().split(":")[0] for line in (ac.AttnResConfig.__doc__ or "").splitlines() if ": " in line]
    assert [name for name in documented if name in FIELDS] == list(FIELDS)


def test_frozen_and_hashable() -> None:
    config = ac.AttnResConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.gain = "mean"  # type: ignore[misc]
    assert config == ac.AttnResConfig(num_blocks=8)
    assert len({config, ac.AttnResConfig(), ac.AttnResConfig(num_blocks=7)}) == 2


def test_block_size_stands_in_for_num_blocks() -> None:
    assert ac.AttnResConfig(block_size=4).num_blocks is None
    assert ac.AttnResConfig(num_blocks=None, block_size=4).num_blocks is None
    full = ac.AttnResConfig(num_blocks=None)
    assert (full.num_blocks, full.block_size) == (None, None)


@pytest.mark.parametrize("num_blocks", [1, 8])
def test_num_blocks_and_block_size_contradict_each_other(num_blocks: int) -> None:
    with pytest.raises(ac.ConfigError, match="contradict each other") as caught:
        ac.AttnResConfig(num_blocks=num_blocks, block_size=2)
    assert "sublayers per block" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_blocks", 0, "num_blocks must be a whole number of at least 1, not 0"),
        ("num_blocks", -2, "num_blocks must be a whole number of at least 1, not -2"),
        ("num_blocks", 2.0, "num_blocks must be a whole number of at least 1, not 2.0"),
        ("num_blocks", True, "num_blocks must be a whole number of at least 1, not True"),
        ("num_blocks", "8", "num_blocks must be a whole number of at least 1, not '8'"),
        ("block_size", 0, "block_size must be a whole number of at least 1, not 0"),
        ("block_size", -1, "block_size must be a whole number of at least 1, not -1"),
        ("min_sublayers", 0, "min_sublayers must be a whole number of at least 1, not 0"),
        ("min_sublayers", None, "min_sublayers must be a whole number of at least 1, not None"),
        ("gain", "max", "gain must be one of 'sum', 'mean', not 'max'"),
        ("gain", None, "gain must be one of 'sum', 'mean', not None"),
        ("value", "norm", "value must be one of 'raw', 'normalized', not 'norm'"),
        ("queries", "head", "queries must be one of 'state', 'reader', not 'head'"),
        ("lowering", "triton", "lowering must be one of 'inductor', 'eager', not 'triton'"),
        ("two_phase", True, "two_phase must be one of 'auto', 'on', 'off', not True"),
        ("fuse", "yes", "fuse must be one of 'auto', 'on', 'off', not 'yes'"),
        ("key_norm_weight", 1, "key_norm_weight must be True or False, not 1"),
        ("depth_loops", "no", "depth_loops must be True or False, not 'no'"),
        ("strict", None, "strict must be True or False, not None"),
        ("eps", -1e-9, "eps must be at least 0, not -1e-09"),
        ("eps", math.inf, "eps must be a finite number, not inf"),
        ("eps", "1e-6", "eps must be a finite number, not '1e-6'"),
        ("eps", True, "eps must be a finite number, not True"),
        ("logit_scale", math.nan, "logit_scale must be a finite number, not nan"),
        ("logit_scale", None, "logit_scale must be a finite number, not None"),
        ("logit_scale", "sqrt", "logit_scale must be a number or 'rsqrt_dim', not 'sqrt'"),
    ],
)
def test_refused_values(name: str, value: Any, message: str) -> None:
    with pytest.raises(ac.ConfigError) as caught:
        ac.AttnResConfig(**{name: value})
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_blocks", 1),
        ("block_size", 1),
        ("min_sublayers", 1),
        ("eps", 0.0),
        ("eps", 1),
        ("logit_scale", 0.0),
        ("logit_scale", -2),
    ],
)
def test_bounds_are_taken(name: str, value: Any) -> None:
    assert getattr(ac.AttnResConfig(**{name: value}), name) == value


def test_unknown_names() -> None:
    with pytest.raises(TypeError):
        ac.AttnResConfig(blocks=8)  # type: ignore[call-arg]
    with pytest.raises(ac.ConfigError, match="unknown option 'blocks', 'heads'") as caught:
        ac.AttnResConfig.from_dict({"heads": 1, "blocks": 8, "gain": "sum"})
    assert "num_blocks" in str(caught.value)


@pytest.mark.parametrize("name", FIELDS)
def test_round_trip_and_fingerprint(name: str) -> None:
    default, other = ac.AttnResConfig(), ac.AttnResConfig(**{name: OTHERS[name]})
    values = json.loads(json.dumps(other.to_dict()))
    assert ac.AttnResConfig.from_dict(values) == other
    assert pickle.loads(pickle.dumps(other)) == other
    assert other.fingerprint() == ac.AttnResConfig.from_dict(values).fingerprint()
    assert other.fingerprint() != default.fingerprint()


def test_fingerprints_differ_between_all_fields() -> None:
    prints = {ac.AttnResConfig(**{name: value}).fingerprint() for name, value in OTHERS.items()}
    assert len(prints) == len(OTHERS)


def test_scale_for() -> None:
    assert ac.AttnResConfig().scale_for(64) == 1.0
    assert ac.AttnResConfig(logit_scale=2).scale_for(64) == 2.0
    assert ac.AttnResConfig(logit_scale="rsqrt_dim").scale_for(64) == 0.125


@pytest.mark.parametrize("name", FIELDS)
def test_the_layout_forgets_only_how_a_model_runs(name: str) -> None:
    config = ac.AttnResConfig(**{name: OTHERS[name]})
    runs = name in ("lowering", "two_phase", "fuse")
    assert config.layout() == (ac.AttnResConfig() if runs else config)
    assert ac.AttnResConfig(num_blocks=None, lowering="eager").layout() == ac.AttnResConfig(num_blocks=None)
