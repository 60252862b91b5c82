"""Generated kernels against ``reference.py`` and autograd, both in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnres_compile.kernels import launch, reference

MANTISSA = {torch.bfloat16: 7, torch.float16: 10}
SMALLEST = {torch.bfloat16: -133, torch.float16: -24}


def agree(found: Tensor, expected: Tensor, ulps: float = 2.0, relative: float = 1e-5, least: float = 0.0) -> None:
    """float32: a relative error of at most 1e-5 of the largest value; others: two units in the last place.

    A unit is that of the value, or of the tensor's root mean square where the value is smaller: what cancels is known
    to the precision of what it cancels from. ``least`` is that size where it is known.
    """
    assert found.shape == expected.shape
    assert torch.equal(torch.isfinite(found), torch.isfinite(expected))
    finite = torch.isfinite(expected)
    values = torch.where(finite, expected, 0.0)
    error = (torch.where(finite, found.double(), 0.0) - values).abs()
    if not error.numel():
        return
    if found.dtype == torch.float32:
        assert error.max() <= relative * values.abs().max().clamp_min(least), (error.max() / values.abs().max()).item()
        return
    size = torch.maximum(values.abs(), values.square().mean().sqrt())
    unit = torch.exp2(torch.floor(torch.log2(size.clamp_min(1e-300))) - MANTISSA[found.dtype])
    unit = unit.clamp_min(2.0 ** SMALLEST[found.dtype])
    assert (error / unit).max() <= ulps, (error / unit).max().item()


def query_gradient_size(
    query: Tensor,
    rows: Sequence[Tensor],
    grad: Tensor,
    gain: float,
    scale: float,
    normalized: bool,
    phase_1: tuple[Tensor, Tensor] | None = None,
    lse_grad: Tensor | None = None,
) -> float:
    """The size of what a query's gradient is a sum of: parts that cancel where one source has nearly all the weight.

    Args:
        query, rows, gain, scale, normalized: of the site.
        grad: gradient of the mix.
        phase_1: mix and log-sum-exp that a merge starts from.
        lse_grad: gradient of phase 1's log-sum-exp.
    """
    v = torch.stack(list(rows)).double()
    keys = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)
    logits = scale * (keys * query.double()).sum(-1)
    values = keys if normalized else v
    if phase_1 is not None:
        logits = torch.cat([logits, phase_1[1].double()[None]])
        values = torch.cat([values, phase_1[0].double()[None]])
    weights = torch.softmax(logits, 0)
    slopes = gain * (values * grad.double()).sum(-1).abs()
    shared = (weights * slopes).sum(0) + (0.0 if lse_grad is None else lse_grad.double().abs())
    parts = (weights * (slopes + shared))[: len(keys)].unsqueeze(-1) * keys.abs()
    return float(parts.sum((0, 1)).max()) * abs(scale) if parts.numel() else 0.0


def _norm(norm: str, h: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if norm == "rmsnorm":
        return torch.nn.functional.rms_norm(h, h.shape[-1:], weight, eps)
    return torch.nn.functional.layer_norm(h, h.shape[-1:], weight, bias, eps)


@dataclass
class Case:
    """One site, with random operands.

    Attributes:
        sources: how many; for a merge the finished blocks behind phase 1's result, besides the partial sum.
        dim: number of features.
        dtype: of the rows.
        tokens: number of rows.
        merge: phase 2 instead of a mix.
        branch: dtype of the branch that joins the last source.
        norm: of the reader.
        weight, bias: whether it has them.
        slots: for the backward; fresh gradients for all sources if not given.
    """

    sources: int = 3
    dim: int = 64
    dtype: torch.dtype = torch.float32
    tokens: int = 3
    merge: bool = False
    branch: torch.dtype | None = None
    norm: str = ""
    weight: bool = True
    bias: bool = True
    gain: float | None = None
    scale: float = 1.0
    normalized: bool = False
    eps: float = 1e-6
    norm_eps: float = 1e-5
    query_size: float = 1.0
    slots: Sequence[int] | None = None
    size: float = 1.0
    seed: int = 0
    edit: dict[int, Any] = field(default_factory=dict)
    stored: Tensor = field(init=False)

    def check(self, backward: bool = True) -> None:
        """Forward and backward agree with float64."""
        torch.manual_seed(self.seed)
        rows = [self._rows() for _ in range(1 if self.merge else self.sources)]
        for index, value in self.edit.items():
            rows[index] = value(rows[index])
        query = torch.randn(self.dim) * self.query_size / self.dim**0.5
        mixed = self._rows() if self.merge else None
        lse = torch.randn(self.tokens) if self.merge else None
        branch = torch.randn(self.tokens, self.dim).to(self.branch) if self.branch else None
        weight = torch.randn(self.dim) if self.norm and self.weight else None
        bias = torch.randn(self.dim) if self.norm == "layernorm" and self.bias else None
        gain = float(self.sources if self.gain is None else self.gain)
        options = (self.norm, self.norm_eps, -1, self.eps, gain, self.scale, self.normalized)
        found = launch.site(query, rows, mixed, lse, branch, weight, bias, *options, True)
        exact = [None if v is None else v.double().requires_grad_() for v in (query, mixed, lse, branch, weight, bias)]
        sources = [row.double().requires_grad_() for row in rows]
        if branch is not None:
            # The new partial sum is a tensor of its own, and rounded: what follows is computed from it.
            partial = found[1]
            agree(partial, rows[-1].double() + branch.double(), ulps=1.0)
            sources[-1] = partial.double().requires_grad_()
        q, m, l, _, w, b = exact
        variant = (-1, self.eps, gain, self.scale, self.normalized)
        expected, _ = reference.site(q, sources, m, l, None, None, None, "", self.norm_eps, *variant)
        if self.norm:
            # The norm reads the mix as it is stored, like any reader; its gradient is that of the mix.
            read = [*rows[:-1], found[1]] if branch is not None else rows
            bare = ("", *options[1:])
            h = launch.site(query, read, mixed, lse, None, None, None, *bare, False)[0]
            agree(h, expected.detach())
            expected = expected + (h.double() - expected).detach()
        self.stored = expected
        if self.norm:
            expected = _norm(self.norm, expected, w, b, self.norm_eps)
        agree(found[0], expected.detach())
        if backward:
            self._backward(found, rows, query, mixed, lse, branch, weight, bias, options, expected, exact, sources)

    def _rows(self) -> Tensor:
        return (torch.randn(self.tokens, self.dim) * self.size).to(self.dtype)

    def _backward(
        self,
        found: list[Tensor],
        rows: list[Tensor],
        query: Tensor,
        mixed: Tensor | None,
        lse: Tensor | None,
        branch: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        options: tuple[Any, ...],
        expected: Tensor,
        exact: list[Tensor | None],
        sources: list[Tensor],
    ) -> None:
        read = [*rows[:-1], found[1]] if branch is not None else rows
        kept = found[1 + (branch is not None) :]
        h, total = (None, None) if self.merge else (kept[0] if self.norm else found[0], kept[-1])
        slots = [-1] * len(rows) if self.slots is None else list(self.slots)
        accumulated = [self._rows() for slot in slots if slot >= 0]
        grad = torch.randn(self.tokens, self.dim).to(self.dtype)
        made = launch.site_backward(grad, query, read, mixed, lse, weight, bias, h, total, accumulated, slots, *options)
        q, m, l, _, w, b = exact
        (of_h,) = torch.autograd.grad(expected, [self.stored], grad.double(), retain_graph=True)
        if h is not None:
            # What the logits share is <gradient, mix>, of the mix as it is stored: a term of the log-sum-exp.
            exact_h, _ = reference.site(
                q, sources, gain=options[4], eps=self.eps, scale=self.scale, normalized=self.normalized
            )
            off = (of_h * (exact_h.detach() - h.double())).sum(-1)
            _, (all_lse,) = reference.inter([q], sources, -1, self.eps, self.scale, self.normalized)
            shared = (off * all_lse).sum()
        else:
            shared = torch.zeros((), dtype=torch.float64)
        wanted = [v for v in (q, w, b, m, l) if v is not None] + sources
        gradients = list(torch.autograd.grad((expected * grad.double()).sum() + shared, wanted))
        of_sources = gradients[-len(sources) :]
        ends = gradients[: -len(sources)]
        for slot, value in zip(slots, of_sources, strict=True):
            if slot >= 0:
                ends.append(value + accumulated[slot].double())
            elif slot == -1:
                ends.append(value)
        assert len(made) == len(ends)
        phase_1 = None if mixed is None or lse is None else (mixed, lse)
        least = query_gradient_size(query, read, of_h, options[4], self.scale, self.normalized, phase_1)
        for index, (value, right) in enumerate(zip(made, ends, strict=True)):
            self._agree_gradient(value, right, least if index == 0 else 0.0)

    def _agree_gradient(self, value: Tensor, right: Tensor, least: float) -> None:
        if value.dtype == torch.float32 and self.dtype != torch.float32:
            # Parameters' gradients are float32 sums of products of rounded rows.
            if not value.numel():
                return
            error = (value.double() - right).abs().max()
            unit = 2.0 ** -MANTISSA[self.dtype]
            size = right.abs().max().clamp_min(1e-6)
            assert error <= 2 * unit * size, (error / size / unit).item()
            return
        agree(value, right, least=least)
