"""The public operation: values and gradients by hand, its arguments, and PyTorch's ways of running it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attnres_compile as ac
from attnres_compile.kernels import cpu
from attnres_compile.kernels import ops as kernel_ops
from attnres_compile.ops import depth_attention
from tests.kernels.phases import assert_close, generator, gradients, ulps

WIDTH = 16


def by_hand(
    query: Tensor,
    sources: Sequence[Tensor],
    gain: float,
    eps: float = 1e-6,
    weight: Tensor | None = None,
    normalized: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The paper's equations for one query or several: the mix, and the softmax's numbers."""
    v = torch.stack(list(sources))
    normed = v / torch.sqrt(v.pow(2).mean(-1, keepdim=True) + eps)
    keys = normed if weight is None or weight.dim() == 2 else normed * weight
    queries = query if weight is None or weight.dim() == 1 else query * weight
    if queries.dim() == 1:
        weights = torch.softmax(scale * torch.einsum("n...d,d->n...", keys, queries), 0)
        return gain * torch.einsum("n...,n...d->...d", weights, normed if normalized else v), weights
    weights = torch.softmax(scale * torch.einsum("n...d,sd->sn...", keys, queries), 1)
    return gain * torch.einsum("sn...,n...d->s...d", weights, normed if normalized else v), weights


def problem(
    count: int = 4, reads: int | None = None, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (2, 3)
) -> tuple[Tensor, list[Tensor]]:
    normal = generator()
    size = (WIDTH,) if reads is None else (reads, WIDTH)
    query = normal(*size).div(WIDTH**0.5).to(dtype).requires_grad_()
    return query, [normal(*shape, WIDTH).mul(0.5 + at).to(dtype).requires_grad_() for at in range(count)]


@pytest.mark.parametrize("reads", [None, 1, 3])
@pytest.mark.parametrize("weighted", [None, "each feature", "each query"])
@pytest.mark.parametrize("value", ["raw", "normalized"])
def test_values_and_gradients(reads: int | None, weighted: str | None, value: str) -> None:
    if weighted == "each query" and reads is None:
        reads = 2
    query, sources = problem(reads=reads)
    normal = generator(5)
    weight = None
    if weighted:
        weight = normal(*(query.shape if weighted == "each query" else (WIDTH,))).requires_grad_()
    inputs = [query, *sources, *([] if weight is None else [weight])]
    for gain, factor in (("mean", 1.0), ("sum", 4.0), (2.5, 2.5)):
        for logit_scale, scale in ((1.0, 1.0), (0.3, 0.3), ("rsqrt_dim", WIDTH**-0.5)):
            mixed, weights = depth_attention(
                query,
                sources,
                gain=gain,
                eps=1e-3,
                key_norm_weight=weight,
                value=value,
                logit_scale=logit_scale,
                return_weights=True,
            )
            expected, numbers = by_hand(query, sources, factor, 1e-3, weight, value == "normalized", scale)
            assert_close([mixed.detach(), weights], [expected.detach(), numbers.detach()], 1e-12)
            assert_close(gradients([mixed], inputs), gradients([expected], inputs))
            assert not weights.requires_grad


@pytest.mark.parametrize(("count", "reads"), [(1, None), (2, 32), (65, None), (17, 2)])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 3, 4)])
def test_sizes(count: int, reads: int | None, shape: tuple[int, ...]) -> None:
    query, sources = problem(count, reads, shape=shape)
    mixed, weights = depth_attention(query, sources, return_weights=True)
    expected, numbers = by_hand(query, sources, 1.0)
    assert_close([mixed.detach(), weights], [expected.detach(), numbers.detach()])
    assert_close(gradients([mixed], [query, *sources]), gradients([expected], [query, *sources]))


@pytest.mark.parametrize("reads", [None, 2])
def test_zero_query_gives_the_plain_sum(reads: int | None) -> None:
    query, sources = problem(5, reads, torch.float32)
    total = sources[0] + sources[1] + sources[2] + sources[3] + sources[4]
    mixed = depth_attention(torch.zeros_like(query), sources, gain="sum")
    if reads is None:
        assert torch.equal(mixed, total)
    else:
        torch.testing.assert_close(mixed, total.expand(2, -1, -1, -1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reads", [None, 3])
def test_dtypes(dtype: torch.dtype, reads: int | None) -> None:
    query, sources = problem(5, reads, dtype, shape=(40,))
    exact_query, exact_sources = query.detach().double(), [source.detach().double() for source in sources]
    for given in (query, query.detach().float()):
        mixed, weights = depth_attention(given, sources, return_weights=True)
        expected, _ = by_hand(exact_query, exact_sources, 1.0)
        assert mixed.dtype == dtype
        assert weights.dtype == torch.float32
        if dtype == torch.float32:
            torch.testing.assert_close(mixed.double(), expected, rtol=1e-5, atol=1e-5)
        else:
            assert ulps(mixed.detach(), expected, torch.full_like(expected, 2.0**-9)) <= 2
        grads = gradients([mixed], sources)
        assert all(grad.dtype == dtype for grad in grads)


def test_key_norm_weight_is_not_rounded_into_the_query() -> None:
    query, sources = problem(5, dtype=torch.bfloat16)
    weight = generator(5)(WIDTH).bfloat16()
    _, weights = depth_attention(query, sources, key_norm_weight=weight, return_weights=True)
    _, expected = by_hand(query.double(), [source.double() for source in sources], 1.0, weight=weight.double())
    torch.testing.assert_close(weights.double(), expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("without_library", [False, True])
def test_gradcheck(without_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if without_library:
        monkeypatch.setattr(cpu, "served", lambda dtype: False)
    for reads in (None, 2):
        query, sources = problem(3, reads, shape=(2,))

        def call(query: Tensor, weight: Tensor, *sources: Tensor) -> Tensor:
            return depth_attention(query, list(sources), gain="sum", eps=1e-3, key_norm_weight=weight)

        weight = generator(3)(WIDTH).requires_grad_()
        assert torch.autograd.gradcheck(call, (query, weight, *sources))


def test_compiled_cpu_kernel_serves_eager_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu.library() is None:
        pytest.fail("the compiled kernels were not built: this test needs a C++ compiler")
    calls: list[int] = []
    through = cpu.mix_through
    monkeypatch.setattr(cpu, "mix_through", lambda *given: calls.append(1) or through(*given))
    query, sources = problem(dtype=torch.bfloat16)
    depth_attention(query, sources)
    assert calls == [1]


def test_autocast() -> None:
    """A float32 query, sources in the autocast dtype: the same numbers, in the sources' dtype."""
    query, sources = problem(dtype=torch.bfloat16)
    query = query.detach().float().requires_grad_()
    for given in (query, torch.stack([query, -query])):
        alone = depth_attention(given, sources, key_norm_weight=query)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = depth_attention(given, sources, key_norm_weight=query)
        assert cast.dtype == torch.bfloat16
        assert torch.equal(alone, cast)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reads", [None, 2])
def test_activation_checkpointing(reentrant: bool, reads: int | None) -> None:
    query, sources = problem(reads=reads)
    inputs = [query, *sources]

    def call(query: Tensor, *sources: Tensor) -> Tensor:
        return depth_attention(query, list(sources)).sin()

    expected = gradients([call(*inputs)], inputs)
    assert query.grad is None
    out = checkpoint(call, *inputs, use_reentrant=reentrant)
    out.backward(generator(9)(*out.shape))
    for value, wanted in zip(inputs, expected, strict=True):
        assert torch.equal(value.grad, wanted)


def test_two_runs_give_the_same_bits() -> None:
    for reads in (None, 3):
        query, sources = problem(9, reads, torch.float32, shape=(64,))
        runs = [[out := depth_attention(query, sources), *gradients([out], [query, *sources])] for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# ------------------------------------------------------------------ compilation and export


class Reader(nn.Module):
    """Depth attention in a module, one read or several."""

    def __init__(self, reads: int | None) -> None:
        super().__init__()
        query, _ = problem(reads=reads, dtype=torch.float32)
        self.query = nn.Parameter(query.detach())
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.options: dict[str, Any] = {"gain": "sum", "logit_scale": "rsqrt_dim", "return_weights": True}

    def forward(self, *sources: Tensor) -> tuple[Tensor, Tensor]:
        return depth_attention(self.query, list(sources), key_norm_weight=self.weight, **self.options)


@pytest.mark.parametrize("reads", [None, 2])
def test_compiled(reads: int | None) -> None:
    torch._dynamo.reset()
    model = Reader(reads)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for shape in ((2, 3), (5, 3)):
        _, sources = problem(dtype=torch.float32, shape=shape)
        inputs = [*model.parameters(), *sources]
        found, expected = compiled(*sources), model(*sources)
        assert_close([value.detach() for value in found], [value.detach() for value in expected], 1e-5)
        assert_close(gradients(found[:1], inputs), gradients(expected[:1], inputs), 1e-5)


@pytest.mark.inductor
@pytest.mark.parametrize("reads", [None, 2])
def test_inductor_opens_it_up(reads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, and no call of an operator is left in the code, forward or backward."""
    from torch._inductor import decomposition
    from torch._inductor.utils import run_and_get_code

    # As in a process where nothing has registered the operators yet, on a machine that has not seen this graph.
    for op in kernel_ops.DECOMPOSITIONS:
        monkeypatch.delitem(decomposition.decompositions, op, raising=False)
    decomposition.fast_random_decomps.cache_clear()
    torch._dynamo.reset()
    model = Reader(reads)
    _, sources = problem(dtype=torch.float32)
    inputs = [*model.parameters(), *sources]
    with torch._inductor.config.patch(force_disable_caches=True):
        found, forward = run_and_get_code(torch.compile(model, fullgraph=True), *sources)
        grads, backward = run_and_get_code(gradients, found[:1], inputs)
    assert forward
    assert not any("attnres." in text for text in (*forward, *backward))
    expected = model(*sources)
    assert_close([value.detach() for value in found], [value.detach() for value in expected], 1e-5)
    assert_close(grads, gradients(expected[:1], inputs), 1e-5)


@pytest.mark.parametrize("reads", [None, 2])
@pytest.mark.parametrize("strict", [False, True])
def test_exported(reads: int | None, strict: bool) -> None:
    model = Reader(reads)
    _, sources = problem(dtype=torch.float32)
    sources = [source.detach() for source in sources]
    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(model, tuple(sources), dynamic_shapes=(({0: tokens},) * 4,), strict=strict)
    names = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert (torch.ops.attnres.inter.default if reads else torch.ops.attnres.site.default) in names
    for rows in (2, 7):
        given = [source[:1].repeat(rows, 1, 1) for source in sources]
        assert_close(
            [value.detach() for value in program.module()(*given)],
            [value.detach() for value in model(*given)],
            1e-5,
        )


# ------------------------------------------------------------------ arguments

QUERY, SOURCES = torch.zeros(WIDTH), [torch.zeros(2, WIDTH)] * 2


@pytest.mark.parametrize(
    ("query", "sources", "options", "message"),
    [
        (QUERY, [], {}, "sources is empty"),
        (QUERY, torch.zeros(3, 2, WIDTH), {}, "one tensor of shape"),
        (QUERY, [torch.zeros(2, WIDTH), torch.zeros(1, WIDTH)], {}, "source 1 is"),
        (QUERY, [torch.zeros(2, WIDTH), torch.zeros(2, WIDTH).half()], {}, "source 1 is .*float16"),
        (QUERY, [torch.zeros(2, WIDTH), torch.zeros(2, WIDTH, device="meta")], {}, "on meta"),
        (QUERY, [torch.zeros(2, WIDTH, dtype=torch.int64)], {}, "int64"),
        (torch.zeros(0), [torch.zeros(2, 0)], {}, r"\(2, 0\)"),
        (torch.zeros(1), SOURCES, {}, r"shape \[16\], or \[S, 16\]"),
        (torch.zeros(0, WIDTH), SOURCES, {}, "for S reads"),
        (torch.zeros(1, 1, WIDTH), SOURCES, {}, "for S reads"),
        (QUERY, SOURCES, {"gain": "max"}, '"mean", "sum" or a number'),
        (QUERY, SOURCES, {"gain": math.inf}, "gain is inf"),
        (QUERY, SOURCES, {"gain": None}, "gain is None"),
        (QUERY, SOURCES, {"eps": math.nan}, "eps is nan"),
        (QUERY, SOURCES, {"value": "key"}, '"raw" or "normalized"'),
        (QUERY, SOURCES, {"logit_scale": "sqrt"}, '"rsqrt_dim" or a number'),
        (QUERY, SOURCES, {"key_norm_weight": torch.ones(1)}, "one weight per feature"),
        (QUERY, SOURCES, {"key_norm_weight": torch.ones(1, WIDTH)}, "one weight per feature"),
        (torch.zeros(2, WIDTH), SOURCES, {"key_norm_weight": torch.ones(1, WIDTH)}, "one weight per feature"),
    ],
)
def test_wrong_arguments(query: Tensor, sources: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ac.ConfigError, match=message) as caught:
        depth_attention(query, sources, **options)
    assert isinstance(caught.value, ValueError)
    assert "attnres_compile.ops.depth_attention" in str(caught.value)


def test_it_is_public() -> None:
    assert ac.ops.depth_attention is depth_attention
    assert "ops" in ac.__all__
