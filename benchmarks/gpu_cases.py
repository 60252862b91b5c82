"""The problems of ``gpu_kernels.py``, and this package's ways to solve them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnres_compile.kernels import device_ops, ops, phase_ops
from attnres_compile.ops import depth_attention

assert device_ops and phase_ops  # register the operators
OURS = "attnres op"
EPS = 1e-6
KINDS = ("mix", "inter", "block")


@dataclass(frozen=True)
class Case:
    """What is to be computed.

    Attributes:
        kind: ``"mix"`` one read of all sources; ``"inter"`` several queries' reads of the same sources; ``"block"``
            the same, and each query also reads a tensor of its own, the running sum of its block.
        sources: N.
        dim: features d.
        tokens: rows of each source.
        dtype: of the sources, a name in ``torch``.
        queries: S, 1 for ``"mix"``.
    """

    kind: str
    sources: int
    dim: int
    tokens: int
    dtype: str = "bfloat16"
    queries: int = 1

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one source, X."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return self.tokens * self.dim * itemsize

    def floor(self, both: bool) -> int:
        """Bytes that the forward, or forward and backward, cannot do without (docs/method.md).

        One read N + 1 tensors and, backward, 2N + 2. Phase 1 reads the sources once for all S queries: N + S, and
        2N + 2S backward. With a merge for each query in addition 3 each (mix, running sum, result), and 5 backward
        (gradient, mix, running sum; the gradients of both).
        """
        n, s = self.sources, self.queries
        merges = s if self.kind == "block" else 0
        tensors = n + s + 3 * merges + ((2 * n + 2 * s + 5 * merges) if both else 0)
        return tensors * self.tensor_bytes

    def __str__(self) -> str:
        reads = "" if self.kind == "mix" else f", S={self.queries}"
        return f"{self.kind} N={self.sources}, D={self.dim}{reads}"


class Problem:
    """The tensors of one case, the same ones for the same seed."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        dtype: torch.dtype = getattr(torch, case.dtype)

        def random(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

        self.case, self.device, self.dtype = case, device, dtype
        self.stack = random(case.sources, case.tokens, case.dim)
        self.partials = random(case.queries if case.kind == "block" else 0, case.tokens, case.dim)
        # Logits of deviation 1. The numbers are bfloat16's, so that everyone computes with the same ones.
        wide = torch.randn(case.queries, case.dim, generator=generator, device=device)
        self.queries = (wide * case.dim**-0.5).bfloat16().float()
        self.grad = random(case.queries, case.tokens, case.dim)

    def listed(self) -> list[Tensor]:
        """The sources, each a leaf."""
        return [value.detach().requires_grad_() for value in self.stack]

    def sums(self) -> list[Tensor]:
        """The running sums of a block, each a leaf."""
        return [value.detach().requires_grad_() for value in self.partials]

    def query(self, index: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """One query, a leaf."""
        query: Tensor = self.queries[index].to(dtype, copy=True)
        return query.requires_grad_()

    def ones(self) -> Tensor:
        """The weight of a key norm that changes nothing."""
        return torch.ones(self.case.dim, device=self.device)


@dataclass
class Bound:
    """An implementation with the tensors of one problem.

    Attributes:
        run: gives the results, in the order of the queries; one tensor may hold several.
        queries: leaves, in order; one may hold several.
        values: leaves: the sources, then the running sums of a block; one may hold several.
        grads: of the results.
    """

    run: Callable[[], list[Tensor]]
    queries: list[Tensor]
    values: list[Tensor]
    grads: list[Tensor]

    def forward(self) -> list[Tensor]:
        """The results, with nothing kept for a backward."""
        with torch.no_grad():
            return self.run()

    def both(self) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """The results, and the gradients of queries and values."""
        found = self.run()
        return found, torch.autograd.grad(found, [*self.queries, *self.values], self.grads)


@dataclass(frozen=True)
class Implementation:
    """A way to compute a case.

    Attributes:
        name: in the table.
        bind: puts a problem's tensors into it.
        gap: why it cannot do a case, or ``""``.
        peer: another package's, which ours has to be ahead of.
        loose: nothing is to be compiled for it: it is checked on a few of the tokens.
    """

    name: str
    bind: Callable[[Problem], Bound]
    gap: Callable[[Case], str]
    peer: bool = False
    loose: bool = False


def one_by_one(problem: Problem, read: Callable[[Tensor, list[Tensor]], Tensor], dtype: torch.dtype) -> Bound:
    """A function of one query and a list of sources, called once for each query."""
    sources, sums = problem.listed(), problem.sums()
    queries = [problem.query(index, dtype) for index in range(problem.case.queries)]

    def run() -> list[Tensor]:
        if sums:
            return [read(query, [*sources, own]) for query, own in zip(queries, sums, strict=True)]
        return [read(query, sources) for query in queries]

    return Bound(run, queries, [*sources, *sums], list(problem.grad))


# ------------------------------------------------------------------ ours


def _site(query: Tensor, sources: Sequence[Tensor], mixed: Tensor | None = None, lse: Tensor | None = None) -> Tensor:
    keep = torch.is_grad_enabled()
    nothing = (None, None, None)
    found: list[Tensor] = torch.ops.attnres.site.default(
        query, list(sources), mixed, lse, *nothing, "", 0.0, -1, EPS, 1.0, 1.0, False, keep
    )
    return found[0]


def _operators(problem: Problem) -> Bound:
    """The operators themselves: a site; phase 1; phase 1 and a merge for each query."""
    if problem.case.kind == "mix":
        return one_by_one(problem, _site, torch.float32)
    sources, sums = problem.listed(), problem.sums()
    queries = [problem.query(index) for index in range(problem.case.queries)]
    count = len(queries)

    def run() -> list[Tensor]:
        found = torch.ops.attnres.inter.default(queries, sources, -1, EPS, 1.0, False)
        if not sums:
            return list(found[:count])
        return [_site(queries[s], [sums[s]], found[s], found[count + s]) for s in range(count)]

    return Bound(run, queries, [*sources, *sums], list(problem.grad))


def _public(problem: Problem) -> Bound:
    """``attnres_compile.ops.depth_attention``, with all queries at once where there are several."""

    def read(query: Tensor, sources: list[Tensor]) -> Tensor:
        found = depth_attention(query, sources, eps=EPS)
        assert isinstance(found, Tensor)
        return found

    if problem.case.kind != "inter":
        return one_by_one(problem, read, torch.float32)
    sources, queries = problem.listed(), problem.queries.clone().requires_grad_()
    return Bound(lambda: [read(queries, sources)], [queries], sources, [problem.grad])


def _plain(smoke: bool) -> Callable[[Problem], Bound]:
    """The operators' straight-line code, compiled by Inductor: what runs where no kernel serves."""

    def whole(queries: list[Tensor], sources: list[Tensor], sums: list[Tensor]) -> list[Tensor]:
        read = torch.ops.attnres.mix.default
        given = [[*sources, own] for own in sums] or [sources] * len(queries)
        return [read(query, each, -1, EPS, 1.0, 1.0, False) for query, each in zip(queries, given, strict=True)]

    # A smoke test has no time to compile.
    compiled = torch.compile(whole, dynamic=False, backend="eager" if smoke else "inductor")

    def bind(problem: Problem) -> Bound:
        ops.register_decompositions()
        sources, sums = problem.listed(), problem.sums()
        queries = [problem.query(index) for index in range(problem.case.queries)]
        return Bound(lambda: list(compiled(queries, sources, sums)), queries, [*sources, *sums], list(problem.grad))

    return bind


def _stacked(problem: Problem) -> Bound:
    """As the paper lists it, run by PyTorch op by op: sources stacked, ``einsum`` in float32."""

    def read(query: Tensor, sources: list[Tensor]) -> Tensor:
        values = torch.stack(sources).float()
        keys = torch.nn.functional.rms_norm(values, values.shape[-1:], eps=EPS)
        weights = torch.einsum("d,ntd->nt", query, keys).softmax(0)
        return torch.einsum("nt,ntd->td", weights, values).to(sources[0].dtype)

    return one_by_one(problem, read, torch.float32)


def _single(problem: Problem) -> Bound:
    """One site after the other, where the operators above work for all queries at once."""
    return one_by_one(problem, _site, torch.float32)


def ours(smoke: bool) -> list[Implementation]:
    """All of them; the operators first."""

    def always(case: Case) -> str:
        return ""

    def several(case: Case) -> str:
        return "the same as attnres op" if case.kind == "mix" else ""

    def single(case: Case) -> str:
        # The code of eight reads is eight times as long, and compiling has to fit into the time.
        return "" if smoke or case.queries == 1 else "compiled for one read only"

    return [
        Implementation(OURS, _operators, always),
        Implementation("attnres single reads", _single, several),
        Implementation("attnres depth_attention", _public, always),
        Implementation("plain, compiled", _plain(smoke), single),
        Implementation("stacked, eager", _stacked, always, loose=True),
    ]


@contextlib.contextmanager
def interpreted_kernels() -> Iterator[bool]:
    """On the CPU, in Triton's interpreter: give the operators' calls to the generated kernels. Says whether it does."""
    import triton

    if not triton.knobs.runtime.interpret:
        yield False
        return
    from attnres_compile.kernels import launch

    library = torch.library.Library("attnres", "IMPL")
    for name in device_ops.SERVED:
        library.impl(name, getattr(launch, name), "CPU")
    try:
        yield True
    finally:
        library._destroy()
