"""Networks whose residual stream runs through graph breaks, each beside the same network without a break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers import randomize
from tests.models import Block, Model


class Printing(Block):
    """A print in the middle of each layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x)).cumsum(1)
        print(end="")
        return x + self.mlp(self.norm2(x))


class PrintingValue(Block):
    """A print of a number that is read off the stream, where depth attention reads it too."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x)).cumsum(1)
        print(round(float(x.mean()), 3), end="")
        return x + self.mlp(self.norm2(x))


class PrintingFormatted(Block):
    """The same with a format, on which the dynamo of some releases fails by itself (2.14)."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x)).cumsum(1)
        print(f"{float(x.mean()):.3f}", end="")
        return x + self.mlp(self.norm2(x))


class Disabled(Block):
    """Attention that is not compiled: it gets the normed stream and returns the branch."""

    @torch.compiler.disable
    def attend(self, normed: Tensor) -> Tensor:
        return self.mixer(normed).cumsum(1)

    def forward(self, x: Tensor) -> Tensor:
        x = (
            x
            + self.attend(self.norm1(x))
        )  # fmt: skip
        return x + self.mlp(self.norm2(x))


class DisabledWithNorm(Block):
    """The norm is not compiled either: what is not compiled reads the stream itself. The branch is the left operand."""

    @torch.compiler.disable
    def attend(self, x: Tensor) -> Tensor:
        return self.mixer(self.norm1(x)).cumsum(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x) + x
        return x + self.mlp(self.norm2(x))


class Branching(Block):
    """A branch that depends on the stream's values, and changes the stream where it is taken."""

    limit = 1e6

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x)).cumsum(1)
        if x.abs().max() > self.limit:
            x = x + self.mixer(x)
        return x + self.mlp(self.norm2(x))


class Ordered(Block):
    """The order of the two branches is the class's to say."""

    swapped = False

    def forward(self, x: Tensor) -> Tensor:
        print(end="")
        for second in (True, False) if self.swapped else (False, True):
            if second:  # noqa: SIM108 (each step has a line of its own)
                x = x + self.mlp(self.norm2(x))
            else:
                x = x + self.mixer(self.norm1(x)).cumsum(1)
        return x


class Parallel(Block):
    """Both branches read one state, and one of them is not compiled."""

    @torch.compiler.disable
    def attend(self, normed: Tensor) -> Tensor:
        return self.mixer(normed).cumsum(1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        return x + self.attend(normed) + self.mlp(normed)


class ParallelPlain(Block):
    """:class:`Parallel` without the break."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        return x + self.mixer(normed).cumsum(1) + self.mlp(normed)


class OutsideAdd(Block):
    """An add of the stream stands in code that is not compiled."""

    @torch.compiler.disable
    def first(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm1(x)).cumsum(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.mlp(self.norm2(x))


class InPlace(Block):
    """Adds into the very tensor that it is given."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.mixer(self.norm1(x)).cumsum(1)
        print(end="")
        x += self.mlp(self.norm2(x))
        return x


class Routed(Block):
    """A loop over the tokens whose features add up to more than the others': other numbers, other loops."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x)).cumsum(1)
        normed = self.norm2(x)
        sums = normed.sum(-1)
        chosen = (sums > sums.mean()).flatten().nonzero().flatten().unbind()
        extra = torch.stack([normed.flatten(0, 1)[index] for index in chosen]).mean(0)
        return x + self.mlp(normed) + extra


class RoutedPlain(Block):
    """:class:`Routed` without the loop."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x)).cumsum(1)
        normed = self.norm2(x)
        sums = normed.sum(-1, keepdim=True)
        chosen = (sums > sums.mean()).to(x.dtype)
        return x + self.mlp(normed) + (normed * chosen).sum((0, 1)) / chosen.sum()


class Chaotic(Block):
    """The last digits of a sum say how far features are moved: no two runs with other numbers are near each other."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x)).cumsum(1)
        normed = self.norm2(x)
        for _ in range(int(x.detach().abs().sum() * 1e12) % x.shape[-1]):
            normed = normed.roll(1, -1)
        return x + self.mlp(normed)


def outside(function: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
    """A forward hook that runs ``function`` on a layer's output, and is not compiled."""

    @torch.compiler.disable
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return function(output)

    return hook


def hooked(model: Model, function: Callable[[Tensor], Tensor | None], layer: int | None = None) -> Model:
    """``model`` with such a hook on each layer, or on one."""
    for number, each in enumerate(model.encoder.layers):
        if layer in (None, number):
            each.register_forward_hook(outside(function))
    return model


def network(block: type[Block] = Block, layers: int = 3, dtype: torch.dtype = torch.float64, **options: Any) -> Model:
    """A model of ``layers`` such blocks with random weights, in eval mode; the same weights for every kind of block."""
    model = Model(layers=layers, **options)
    model.encoder.layers = nn.ModuleList(block(options.get("dropout", 0.0)) for _ in range(layers))
    return randomize(model).to(dtype).eval()  # type: ignore[return-value]
