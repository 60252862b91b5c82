"""What the GPU benchmarks meet: adapters to other packages, and helpers in processes of their own."""

from __future__ import annotations

import importlib
import itertools
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnres_compile.kernels import reference

FOLDER = Path(__file__).parents[1] / "benchmarks"
NAMES = ("gpu_cases", "gpu_checks", "gpu_peers", "gpu_timing")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import the programs' files as they import one another when they are run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


def module(name: str) -> Any:
    return importlib.import_module(name)


# ------------------------------------------------------------------ other packages


def mixed(sources: Any, query: Tensor, eps: float, scale: float = 1.0) -> Tensor:
    wide = reference.mix(query.float(), [source.float() for source in sources], -1, eps, 1.0, scale)
    return wide.to(sources[0].dtype)


def fla() -> Any:
    """With the signature of fla-core 0.6.0; defaults are such that it would be noticed if they were used."""

    def fused_attnres(
        query: Tensor,
        residuals: list[Tensor],
        rms_weight: Tensor,
        output_rms_weight: Tensor | None = None,
        rms_eps: float = 0.5,
        scale: float = 2.0,
        return_weights: bool = False,
        checkpoint_level: int = 1,
    ) -> Tensor:
        assert output_rms_weight is None and not return_weights and checkpoint_level == (not torch.is_grad_enabled())
        return mixed(residuals, query * rms_weight, rms_eps, scale)

    return types.SimpleNamespace(fused_attnres=fused_attnres)


def liger() -> Any:
    """With the signature of liger-kernel 0.8.5."""

    def liger_attn_res(V: Tensor, w_query: Tensor, w_norm: Tensor, eps: float = 0.5) -> Tensor:
        assert V.is_leaf and V.requires_grad
        return mixed(V.unbind(0), w_query * w_norm, eps)

    return types.SimpleNamespace(liger_attn_res=liger_attn_res)


def flash(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With the signatures of flash-attn-res 0.1.12, and its autotuned kernels."""
    configurations = [types.SimpleNamespace(num_warps=warps) for warps in (1, 8)]
    tuned = [types.SimpleNamespace(configs=list(configurations)) for _ in range(2)]
    kernels = types.SimpleNamespace(
        phase_1_batched_attention_forward_kernel=tuned[0],
        phase_1_batched_attention_backward_kernel=tuned[1],
        forward_configs=configurations,
        phase1_backward_configs=configurations,
    )
    for name in ("flash_attn_res", "flash_attn_res.kernels"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn_res.kernels.phase_1", kernels)

    def phase_1(block_representations: Tensor, pseudo_queries: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        assert block_representations.dim() == 4 and pseudo_queries.dim() == 2
        sources = [value.float() for value in block_representations.unbind(0)]
        mixes, lses = reference.inter(list(pseudo_queries.unbind(0)), sources, -1, eps)
        return torch.stack(mixes).bfloat16(), torch.stack(lses)

    def phase_2(own: Tensor, query: Tensor, mix: Tensor, lse: Tensor, eps: float) -> Tensor:
        assert own.dim() == 3 and lse.dim() == 2
        return reference.merge(query, mix.float(), lse, own.float(), -1, eps).bfloat16()

    def set_autotune_configs(kernel: Any, configs: list[Any]) -> None:
        kernel.configs = list(configs)

    return types.SimpleNamespace(
        phase_1_batched_attention_triton_op=phase_1,
        phase_2_online_softmax_merge_triton_op=phase_2,
        set_autotune_configs=set_autotune_configs,
    )


def fast() -> Any:
    """With the signatures of fast-attnres 2.1.0."""

    def attnres(values: list[Tensor], query: Tensor, *, eps: float = 0.5, scale: float = 2.0) -> Tensor:
        assert query.dtype == torch.bfloat16
        return mixed(values, query, eps, scale)

    def attnres_multi(values: list[Tensor], queries: Tensor, *, eps: float = 0.5, scale: float = 2.0) -> Tensor:
        assert queries.dtype == torch.bfloat16
        return torch.stack([mixed(values, query, eps, scale) for query in queries])

    return types.SimpleNamespace(attnres=attnres, attnres_multi=attnres_multi)


@pytest.mark.parametrize("kind", ["mix", "inter", "block"])
@pytest.mark.parametrize("name", ["fla", "fla gluon", "liger", "flash", "fast"])
def test_adapters_ask_for_the_method(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages replaced by their signatures: what they are asked for is what everyone is compared with."""
    peers, checks, cases = module("gpu_peers"), module("gpu_checks"), module("gpu_cases")
    replaced = {"fla": fla, "fla gluon": fla, "liger": liger, "flash": lambda: flash(monkeypatch), "fast": fast}[name]()
    monkeypatch.setattr(peers.Package, "load", lambda self: (replaced, ""))
    make: Callable[..., Any] = {
        "fla": peers._fla,
        "fla gluon": lambda device: peers._fla(device, gluon=True),
        "liger": peers._liger,
        "flash": peers._flash,
        "fast": peers._fast,
    }[name]
    each = make(torch.device("cuda"))
    case = cases.Case(kind, 3, 16, 6, queries=1 if kind == "mix" else 2)
    if name == "liger" and kind == "block":
        assert each.gap(case) == "each read would need a stack of its own"
        return
    assert each.peer and each.gap(case) == ""
    problem = cases.Problem(case, CPU)
    found = checks.errors(each.bind(problem), case, checks.expected(problem))
    # Two phases round the mix to bfloat16 in between.
    assert max(found.values()) < (6e-3 if name == "flash" and kind == "block" else 4e-3)


def test_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = module("gpu_peers")
    case = module("gpu_cases").Case
    monkeypatch.setattr(peers, "_version", lambda package: "")
    for each in peers.peers(torch.device("cuda")):
        assert each.gap(case("mix", 9, 64, 10)) == "not installed"
    monkeypatch.setattr(peers, "_version", lambda package: "1.0")
    monkeypatch.setattr(peers.Package, "load", lambda self: (None, "import failed: ImportError: of something"))
    for each in peers.peers(torch.device("cuda")):
        assert each.gap(case("mix", 9, 64, 10)) == "import failed: ImportError: of something"
    monkeypatch.setattr(peers.Package, "load", lambda self: (types.SimpleNamespace(), ""))
    gaps = [each.gap(case("mix", 9, 7168, 10, "float32")) for each in peers.peers(torch.device("cuda"))]
    assert gaps == ["", gaps[1], "", "d is not a power of two", "bfloat16 only"]
    assert {each.gap(case("mix", 9, 64, 10)) for each in peers.peers(CPU)} == {"runs on CUDA only"}


def test_a_package_that_does_not_import_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = module("gpu_peers")
    monkeypatch.setattr(peers, "_version", lambda package: "1.0")
    package = peers.Package("broken", "a_module_that_is_not_there")
    assert package.load() == (
        None,
        "import failed: ModuleNotFoundError: No module named 'a_module_that_is_not_there'",
    )


def test_spilling_configurations_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = module("gpu_peers")
    replaced = flash(monkeypatch)
    kernels = sys.modules["flash_attn_res.kernels.phase_1"]
    for sources, dim, warps in ((9, 2048, [1, 8]), (9, 4096, [8]), (33, 4096, [8]), (2, 1024, [1, 8])):
        peers._leave_out_spilling(replaced, module("gpu_cases").Case("mix", sources, dim, 10))
        assert [each.num_warps for each in kernels.phase_1_batched_attention_forward_kernel.configs] == warps


def test_keys_that_are_no_arguments_are_passed_over() -> None:
    """flash-attn-res 0.1.12 has them, and Triton 3.9 refuses them."""
    import triton

    peers = module("gpu_peers")
    seen: list[Any] = []

    def strict(configs: Any, key: Any, **options: Any) -> Callable[[Any], Any]:
        seen.append(key)
        return lambda function: function

    before = triton.autotune
    triton.autotune = strict
    try:
        with peers._older_autotune():
            decorate = triton.autotune(configs=[], key=["D", "OTHER"])
            decorate(types.SimpleNamespace(arg_names=["x", "D"]))
        assert triton.autotune is strict
    finally:
        triton.autotune = before
    assert seen == [["D"]]


# ------------------------------------------------------------------ helpers

HELPER = """
import json, os, sys, time
print('@@ ["", null]', flush=True)
for line in sys.stdin:
    job = json.loads(line)
    print("noise", flush=True)
    for part in job["parts"]:
        if part == "hangs": time.sleep(60)
        if part == "dies": sys.exit("out of something")
        if part == "times":
            start = time.time()
            time.sleep(1)
            print("@@ " + json.dumps([part, [start, time.time()]]), flush=True)
            continue
        print("@@ " + json.dumps([part, {"did": job["name"]}]), flush=True)
        if part == "ruins": os._exit(75)
"""


def share_out(parts: list[list[str]], helpers: int = 1, patience: float = 30, seconds: float = 60) -> dict[str, Any]:
    timing = module("gpu_timing")
    work = [timing.Job({"name": str(number)}, names) for number, names in enumerate(parts)]
    command = [sys.executable, "-c", HELPER]
    found = list(timing.share_out(work, command, helpers, patience, time.monotonic() + seconds))
    named = {f"{job.job['name']} {part}": value for job, part, value in found}
    assert len(named) == len(found) == sum(map(len, parts))
    return named


def test_helpers_do_all_parts() -> None:
    found = share_out([["a", "b"], ["c"], ["d", "e"]], helpers=2)
    assert found == {
        f"{job} {part}": {"did": str(job)} for job, part in ((0, "a"), (0, "b"), (1, "c"), (2, "d"), (2, "e"))
    }


def test_what_hangs_or_dies_is_lost_alone() -> None:
    found = share_out([["a", "hangs", "b"], ["dies", "c"]], patience=2)
    assert found["0 a"] == found["0 b"] == {"did": "0"} and found["1 c"] == {"did": "1"}
    assert found["0 hangs"] == {"lost": "took more than 2 s"}
    assert found["1 dies"] == {"lost": "the process ended: out of something"}


def test_a_ruined_device_costs_nothing_but_its_own_part() -> None:
    assert share_out([["ruins", "a", "ruins2"]]) == {f"0 {part}": {"did": "0"} for part in ("ruins", "a", "ruins2")}


def test_what_is_left_when_the_time_is_up_is_named() -> None:
    found = share_out([["a", "hangs", "b"], ["c"]], seconds=3)
    assert found["0 a"] == {"did": "0"}
    assert found["0 hangs"] == found["0 b"] == found["1 c"] == {"lost": "the time was up"}


@pytest.mark.parametrize(("memory", "apart"), [(10, True), (0, False)])
def test_large_jobs_wait_for_memory(memory: int, apart: bool) -> None:
    timing = module("gpu_timing")
    work = [timing.Job({"name": str(number)}, ["times"], bytes=6) for number in range(3)]
    command = [sys.executable, "-c", HELPER]
    found = list(timing.share_out(work, command, 3, 30, time.monotonic() + 60, memory=memory))
    spans = sorted(span for _, _, span in found)
    assert len(spans) == 3
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans)) == apart


def test_turns_alternate() -> None:
    timing = module("gpu_timing")
    called: list[str] = []
    actions = {name: [lambda name=name: called.append(name)] * 2 for name in ("a", "b")}
    found = timing.alternate(actions, 2, CPU)
    assert called == ["a", "a", "b", "b", "b", "b", "a", "a"] * 2
    assert set(found) == {"a", "b"}


def test_a_turn_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device waits until all is asked for, and the clock runs around the calls alone."""
    timing = module("gpu_timing")
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def elapsed_time(self, last: Event) -> float:
            return 4.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append(f"sleep {cycles}"))
    call = [lambda: done.append("call")] * 2
    seconds, host = timing._turn(call, 0.001, torch.device("cuda"))
    assert seconds == 0.004 and host < 0.1
    assert done == ["synchronize", "sleep 2000000", "event", "call", "call", "event", "synchronize"]
