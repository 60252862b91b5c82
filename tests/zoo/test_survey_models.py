"""The survey's random weights show something, and where none can, no model is blamed and none is praised."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile import comparison, exactness
from attnres_compile.inputs import Inputs, as_inputs
from tests.zoo import made_entries as made
from tests.zoo.survey.entry import Entry, NotBuilt
from tests.zoo.survey.measure import Convert, measure
from tests.zoo.survey.models import is_flat, randomise, twin
from tests.zoo.survey.wording import why_not


class Saturating(made.Stack):
    """A softmax at the end, of numbers in the thousands with the largest noise, and of small ones with the smallest."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.full((made.WIDTH, 1), 1e-3))

    def forward(self, x: Tensor) -> Tensor:
        logits = 1e4 * (super().forward(x) @ self.head) ** 3
        return torch.softmax(logits.flatten(1), -1)


class Silent(made.Stack):
    """Nothing of its stream reaches the output, whatever the weights are."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.0 * super().forward(x)


def entry(build: type[nn.Module]) -> Entry:
    return replace(made.entry("stack"), build=lambda: build().eval())


def _run(model: nn.Module, inputs: Inputs) -> comparison.Run:
    with comparison.same_randomness(), torch.enable_grad():
        return comparison.run(twin(model), inputs, seed=0)


def test_weights_with_which_a_softmax_saturates_are_not_taken() -> None:
    torch.manual_seed(0)
    model = Saturating().eval()
    inputs = as_inputs(dict(made.entry("stack").inputs(model, 0)))
    large = copy.deepcopy(model)
    exactness.randomise_(large, 0)
    assert is_flat(_run(large, inputs)), "the largest noise would have done"
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    randomise(model, inputs)
    assert not is_flat(_run(model, inputs))
    assert all(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_model_whose_softmax_saturates_is_converted() -> None:
    row = measure(entry(Saturating))
    assert (row.status, row.found) == ("converted", (6,)), row.detail


def test_where_nothing_reaches_the_output_nothing_is_shown() -> None:
    class Flat(made.Stack):
        def forward(self, x: Tensor) -> Tensor:
            return 0.0 * super().forward(x)

    row = measure(entry(Flat))
    assert (row.status, row.reason) == ("not_run", "no_gradient"), row.detail
    assert "gradients are all zero" in row.detail


def passed_by(model: nn.Module, inputs: Inputs, config: ac.AttnResConfig) -> nn.Module:
    """Makes queries, and computes the original with the converted model's weights."""
    original = copy.deepcopy(model)
    converted = exactness.convert_copy(model, inputs, config)

    def forward(x: Tensor) -> Tensor:
        weights = dict(converted.named_parameters())
        result: Tensor = torch.func.functional_call(
            original, {n: weights[n] for n, _ in original.named_parameters()}, x
        )
        return result

    converted.forward = forward
    return converted


@pytest.mark.parametrize(("build", "convert", "zero"), [(made.Stack, passed_by, False), (Silent, None, True)])
def test_depth_attention_that_takes_no_part_is_found_out(
    build: type[nn.Module], convert: Convert | None, zero: bool
) -> None:
    """Of a model with gradients somewhere; that its queries have none is never put down to the weights then."""
    row = measure(entry(build), convert=convert)
    assert (row.status, row.reason) == ("wrong", "not_exact")
    assert "queries got no gradient" in row.detail
    assert ("gradients of the original are zero as well" in row.detail) == zero


# --- words


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ImportError("\nFooModel requires the torchaudio library but it was not found in your environment.\nPlease"),
            "it needs the library torchaudio, which is not installed",
        ),
        (
            AssertionError("If you want to train `FooModel`, make sure to use `model.train()` to put the model into"),
            "its backward pass is written by hand and refuses eval mode, "
            "in which outputs and gradients are compared here",
        ),
        (NotBuilt("the class has no forward"), "the class has no forward"),
        (ValueError("no such input\nin two lines"), "ValueError: no such input"),
    ],
)
def test_why_a_model_does_not_run_is_said_in_words(error: Exception, words: str) -> None:
    assert why_not(error) == words
