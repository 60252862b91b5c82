"""The network that a spec describes, in plain PyTorch."""

from __future__ import annotations

import types

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import randomize
from tests.properties.doing import Doing, dropout
from tests.properties.machine import BATCH, TOKENS, WIDTH, Machine, from_layout, to_layout
from tests.properties.spec import Branch, Do, Instruction, Loop, Region, Spec, Step


class _Branch(nn.Module):
    def __init__(self, spec: Branch, ways: Ways) -> None:
        super().__init__()
        self.spec, self.mode = spec, ways.training
        if spec.norm == "layer":
            self.norm = nn.LayerNorm(WIDTH)
        elif spec.norm == "rms":
            self.norm_weight = nn.Parameter(torch.ones(WIDTH))
        if spec.body in ("linear", "mlp"):
            self.up = nn.Linear(WIDTH, WIDTH)
        if spec.body == "mlp":
            self.down = nn.Linear(WIDTH, WIDTH)
        if "layerscale" in spec.after:
            self.scale = nn.Parameter(torch.ones(WIDTH))
        if "learned" in spec.after:
            self.number = nn.Parameter(torch.ones(()))
        if spec.body == "program":
            self.program = Program(spec.program, ways)

    def forward(self, m: Machine) -> Tensor:
        spec = self.spec
        if spec.reads == "x":
            v = m.x
        elif spec.reads == "x0":
            v = m.old(*m.saved[0])
        elif spec.reads == "saved":
            v = m.older()
        else:
            v = m.old(m.y if spec.reads == "y" else m.extra, "btd")
        first = m.layout == "bdt"
        if first:
            v = v.transpose(1, 2)
        if spec.body == "identity":
            pass
        elif spec.norm == "layer":
            v = self.norm(v.double())
        elif spec.norm == "rms":
            v = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm_weight
        elif spec.norm == "half":
            v = v * 0.5
        if spec.body == "pool":
            v = torch.roll(v, 1, 0) - v.mean(0, keepdim=True)
        elif spec.body == "shared":
            v = m.shared(v.double())
        elif spec.body == "program":
            inner = m.inner(v, "btd" if first else m.layout)
            self.program(inner)
            v = from_layout(inner.x, inner.layout)
            v = v if first else to_layout(v, m.layout)
        elif spec.body != "identity":
            v = self.up(v.double())
            if spec.body == "mlp":
                v = self.down(torch.tanh(v))
        v = self._after(v)
        return v.transpose(1, 2) if first else v

    def _after(self, v: Tensor) -> Tensor:
        for what in self.spec.after:
            if what == "dropout":
                v = dropout(v, self.mode)
            elif what == "half":
                v = v * 0.5
            elif what == "learned":
                v = self.number.to(v.dtype) * v
            else:
                v = v * self.scale.to(v.dtype)
        return v


def _join(a: Tensor, b: Tensor, spelling: str) -> Tensor:
    if spelling == "torch":
        return torch.add(a, b)
    if spelling == "method":
        return a.add(b)
    if spelling == "alpha":
        return torch.add(a, b, alpha=0.5)
    if spelling == "sub":
        return a - b
    if spelling == "sum":
        return sum([a, b])
    if spelling == "iadd":
        a += b
        return a
    if spelling == "add_":
        return a.add_(b)
    if spelling == "stack":
        return torch.stack([a, b]).sum(0)
    if spelling == "addcmul":
        return torch.addcmul(a, b, b.new_ones(()))
    return a + b


# One per join of a step, on lines of its own: a report names a sum by its line.
_JOINS = tuple(types.FunctionType(_join.__code__.replace(co_firstlineno=1000 * (at + 1)), globals()) for at in range(3))


class _Step(nn.Module):
    def __init__(self, spec: Step, ways: Ways) -> None:
        super().__init__()
        self.spec = spec
        self.branches = nn.ModuleList(_Branch(branch, ways) for branch in spec.branches)
        self.scale = Doing(Do(spec.scale), ways.training, ways.breaks) if spec.scale else None

    def forward(self, m: Machine) -> None:
        branches = [branch(m) for branch in self.branches]
        if self.scale is not None:
            self.scale(m)
        values = [m.x, *branches]
        line = [values[i] for i in self.spec.order]
        for join, at, spelling in zip(_JOINS, self.spec.joins, self.spec.spellings, strict=False):
            line[at : at + 2] = [join(line[at], line[at + 1], spelling)]
        m.x = line[0]


class _Loop(nn.Module):
    def __init__(self, spec: Loop, ways: Ways) -> None:
        super().__init__()
        made = [Program(spec.program, ways) for _ in range(1 if spec.shared else spec.times)]
        self.programs = nn.ModuleList(made)
        self.times = spec.times

    def forward(self, m: Machine) -> None:
        for turn in range(self.times):
            self.programs[turn % len(self.programs)](m)


class _Region(nn.Module):
    def __init__(self, spec: Region, ways: Ways) -> None:
        super().__init__()
        self.program = Program(spec.program, ways)
        self.reentrant, self.checkpoints = spec.reentrant, ways.checkpoints

    def forward(self, m: Machine) -> None:
        if self.checkpoints:
            m.x = checkpoint(self._inside, m, m.x, use_reentrant=self.reentrant)
        else:
            m.x = self._inside(m, m.x)

    def _inside(self, m: Machine, x: Tensor) -> Tensor:
        inner = m.fork(x)
        self.program(inner)
        return inner.x


class Ways:
    """How a network is built: its mode, whether regions are checkpointed, and whether graphs break where they may."""

    def __init__(self, training: bool, checkpoints: bool, breaks: bool) -> None:
        self.training, self.checkpoints, self.breaks = training, checkpoints, breaks


class Program(nn.Module):
    """Instructions, one after the other."""

    def __init__(self, program: tuple[Instruction, ...], ways: Ways) -> None:
        super().__init__()
        self.steps = nn.ModuleList(_made(item, ways) for item in program)

    def forward(self, m: Machine) -> None:
        for step in self.steps:
            step(m)


def _made(item: Instruction, ways: Ways) -> nn.Module:
    if isinstance(item, Step):
        return _Step(item, ways)
    if isinstance(item, Loop):
        return _Loop(item, ways)
    if isinstance(item, Region):
        return _Region(item, ways)
    return Doing(item, ways.training, ways.breaks)


class Network(nn.Module):
    """The network of a spec; float64, random weights that hide nothing."""

    def __init__(self, spec: Spec, checkpoints: bool = False, breaks: bool = False) -> None:
        super().__init__()
        ways = Ways(spec.training, checkpoints, breaks)
        self.spec = spec
        self.embed_x = nn.Linear(WIDTH, WIDTH)
        self.embed_y = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.program = Program(spec.program, ways)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.double().train(spec.training)
        randomize(self)

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        start = self.embed_x(x) if self.spec.embed else x
        m = Machine(start, self.embed_y(y), x, self.shared)
        self.program(m)
        last = self.head(self.norm(from_layout(m.x, m.layout).double())) if self.spec.head else m.x
        return [last, *m.outputs]


def inputs(seed: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs of any :class:`Network`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, TOKENS, WIDTH)
    x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y
