"""Whether an operator hands a tensor on, found out from numbers.

An operator *carries* a tensor when what it gives is affine in it, and each element of the result holds at most one
element of it: casts, views, permutations, windows, copies, scales, masks, and adding something else. Contractions,
norms, activations and means do not. To tell, it is run on four tensors: zeros, ones, the numbers of the elements, and
noise. No operator is known by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnres_compile.oracle.events import Call, is_float

# Largest relative difference that is rounding: the lowest precision is what counts.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 2e-2


@dataclass
class Image:
    """What became of three tensors on the way that a state went.

    Attributes:
        shape: of the state.
        noise: random numbers, one per element of the state.
        ones, numbers, noisy: where ones, the elements' numbers (from 1) and the noise are now; what is added, left out.
        rounding: largest relative difference that is rounding by now: that of the lowest precision on the way.
    """

    shape: torch.Size
    noise: Tensor
    ones: Tensor
    numbers: Tensor
    noisy: Tensor
    rounding: float = 0.0

    @classmethod
    def of(cls, state: Tensor) -> Image:
        """That of a state itself."""
        count = state.numel()
        generator = torch.Generator().manual_seed(0)
        # Nothing here may be of a lower precision than the model's: who watches for that sees this, too.
        noise = torch.randn(count, generator=generator, dtype=torch.float64).to(state.device, state.dtype)
        numbers = torch.arange(1, count + 1, device=state.device).to(state.dtype)
        return cls(
            state.shape,
            noise,
            torch.ones_like(state, requires_grad=False).detach(),
            torch.empty_like(state).copy_(numbers.view(state.shape)).detach(),
            torch.empty_like(state).copy_(noise.view(state.shape)).detach(),
        )

    def dims(self) -> tuple[frozenset[int], ...]:
        """For each dimension of what the state became, the dimensions of the state that change along it."""
        elements, known = self._elements()
        shape = tuple(self.shape)
        found = []
        for dim, size in enumerate(elements.shape):
            varies: set[int] = set()
            for other in {1, size - 1} if size > 1 else ():
                both = known.select(dim, 0) & known.select(dim, other)
                first, second = (_coordinates(elements.select(dim, i)[both], shape) for i in (0, other))
                varies |= {at for at, (a, b) in enumerate(zip(first, second, strict=True)) if bool((a != b).any())}
            found.append(frozenset(varies))
        return tuple(found)

    def _elements(self) -> tuple[Tensor, Tensor]:
        known = self.ones.abs() > 1e-12
        ratio = torch.where(known, self.numbers / torch.where(known, self.ones, 1), 1)
        return (ratio.round().long() - 1), known

    def is_carried(self, size: float) -> bool:
        """Whether each element holds at most one of the state's; ``size`` is that of what was added."""
        rounding = self.rounding
        elements, known = self._elements()
        if not bool(known.any()):
            return False
        inside = (elements >= 0) & (elements < self.noise.numel())
        if not bool((inside | ~known).all()):
            return False
        wanted = torch.where(known, self.ones * self.noise[elements.clamp(0, self.noise.numel() - 1)].to(self.ones), 0)
        allowed = rounding * (wanted.abs() + size + self.ones.abs().max())
        if not bool(((self.noisy - wanted).abs() <= allowed).all()):
            return False
        numbers = torch.where(known, self.ones * (elements + 1).to(self.ones.dtype), 0)
        return bool(((self.numbers - numbers).abs() <= rounding * (numbers.abs() + size + 1e-30) + 1e-12).all())


def carry(call: Call, slot: int, written: list[int], out: int, image: Image) -> tuple[Image, bool] | None:
    """The image behind an operator, and whether it adds something; ``None`` where it does not carry the tensor."""
    given = call.leaves[slot]
    if not is_float(given) or image.ones.shape != given.shape:
        return None
    zero = _run(call, slot, written, out, torch.zeros_like(image.ones))
    if zero is None:
        return None
    parts = []
    for tensor in (image.ones, image.numbers, image.noisy):
        made = _run(call, slot, written, out, tensor)
        if made is None or made.shape != zero.shape:
            return None
        parts.append(made - zero)
        if len(parts) == 1 and not bool(parts[0].any()):
            return None
    rounding = max(image.rounding, *(_ROUNDING.get(dtype, _COARSE) for dtype in (given.dtype, zero.dtype)))
    ones, numbers, noisy = parts
    found = Image(image.shape, image.noise, ones, numbers, noisy, rounding)
    size = float(zero.abs().max()) if zero.numel() else 0.0
    return (found, bool(zero.any())) if found.is_carried(size) else None


def is_pointwise(call: Call, slot: int, written: list[int], out: int) -> bool:
    """Whether each element of the result depends on the element at its place, and on no other."""
    given = call.leaves[slot]
    if not is_float(given) or given.numel() < 2:
        return False
    generator = torch.Generator().manual_seed(1)
    first = torch.rand(given.shape, generator=generator, dtype=torch.float64).to(given.device, given.dtype) + 0.5
    second = first.clone()
    second.view(-1)[:: max(given.numel() // 3, 1)] += 0.25
    made = [_run(call, slot, written, out, tensor) for tensor in (first, second)]
    if made[0] is None or made[1] is None or made[0].shape != given.shape:
        return False
    changed = made[0] != made[1]
    return bool(changed.any()) and not bool((changed & (first == second)).any())


def _run(call: Call, slot: int, written: list[int], out: int, value: Tensor) -> Tensor | None:
    try:
        made = call.again({slot: value}, written)
    except Exception:
        return None
    found = made[out] if out < len(made) else None
    return found.detach() if found is not None and is_float(found) else None


def _coordinates(elements: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
    found = []
    for size in reversed(shape):
        found.append(elements % size)
        elements = elements // size
    return found[::-1]
