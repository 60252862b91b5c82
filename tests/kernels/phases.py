"""Problems for the operators of the two phases and of whole sites, and how their results are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnres_compile.kernels import reference

OPS = torch.ops.attnres
NARROW = [torch.bfloat16, torch.float16]
# (shape of a source, its feature dimension)
SHAPES = [((3, 5, 48), -1), ((4, 33), 1), ((2, 40, 3, 4), 1), ((17,), 0), ((70, 2, 3), 0), ((4, 1), -1), ((1, 24), -1)]
NORMS = [("", ""), ("rmsnorm", ""), ("rmsnorm", "w"), ("layernorm", ""), ("layernorm", "w"), ("layernorm", "wb")]


@dataclass(frozen=True)
class Read:
    """Options of a read, by the names that the reference has for them."""

    dim: int = -1
    eps: float = 1e-5
    gain: float = 1.7
    scale: float = 0.8
    normalized: bool = False

    def named(self, gain: bool = True) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if gain or name != "gain"}

    @property
    def inter(self) -> tuple[Any, ...]:
        return self.dim, self.eps, self.scale, self.normalized

    @property
    def merge(self) -> tuple[Any, ...]:
        return self.dim, self.eps, self.gain, self.scale, self.normalized


def generator(seed: int = 0) -> Callable[..., Tensor]:
    made = torch.Generator().manual_seed(seed)
    return lambda *size: torch.randn(size, generator=made, dtype=torch.float64)


def without(shape: Sequence[int], dim: int) -> list[int]:
    found = list(shape)
    del found[dim]
    return found


@dataclass(frozen=True)
class Site:
    """Arguments of ``attnres::site``; tensors are float64 leaves."""

    query: Tensor
    sources: list[Tensor]
    mixed: Tensor | None = None
    lse: Tensor | None = None
    branch: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    norm: str = ""
    norm_eps: float = 1e-4
    read: Read = field(default_factory=Read)

    @property
    def tensors(self) -> list[Tensor]:
        optional = (self.mixed, self.lse, self.branch, self.weight, self.bias)
        return [self.query, *self.sources, *(value for value in optional if value is not None)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Site:
        rest = iter(tensors[1 + len(self.sources) :])
        names = [name for name in ("mixed", "lse", "branch", "weight", "bias") if getattr(self, name) is not None]
        given = {name: next(rest) for name in names}
        return replace(self, query=tensors[0], sources=list(tensors[1 : 1 + len(self.sources)]), **given)

    def cast(self, dtype: torch.dtype) -> Site:
        """Everything rounded to ``dtype`` but for the log-sum-exp, which is of the compute dtype."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        cast = self.with_tensors([value.detach().to(dtype) for value in self.tensors])
        return cast if self.lse is None else replace(cast, lse=self.lse.detach().to(wide))

    def leaves(self) -> Site:
        return self.with_tensors([value.detach().clone().requires_grad_() for value in self.tensors])

    def operator(self, keep: bool = False) -> list[Tensor]:
        return OPS.site(*self.arguments, keep)

    @property
    def arguments(self) -> tuple[Any, ...]:
        given = (self.query, self.sources, self.mixed, self.lse, self.branch, self.weight, self.bias)
        return *given, self.norm, self.norm_eps, *self.read.merge

    def reference(self) -> list[Tensor]:
        out, partial = reference.site(
            *(self.query, self.sources, self.mixed, self.lse, self.branch, self.weight, self.bias),
            norm=self.norm,
            norm_eps=self.norm_eps,
            **self.read.named(),
        )
        return [out] if self.branch is None else [out, partial]


def site(
    kind: str,
    branch: bool = False,
    norm: str = "",
    parameters: str = "",
    count: int = 3,
    shape: tuple[int, ...] = (2, 3, 8),
    read: Read | None = None,
    seed: int = 0,
) -> Site:
    normal, read = generator(seed), read or Read()
    size = shape[read.dim]
    merged = kind == "merge"
    return Site(
        normal(size).div(size**0.5),
        [normal(*shape) * (0.5 + index) for index in range(1 if merged else count)],
        mixed=normal(*shape) if merged else None,
        lse=normal(*without(shape, read.dim)) if merged else None,
        branch=normal(*shape) if branch else None,
        weight=1 + normal(size) / 4 if "w" in parameters else None,
        bias=normal(size) if "b" in parameters else None,
        norm=norm,
        read=read,
    ).leaves()


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], seed: int = 9) -> list[Tensor]:
    normal = generator(seed)
    return list(
        torch.autograd.grad(outputs, inputs, [normal(*out.shape).to(out.dtype) for out in outputs], allow_unused=True)
    )


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-11) -> None:
    assert len(found) == len(expected)
    size = max((float(value.detach().abs().max()) for value in expected if value.numel()), default=1.0)
    for value, wanted in zip(found, expected, strict=True):
        assert value.shape == wanted.shape
        torch.testing.assert_close(value.double(), wanted.double(), rtol=tolerance, atol=tolerance * size)


def ulps(value: Tensor, exact: Tensor, size: Tensor) -> float:
    """The largest error in units in the last place of ``value``'s dtype, at no less than the magnitude ``size``."""
    info = torch.finfo(value.dtype)
    magnitude = torch.maximum(exact.abs(), size).clamp_min(info.smallest_normal)
    unit = 2.0 ** magnitude.log2().floor() * info.eps
    return float(((value.double() - exact).abs() / unit).max())
