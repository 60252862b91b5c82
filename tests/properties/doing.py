"""Everything that can happen to the stream or beside it that is no residual step."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from tests.properties.machine import LAYOUTS, WIDTH, Machine, from_layout, to_layout
from tests.properties.spec import Do

# With the stream or beside it, none of which it notices.
QUIET = ("tap", "return", "save", "roll", "contiguous", "clone", "eval_dropout", "swap", *LAYOUTS)
AFFINE = ("two", "scalar", "vector", "twice", "long")
CASTS = ("float", "double")
HAZARDS = ("dropout", "clamp", "relu", "post_norm", "gate", "cut")
WRITES = (
    "slice_write",  # into a part of a copy
    "scale_write",  # into the state
    "zero_write",  # into a part of the state
    "alias",  # keeps a view of the state, for
    "alias_write",  # that writes into the last one
    "output_write",  # into what is returned
)
BREAKS = ("graph_break", "print", "disabled")


def dropout(x: Tensor, training: bool) -> Tensor:
    # Dropout draws in the order of memory, and a state that became a mix may lie there in another one.
    return F.dropout(x.contiguous(), 0.3, training)


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _outside(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


class Doing(nn.Module):
    """One thing done."""

    def __init__(self, spec: Do, training: bool, breaks: bool) -> None:
        super().__init__()
        self.what, self.mode, self.breaks = spec.what, training, breaks
        if self.what in ("tap", "post_norm"):
            self.norm = nn.LayerNorm(WIDTH)
        if self.what in ("tap", "gate", "cut", "disabled"):
            self.linear = nn.Linear(WIDTH, WIDTH)
        if self.what == "scalar":
            self.scale = nn.Parameter(torch.ones(()))
        if self.what == "vector":
            self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, m: Machine) -> None:
        what, x = self.what, m.x
        if what in LAYOUTS:
            m.x = to_layout(from_layout(x, m.layout), what)
            m.layout = what
        elif what == "tap":
            m.outputs.append(self.linear(self.norm(from_layout(x, m.layout).double())))
        elif what == "return":
            m.outputs.append(x)
        elif what == "save":
            m.saved.append((x, m.layout))
        elif what == "swap":
            m.x, m.y = to_layout(m.y, m.layout), from_layout(x, m.layout)
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
        elif what == "eval_dropout":
            m.x = F.dropout(x, 0.5, False)
        elif what in AFFINE:
            self._affine(m)
        elif what in BREAKS:
            self._break(m)
        elif what in WRITES:
            self._write(m)
        else:
            self._hazard(m)

    def _affine(self, m: Machine) -> None:
        what, x = self.what, m.x
        if what == "two":
            m.x = 1.5 * x
        elif what == "scalar":
            m.x = x * self.scale.to(x.dtype)
        elif what == "vector":
            scale = self.scale.to(x.dtype)
            m.x = x * (scale[:, None] if m.layout == "bdt" else scale)
        elif what == "twice":
            m.x = x + x
        else:
            m.x = x + m.older()

    def _break(self, m: Machine) -> None:
        if self.what == "disabled":
            first = m.layout == "bdt"
            v = m.x.transpose(1, 2) if first else m.x
            f = _outside(self.linear, v.double()) if self.breaks else self.linear(v.double())
            m.x = m.x + (f.transpose(1, 2) if first else f)
        elif self.breaks and self.what == "print":
            print(end="")
        elif self.breaks:
            torch._dynamo.graph_break()

    def _write(self, m: Machine) -> None:
        what, x = self.what, m.x
        if what == "slice_write":
            part = x.contiguous()
            part[0].mul_(0.5)
            m.x = part
        elif what == "scale_write":
            m.x = x.mul_(0.5)
        elif what == "zero_write":
            if isinstance(x, fx.Proxy):  # cannot be assigned to
                x.select(-1, 0).zero_()
            else:
                x[..., 0] = 0
        elif what == "alias":
            m.aliases.append(x.transpose(0, 1))
        elif what == "alias_write":
            if m.aliases:
                m.aliases[-1].mul_(0.5)
        elif m.outputs:
            m.outputs[-1].add_(1.0)

    def _hazard(self, m: Machine) -> None:
        what, x = self.what, m.x
        if what == "dropout":
            m.x = dropout(x, self.mode)
        elif what == "clamp":
            m.x = x.clamp(-2.0, 2.0)
        elif what == "relu":
            m.x = F.relu(x)
        elif what == "post_norm":
            m.x = to_layout(self.norm(from_layout(x, m.layout).double()), m.layout)
        elif what == "gate":
            f = to_layout(self.linear(from_layout(x, m.layout).double()), m.layout)
            m.x = x + 0.3 * (f - x)
        elif what == "cut":
            v = from_layout(x, m.layout).double()
            m.x = to_layout(self.linear(torch.cat([v[:, :1], v[:, 1:]], 1)), m.layout)
        else:
            raise AssertionError(what)
