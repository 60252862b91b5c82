"""Whether a converted model is exact, where float32 alone cannot tell; :mod:`tests.zoo.survey.measure` has the rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from attnres_compile import comparison, exactness
from attnres_compile.inputs import Inputs
from tests.zoo.survey.models import NotRun, is_flat, twin
from tests.zoo.survey.wording import one_line

# How many times further off than one rounding of every parameter a converted model may be.
FACTOR = 10.0


@dataclass(frozen=True)
class Verdict:
    """How the comparison ended.

    Attributes:
        exact: whether the model is.
        output_error, gradient_error: relative, in float32.
        detail: the numbers, where float32 did not decide.
    """

    exact: bool
    output_error: float | None
    gradient_error: float | None
    detail: str = ""


def judged(model: nn.Module, inputs: Inputs, verified: Callable[[torch.dtype | None], exactness.Exactness]) -> Verdict:
    """Compares, and compares again as far as it takes to tell rounding from an error.

    Args:
        model: the original.
        inputs: what to call it with.
        verified: compares in a dtype; ``None`` is the model's own.

    Raises:
        NotRun: all gradients of the original are zero, so that nothing can be shown.
    """
    single = verified(None)
    exact, detail = (True, "") if single.holds else _decided(model, inputs, single, verified)
    return Verdict(exact, single.output_error, single.gradient_error, detail)


def _decided(
    model: nn.Module,
    inputs: Inputs,
    single: exactness.Exactness,
    verified: Callable[[torch.dtype | None], exactness.Exactness],
) -> tuple[bool, str]:
    in_single = _numbers("float32", single)
    if max(single.output_error or 0.0, single.gradient_error or 0.0) <= single.tolerance:
        # Shapes, dtypes, integers or queries without gradients: not for float64 to judge.
        return False, "; ".join([in_single, *single.notes, *_without_gradients(model, inputs)])
    try:
        double = verified(torch.float64)
    except Exception as error:
        return _by_rounding(model, inputs, single, None, f"{in_single}; float64 does not run: {one_line(error)}")
    in_double = f"{in_single}; {_numbers('float64', double)}"
    if double.holds:
        return True, f"{in_double}: ill-conditioned, float64 decided"
    if double.dtype != "float64":
        return _by_rounding(model, inputs, single, None, f"{in_double}; computes in {double.dtype} in places")
    worst = "; ".join([in_double, f"worst: {double.worst_output}, {double.worst_gradient}", *double.notes])
    if max(double.output_error or 0.0, double.gradient_error or 0.0) <= double.tolerance:
        return False, worst
    return _by_rounding(model, inputs, double, torch.float64, worst)


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


def _by_rounding(
    model: nn.Module, inputs: Inputs, found: exactness.Exactness, dtype: torch.dtype | None, numbers: str
) -> tuple[bool, str]:
    """Whether the errors ``found`` in ``dtype`` are what one rounding of every parameter does to the original."""
    output, gradient = rounding(model, inputs, dtype)
    numbers += f"; one rounding of the parameters moves outputs by {output:.1e}, gradients by {gradient:.1e}"
    limits = [max(found.tolerance, FACTOR * moved) for moved in (output, gradient)]
    if (found.output_error or 0.0) <= limits[0] and (found.gradient_error or 0.0) <= limits[1]:
        return True, f"{numbers}: ill-conditioned, that decided"
    return False, numbers


def rounding(model: nn.Module, inputs: Inputs, dtype: torch.dtype | None = None) -> tuple[float, float]:
    """How far outputs and gradients of a model move when each parameter is moved by up to one rounding.

    Args:
        model: the original.
        inputs: what to call it with.
        dtype: to compute in, and whose rounding it is; ``None`` is the model's own float32.

    Returns:
        The relative errors, as :func:`attnres_compile.verify` has them.
    """
    moved, still = (comparison.as_dtype(twin(model), dtype) for _ in range(2))
    inputs = comparison.as_dtype(inputs, dtype)
    generator = torch.Generator().manual_seed(1)
    eps = torch.finfo(dtype or torch.float32).eps
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + eps * torch.randint(-1, 2, parameter.shape, generator=generator).to(parameter.dtype))
    with comparison.same_randomness(), torch.enable_grad():
        before, after = comparison.run(still, inputs, 0), comparison.run(moved, inputs, 0)
    outputs = comparison.compare(before.outputs, after.outputs, floor=0.0)
    gradients = comparison.compare(before.gradients, after.gradients, floor=exactness.GRADIENT_FLOOR)
    return outputs.error or 0.0, gradients.error or 0.0


def _numbers(dtype: str, result: exactness.Exactness) -> str:
    def text(value: float | None) -> str:
        return "none" if value is None else f"{value:.1e}"

    return f"{dtype}: outputs {text(result.output_error)}, gradients {text(result.gradient_error)}"
