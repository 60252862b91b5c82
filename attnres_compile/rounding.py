"""How far off is still rounding: the one rule by which every comparison with an original is decided.

A run may be off from another by a fixed small number, which depends on the precision it computes in. Some models turn
rounding errors into larger ones, whoever computes them: they may be off by ten times what the *original* is off by
itself. That alone would let a small mistake pass in a coarse precision, so where the original computes in float64 the
conversion must hold there first. And where it cannot be held to anything that would show a mistake, nothing is said.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from attnres_compile.comparison import LowestPrecision, Run, as_dtype, compare, run, twin
from attnres_compile.inputs import Inputs

# Largest relative error that always is rounding: this project's promise.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
# Half precisions round the running sum once per sublayer, in either form of it: a random walk. Llamas of 4 to 64
# sublayers measured 0.5 to 1.3 eps * sqrt(sublayers), in both dtypes, outputs and gradients.
HALF_FACTOR = 3.0
# How many times further off than the original's own rounding a converted model may be. With random queries, whose
# softmax weights are more sensitive than a sum, models of 4 to 32 sublayers measured 0.5 to 6 times, in float32 and
# bfloat16.
FACTOR = 10.0
# Some gradients are zero but for rounding (the bias of an attention's keys). No gradient is measured against
# less than this share of the largest one.
GRADIENT_FLOOR = 0.1
# Where the limit is above this, a comparison says nothing.
MEANINGLESS = {torch.float64: 1e-2, torch.float32: 1e-2, torch.float16: 0.5, torch.bfloat16: 0.5}
# The same where a comparison is all there is to decide whether a conversion is right: smaller than any mistake.
UNDECIDED = {torch.float64: 1e-6, torch.float32: 5e-4, torch.float16: 0.5, torch.bfloat16: 0.5}


def tolerance_for(dtype: torch.dtype, queries: int, own: float = 0.0) -> float:
    """Largest relative error that is rounding.

    Args:
        dtype: the lowest precision that the model computes in.
        queries: number of pseudo-queries.
        own: what the original itself is off by in that precision (:meth:`Original.off`).
    """
    always = TOLERANCES.get(dtype)
    if always is None:
        always = float(HALF_FACTOR * torch.finfo(dtype).eps * math.sqrt(max(queries, 1)))
    return max(always, FACTOR * own)


def distance(before: Run, after: Run) -> float:
    """The largest relative error of outputs and gradients between two runs of one model, in whatever dtypes."""
    outputs = compare(before.outputs, after.outputs, floor=0.0, dtypes=False)
    gradients = compare(before.gradients, after.gradients, floor=GRADIENT_FLOOR, dtypes=False)
    return max(outputs.error or 0.0, gradients.error or 0.0)


@dataclass(frozen=True)
class Original:
    """A model that was not converted, to ask what rounding does to it.

    Attributes:
        make: a new copy of it at each call, as it ran.
        inputs: what it was called with.
        seed: of the loss and of its own random numbers.
        ran: what it gave.
        dtype: the lowest precision that it computed in.
    """

    make: Callable[[], nn.Module]
    inputs: Inputs
    seed: int
    ran: Run
    dtype: torch.dtype

    def off(self) -> float:
        """What the run is off by itself: from the same model and numbers in float64, or from the same model with each
        parameter moved by up to one rounding, whichever is larger. Without the first where float64 does not run, or is
        what ran, or where the model draws random numbers, which are others in another dtype.
        """
        return max(self._from_double(), self._by_parameters())

    def _from_double(self) -> float:
        if self.dtype == torch.float64 or self.ran.draws:
            return 0.0
        lowest = LowestPrecision()
        try:
            found = run(as_dtype(self.make(), torch.float64), as_dtype(self.inputs, torch.float64), self.seed, lowest)
        except Exception:  # Many models name a dtype in their code, and do not run in another.
            return 0.0
        return distance(found, self.ran) if lowest.dtype == torch.float64 else 0.0

    def _by_parameters(self) -> float:
        moved = twin(self.make())
        move_parameters(moved, self.dtype, self.seed + 1)
        return distance(self.ran, run(moved, self.inputs, self.seed))


@torch.no_grad()
def move_parameters(model: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Move each number of each parameter by up to one rounding.

    Args:
        model: changed in place.
        dtype: whose roundings; a coarser parameter's are its own.
        seed: of the directions.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if not parameter.is_floating_point() or parameter.dtype not in MEANINGLESS:
            continue
        eps = max(torch.finfo(each).eps for each in (parameter.dtype, dtype))
        steps = torch.randint(-1, 2, parameter.shape, generator=generator).to(parameter.device)
        parameter.mul_((1 + eps * steps.double()).to(parameter.dtype))


@dataclass(frozen=True)
class Verdict:
    """How a comparison ended.

    Attributes:
        holds: whether what differs is rounding; ``None`` where that cannot be told.
        tolerance: the largest error that counts as rounding, relative.
        note: how it was decided, where the fixed number did not; or ``""``.
    """

    holds: bool | None
    tolerance: float
    note: str = ""


def decide(
    original: Original,
    queries: int,
    judge: Callable[[float], bool],
    error: float,
    finer: Callable[[], tuple[bool, float] | None],
) -> Verdict:
    """Whether a converted model computes what the original does.

    Args:
        original: what it is compared with.
        queries: number of pseudo-queries.
        judge: whether everything holds if errors up to this number are rounding.
        error: the largest relative error that was found.
        finer: whether the conversion holds in float64, and how far off it is there; ``None`` if it does not compute in
            float64. Only asked where the fixed number is exceeded.
    """
    always = tolerance_for(original.dtype, queries)
    if judge(always):
        return Verdict(True, always)
    if not judge(sys.float_info.max) or not math.isfinite(error):
        return Verdict(False, always)  # Names, shapes, integers, gradients that one of the two lacks.
    name = str(original.dtype).removeprefix("torch.")
    decided = finer() if original.dtype != torch.float64 else None
    if decided is not None and not decided[0]:
        return Verdict(False, always, f"in float64 it is off by {decided[1]:.1e}, so this is no rounding")
    own = original.off()
    allowed = tolerance_for(original.dtype, queries, own)
    told = f"the original itself is off by {own:.1e} in {name}, and {FACTOR:g} times that is rounding"
    if decided is not None:
        return Verdict(judge(allowed), allowed, f"{told}; in float64 it is off by {decided[1]:.1e}")
    if allowed > UNDECIDED[original.dtype] and judge(allowed):
        return Verdict(None, allowed, f"not counted: {told}, which is too coarse to tell")
    return Verdict(judge(allowed), allowed, told)
