"""A model of the survey with random weights that show something: finite outputs, which depend on the weights."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from attnres_compile import comparison, exactness
from attnres_compile.inputs import Inputs, as_inputs
from tests.zoo.survey.entry import Entry
from tests.zoo.survey.wording import why_not

# Noise of the random weights, relative to what randomise_ takes, and its seed: tried in this order.
RANDOMISATIONS = ((1.0, 0), (1.0, 1), (0.3, 0), (0.1, 0))


class NotRun(Exception):
    """Eager PyTorch cannot build or run the model: reason and detail of its row."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(detail)


def built(entry: Entry) -> tuple[nn.Module, Inputs]:
    """The model of an entry, which can be copied, and what to call it with.

    Raises:
        NotRun: the library refuses it.
    """
    torch.manual_seed(0)
    try:
        model = entry.build()
        inputs = as_inputs(dict(entry.inputs(model, 0)))
    except Exception as error:
        raise NotRun("not_built", why_not(error)) from error
    model.eval()
    try:
        copy.deepcopy(model)
    except Exception:
        # The user who converts in place needs no copy; here they are made by building again.
        model.__dict__["__deepcopy__"] = functools.partial(_rebuilt, entry, model)
    return model, inputs


@torch.no_grad()
def _rebuilt(entry: Entry, model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    made = entry.build().eval()
    own = _state(model)
    for name, tensor in _state(made).items():
        tensor.copy_(own[name])
    made.__dict__["__deepcopy__"] = functools.partial(_rebuilt, entry, made)
    return made


def randomise(model: nn.Module, inputs: Inputs) -> None:
    """Gives the model random weights with which its outputs are finite, in place.

    With large noise a softmax at the end may saturate, so that not one parameter has a gradient. A comparison would
    show nothing then; smaller noise is taken, where that helps.

    Raises:
        NotRun: it does not run, or there are none.
    """
    own = {name: tensor.detach().clone() for name, tensor in _state(model).items()}
    found: comparison.Run | None = None
    saturated: tuple[float, int] | None = None
    for scale, seed in RANDOMISATIONS:
        _randomised(model, own, scale, seed)
        found = _eagerly(model, inputs)
        if _all_finite(found):
            if not is_flat(found):
                return
            saturated = saturated or (scale, seed)
        _towards(model, own, 0.0)
    if saturated is not None:
        _randomised(model, own, *saturated)
        return
    if _all_finite(_eagerly(model, inputs)):
        raise NotRun("not_finite", "its outputs are not finite with any of the random weights that were tried")
    assert found is not None
    bad = ", ".join(name for name, tensor in found.outputs.items() if not _finite(tensor))
    raise NotRun("not_finite", f"its outputs are not finite with its own initial weights either: {bad}")


def is_flat(found: comparison.Run) -> bool:
    """Whether there are gradients, and all of them are zero."""
    return bool(found.gradients) and not any(bool(tensor.any()) for tensor in found.gradients.values())


def _randomised(model: nn.Module, own: Mapping[str, torch.Tensor], scale: float, seed: int) -> None:
    exactness.randomise_(model, seed)
    if scale != 1.0:
        _towards(model, own, scale)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def _towards(model: nn.Module, own: Mapping[str, torch.Tensor], share: float) -> None:
    """Leaves the model only this share of its distance from the weights ``own``."""
    for name, tensor in _state(model).items():
        if torch.equal(tensor, own[name]):
            continue
        if share == 0.0 or not tensor.is_floating_point():
            tensor.copy_(own[name])
        else:
            tensor.copy_(own[name] + share * (tensor - own[name]))


def _eagerly(model: nn.Module, inputs: Inputs) -> comparison.Run:
    try:
        with comparison.same_randomness(), torch.enable_grad():
            return comparison.run(twin(model), inputs, seed=0)
    except Exception as error:
        raise NotRun("not_run", why_not(error)) from error


def twin(model: nn.Module) -> nn.Module:
    """A copy in eval mode."""
    return exactness.private_copy(model, train=False, seed=None)


def _all_finite(found: comparison.Run) -> bool:
    return all(_finite(tensor) for tensor in found.outputs.values())


def _finite(tensor: torch.Tensor) -> bool:
    """No NaN; infinities may be masks, but not all of it."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return not bool(tensor.isnan().any()) and not bool(tensor.isinf().all())
