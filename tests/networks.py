"""Random residual networks: a spec that can be printed and shrunk, and the module that it describes.

A spec is a short program over a stream ``x``: residual steps with random trees of adds, re-layouts, casts,
scales, nested groups, taps, old states that come back, a second stream, and hazards that detection must
leave alone. :func:`networks` draws specs for hypothesis; :class:`Network` is plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, TOKENS, WIDTH = 2, 4, 6

# ------------------------------------------------------------------ specs


@dataclass(frozen=True)
class Branch:
    """What is added to the stream.

    Attributes:
        reads: ``x``, ``y`` (the other stream), ``x0``, ``saved`` (an older state), ``input`` (an independent tensor).
        norm: how it is read: ``none``, ``layer``, ``rms`` (by hand, three reads) or ``half`` (saves nothing).
        body: ``linear``, ``mlp``, ``pool`` (weightless), ``identity``, ``shared`` (one module for all), ``program``.
        after: ``dropout``, ``layerscale``, ``half``, ``float`` (cast down), applied in order.
        program: a stream of its own inside the branch, for ``body="program"``.
    """

    reads: str = "x"
    norm: str = "layer"
    body: str = "linear"
    after: tuple[str, ...] = ()
    program: tuple[Instruction, ...] = ()


@dataclass(frozen=True)
class Step:
    """``x`` becomes a sum of ``x`` and branches: neighbours of ``order`` are joined at ``joins``, one by one."""

    branches: tuple[Branch, ...]
    order: tuple[int, ...]
    joins: tuple[int, ...]
    spellings: tuple[str, ...]


@dataclass(frozen=True)
class Do:
    """Something that happens to the stream or beside it; see :class:`_Do`."""

    what: str


Instruction = Step | Do


@dataclass(frozen=True)
class Spec:
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


# ------------------------------------------------------------------ the module

LAYOUTS = ("btd", "tbd", "flat", "bdt", "windows")


def _to_layout(x: Tensor, layout: str) -> Tensor:
    if layout == "tbd":
        return x.transpose(0, 1)
    if layout == "flat":
        return x.reshape(BATCH * TOKENS, WIDTH)
    if layout == "bdt":
        return x.permute(0, 2, 1)
    if layout == "windows":
        return x.reshape(BATCH, 2, TOKENS // 2, WIDTH).permute(0, 2, 1, 3)
    return x


def _from_layout(x: Tensor, layout: str) -> Tensor:
    if layout == "tbd":
        return x.transpose(0, 1)
    if layout == "flat":
        return x.view(BATCH, TOKENS, WIDTH)
    if layout == "bdt":
        return x.permute(0, 2, 1)
    if layout == "windows":
        return x.permute(0, 2, 1, 3).reshape(BATCH, TOKENS, WIDTH)
    return x


def _dropout(x: Tensor, training: bool) -> Tensor:
    # Dropout draws in the order of memory, and a state that became a mix may lie there in another one.
    return F.dropout(x.contiguous(), 0.3, training)


class _Machine:
    """What a program works on."""

    def __init__(self, x: Tensor, y: Tensor, extra: Tensor, shared: nn.Module) -> None:
        self.x, self.y, self.extra, self.shared = x, y, extra, shared
        self.layout = "btd"
        self.saved: list[tuple[Tensor, str]] = [(x, "btd")]
        self.outputs: list[Tensor] = []

    def inner(self, x: Tensor, layout: str) -> _Machine:
        machine = _Machine(x, self.y, self.extra, self.shared)
        machine.layout = layout
        machine.saved = [(x, layout)]
        machine.outputs = self.outputs
        return machine

    def old(self, x: Tensor, layout: str) -> Tensor:
        return x if layout == self.layout else _to_layout(_from_layout(x, layout), self.layout)


class _Branch(nn.Module):
    def __init__(self, spec: Branch, training: bool) -> None:
        super().__init__()
        self.spec, self.mode = spec, training
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
        if spec.body == "program":
            self.program = _Program(spec.program, training)

    def forward(self, m: _Machine) -> Tensor:
        spec = self.spec
        if spec.reads == "x":
            v, layout = m.x, m.layout
        elif spec.reads == "x0":
            v, layout = m.saved[0]
        elif spec.reads == "y":
            v, layout = m.y, "btd"
        elif spec.reads == "input":
            v, layout = m.extra, "btd"
        else:
            v, layout = m.saved[len(m.saved) // 2]
        v = m.old(v, layout)
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
            v = _from_layout(inner.x, inner.layout)
            v = v if first else _to_layout(v, m.layout)
        elif spec.body != "identity":
            v = self.up(v.double())
            if spec.body == "mlp":
                v = self.down(torch.tanh(v))
        v = self._after(v)
        return v.transpose(1, 2) if first else v

    def _after(self, v: Tensor) -> Tensor:
        for what in self.spec.after:
            if what == "dropout":
                v = _dropout(v, self.mode)
            elif what == "half":
                v = v * 0.5
            elif what == "float":
                v = v.float()
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


class _Step(nn.Module):
    def __init__(self, spec: Step, training: bool) -> None:
        super().__init__()
        self.spec = spec
        self.branches = nn.ModuleList(_Branch(branch, training) for branch in spec.branches)

    def forward(self, m: _Machine) -> None:
        values = [m.x, *(branch(m) for branch in self.branches)]
        line = [values[i] for i in self.spec.order]
        for at, spelling in zip(self.spec.joins, self.spec.spellings, strict=True):
            line[at : at + 2] = [_join(line[at], line[at + 1], spelling)]
        m.x = line[0]


class _Do(nn.Module):
    """One thing done to the stream (re-layouts, casts, scales, hazards) or with it (taps, saves)."""

    def __init__(self, spec: Do, training: bool) -> None:
        super().__init__()
        self.what, self.mode = spec.what, training
        if self.what in ("tap", "post_norm"):
            self.norm = nn.LayerNorm(WIDTH)
        if self.what in ("tap", "gate", "cut"):
            self.linear = nn.Linear(WIDTH, WIDTH)
        if self.what == "scalar":
            self.scale = nn.Parameter(torch.ones(()))
        if self.what == "vector":
            self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, m: _Machine) -> None:
        what, x = self.what, m.x
        if what in LAYOUTS:
            m.x = _to_layout(_from_layout(x, m.layout), what)
            m.layout = what
        elif what == "tap":
            m.outputs.append(self.linear(self.norm(_from_layout(x, m.layout).double())))
        elif what == "return":
            m.outputs.append(x)
        elif what == "save":
            m.saved.append((x, m.layout))
        elif what == "swap":
            m.x, m.y = _to_layout(m.y, m.layout), _from_layout(x, m.layout)
        elif what == "roll":
            m.x = torch.roll(x, 1, 0)
        elif what == "contiguous":
            m.x = x.contiguous()
        elif what == "clone":
            m.x = x.clone()
        elif what == "float":
            m.x = x.float()
        elif what == "double":
            m.x = x.double()
        elif what == "two":
            m.x = 1.5 * x
        elif what == "scalar":
            m.x = x * self.scale.to(x.dtype)
        elif what == "vector":
            scale = self.scale.to(x.dtype)
            m.x = x * (scale[:, None] if m.layout == "bdt" else scale)
        elif what == "eval_dropout":
            m.x = F.dropout(x, 0.5, False)
        elif what == "twice":
            m.x = x + x
        else:
            self._hazard(m)

    def _hazard(self, m: _Machine) -> None:
        what, x = self.what, m.x
        if what == "dropout":
            m.x = _dropout(x, self.mode)
        elif what == "clamp":
            m.x = x.clamp(-2.0, 2.0)
        elif what == "relu":
            m.x = F.relu(x)
        elif what == "post_norm":
            m.x = _to_layout(self.norm(_from_layout(x, m.layout).double()), m.layout)
        elif what == "gate":
            f = _to_layout(self.linear(_from_layout(x, m.layout).double()), m.layout)
            m.x = x + 0.3 * (f - x)
        elif what == "slice_write":
            part = x.contiguous()
            part[0].mul_(0.5)
            m.x = part
        elif what == "scale_write":
            m.x = x.mul_(0.5)
        elif what == "cut":
            v = _from_layout(x, m.layout).double()
            m.x = _to_layout(self.linear(torch.cat([v[:, :1], v[:, 1:]], 1)), m.layout)
        else:
            raise AssertionError(what)


class _Program(nn.Module):
    def __init__(self, program: tuple[Instruction, ...], training: bool) -> None:
        super().__init__()
        self.steps = nn.ModuleList(_Step(i, training) if isinstance(i, Step) else _Do(i, training) for i in program)

    def forward(self, m: _Machine) -> None:
        for step in self.steps:
            step(m)


class Network(nn.Module):
    """The network that a spec describes; float64, weights as they come."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.embed_x = nn.Linear(WIDTH, WIDTH)
        self.embed_y = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.program = _Program(spec.program, spec.training)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.double().train(spec.training)

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        start = self.embed_x(x) if self.spec.embed else x
        m = _Machine(start, self.embed_y(y), x, self.shared)
        self.program(m)
        last = self.head(self.norm(_from_layout(m.x, m.layout).double())) if self.spec.head else m.x
        return [last, *m.outputs]


def inputs(seed: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs of any :class:`Network`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, TOKENS, WIDTH)
    x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


# ------------------------------------------------------------------ strategies

_ADDS = ("+", "+", "+", "+", "torch", "method", "alpha", "sub", "sum", "iadd", "add_")
_RARE_ADDS = ("stack", "addcmul")
_QUIET = ("tap", "tap", "return", "save", "roll", "contiguous", "clone", "eval_dropout", "swap", *LAYOUTS)
_AFFINE = ("two", "scalar", "vector", "twice")
_CASTS = ("float", "double")
HAZARDS = ("dropout", "clamp", "relu", "post_norm", "gate", "slice_write", "scale_write", "cut")


def _branches(depth: int) -> st.SearchStrategy[Branch]:
    reads = st.sampled_from(("x",) * 8 + ("x0", "saved", "saved", "y", "input"))
    norm = st.sampled_from(("layer", "layer", "rms", "half", "none"))
    bodies = ("linear",) * 6 + ("mlp", "mlp", "pool", "identity", "shared") + (("program",) if depth else ())
    after = st.lists(st.sampled_from(("dropout", "layerscale", "half")), max_size=2).map(tuple)

    def whole(body: str) -> st.SearchStrategy[Branch]:
        program = programs(depth - 1) if body == "program" else st.just(())
        return st.builds(Branch, reads, norm, st.just(body), after, program)

    return st.sampled_from(bodies).flatmap(whole)


@st.composite
def _steps(draw: Callable[..., Any], depth: int) -> Step:
    branches = draw(st.lists(_branches(depth), min_size=1, max_size=3))
    count = len(branches)
    order = draw(st.permutations(range(count + 1)))
    joins = draw(st.tuples(*(st.integers(0, n - 1) for n in range(count, 0, -1))))
    spelling = st.sampled_from(_ADDS * 3 + _RARE_ADDS)
    spellings = draw(st.tuples(*(spelling for _ in range(count))))
    return Step(tuple(branches), tuple(order), joins, spellings)


def programs(depth: int, least: int = 2, most: int = 6) -> st.SearchStrategy[tuple[Instruction, ...]]:
    """Programs whose branches nest ``depth`` deep; most instructions are residual steps."""
    step = _steps(depth)
    kinds = st.sampled_from((_QUIET, _QUIET, _QUIET, _AFFINE, _CASTS, HAZARDS, HAZARDS))
    do = kinds.flatmap(st.sampled_from).map(Do)
    instruction = st.sampled_from((0, 0, 0, 1)).flatmap(lambda kind: do if kind else step)
    return st.lists(instruction, min_size=least, max_size=most).map(tuple)


def networks() -> st.SearchStrategy[Spec]:
    """Random networks."""
    often = st.sampled_from((True, True, True, False))
    return st.builds(Spec, programs(1, least=3, most=8), often, st.booleans(), often)


_PLAIN_ADDS = ("+", "torch", "method", "sum", "stack")
_CARRIERS = (
    "tap",
    "return",
    "save",
    "roll",
    "contiguous",
    "clone",
    "eval_dropout",
    "two",
    "scalar",
    "vector",
    *LAYOUTS,
)


@st.composite
def _plain_steps(draw: Callable[..., Any]) -> Step:
    norms, bodies = st.sampled_from(("layer", "rms", "half")), st.sampled_from(("linear", "mlp"))
    after = st.lists(st.sampled_from(("dropout", "layerscale", "half")), max_size=2).map(tuple)
    branches = draw(st.lists(st.builds(Branch, st.just("x"), norms, bodies, after), min_size=1, max_size=3))
    count = len(branches)
    return Step(
        tuple(branches),
        tuple(draw(st.permutations(range(count + 1)))),
        draw(st.tuples(*(st.integers(0, n - 1) for n in range(count, 0, -1)))),
        draw(st.tuples(*(st.sampled_from(_PLAIN_ADDS) for _ in range(count)))),
    )


def plain_networks() -> st.SearchStrategy[Spec]:
    """Networks of one stream that must be converted whole: each :class:`Step` is a sublayer."""
    return _one_stream(st.sampled_from(_CARRIERS))


def cut_networks() -> st.SearchStrategy[Spec]:
    """The same with casts and hazards on the stream, so that parts of it may have to be left alone."""
    return _one_stream(st.sampled_from((_CARRIERS, _CASTS, HAZARDS, HAZARDS)).flatmap(st.sampled_from))


def _one_stream(what: st.SearchStrategy[str]) -> st.SearchStrategy[Spec]:
    do = what.map(Do)
    pair = st.tuples(_plain_steps(), st.lists(do, max_size=2).map(tuple)).map(lambda p: (p[0], *p[1]))
    program = st.lists(pair, min_size=2, max_size=5).map(lambda pairs: tuple(i for p in pairs for i in p))
    return st.builds(Spec, program, st.booleans(), st.sampled_from((True, True, False)), st.booleans())
