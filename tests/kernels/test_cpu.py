"""What the compiled CPU kernels do beyond the operator: accumulation, threads, and doing without a compiler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnres_compile.kernels import cpu, plain

OPTIONS = (-1, 1e-6, 3.0, 1.0, False)


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if cpu.library() is None:
        pytest.fail("the compiled kernels were not built: these tests need a C++ compiler")


def problem(
    count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, list[Tensor]]:
    torch.manual_seed(0)
    return (
        torch.randn(shape).to(dtype),
        torch.randn(shape[-1]).div(shape[-1] ** 0.5).to(dtype),
        [torch.randn(shape).to(dtype) for _ in range(count)],
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("without_library", [False, True])
def test_backward_adds_to_what_is_there(
    dtype: torch.dtype, without_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grad, query, sources = problem(4, (3, 5, 100), dtype)
    accumulated = [torch.randn(3, 5, 100).to(dtype), torch.randn(5, 3, 100).to(dtype).transpose(0, 1)]
    before = [value.clone() for value in accumulated]
    if without_library:
        monkeypatch.setattr(cpu, "library", lambda: None)
    found = torch.ops.attnres.mix_cpu_backward(
        grad, query, sources, accumulated, [1, cpu.UNWANTED, cpu.FRESH, 0], *OPTIONS
    )
    query_grad, first, _, third, fourth = plain.mix_backward(
        grad.double(), query.double(), [source.double() for source in sources], *OPTIONS
    )
    expected = [query_grad, first + accumulated[1], third, fourth + accumulated[0]]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert len(found) == len(expected)
    for value, wanted in zip(found, expected, strict=True):
        assert value.dtype == dtype
        assert (value.double() - wanted).abs().max() <= tolerance * wanted.abs().max()
    # It is a function: what it adds to stays as it was.
    assert all(torch.equal(a, b) for a, b in zip(before, accumulated, strict=True))


@pytest.mark.parametrize("tokens", [1, 3, 64, 257])
def test_threads(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of threads computes the same; the same number, the same bits."""
    monkeypatch.setattr(cpu, "_GRAIN", 1)
    grad, query, sources = problem(3, (tokens, 40), torch.float32)
    wanted = plain.mix_backward(grad.double(), query.double(), [s.double() for s in sources], *OPTIONS)
    slots = [cpu.FRESH] * 3
    known = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found = torch.ops.attnres.mix_cpu_backward(grad, query, sources, [], slots, *OPTIONS)
            again = torch.ops.attnres.mix_cpu_backward(grad, query, sources, [], slots, *OPTIONS)
            for value, repeated, exact in zip(found, again, wanted, strict=True):
                assert torch.equal(value, repeated)
                torch.testing.assert_close(value.double(), exact, rtol=1e-4, atol=1e-5)
            mixed = torch.ops.attnres.mix_cpu(query, sources, *OPTIONS)
            torch.testing.assert_close(mixed, plain.mix(query, sources, *OPTIONS), rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(known)


def test_large_results() -> None:
    """Past the sizes at which large pages are asked for and at which results are written past the caches."""
    grad, query, sources = problem(2, (4200, 1024), torch.float32)
    found = torch.ops.attnres.mix_cpu_backward(grad, query, sources, [], [cpu.FRESH] * 2, *OPTIONS)
    wanted = plain.mix_backward(grad, query, sources, *OPTIONS)
    for value, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-3)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning that names what is missing, and the plain code's numbers."""
    from torch._inductor.codecache import CppCodeCache

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(CppCodeCache, "load", fail)
    cpu.library.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no compiler here"):
            assert not cpu.served(torch.float32)
        _, query, sources = problem(3, (4, 16), torch.float32)
        mixed = torch.ops.attnres.mix_cpu(query, sources, *OPTIONS)
        assert torch.equal(mixed, plain.mix(query, sources, *OPTIONS))
    finally:
        cpu.library.cache_clear()


def chain(sources: list[Tensor], queries: list[Tensor], through: bool) -> Tensor:
    """Three sites over the same sources, and another reader of each source."""
    total = sources[0] * 0
    given = sources
    for query in queries:
        options = (-1, 1e-6, float(len(sources)), 1.0, False)
        if through:
            mixed, *sources = cpu.mix_through(query, sources, *options)
        else:
            mixed = torch.ops.attnres.mix(query, sources, *options)
        total = total + mixed.sin()
    return total + sum((source.square() for source in sources), total * 0) + given[0].exp()


def test_sources_handed_on() -> None:
    """The same value and gradients as separate sites have, in any mix of what needs gradients."""
    generator = torch.Generator().manual_seed(1)
    queries = [torch.randn(24, generator=generator, dtype=torch.float64) for _ in range(3)]
    sources = [torch.randn(5, 24, generator=generator, dtype=torch.float64) for _ in range(4)]
    for needs in ([0, 1, 2, 3, 4, 5, 6], [0], [3, 5], [2, 6]):
        results = []
        for through in (False, True):
            inputs = [value.clone().requires_grad_(i in needs) for i, value in enumerate([*queries, *sources])]
            value = chain(inputs[3:], inputs[:3], through)
            value.square().sum().backward()
            results.append([value.detach(), *(inputs[index].grad for index in needs)])
        for alone, handed_on in zip(*results, strict=True):
            torch.testing.assert_close(handed_on, alone, rtol=1e-12, atol=1e-12)


def test_site_whose_mix_is_not_used() -> None:
    source = torch.randn(3, 8, requires_grad=True)
    query = torch.randn(8, requires_grad=True)
    _, handed_on = cpu.mix_through(query, [source], -1, 1e-6, 1.0, 1.0, False)
    handed_on.sum().backward()
    assert source.grad is not None
    assert torch.equal(source.grad, torch.ones(3, 8))
    assert query.grad is None


def test_nothing_is_recorded_without_gradients() -> None:
    source = torch.randn(3, 8, requires_grad=True)
    with torch.no_grad():
        mixed, handed_on = cpu.mix_through(torch.zeros(8), [source], -1, 1e-6, 1.0, 1.0, False)
    assert handed_on is source
    assert not mixed.requires_grad
