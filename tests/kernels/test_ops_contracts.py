"""The operators for the two phases and for whole sites: their contracts with PyTorch, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attnres_compile.kernels import ops, reference
from attnres_compile.kernels.plain import FRESH, UNWANTED
from tests.kernels.phases import (
    NORMS,
    OPS,
    Read,
    Site,
    assert_close,
    generator,
    gradients,
    site,
)


@pytest.mark.parametrize("kind", ["mix", "merge"])
@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize(("norm", "parameters"), NORMS)
def test_gradcheck_of_sites(kind: str, branch: bool, norm: str, parameters: str) -> None:
    for normalized in (False, True):
        problem = site(kind, branch, norm, parameters, shape=(2, 4), read=Read(eps=1e-3, normalized=normalized))

        def call(*tensors: Tensor, problem: Site = problem) -> tuple[Tensor, ...]:
            return tuple(problem.with_tensors(tensors).operator(True))

        assert torch.autograd.gradcheck(call, tuple(problem.tensors))


def test_gradcheck_of_phases() -> None:
    normal = generator()
    for normalized in (False, True):
        read = Read(eps=1e-3, normalized=normalized)
        inputs = [normal(4), normal(4), *(normal(2, 4) for _ in range(3))]

        def inter(*tensors: Tensor, read: Read = read) -> tuple[Tensor, ...]:
            return tuple(OPS.inter(list(tensors[:2]), list(tensors[2:]), *read.inter))

        assert torch.autograd.gradcheck(inter, [value.requires_grad_() for value in inputs])
        inputs = [normal(4), normal(2, 4), normal(2), normal(2, 4)]

        def merge(*tensors: Tensor, read: Read = read) -> Tensor:
            return OPS.merge(*tensors, *read.merge)

        assert torch.autograd.gradcheck(merge, [value.requires_grad_() for value in inputs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mix", "merge"])
@pytest.mark.parametrize(("branch", "norm", "parameters"), [(False, "", ""), (True, "layernorm", "wb")])
def test_opcheck_of_sites(kind: str, branch: bool, norm: str, parameters: str, dtype: torch.dtype) -> None:
    problem = site(kind, branch, norm, parameters).cast(dtype)
    for keep in (False, True):
        torch.library.opcheck(OPS.site.default, (*problem.leaves().arguments, keep))
    out, *_, total = (*problem.operator(True), None) if kind == "merge" else problem.operator(True)
    h = None if kind == "merge" else torch.randn_like(out)
    slots = [FRESH, 0, UNWANTED][-len(problem.sources) :] if kind == "mix" else [0]
    given = (problem.mixed, problem.lse, problem.weight, problem.bias, h, total)
    torch.library.opcheck(
        OPS.site_backward.default,
        (out, problem.query, problem.sources, *given, [torch.randn_like(out)], slots, *problem.arguments[7:]),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_phases(dtype: torch.dtype) -> None:
    normal = generator()
    queries = [normal(8).to(dtype).requires_grad_() for _ in range(2)]
    sources = [normal(3, 8).to(dtype).requires_grad_() for _ in range(3)]
    read = Read()
    torch.library.opcheck(OPS.inter.default, (queries, sources, *read.inter))
    queries, sources = ([value.detach() for value in values] for values in (queries, sources))
    found = OPS.inter(queries, sources, *read.inter)
    grads = [torch.randn_like(value) for value in found]
    slots = [FRESH, UNWANTED, 0]
    torch.library.opcheck(
        OPS.inter_backward.default,
        (grads, queries, sources, found[:2], found[2:], [sources[0]], slots, *read.inter),
    )
    inputs = [queries[0], found[0], found[2], sources[0]]
    torch.library.opcheck(OPS.merge_backward.default, (sources[1], *inputs, *read.merge))
    torch.library.opcheck(OPS.merge.default, (*(value.requires_grad_() for value in inputs), *read.merge))


def test_fake_tensors_agree_with_real_ones() -> None:
    layouts = [
        torch.randn(2, 5, 16),
        torch.randn(5, 2, 16).transpose(0, 1),
        torch.randn(2, 5, 32)[..., ::2],
        torch.randn(16, 2, 5).permute(1, 2, 0),
        torch.randn(2, 1, 16).expand(2, 5, 16),
    ]
    for first in layouts:
        for second in layouts:
            arguments = (torch.randn(16), [second, first], None, None, second, None, None, "rmsnorm", 1e-6)
            real = OPS.site(*arguments, *Read().merge, True)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                sources = [mode.from_tensor(value) for value in (second, first)]
                fake = OPS.site(arguments[0], sources, *arguments[2:], *Read().merge, True)
            for a, b in zip(fake, real, strict=True):
                assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_results_are_tensors_of_their_own() -> None:
    """Where a result equals an argument or another result it is still a tensor of its own."""
    source = torch.randn(3, 8)
    query = torch.zeros(8)
    read = Read(gain=1.0).merge
    results = [
        OPS.inter([query, query], [source], *Read().inter),
        OPS.site(query, [source], None, None, torch.zeros(3, 8), None, None, "", 0.0, *read, True),
        OPS.site_backward(source, query, [source] * 2, *[None] * 6, [source], [0, FRESH], "", 0.0, *read),
        [OPS.merge(query, source, torch.zeros(3), source, *read)],
    ]
    for found in results:
        pointers = [value.untyped_storage().data_ptr() for value in (source, query, *found)]
        assert len(set(pointers)) == len(pointers)


def test_backward_adds_to_what_is_there() -> None:
    normal = generator()
    read = Read()
    sources, accumulated = ([normal(3, 8) for _ in range(count)] for count in (4, 2))
    before = [value.clone() for value in accumulated]
    slots = [1, UNWANTED, FRESH, 0]

    def expected(grads: list[Tensor]) -> list[Tensor]:
        return [grads[0] + accumulated[1], grads[2], grads[3] + accumulated[0]]

    query, grad = normal(8), normal(3, 8)
    given = (grad, query, sources, *[None] * 6)
    plainly = OPS.site_backward(*given, [], [FRESH] * 4, "rmsnorm", 1e-6, *read.merge)
    found = OPS.site_backward(*given, accumulated, slots, "rmsnorm", 1e-6, *read.merge)
    assert_close(found, [plainly[0], *expected(plainly[1:])], 1e-14)

    mixes = OPS.inter([query], sources, *read.inter)
    given = ([grad, normal(3)], [query], sources, mixes[:1], mixes[1:])
    plainly = OPS.inter_backward(*given, [], [FRESH] * 4, *read.inter)
    found = OPS.inter_backward(*given, accumulated, slots, *read.inter)
    assert_close(found, [plainly[0], *expected(plainly[1:])], 1e-14)
    # They are functions: what they add to stays as it was.
    assert all(torch.equal(a, b) for a, b in zip(before, accumulated, strict=True))


def test_added_gradients_are_rounded_once() -> None:
    """A narrow gradient is not lost next to a large one because it was rounded on its own first."""
    source = torch.ones(1, 2, dtype=torch.bfloat16)
    grad = torch.tensor([[257 / 256, 1.0]], dtype=torch.float32)
    there = torch.tensor([[1 / 128, 0.0]], dtype=torch.bfloat16)
    query = torch.zeros(2)
    *_, found = OPS.site_backward(grad, query, [source], *[None] * 6, [there], [0], "", 0.0, *Read(gain=1.0).merge)
    # Rounding 1 + 1/256 first would give 1, and then 1 + 1/128.
    assert float(found[0, 0]) == 1 + 2 / 128


def test_unused_results_have_no_gradient() -> None:
    normal = generator()
    queries = [normal(8).requires_grad_() for _ in range(3)]
    sources = [normal(4, 8).requires_grad_() for _ in range(2)]
    inputs = [*queries, *sources]
    found = OPS.inter(queries, sources, *Read().inter)
    mixes, lses = reference.inter(queries, sources, **Read().named(gain=False))
    # The first query's mix alone, the second's log-sum-exp alone, nothing of the third's.
    grads = gradients([found[0], found[4]], inputs)
    expected = gradients([mixes[0], lses[1]], inputs)
    assert grads[2] is None and expected[2] is None
    assert_close([*grads[:2], *grads[3:]], [*expected[:2], *expected[3:]])
    problem = site("mix", branch=True)
    _, partial = problem.operator()
    grads = gradients([partial], problem.tensors)
    assert [grad is None for grad in grads] == [True, True, True, False, False]
    assert torch.equal(grads[3], grads[4])


def test_some_inputs_without_gradient() -> None:
    problem = site("mix", True, "layernorm", "wb")
    everything = gradients(problem.operator(True)[:2], problem.tensors)
    for wanted in ([0], [2], [3], [4], [5, 6], [0, 1, 4]):
        tensors = [value.detach().requires_grad_(at in wanted) for at, value in enumerate(problem.tensors)]
        out = [value for value in problem.with_tensors(tensors).operator(True)[:2] if value.requires_grad]
        found = gradients(out, [tensors[at] for at in wanted])
        assert_close(found, [everything[at] for at in wanted], 1e-12)


QUERY, SOURCE, WRONG = torch.zeros(8), torch.zeros(2, 8), torch.zeros(1, 8)
INTER, MERGE, FUSED = (-1, 1e-6, 1.0, False), (-1, 1e-6, 1.0, 1.0, False), ("", 0.0, -1, 1e-6, 1.0, 1.0, False)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("inter", ([], [SOURCE], *INTER), "at least one query"),
        ("inter", ([QUERY], [], *INTER), "at least one source"),
        ("inter", ([QUERY, QUERY[:1]], [SOURCE], *INTER), r"query of shape \[8\]"),
        ("inter", ([QUERY], [SOURCE, WRONG], *INTER), "one shape"),
        ("inter_backward", ([SOURCE], [QUERY], [SOURCE], [SOURCE], [SOURCE[:, 0]], [], [-1], *INTER), "2 gradients"),
        (
            "inter_backward",
            ([SOURCE, SOURCE[:, 0]], [QUERY], [SOURCE], [SOURCE], [SOURCE[:, 0]], [], [0], *INTER),
            "slots",
        ),
        ("merge", (QUERY, WRONG, SOURCE[:, 0], SOURCE, *MERGE), "mix like its sources"),
        ("merge", (QUERY, SOURCE, SOURCE[:, :1], SOURCE, *MERGE), "one number per token"),
        ("merge", (QUERY, SOURCE.double(), SOURCE[:, 0], SOURCE, *MERGE), "mix like its sources"),
        ("merge_backward", (WRONG, QUERY, SOURCE, SOURCE[:, 0], SOURCE, *MERGE), "gradient like"),
        ("site", (QUERY, [SOURCE], None, None, WRONG, None, None, *FUSED, False), "branch like"),
        ("site", (QUERY, [SOURCE], SOURCE, None, None, None, None, *FUSED, False), "together"),
        ("site", (QUERY, [SOURCE] * 2, SOURCE, SOURCE[:, 0], None, None, None, *FUSED, False), "exactly one source"),
        ("site", (QUERY, [SOURCE], None, None, None, QUERY, None, *FUSED, False), "no norm weight"),
        ("site", (QUERY, [SOURCE], None, None, None, None, QUERY, "rmsnorm", *FUSED[1:], False), "no norm bias"),
        ("site", (QUERY, [SOURCE], None, None, None, QUERY[:1], None, "rmsnorm", *FUSED[1:], False), "norm weight of"),
        ("site", (QUERY, [SOURCE], None, None, None, None, None, "batchnorm", *FUSED[1:], False), "knows the norms"),
        ("site_backward", (WRONG, QUERY, [SOURCE], *[None] * 6, [], [-1], *FUSED), "gradient like"),
        ("site_backward", (SOURCE, QUERY, [SOURCE], *[None] * 6, [], [], *FUSED), "one slot per source"),
        ("site_backward", (SOURCE, QUERY, [SOURCE], *[None] * 6, [WRONG], [0], *FUSED), "accumulated gradient like"),
    ],
)
def test_arguments_that_would_broadcast_are_refused(name: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(OPS, name)(*arguments)


def test_decompositions_reach_inductor() -> None:
    from torch._inductor import decomposition

    ops.register_decompositions()
    table = decomposition.select_decomp_table()
    for name in ("mix", "inter", "merge", "site"):
        assert getattr(OPS, name).default in table
        assert getattr(OPS, f"{name}_backward").default in table
