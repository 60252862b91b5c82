"""What a program works on: the stream, what is beside it, and the layouts that it takes."""

from __future__ import annotations

from torch import Tensor, nn

BATCH, TOKENS, WIDTH = 2, 4, 6
LAYOUTS = ("btd", "tbd", "flat", "bdt", "windows")


def to_layout(x: Tensor, layout: str) -> Tensor:
    """From ``[BATCH, TOKENS, WIDTH]``."""
    if layout == "tbd":
        return x.transpose(0, 1)
    if layout == "flat":
        return x.reshape(BATCH * TOKENS, WIDTH)
    if layout == "bdt":
        return x.permute(0, 2, 1)
    if layout == "windows":
        return x.reshape(BATCH, 2, TOKENS // 2, WIDTH).permute(0, 2, 1, 3)
    return x


def from_layout(x: Tensor, layout: str) -> Tensor:
    """Back to ``[BATCH, TOKENS, WIDTH]``."""
    if layout == "tbd":
        return x.transpose(0, 1)
    if layout == "flat":
        return x.view(BATCH, TOKENS, WIDTH)
    if layout == "bdt":
        return x.permute(0, 2, 1)
    if layout == "windows":
        return x.permute(0, 2, 1, 3).reshape(BATCH, TOKENS, WIDTH)
    return x


class Machine:
    """The state of a program.

    Attributes:
        x: the stream, in ``layout``.
        y: another stream, ``[BATCH, TOKENS, WIDTH]`` like ``extra``, an independent tensor.
        shared: one linear layer for all who want it.
        saved: older states with their layouts; the first is where the stream began.
        outputs: what is returned beside the last state.
        aliases: views of states that are written into later.
    """

    def __init__(self, x: Tensor, y: Tensor, extra: Tensor, shared: nn.Module) -> None:
        self.x, self.y, self.extra, self.shared = x, y, extra, shared
        self.layout = "btd"
        self.saved: list[tuple[Tensor, str]] = [(x, "btd")]
        self.outputs: list[Tensor] = []
        self.aliases: list[Tensor] = []

    def inner(self, x: Tensor, layout: str) -> Machine:
        """For a stream that begins at ``x``; returns through the same outputs."""
        machine = Machine(x, self.y, self.extra, self.shared)
        machine.layout = layout
        machine.saved = [(x, layout)]
        machine.outputs = self.outputs
        return machine

    def fork(self, x: Tensor) -> Machine:
        """For the same stream at ``x``, with nothing that could be written to in common."""
        machine = self.inner(x, self.layout)
        machine.saved, machine.outputs = list(self.saved), []
        return machine

    def old(self, x: Tensor, layout: str) -> Tensor:
        """An older state in the layout of now."""
        return x if layout == self.layout else to_layout(from_layout(x, layout), self.layout)

    def older(self) -> Tensor:
        """Some older state."""
        return self.old(*self.saved[len(self.saved) // 2])
