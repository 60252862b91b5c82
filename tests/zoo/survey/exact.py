"""Whether a converted model is exact, and the numbers behind it; :mod:`attnres_compile.rounding` has the rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from attnres_compile import comparison, exactness, rounding
from attnres_compile.inputs import Inputs
from tests.zoo.survey.models import NotRun, is_flat, twin

# What is within this is told by the row's numbers alone.
FIXED = rounding.TOLERANCES[torch.float32]


@dataclass(frozen=True)
class Verdict:
    """How the comparison ended.

    Attributes:
        exact: whether the model is.
        output_error, gradient_error: relative, in float32.
        detail: the numbers, where the fixed limit of float32 did not decide.
    """

    exact: bool
    output_error: float | None
    gradient_error: float | None
    detail: str = ""


def judged(model: nn.Module, inputs: Inputs, verified: Callable[[], exactness.Exactness]) -> Verdict:
    """Compares by the package's own rule.

    Args:
        model: the original.
        inputs: what to call it with.
        verified: compares in the model's own dtype.

    Raises:
        NotRun: all gradients of the original are zero, so that nothing can be shown.
    """
    found = verified()
    detail = ""
    if not found.holds or max(found.output_error or 0.0, found.gradient_error or 0.0) > FIXED:
        places = f"worst: {found.worst_output}, {found.worst_gradient}"
        detail = "; ".join([_numbers(found.dtype, found), places, *found.notes])
    if found.holds is False:
        detail = "; ".join([detail, *_without_gradients(model, inputs)])
    # Within ten times its own rounding, though that is so coarse that nothing else is known: the detail says so.
    return Verdict(found.holds is not False, found.output_error, found.gradient_error, detail)


def _without_gradients(model: nn.Module, inputs: Inputs) -> list[str]:
    """How much of the original gets no gradient: queries there cannot get one either, which is nobody's mistake.

    Raises:
        NotRun: all of it.
    """
    with comparison.same_randomness(), torch.enable_grad():
        original = comparison.run(twin(model), inputs, seed=0)
    if is_flat(original):
        text = "the original's own gradients are all zero with all of the random weights that were tried"
        raise NotRun("no_gradient", f"{text}: nothing shows that the depth attention takes part")
    zero = sum(not bool(tensor.any()) for tensor in original.gradients.values())
    return [f"{zero} of {len(original.gradients)} gradients of the original are zero as well"] if zero else []


def _numbers(dtype: str, result: exactness.Exactness) -> str:
    def text(value: float | None) -> str:
        return "none" if value is None else f"{value:.1e}"

    return f"{dtype}: outputs {text(result.output_error)}, gradients {text(result.gradient_error)}"
