"""Architectures by hand that show what the survey's machinery does with each kind of trouble."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile import exactness
from attnres_compile.inputs import Inputs
from tests.zoo.survey.entry import Entry, NotBuilt
from tests.zoo.survey.measure import measure
from tests.zoo.survey.row import Row

WIDTH = 12


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """A pre-norm stream of ``depth`` sublayers and, behind a projection, one of ``more``."""

    def __init__(self, depth: int = 6, more: int = 0) -> None:
        super().__init__()
        self.first = nn.ModuleList(Branch() for _ in range(depth))
        self.between = nn.Linear(WIDTH, WIDTH)
        self.second = nn.ModuleList(Branch() for _ in range(more))

    def forward(self, x: Tensor) -> Tensor:
        for branch in self.first:
            x = x + branch(x)
        x = torch.tanh(self.between(x))
        for branch in self.second:
            x = x + branch(x)
        return x


class PostNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for branch, norm in zip(self.branches, self.norms, strict=True):
            x = norm(x + torch.tanh(branch(x)))
        return x


class Chain(nn.Module):
    """No residual at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Broken(Stack):
    """Each layer prints, which dynamo does not trace."""

    def forward(self, x: Tensor) -> Tensor:
        for branch in self.first:
            x = x + branch(x)
            torch._dynamo.graph_break()
        return x


class Touchy(nn.Module):
    """Ill-conditioned: the difference of nearly equal numbers is blown up, so that float32 shows few digits.

    Args:
        factor: by how much.
        single: it computes in float32 whatever its weights are in.
    """

    def __init__(self, factor: float = 200.0, single: bool = False) -> None:
        super().__init__()
        self.stack, self.factor, self.single = Stack(), factor, single

    def forward(self, x: Tensor) -> Tensor:
        if self.single:
            x = x.float()
            weights = {name: tensor.float() for name, tensor in self.stack.named_parameters()}
            made = torch.func.functional_call(self.stack, weights, (x,))
        else:
            made = self.stack(x)
        return torch.sin(self.factor * made)


class Refusing(Stack):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("this model takes no such input\nand says so in two lines")


class Infinite(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / torch.zeros(()) * 0.0


class Uncopied(Stack):
    def __deepcopy__(self, memo: Any) -> nn.Module:
        raise TypeError("this model cannot be copied")


def _hang() -> nn.Module:
    time.sleep(600)
    raise AssertionError


def _hog() -> nn.Module:
    kept = []
    while True:
        kept.append(torch.ones(4 * 2**20))  # 16 MiB, written
        time.sleep(0.002)


def _crash() -> nn.Module:
    print("the last words")
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def _leave() -> nn.Module:
    os._exit(3)


def _refuse() -> nn.Module:
    raise NotBuilt("needs a compiler for a language of 1964")


def _vectors(model: nn.Module, seed: int) -> Mapping[str, Any]:
    return {"x": torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(seed))}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "stack": Stack,
    "two-streams": lambda: Stack(6, 4),
    "post-norm": PostNorm,
    "chain": Chain,
    "broken": Broken,
    "touchy": Touchy,
    "touchier": lambda: Touchy(3e3),
    "touchy-single": lambda: Touchy(3e3, single=True),
    "refusing": Refusing,
    "infinite": Infinite,
    "uncopied": Uncopied,
    "hang": _hang,
    "hog": _hog,
    "crash": _crash,
    "leave": _leave,
    "refuse": _refuse,
}


def entry(name: str) -> Entry:
    """The entry of one of these."""
    return by_name()[name]


def by_name(library: str | None = None) -> dict[str, Entry]:
    """All of them, by the names of their kind."""
    return {
        name: Entry(f"torch/made/{name}", "torch", "made", lambda build=build: build().eval(), _vectors)  # type: ignore[misc]
        for name, build in MODELS.items()
    }


def by_full_name(library: str | None = None) -> dict[str, Entry]:
    """The same by their names in the survey."""
    return {each.name: each for each in by_name(library).values()}


# --- converters that do not do what they say


def a_mean(model: nn.Module, inputs: Inputs, config: ac.AttnResConfig) -> nn.Module:
    """Divides each sum by its number of sources."""
    return exactness.convert_copy(model, inputs, replace(config, gain="mean"))


def slightly_off(model: nn.Module, inputs: Inputs, config: ac.AttnResConfig) -> nn.Module:
    """Moves one weight by 1e-4 of itself."""
    made = exactness.convert_copy(model, inputs, config)
    with torch.no_grad():
        next(p for p in made.parameters() if p.ndim > 1).mul_(1 + 1e-4)
    return made


def only_long_streams(model: nn.Module, inputs: Inputs, config: ac.AttnResConfig) -> nn.Module:
    """Converts a part, exactly."""
    return exactness.convert_copy(model, inputs, replace(config, min_sublayers=6))


def a_failure(model: nn.Module, inputs: Inputs, config: ac.AttnResConfig) -> nn.Module:
    raise ZeroDivisionError("a bug in the package")


def measure_wrongly(each: Entry, says: Callable[[str], None]) -> Row:
    """As ``measure``, with the first of these."""
    return measure(each, says, a_mean)
