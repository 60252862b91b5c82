"""Specs and the text that is generated from them.

Golden files show what a few kernels look like. After a change of the generator, ``ATTNRES_ACCEPT=1`` accepts the new
text; reading the difference is the review.
"""

from __future__ import annotations

import ast
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnres_compile.errors import KernelError
from attnres_compile.kernels import tuning
from attnres_compile.kernels.codegen import generate
from attnres_compile.kernels.spec import (
    BYTES,
    FLOATS,
    KernelSpec,
    Schedule,
    arguments,
    entry,
    is_row,
    row_bytes,
    statistics_bytes,
)

GOLDEN = Path(__file__).parent / "golden"
BF16 = "bfloat16"
EXAMPLES: dict[str, KernelSpec] = {
    "mix_forward": KernelSpec("mix", 3, 2048, gain=3.0),
    "mix_forward_add_rmsnorm": KernelSpec(
        "mix", 3, 768, gain=3.0, branch_dtype=BF16, norm="rmsnorm", norm_weight=BF16, keep=True
    ),
    "mix_backward": KernelSpec("mix", 3, 1024, gain=3.0, backward=True, gradients="fa-"),
    "inter_forward": KernelSpec("inter", 2, 1024, queries=2),
    "inter_backward": KernelSpec("inter", 2, 1024, queries=2, backward=True, gradients="fa"),
    "merge_forward": KernelSpec("merge", 1, 1024, gain=5.0),
    "merge_backward_layernorm": KernelSpec(
        "merge", 1, 1024, gain=5.0, backward=True, gradients="a", norm="layernorm", norm_weight=BF16, norm_bias=BF16
    ),
    "mix_forward_chunked": KernelSpec("mix", 2, 20000, "float32", gain=1.0, scale=0.5, strided=True),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden_text(name: str) -> None:
    text = generate(EXAMPLES[name], tuning.schedule(EXAMPLES[name]))
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("ATTNRES_ACCEPT") == "1":
        file.write_text(text)
    assert text == file.read_text()


def test_every_golden_file_has_its_spec() -> None:
    assert {file.stem for file in GOLDEN.glob("*.txt")} == set(EXAMPLES)


SPECS = st.builds(
    dict,
    kind=st.sampled_from(["mix", "inter", "merge", "norm"]),
    sources=st.integers(0, 65),
    dim=st.integers(1, 20000),
    dtype=st.sampled_from(FLOATS),
    backward=st.booleans(),
    queries=st.integers(1, 3),
    query_dtype=st.sampled_from(FLOATS),
    gain=st.sampled_from([1.0, 9.0]),
    scale=st.sampled_from([1.0, 0.125]),
    normalized=st.booleans(),
    branch_dtype=st.sampled_from([None, *FLOATS]),
    norm=st.sampled_from(["", "rmsnorm", "layernorm"]),
    norm_weight=st.sampled_from([None, *FLOATS]),
    norm_bias=st.sampled_from([None, *FLOATS]),
    keep=st.booleans(),
    delta=st.sampled_from(["compute", "store", "load"]),
    strided=st.booleans(),
)


def valid(options: dict[str, Any]) -> KernelSpec:
    """The nearest spec that a kernel exists for."""
    if options["backward"] or options["kind"] == "norm":
        options |= {"backward": True, "branch_dtype": None, "keep": False}
    if options["kind"] == "norm":
        options |= {"sources": 0, "norm": options["norm"] or "rmsnorm", "delta": "compute"}
    else:
        options["sources"] = 1 if options["kind"] == "merge" else max(1, options["sources"])
    if options["kind"] != "inter":
        options["queries"] = 1
    else:
        options |= {"gain": 1.0, "norm": "", "branch_dtype": None}
    if not options["norm"]:
        options |= {"norm_weight": None, "norm_bias": None}
    if options["norm"] == "rmsnorm":
        options["norm_bias"] = None
    if options["delta"] == "store" and options["norm"]:
        options["delta"] = "compute"
    if not options["backward"] or options["kind"] in ("inter", "norm"):
        options["delta"] = "compute"
    if options["kind"] == "merge" and (options["delta"] != "load" or not options["norm"]):
        options["delta"] = "compute"
    if options["backward"]:
        options["gradients"] = "".join("fa-"[i % 3] for i in range(options["sources"]))
    return KernelSpec(**options)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(SPECS)
def test_any_spec_gives_a_module_with_the_kernel_that_its_arguments_say(options: dict[str, Any]) -> None:
    for spec in tuning.plan(valid(options)):
        check_text(spec)


def check_text(spec: KernelSpec) -> None:
    text = generate(spec, tuning.schedule(spec))
    (kernel,) = [
        node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == entry(spec)
    ]
    names = [argument.name for argument in arguments(spec)]
    assert [argument.arg for argument in kernel.args.args] == names
    assert len(set(names)) == len(names)
    loaded = {node.id for node in ast.walk(kernel) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    # Every argument is used, and none is assigned to: a row would find what the row before left.
    assert set(names) <= loaded
    stored = {node.id for node in ast.walk(kernel) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert not stored & set(names)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(SPECS)
def test_a_plan_covers_the_site_exactly_once(options: dict[str, Any]) -> None:
    spec = valid({**options, "delta": "compute"})
    parts = [part for part in tuning.plan(spec) if part.kind == spec.kind and part.backward == spec.backward]
    if spec.kind == "inter":
        assert sum(part.queries * part.sources for part in parts) == spec.queries * spec.sources
        if spec.backward:
            # The first queries write what was fresh; later ones add to it.
            count = spec.sources
            letters = "".join(part.gradients for part in parts)
            assert letters[:count] == spec.gradients
            assert letters[count:] == spec.gradients.replace("f", "a") * (len(letters) // count - 1)
    else:
        assert sum(part.sources for part in parts) == spec.sources
        assert "".join(part.gradients for part in parts) == spec.gradients
    if spec.norm and spec.backward:
        summing = [part for part in tuning.plan(spec) if any(a.name == "norm_weight_sum" for a in arguments(part))]
        assert len(summing) == (1 if spec.norm_weight else 0)


@pytest.mark.parametrize(
    ("spec", "rows", "statistics"),
    [
        # Forward N + 1 tensors, backward 2N + 2, of d elements: docs/method.md.
        (KernelSpec("mix", 9, 2048), 10 * 2048 * 2, 0),
        (KernelSpec("mix", 9, 2048, keep=True), 10 * 2048 * 2, 4),
        (KernelSpec("mix", 9, 2048, backward=True, gradients="f" * 9), 20 * 2048 * 2, 4),
        (KernelSpec("mix", 9, 2048, backward=True, gradients="a" * 9), 29 * 2048 * 2, 4),
        # The add reads the branch and writes the partial sum; nobody reads the mix where only the norm's result is.
        (KernelSpec("mix", 9, 64, "float32", branch_dtype=BF16), 11 * 64 * 4 + 64 * 2, 0),
        (KernelSpec("mix", 9, 64, "float32", norm="rmsnorm"), 10 * 64 * 4, 0),
        (KernelSpec("inter", 8, 64, "float16", queries=4), 12 * 64 * 2, 16),
        (KernelSpec("merge", 1, 64), 3 * 64 * 2, 4),
        (KernelSpec("merge", 1, 64, backward=True, gradients="f"), 5 * 64 * 2, 8),
    ],
)
def test_bytes_per_token(spec: KernelSpec, rows: int, statistics: int) -> None:
    assert (row_bytes(spec), statistics_bytes(spec)) == (rows, statistics)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "mixed"},
        {"sources": 0},
        {"dim": 0},
        {"dim": True},
        {"dtype": "float64"},
        {"dtype": "float32)\nimport os"},
        {"query_dtype": "int8"},
        {"norm": "batchnorm"},
        {"norm_weight": BF16},
        {"norm": "rmsnorm", "norm_bias": BF16},
        {"eps": float("nan")},
        {"gain": "9"},
        {"queries": 2},
        {"kind": "merge", "sources": 2},
        {"kind": "inter", "norm": "rmsnorm"},
        {"gradients": "ff"},
        {"backward": True, "gradients": "f"},
        {"backward": True, "gradients": "fx"},
        {"delta": "load"},
    ],
    ids=str,
)
def test_what_no_kernel_computes_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(KernelError, match="no kernel for"):
        KernelSpec(**{"kind": "mix", "sources": 2, "dim": 64, **options})


def test_a_norm_that_does_not_fit_is_not_left_out() -> None:
    spec = KernelSpec("mix", 2, 20000, backward=True, gradients="ff", norm="rmsnorm")
    with pytest.raises(KernelError, match=r"tuning\.plan"):
        generate(spec, tuning.schedule(spec))


def test_equal_specs_give_equal_text_and_different_ones_do_not() -> None:
    spec = KernelSpec("mix", 3, 64)
    chosen = Schedule(1, 64)
    assert generate(spec, chosen) == generate(dataclasses.replace(spec), chosen)
    for change in ({"eps": 1e-5}, {"gain": 3.0}, {"scale": 2.0}, {"normalized": True}, {"dim": 65}, {"keep": True}):
        assert generate(dataclasses.replace(spec, **change), chosen) != generate(spec, chosen)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [1, 64, 768, 1024, 2048, 4096, 7168, 8192, 16384])
@pytest.mark.parametrize("warp_size", [32, 64])
def test_threads_load_16_bytes_where_the_row_is_wide_enough(dim: int, dtype: str, warp_size: int) -> None:
    spec = KernelSpec("mix", 9, dim, dtype)
    chosen = tuning.schedule(spec, warp_size)
    threads = chosen.warps * warp_size
    assert chosen.chunk & (chosen.chunk - 1) == 0
    assert threads <= 1024
    assert chosen.chunk * BYTES[dtype] <= threads * 16
    if dim * BYTES[dtype] >= warp_size * 16:
        assert chosen.chunk * BYTES[dtype] == threads * 16
    rows = [argument for argument in arguments(spec) if is_row(argument, spec)]
    assert len(rows) == 10
