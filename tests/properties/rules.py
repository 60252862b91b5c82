"""One small network per rule of detection, with what the rule says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers import randomize
from tests.properties.machine import TOKENS, WIDTH

Body = Callable[["Net", Tensor, Tensor], Any]


class Net(nn.Module):
    """Layers and parameters for a few lines of forward."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.f = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.n = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.end = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.ones(1, 1, WIDTH))
        self.vector = nn.Parameter(torch.ones(WIDTH))
        self.table = nn.Parameter(torch.ones(TOKENS, WIDTH))
        self.conv = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(4))
        self.drop = nn.Dropout(0.5)
        self.double().train()
        randomize(self)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.body(self, x, y)

    def branch(self, i: int, x: Tensor) -> Tensor:
        """A sublayer."""
        return self.f[i](self.n[i](x))


@dataclass(frozen=True)
class Case:
    """A network and what must come of it.

    Attributes:
        body: its forward.
        sublayers: of each converted stream.
        reasons: why adds were left alone.
        sites: how many there are, where that is the point.
        options: of the configuration.
    """

    body: Body
    sublayers: tuple[int, ...] = ()
    reasons: frozenset[str] = frozenset()
    sites: int | None = None
    options: tuple[tuple[str, Any], ...] = ()


def each(step: Callable[[Net, int, Tensor], Tensor], count: int = 3, end: bool = True) -> Body:
    """``count`` times ``x = step(net, i, x)``, then a head."""

    def body(m: Net, x: Tensor, y: Tensor) -> Tensor:
        for i in range(count):
            x = step(m, i, x)
        return m.end(x) if end else x

    return body


def converted(body: Body, *sublayers: int, sites: int | None = None, reasons: str = "", **options: Any) -> Case:
    return Case(body, sublayers or (3,), frozenset(reasons.split()), sites, tuple(options.items()))


def left(body: Body, reasons: str, **options: Any) -> Case:
    return Case(body, (), frozenset(reasons.split()), None, tuple(options.items()))


# ------------------------------------------------------------------ a few longer ones


def _read_before_the_add(m: Net, x: Tensor, y: Tensor) -> Tensor:
    x = m.f[3](x)
    product = torch.ones_like(x)
    for i in range(3):
        branch = m.branch(i, x)
        view = x.transpose(0, 1)
        x = x.add_(branch)
        product = product * view.transpose(0, 1)
    return m.end(x) * product


def _written_later(m: Net, x: Tensor, y: Tensor) -> Tensor:
    x = x + m.branch(0, x)
    view = x.transpose(0, 1)
    x = x + m.branch(1, x)
    x = x + m.branch(2, x)
    view.mul_(0.5)
    return m.end(x) * view.transpose(0, 1)


def _part_written(m: Net, x: Tensor, y: Tensor) -> Tensor:
    for i in range(3):
        x = x + m.branch(i, x)
        part = x.contiguous()
        part.select(0, 0).mul_(0.5)
    return m.end(x)


def _global_skip(m: Net, x: Tensor, y: Tensor) -> Tensor:
    for i in (0, 2):
        inner = x
        inner = inner + m.branch(i, inner)
        inner = inner + m.branch(i + 1, inner)
        x = x + m.conv[i](inner.transpose(1, 2)).transpose(1, 2)
    return m.end(x)


def _lone_skip(m: Net, x: Tensor, y: Tensor) -> Tensor:
    inner = x
    for i in range(3):
        inner = inner + m.branch(i, inner)
    return x + m.end(inner)


def _long_skips(m: Net, x: Tensor, y: Tensor) -> Tensor:
    states = [x]
    for i in range(3):
        x = x + m.branch(i, x) + (states[-2] if i > 1 else 0.0)
        states.append(x)
    return m.end(x)


def _two_heads(m: Net, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    outputs = []
    for i in range(3):
        x = x + m.branch(i, x)
        outputs.append(m.n[3](x))
    return (*outputs, x)


def _asked_for_its_shape(m: Net, x: Tensor, y: Tensor) -> Tensor:
    for i in range(3):
        x = x + m.branch(i, x)
    return m.end(x) * x.size(1)


def _constant_first(m: Net, i: int, x: Tensor) -> Tensor:
    return x + torch.roll(x, 1, 1) * m.f[i](m.table)


def _expanded(m: Net, i: int, x: Tensor) -> Tensor:
    one = x.mean(0, keepdim=True)
    return one + m.branch(i, one.expand(2, TOKENS, WIDTH))


def _broadcast_branch(m: Net, i: int, x: Tensor) -> Tensor:
    return x + m.branch(i, x).mean(1, keepdim=True)


def _in_and_out(m: Net, i: int, x: Tensor) -> Tensor:
    flat = x.reshape(-1, WIDTH)
    return (flat + m.branch(i, flat)).view(2, TOKENS, WIDTH)


def _turned(m: Net, x: Tensor, y: Tensor) -> Tensor:
    x = x.transpose(1, 2)
    x = x + m.conv[0](x)
    x = x + m.conv[1](x)
    x = x.transpose(1, 2)
    x = x + m.branch(2, x)
    return m.end(x)


def _narrowed(m: Net, x: Tensor, y: Tensor) -> Tensor:
    x = x + m.branch(0, x)
    x = x.float()
    x = x + m.branch(1, x.double()).float()
    x = x.double()
    x = x + m.branch(2, x)
    return m.end(x)


def _two_carriers(m: Net, x: Tensor, y: Tensor) -> Tensor:
    for i in range(3):
        x = x + m.branch(i, x)
        x = (m.vector * x).transpose(0, 1)
        x = x.transpose(0, 1).roll(1, 2)
    return m.end(x)


def _parts(m: Net, x: Tensor, y: Tensor) -> Tensor:
    for i in range(3):
        x = torch.cat([x[:, :2] + m.branch(i, x[:, :2]), x[:, 2:]], 1)
    return m.end(x)


def _highways(m: Net, x: Tensor, y: Tensor) -> Tensor:
    x = m.end(x)
    for i in range(3):
        gate = torch.sigmoid(m.f[3](x))
        x = gate * m.f[i](x) + (1 - gate) * x
    return m.end(x)


def regions(m: Net, x: Tensor, y: Tensor) -> Tensor:
    """Not for ``symbolic_trace``, which cannot see through checkpoints."""
    for i in range(3):
        x = checkpoint(lambda s, i=i: s + m.branch(i, s), x, use_reentrant=False)
    return m.end(x)


# ------------------------------------------------------------------ the rules

CASES: dict[str, Case] = {
    # 1. spellings
    "plain": converted(each(lambda m, i, x: x + m.branch(i, x))),
    "alpha": converted(each(lambda m, i, x: torch.add(x, m.branch(i, x), alpha=0.5))),
    "minus": converted(each(lambda m, i, x: x - m.branch(i, x))),
    "in place": converted(each(lambda m, i, x: x.clone().add_(m.branch(i, x)))),
    "stacked": converted(each(lambda m, i, x: torch.stack([x, m.branch(i, x)]).sum(0))),
    "builtin sum": converted(each(lambda m, i, x: sum([x, m.branch(i, x)]))),
    "fused product": converted(each(lambda m, i, x: torch.addcmul(x, m.branch(i, x), m.vector))),
    "opaque": left(each(lambda m, i, x: torch.addcdiv(x, m.branch(i, x), m.vector)), "unsupported_form"),
    "two branches": converted(each(lambda m, i, x: x + m.branch(2 * i, x) + m.branch(2 * i + 1, x), 2), 2),
    # 2. steps
    "broadcast skip": left(each(_expanded), "broadcast_skip"),
    "broadcast branch": converted(each(_broadcast_branch)),
    "unrelated": left(lambda m, x, y: m.end(m.f[0](x) + m.f[1](x)), "unrelated_operands"),
    "bias": left(each(lambda m, i, x: x + m.vector, 1), "constant_operand"),
    # 3. anchors
    "polynomial": left(each(lambda m, i, x: x + 0.04 * x**3), "no_learned_branch"),
    "token shift": left(each(lambda m, i, x: x + (torch.roll(x, 1, 1) - x) * m.shift), "no_learned_branch"),
    "one dimension": left(each(lambda m, i, x: x + torch.matmul(x, m.vector).unsqueeze(-1)), "no_learned_branch"),
    "not on the path": left(each(_constant_first), "no_learned_branch"),
    # 4. and 5. streams
    "between anchors": converted(each(lambda m, i, x: x + (torch.roll(x, 1, 1) * 0.5 if i == 1 else m.branch(i, x)))),
    "cut ends": converted(
        each(lambda m, i, x: x + (torch.roll(x, 1, 1) * 0.5 if i == 3 else m.branch(i, x)), 4),
        3,
        reasons="no_learned_branch",
    ),
    "enclosed": converted(_global_skip, 2, 2, 2),
    "outer skip": converted(_lone_skip, 3, reasons="outer_skip"),
    "long skips": converted(_long_skips, queries="reader"),
    "too short": left(lambda m, x, y: m.end(x + m.branch(0, x)), "too_few_sublayers"),
    # 6. what a state may go through
    "casts": converted(_narrowed),
    "reshapes": converted(each(_in_and_out)),
    "permutes": converted(each(lambda m, i, x: (x + m.branch(i, x)).transpose(0, 1))),
    "rolls": converted(each(lambda m, i, x: torch.roll(x + m.branch(i, x), 1, 1))),
    "copies": converted(each(lambda m, i, x: (x + m.branch(i, x)).clone())),
    "numbers": converted(each(lambda m, i, x: 0.5 * (x + m.branch(i, x)))),
    "learned scales": converted(each(lambda m, i, x: m.vector * x + m.branch(i, x))),
    "in order": converted(_two_carriers),
    "first state again": converted(lambda m, x, y: each(lambda m, i, s: 0.9 * s + 0.5 * x + m.branch(i, s))(m, x, y)),
    "idle dropout": converted(each(lambda m, i, x: F.dropout(x + m.branch(i, x), 0.5, False))),
    "masks of the stream": left(
        each(lambda m, i, x: (x + m.branch(i, x)) * torch.sigmoid(m.f[3](x))), "too_few_sublayers"
    ),
    "mixed dtypes": converted(each(lambda m, i, x: x + m.branch(i, x).float())),
    # 7. readers
    "a query per reader": converted(_two_heads, 3, sites=7, queries="reader"),
    "one query for all readers": converted(_two_heads, 3, sites=4),
    "returned states": converted(
        lambda m, x, y: each(lambda m, i, s: s + m.branch(i, s), 3, end=False)(m, x, y), 3, sites=4
    ),
    "shapes are not read": converted(_asked_for_its_shape, 3, sites=4, queries="reader"),
    # 8. writes
    "read after a write": left(_read_before_the_add, "mutated"),
    "written later": left(_written_later, "mutated"),
    "a part written": left(_part_written, "mutated"),
    # 9. features
    "features first": converted(_turned),
    # refusals
    "post-norm": left(each(lambda m, i, x: m.n[i](x + m.f[i](x))), "post_norm"),
    "post-activation": left(each(lambda m, i, x: F.relu(x + m.f[i](x))), "post_activation"),
    "clamp": left(each(lambda m, i, x: (x + m.branch(i, x)).clamp(-2.0, 2.0)), "clamp_on_stream"),
    "dropout": left(each(lambda m, i, x: F.dropout(x + m.branch(i, x), 0.5, True)), "dropout_on_stream"),
    "parts": left(_parts, "partial_update"),
    "gate": left(each(lambda m, i, x: x + 0.3 * (m.f[i](x) - x)), "gated unsupported_form"),
    "lerp": left(each(lambda m, i, x: torch.lerp(x, m.f[i](x), 0.3)), "gated"),
    "highway": left(_highways, "gated"),
    "loop": left(each(lambda m, i, x: x + F.linear(m.n[0](x), m.f[0].weight)), "shared_weights"),
    "loop over depth": converted(each(lambda m, i, x: x + F.linear(m.n[0](x), m.f[0].weight)), depth_loops=True),
}
