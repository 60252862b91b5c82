"""Where generated kernels come in: which calls reach them, and how they are traced.

No device is needed for that: tensors without data say that they lie on one. A build of PyTorch without CUDA cannot
record gradients of those, so backward operators are traced by calling them.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch import Tensor, fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch._subclasses.fake_tensor import FakeTensorMode

from attnres_compile.kernels import device_ops, phase_ops
from attnres_compile.kernels.plain import FRESH
from attnres_compile.ops import depth_attention
from tests.kernels.phases import OPS, Read

READ = Read()
FUSED = ("rmsnorm", 1e-5, *READ.merge)


class Launch(types.ModuleType):
    """A stand-in for the launching of kernels: the plain code, after a cosine that tells its traces apart."""

    def __init__(self, serves: Callable[[torch.dtype, int, torch.device], bool]) -> None:
        super().__init__("attnres_compile.kernels.launch")
        self.calls: list[str] = []
        self.served = serves
        for name in device_ops.SERVED:
            setattr(self, name, self._runs(name))

    def _runs(self, name: str) -> Callable[..., list[Tensor]]:
        def run(*arguments: Any) -> list[Tensor]:
            self.calls.append(name)
            first, *rest = phase_ops.PLAIN[name](*arguments)
            return [first.cos(), *rest]

        return run


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Launch:
    module = Launch(lambda dtype, dim, device: dtype == torch.bfloat16 and dim == 16 and device.type == "cuda")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as found:
        yield found


def tensors(device: str, dtype: torch.dtype = torch.bfloat16, width: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """A query and two sources."""
    query, first, second = (
        torch.empty(size, dtype=dtype, device=device) for size in ((width,), (4, width), (4, width))
    )
    return query, first, second


def everything(query: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    """One result of each operator that kernels serve, and the last ones of the backward operators."""
    sources = [first, second]
    out, h, total = OPS.site(query, sources, None, None, None, query, None, *FUSED, True)
    mixed, lse = OPS.inter([query], sources, *READ.inter)
    given = (query, sources, None, None, query, None, h, total, [second], [0, FRESH])
    of_site = OPS.site_backward(out, *given, *FUSED)
    of_inter = OPS.inter_backward([mixed, lse], [query], sources, [mixed], [lse], [], [FRESH] * 2, *READ.inter)
    return out, mixed, *of_site, *of_inter


NAMES = ["site", "inter", "site_backward", "inter_backward"]


def traced(call: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Any]:
    """Targets of the graph that AOTAutograd makes of ``call``."""
    graphs: list[list[Any]] = []

    def compiler(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append([node.target for node in gm.graph.nodes if node.op == "call_function"])
        return make_boxed_func(gm.forward)

    outputs = aot_function(call, fw_compiler=compiler)(*inputs)
    assert all(value.device == inputs[0].device for value in outputs)
    (targets,) = graphs
    return targets


def operators(targets: list[Any]) -> list[str]:
    return [
        t._schema.name.split("::")[1] for t in targets if isinstance(t, torch._ops.OpOverload) and "attnres" in str(t)
    ]


@pytest.mark.usefixtures("mode")
def test_launches_are_traced_into_the_graph(launch: Launch) -> None:
    targets = traced(everything, tensors("cuda"))
    assert set(launch.calls) == set(NAMES)
    assert operators(targets) == []
    assert targets.count(torch.ops.aten.cos.default) == 4


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(("reads", "name"), [(None, "site"), (3, "inter")])
def test_the_public_operation_reaches_them(launch: Launch, reads: int | None, name: str) -> None:
    query, first, second = tensors("cuda")
    query = query if reads is None else query.expand(reads, -1)
    traced(lambda *given: (depth_attention(given[0], [*given[1:]], gain="sum"),), (query, first, second))
    assert set(launch.calls) == {name}


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(
    ("device", "dtype", "width"),
    [("cpu", torch.bfloat16, 16), ("cuda", torch.float64, 16), ("cuda", torch.bfloat16, 24)],
)
def test_other_calls_stay_operators(launch: Launch, device: str, dtype: torch.dtype, width: int) -> None:
    assert operators(traced(everything, tensors(device, dtype, width))) == NAMES
    assert launch.calls == []


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(
    ("layout", "served"), [(torch.channels_last, True), (torch.contiguous_format, False)], ids=["rows", "planes"]
)
def test_features_that_are_not_last(launch: Launch, layout: torch.memory_format, served: bool) -> None:
    """Channels-last images have rows for kernels to read; others would have to be copied."""
    query = torch.empty(16, dtype=torch.bfloat16, device="cuda")
    source = torch.empty(2, 16, 4, 4, dtype=torch.bfloat16, device="cuda", memory_format=layout)

    def call(query: Tensor, source: Tensor) -> tuple[Tensor, ...]:
        return tuple(OPS.inter([query], [source], 1, 1e-6, 1.0, False))

    assert operators(traced(call, (query, source))) == ([] if served else ["inter"])
    assert bool(launch.calls) == served


@pytest.mark.usefixtures("mode")
def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "attnres_compile.kernels.launch", None)
    assert operators(traced(everything, tensors("cuda"))) == NAMES


@pytest.mark.usefixtures("mode")
def test_wrong_arguments_are_refused_before_the_launch(launch: Launch) -> None:
    query, first, _ = tensors("cuda")
    with pytest.raises(ValueError, match="one shape"):
        traced(everything, (query, first, torch.empty(5, 16, dtype=torch.bfloat16, device="cuda")))
    assert launch.calls == []


def test_implementation_for_devices(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the dispatcher calls for a CUDA tensor, called directly: kernels run at once, with nothing recorded."""
    from torch._library.triton import is_wrap_triton_enabled

    recorded: list[bool] = []
    run = launch.inter

    def watch(*arguments: Any) -> list[Tensor]:
        recorded.append(is_wrap_triton_enabled())
        return run(*arguments)

    monkeypatch.setattr(launch, "inter", watch)
    with FakeTensorMode():
        query, first, second = tensors("cuda")
        found = device_ops._on_device("inter")([query], [first, second], *READ.inter)
    assert (len(found), recorded, launch.calls) == (2, [False], ["inter"])
    assert is_wrap_triton_enabled()
    query, first, second = (torch.randn(size) for size in ((16,), (4, 16), (4, 16)))
    found = device_ops._on_device("inter")([query], [first, second], *READ.inter)
    assert launch.calls == ["inter"]
    assert all(torch.equal(a, b) for a, b in zip(found, OPS.inter([query], [first, second], *READ.inter), strict=True))
    with pytest.raises(ValueError, match="at least one query"):
        device_ops._on_device("inter")([], [first], *READ.inter)
    given = (first, query, [first, second], *[None] * 6, [], [FRESH] * 2)
    found = device_ops._on_device("site_backward")(*given, *FUSED)
    assert len(found) == 3


def test_operators_have_an_implementation_for_devices() -> None:
    for name in device_ops.SERVED:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"attnres::{name}", "CUDA")
        positions = [argument.name for argument in getattr(OPS, name).default._schema.arguments]
        assert (positions[device_ops.SERVED[name][0]], positions[device_ops.SERVED[name][1]]) == ("sources", "dim")


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_operators(launch: Launch, strict: bool) -> None:
    class Everything(torch.nn.Module):
        def forward(self, query: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
            return everything(query, first, second)

    with FakeTensorMode(), torch.no_grad():
        program = torch.export.export(Everything(), tensors("cuda"), strict=strict)
        assert operators([node.target for node in program.graph.nodes if node.op == "call_function"]) == NAMES
        later = program.run_decompositions()
    assert operators([node.target for node in later.graph.nodes if node.op == "call_function"]) == NAMES
    assert launch.calls == []


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Triton, with an H100 to compile for: PyTorch asks for one when it looks for what a kernel writes to."""
    triton = pytest.importorskip("triton", reason="Triton is for Linux only")
    from triton.backends.compiler import GPUTarget

    driver = types.SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return triton


def copy_kernel(source, out, size: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: F821
    at = tl.program_id(0) * size + tl.arange(0, size)  # noqa: F821
    tl.store(out + at, tl.load(source + at))  # noqa: F821


@pytest.mark.usefixtures("mode")
def test_a_kernel_is_in_the_graph_itself(launch: Launch, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor and AOTInductor compile is the kernel, not a call of Python."""
    monkeypatch.setitem(globals(), "tl", target.language)
    jitted = target.jit(copy_kernel)

    def run(queries: list[Tensor], sources: list[Tensor], *_: Any) -> list[Tensor]:
        out, lse = torch.empty_like(sources[0]), sources[0].new_empty(sources[0].shape[:-1], dtype=torch.float32)
        torch.library.wrap_triton(jitted)[(4,)](sources[0], out, 16)
        return [out, lse]

    monkeypatch.setattr(launch, "inter", run)
    query, first, second = tensors("cuda")
    targets = traced(lambda *given: tuple(OPS.inter([given[0]], [*given[1:]], *READ.inter)), (query, first, second))
    assert operators(targets) == []
    assert targets.count(triton_kernel_wrapper_functional) == 1


@pytest.mark.usefixtures("mode", "target")
def test_generated_kernels_are_in_the_graph(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One launch for each operator, of the real kernels."""
    monkeypatch.setenv("ATTNRES_CACHE_DIR", str(tmp_path))
    targets = traced(everything, tensors("cuda"))
    assert operators(targets) == []
    assert targets.count(triton_kernel_wrapper_functional) == 4
