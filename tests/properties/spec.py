"""What a random network is: a short program over a stream ``x``, as data.

Residual steps with random trees of adds, re-layouts, casts, scales, loops, checkpointed regions, nested groups, taps,
old states that come back, a second stream, writes, graph breaks, and hazards that detection must leave alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields


class _Short:
    """Printed as what must be said to make it."""

    def __repr__(self) -> str:
        values = [(f, getattr(self, f.name)) for f in fields(self)]  # type: ignore[arg-type]
        said = [f"{f.name}={value!r}" for f, value in values if value != f.default]
        return f"{type(self).__name__}({', '.join(said)})"


@dataclass(frozen=True, repr=False)
class Branch(_Short):
    """What is added to the stream.

    Attributes:
        reads: ``x``, ``y`` (the other stream), ``x0``, ``saved`` (an older state), ``input`` (an independent tensor).
        norm: how it is read: ``none``, ``layer``, ``rms`` (by hand, three reads) or ``half`` (saves nothing).
        body: ``linear``, ``mlp``, ``pool`` (weightless), ``identity``, ``shared`` (one module for all), ``program``.
        after: ``dropout``, ``layerscale``, ``half``, ``learned`` (a learned number), applied in order.
        program: a stream of its own inside the branch, for ``body="program"``.
    """

    reads: str = "x"
    norm: str = "layer"
    body: str = "linear"
    after: tuple[str, ...] = ()
    program: tuple[Instruction, ...] = ()


@dataclass(frozen=True, repr=False)
class Step(_Short):
    """``x`` becomes a sum of ``x`` and branches: neighbours of ``order`` are joined at ``joins``, one by one.

    ``scale`` is what ``x`` is multiplied by in that sum: nothing, a number (``two``), a learned ``scalar`` or
    ``vector``.
    """

    branches: tuple[Branch, ...]
    order: tuple[int, ...] = (0, 1)
    joins: tuple[int, ...] = (0,)
    spellings: tuple[str, ...] = ("+",)
    scale: str = ""


@dataclass(frozen=True, repr=False)
class Do(_Short):
    """Something that happens to the stream or beside it; see :mod:`tests.properties.doing`."""

    what: str


@dataclass(frozen=True, repr=False)
class Loop(_Short):
    """A Python loop: one program ``times`` over, with the same modules each time (``shared``) or each time others."""

    program: tuple[Instruction, ...]
    times: int = 2
    shared: bool = False


@dataclass(frozen=True, repr=False)
class Region(_Short):
    """A program under activation checkpointing, in either form of it. Where a network is not to checkpoint, plain."""

    program: tuple[Instruction, ...]
    reentrant: bool = False


Instruction = Step | Do | Loop | Region


@dataclass(frozen=True, repr=False)
class Spec(_Short):
    """A network.

    Attributes:
        program: what it does.
        embed: whether the stream starts from an embedding; else from the input itself.
        training: mode, which dropout looks at.
        head: whether the last state goes through a norm and a head; else it is returned.
    """

    program: tuple[Instruction, ...]
    embed: bool = True
    training: bool = False
    head: bool = True


def steps(program: tuple[Instruction, ...]) -> Iterator[tuple[Step, bool]]:
    """The residual steps of a program as they come, loops unrolled, and whether a loop shares their modules."""
    for item in program:
        if isinstance(item, Step):
            yield item, False
        elif isinstance(item, Loop):
            for _ in range(item.times):
                for step, shared in steps(item.program):
                    yield step, shared or (item.shared and item.times > 1)
        elif isinstance(item, Region):
            yield from steps(item.program)
