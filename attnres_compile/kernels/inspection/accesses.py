"""What is common to the interpreters of compiled kernels: integers as registers hold them, and memory that counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from attnres_compile.errors import KernelError

Way = Literal["ld", "st"]

# A tensor argument number i lies at address (i + 1) << BASE; none is that large.
BASE = 44


@dataclass
class Traffic:
    """What one argument's memory saw.

    Attributes:
        requested: bytes asked for: active threads times width; an address that is the same for all threads once.
        widths: bytes per thread of the instructions.
    """

    requested: int = 0
    widths: set[int] = field(default_factory=set)
    _starts: dict[int, list[Tensor]] = field(default_factory=dict, repr=False)

    def add(self, starts: Tensor, width: int) -> None:
        """One execution of an instruction, at one byte offset per active thread."""
        uniform = bool((starts == starts[0]).all())
        self.requested += width if uniform else width * starts.numel()
        self.widths.add(width)
        self._starts.setdefault(width, []).append(starts[:1] if uniform else starts)

    def bytes(self) -> Tensor:
        """The offset of every byte seen, each once, in order."""
        parts = [
            (torch.cat(starts).unique()[:, None] + torch.arange(width)).flatten()
            for width, starts in self._starts.items()
        ]
        every: Tensor = torch.cat(parts).unique()
        return every


class Memory:
    """The tensors that a kernel is called with, and what it does to each.

    Args:
        count: number of arguments.
        threads: of a block.
    """

    def __init__(self, count: int, threads: int) -> None:
        self.count = count
        self.threads = threads
        self.traffic: dict[tuple[int, Way], Traffic] = {}

    def access(self, way: Way, width: int, start: Tensor, mask: Tensor) -> None:
        """``width`` bytes at ``start`` for each thread whose ``mask`` is true; both of one element or one per thread.

        Raises:
            KernelError: memory of no argument, or of several.
        """
        active = start.expand(self.threads)[mask.expand(self.threads)]
        if active.numel() == 0:
            return
        number = int(active[0] >> BASE)
        if bool((active >> BASE != number).any()) or not 1 <= number <= self.count:
            raise KernelError("a kernel accesses memory of no argument, or of several by one instruction")
        seen = self.traffic.setdefault((number - 1, way), Traffic())
        seen.add(active & ((1 << BASE) - 1), width)


def base(argument: int) -> int:
    """The address of a tensor argument."""
    return (argument + 1) << BASE


def one(value: int) -> Tensor:
    """A value that is the same for all threads."""
    return torch.tensor([value if value < 1 << 63 else value - (1 << 64)])


def wrap(value: Tensor, bits: int) -> Tensor:
    """The value as a register of that many bits holds it: up to 32 bits zero-extended, 64 bits as int64."""
    return value if bits >= 64 else value & ((1 << bits) - 1)


def signed(value: Tensor, bits: int) -> Tensor:
    """What a register means when it is read as a signed number."""
    half = 1 << (bits - 1)
    return value if bits >= 64 else ((value & ((1 << bits) - 1)) ^ half) - half


def shift_left(value: Tensor, by: Tensor, bits: int) -> Tensor:
    """Zeros are shifted in; by the width or more everything is shifted out."""
    return wrap(torch.where(by >= bits, 0, value << by.clamp(0, bits - 1)), bits)


def divide(value: Tensor, by: Tensor, remainder: bool) -> Tensor | None:
    """Quotient or remainder of numbers that are not negative; None for others, which no index here is."""
    if bool(((value < 0) | (by <= 0)).any()):
        return None
    return value % by if remainder else torch.div(value, by, rounding_mode="floor")
