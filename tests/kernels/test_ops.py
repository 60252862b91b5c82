"""The operators' contracts with PyTorch: schemas, shapes without data, autograd, and the guard against silence."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attnres_compile.errors import PlainExecutionError
from attnres_compile.kernels import cpu, ops

assert ops.LIBRARY

OPTIONS = (-1, 1e-6, 3.0, 1.0, False)


def problem(dtype: torch.dtype = torch.float32, grad: bool = False) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    query = torch.randn(16).to(dtype).requires_grad_(grad)
    return query, [torch.randn(2, 5, 16).to(dtype).requires_grad_(grad) for _ in range(3)]


@pytest.mark.parametrize("name", ["mix", "mix_cpu"])
def test_opcheck(name: str) -> None:
    query, sources = problem(grad=name == "mix")
    torch.library.opcheck(getattr(torch.ops.attnres, name).default, (query, sources, *OPTIONS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_backward(dtype: torch.dtype) -> None:
    query, sources = problem(dtype)
    grad = torch.randn(2, 5, 16).to(dtype)
    torch.library.opcheck(torch.ops.attnres.mix_backward.default, (grad, query, sources, *OPTIONS))
    slots = [cpu.FRESH, 0, cpu.UNWANTED]
    torch.library.opcheck(torch.ops.attnres.mix_cpu_backward.default, (grad, query, sources, [grad], slots, *OPTIONS))


def test_gradcheck() -> None:
    query, sources = problem(torch.float64, grad=True)
    for normalized in (False, True):

        def mix(query: Tensor, *sources: Tensor, normalized: bool = normalized) -> Tensor:
            return torch.ops.attnres.mix(query, list(sources), -1, 1e-3, 3.0, 0.7, normalized)

        assert torch.autograd.gradcheck(mix, (query, *sources))


@pytest.mark.parametrize("name", ["mix", "mix_cpu"])
def test_fake_tensors_and_meta_agree_with_real_ones(name: str) -> None:
    operator = getattr(torch.ops.attnres, name).default
    query, _ = problem()
    layouts = [
        torch.randn(2, 5, 16),
        torch.randn(5, 2, 16).transpose(0, 1),
        torch.randn(2, 5, 32)[..., ::2],
        torch.randn(16, 2, 5).permute(1, 2, 0),
        torch.randn(2, 1, 16).expand(2, 5, 16),
    ]
    for first in layouts:
        for second in layouts:
            real = operator(query, [first, second], *OPTIONS)
            with FakeTensorMode() as mode:
                fake = operator(mode.from_tensor(query), [mode.from_tensor(t) for t in (first, second)], *OPTIONS)
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    meta = torch.ops.attnres.mix(query.to("meta"), [layouts[0].to("meta")], *OPTIONS)
    assert meta.shape == layouts[0].shape


@pytest.mark.parametrize(
    ("query", "sources", "message"),
    [
        (torch.zeros(16), [], "at least one source"),
        (torch.zeros(16), [torch.zeros(2, 16), torch.zeros(1, 16)], "one shape"),
        (torch.zeros(16), [torch.zeros(2, 16), torch.zeros(2, 16).double()], "dtype"),
        (torch.zeros(1), [torch.zeros(2, 16)], r"query of shape \[16\]"),
        (torch.zeros(16), [torch.zeros(2, 16, dtype=torch.int64)], "floating-point"),
    ],
)
def test_arguments_that_would_broadcast_are_refused(query: Tensor, sources: list[Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        torch.ops.attnres.mix(query, sources, *OPTIONS)


def test_declare_raises_with_every_remedy() -> None:
    queries = [torch.zeros(4, requires_grad=True)]
    with pytest.raises(PlainExecutionError) as caught:
        torch.ops.attnres.declare(torch.zeros(1), queries, "{}")
    text = str(caught.value)
    for remedy in ('backend="attnres"', "recompile_limit", 'set_stance("force_eager")', "revert(model)"):
        assert remedy in text


def test_declare_is_silent_without_data_and_stays_in_graphs() -> None:
    """AOTAutograd must not drop it: a foreign backend that runs the graph has to meet it."""

    def model(token: Tensor, query: Tensor, x: Tensor) -> Tensor:
        torch.ops.attnres.declare(token, [query], "{}")
        return x.sin() * query

    with FakeTensorMode() as mode:
        values = [mode.from_tensor(torch.zeros(1)), mode.from_tensor(torch.zeros(4)), mode.from_tensor(torch.zeros(4))]
        assert model(*values).shape == (4,)
    torch._dynamo.reset()
    for backend in ("eager", "aot_eager"):
        for grad in (False, True):
            compiled = torch.compile(model, backend=backend, fullgraph=True)
            with pytest.raises(PlainExecutionError):
                compiled(torch.zeros(1), torch.zeros(4, requires_grad=grad), torch.zeros(4))


def test_importing_the_operators_leaves_inductor_alone() -> None:
    code = (
        "import sys, attnres_compile.kernels.ops, attnres_compile.kernels.cpu, attnres_compile.passes.lower; "
        "assert not any(name.startswith('torch._inductor.c') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_decompositions_reach_a_table_that_is_in_use() -> None:
    from torch._inductor import decomposition

    decomposition.select_decomp_table()
    ops.register_decompositions()
    ops.register_decompositions()
    table = decomposition.select_decomp_table()
    assert torch.ops.attnres.mix.default in table
    assert torch.ops.attnres.mix_backward.default in table
