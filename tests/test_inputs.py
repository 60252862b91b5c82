"""What a model can be called with, and the text form of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnres_compile.errors import InputsError, TargetError
from attnres_compile.inputs import Inputs, InputSpec, as_inputs, make_inputs, parse_spec

X = torch.ones(2)


@pytest.mark.parametrize(
    ("value", "args", "kwargs"),
    [
        (X, (X,), {}),
        ((X, 3), (X, 3), {}),
        ([X, None], (X, None), {}),
        ((), (), {}),
        ({"a": X, "flag": True}, (), {"a": X, "flag": True}),
    ],
)
def test_as_inputs(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    inputs = as_inputs(value)
    assert inputs.args == args
    assert inputs.kwargs == kwargs
    assert as_inputs(inputs) is inputs


def test_batch_encoding_is_keywords() -> None:
    from transformers import BatchEncoding

    inputs = as_inputs(BatchEncoding({"input_ids": X}))
    assert inputs == Inputs((), {"input_ids": X})
    assert type(inputs.kwargs) is dict


@pytest.mark.parametrize("value", [None, 3, "abc", {1, 2}, SimpleNamespace(a=1), object])
def test_other_values_are_refused_by_type(value: Any) -> None:
    with pytest.raises(InputsError) as caught:
        as_inputs(value)
    assert type(value).__name__ in str(caught.value)
    assert "a dict of keyword arguments" in caught.value.remedy


def test_inputs_checks_itself() -> None:
    assert Inputs([X]).args == (X,)
    with pytest.raises(InputsError, match="tuple or a list"):
        Inputs(X)
    with pytest.raises(InputsError, match="named by text, not by 0"):
        as_inputs({0: X})
    with pytest.raises(InputsError, match=r"Inputs\.kwargs must be a dict"):
        Inputs((), [X])


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("int64[2,128]<32000", InputSpec(None, torch.int64, (2, 128), 32000)),
        ("i64[2]", InputSpec(None, torch.int64, (2,), 2)),
        ("mask=bool[2, 5]", InputSpec("mask", torch.bool, (2, 5), None)),
        (" x = torch.bfloat16[1] ", InputSpec("x", torch.bfloat16, (1,), None)),
        ("f32[]", InputSpec(None, torch.float32, (), None)),
        ("uint8[3]<256", InputSpec(None, torch.uint8, (3,), 256)),
        ("double[0,4]", InputSpec(None, torch.float64, (0, 4), None)),
        ("c64[2]", InputSpec(None, torch.complex64, (2,), None)),
    ],
)
def test_parse_spec(text: str, spec: InputSpec) -> None:
    assert parse_spec(text) == spec
    made = spec.make(torch.Generator())
    assert made.shape == spec.shape
    assert made.dtype == spec.dtype


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "not a name, a dtype and a shape"),
        ("int64", "not a name, a dtype and a shape"),
        ("int64[2", "not a name, a dtype and a shape"),
        ("int65[2]", "'int65' is no dtype"),
        ("float32[2,x]", "'x' is no size"),
        ("float32[2,]", "'' is no size"),
        ("float32[-1]", "'-1' is no size"),
        ("float32[2]<5", "a bound is for integers, not for float32"),
        ("bool[2]<2", "a bound is for integers, not for bool"),
        ("int64[2]<", "the bound '' is no whole number"),
        ("int64[2]<0", "the bound '0' is no whole number of at least 1"),
        ("int8[2]<129", "the bound 129 is more than torch.int8 can hold"),
        ("a b=int64[2]", "'a b' cannot be the name"),
        ("class=int64[2]", "'class' cannot be the name"),
        ("=int64[2]", "'' cannot be the name"),
    ],
)
def test_wrong_spec_names_the_part_and_shows_the_grammar(text: str, what: str) -> None:
    with pytest.raises(TargetError) as caught:
        parse_spec(text)
    assert what in str(caught.value)
    assert repr(text) in str(caught.value)
    assert "[NAME=]DTYPE[DIM,DIM,...][<BOUND]" in str(caught.value)


def test_make_inputs_is_deterministic_and_leaves_global_randomness_alone() -> None:
    specs = ["int64[64]<5", "int64[64]<5", "y=f32[8]", "m=bool[64]"]
    before = torch.get_rng_state()
    first, second = make_inputs(specs), make_inputs(specs)
    assert torch.equal(before, torch.get_rng_state())
    assert [torch.equal(a, b) for a, b in zip(first.args, second.args, strict=True)] == [True, True]
    assert torch.equal(first.kwargs["y"], second.kwargs["y"])
    # One stream of numbers for all of them: source and target must not be the same sentence.
    assert not torch.equal(first.args[0], first.args[1])
    assert set(first.args[0].tolist()) == {0, 1, 2, 3, 4}
    assert set(first.kwargs["m"].tolist()) == {True, False}
    assert list(first.kwargs) == ["y", "m"]


def test_keyword_twice() -> None:
    with pytest.raises(TargetError, match="'x' is given twice"):
        make_inputs(["x=f32[1]", "x=f32[2]"])


def test_no_memory_is_one_message() -> None:
    with pytest.raises(TargetError, match=r"no tensor of shape \[1000000000000,1000000000000\]"):
        make_inputs(["f32[1000000000000,1000000000000]"])
