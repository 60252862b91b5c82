"""``transform(..., verify=True)``: what it lets through, what it stops, and that it leaves no trace."""

from __future__ import annotations

import dataclasses
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile import calls, exactness, self_check, tracing
from attnres_compile.comparison import Run
from attnres_compile.conversion import ConvertedForward
from attnres_compile.passes import detect as detect_pass
from attnres_compile.passes.streams import Step
from tests import models

EAGER = ac.AttnResConfig(lowering="eager", num_blocks=2)


class BatchNormed(nn.Module):
    """Statistics, dropout and a frozen part: all that a careless check would leave changed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.build(dropout=0.3)
        self.norm = nn.BatchNorm1d(3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(self.norm(x))


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "grads": {name: p.grad for name, p in model.named_parameters()},
        "identities": {name: id(p) for name, p in model.named_parameters()},
        "modes": [module.training for module in model.modules()],
        "names": {name: sorted(module.__dict__) for name, module in model.named_modules()},
        "hooks": [len(module._forward_hooks) for module in model.modules()],
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()),
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    return bool(np.all(a == b))


def break_rewriting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every branch is taken for twice of what it is."""

    def doubled(**fields: Any) -> Step:
        terms = tuple(dataclasses.replace(term, factor=2 * term.factor) for term in fields["terms"])
        return Step(**{**fields, "terms": terms})

    monkeypatch.setattr(detect_pass, "Step", doubled)


def break_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right outputs, and one gradient of the converted model a little off."""
    plain = self_check.run

    def off(model: nn.Module, *args: Any) -> Run:
        found = plain(model, *args)
        if any("attnres" in name for name in found.differentiable):
            name = next(name for name in found.gradients if name.endswith("layers.1.mixer.weight"))
            found.gradients[name] = found.gradients[name] * 1.01
        return found

    monkeypatch.setattr(self_check, "run", off)


def break_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: ConvertedForward, *args: Any, **kwargs: Any) -> Any:
        raise ac.PlanMismatchError("nothing fits")

    monkeypatch.setattr(ConvertedForward, "run", run)


def test_a_right_conversion_passes_and_is_the_usual_one() -> None:
    model, x = models.build(), models.example()
    before = model(x)
    assert ac.transform(model, x, EAGER, verify=True) is model
    assert len(ac.pseudo_queries(model)) == models.SITES
    assert all(query.grad is None for query in ac.pseudo_queries(model).values())
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-6)
    assert ac.report(model) == ac.report(ac.transform(models.build(), x, EAGER))


@pytest.mark.parametrize("damage", [None, break_rewriting, break_gradients, break_running])
def test_no_trace_is_left(damage: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = BatchNormed().train()
    model.inner.encoder.layers[0].eval()  # a part that stays in another mode
    model.inner.encoder.layers[2].mixer.weight.requires_grad_(False)
    stepped: list[Tensor] = []
    model.norm.weight.register_post_accumulate_grad_hook(stepped.append)
    model.inner.head.register_forward_hook(lambda *_: None)
    model.inner.head.weight.grad = torch.ones(4, models.WIDTH)
    x = models.example().requires_grad_()
    kept, before = x.detach().clone(), snapshot(model)
    if damage is None:
        ac.transform(model, x, EAGER, verify=True)
        ac.revert(model)
    else:
        damage(monkeypatch)
        with pytest.raises(ac.AttnResError):
            ac.transform(model, x, EAGER, verify=True)
    assert equal(snapshot(model), before)
    assert model.calls == 0
    assert not stepped
    assert x.grad is None
    assert torch.equal(x, kept)
    with pytest.raises(ac.NotTransformedError):
        ac.report(model)


def test_a_wrong_output_is_said_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = models.build(), models.example()
    before, keys = model(x), list(model.state_dict())
    break_rewriting(monkeypatch)
    with pytest.raises(ac.InexactError, match="output 'output' is off by") as caught:
        ac.transform(model, x, EAGER, verify=True)
    found = caught.value.exactness
    assert not found.holds
    assert found.output_error is not None and found.output_error > 0.01
    assert not found.randomised
    assert found.mode == "eval"
    assert "It was reverted. That is a bug of this package: please report it" in str(caught.value)
    assert "attnres verify" in caught.value.remedy
    assert list(model.state_dict()) == keys
    assert torch.equal(model(x), before)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.exactness == found and str(again) == str(caught.value)


def test_a_wrong_gradient_alone_is_said_with_its_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    break_gradients(monkeypatch)
    with pytest.raises(ac.InexactError, match=r"gradient of 'encoder\.layers\.1\.mixer\.weight' is off by") as caught:
        ac.transform(models.build(), models.example(), EAGER, verify=True)
    assert caught.value.exactness.output_error is not None
    assert caught.value.exactness.output_error <= 1e-5


def test_an_error_of_the_converted_model_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    break_running(monkeypatch)
    with pytest.raises(ac.PlanMismatchError, match="nothing fits") as caught:
        ac.transform(models.build(), models.example(), EAGER, verify=True)
    assert "it was reverted" in caught.value.__notes__[0]


def test_depth_attention_that_does_not_run_is_no_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(self: ConvertedForward, *args: Any, **kwargs: Any) -> Any:
        with calls.plainly(frozenset({self.key})):  # Its layers by themselves would refuse.
            return type(self.owner).forward(self.owner, *args, **kwargs)

    monkeypatch.setattr(ConvertedForward, "run", plain)
    with pytest.raises(ac.InexactError, match="6 of 6 queries got no gradient"):
        ac.transform(models.build(), models.example(), EAGER, verify=True)


def test_queries_whose_gradient_is_zero_did_run() -> None:
    """Heads and gates that start from zero hide all gradients of what comes before them."""
    model = models.build()
    nn.init.zeros_(model.head.weight)
    ac.transform(model, models.example(), EAGER, verify=True)
    assert ac.pseudo_queries(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("train", [False, True])
def test_dtypes_and_modes(dtype: torch.dtype, train: bool) -> None:
    model = models.build(dropout=0.3).to(dtype).train(train)
    ac.transform(model, models.example().to(dtype), EAGER, verify=True)
    assert model.training is train
    assert ac.pseudo_queries(model)


def test_nothing_to_differentiate() -> None:
    model = models.build().requires_grad_(False)
    with torch.inference_mode():
        ac.transform(model, models.example(), EAGER, verify=True)
    assert ac.pseudo_queries(model)


@pytest.mark.parametrize("train", [False, True])
def test_compiled_dropout_is_to_be_the_originals(train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor draws its own random numbers, and with those no mask would be the original's."""
    seen = []

    def run(self: ConvertedForward, *args: Any, **kwargs: Any) -> Any:
        seen.append(torch._inductor.config.fallback_random)
        raise ac.PlanMismatchError("seen enough")

    monkeypatch.setattr(ConvertedForward, "run", run)
    with pytest.raises(ac.PlanMismatchError):
        ac.transform(models.build(dropout=0.5).train(train), models.example(), verify=True)
    assert seen == [train]
    assert not torch._inductor.config.fallback_random


# ------------------------------------------------------------------ what is refused beforehand


@pytest.mark.parametrize(("name", "value"), [("gain", "mean"), ("value", "normalized")])
def test_configurations_that_are_not_exact(name: str, value: str) -> None:
    model = models.build()
    with pytest.raises(ac.ConfigError, match=f"verify=True needs {name}=.*, so that even with zero queries"):
        ac.transform(model, models.example(), dataclasses.replace(EAGER, **{name: value}), verify=True)
    assert not any("attnres" in key for key in model.state_dict())


class Lock(nn.Module):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("there is one of me")


def test_models_that_cannot_be_copied() -> None:
    model = models.build()
    model.lock = Lock()
    with pytest.raises(
        ac.AttnResError, match=r"cannot be copied: RuntimeError: there is one of me\. verify=True compar"
    ):
        ac.transform(model, models.example(), EAGER, verify=True)


def test_models_without_numbers() -> None:
    with pytest.raises(ac.AttnResError, match="the meta device has no numbers"):
        ac.transform(models.build().to("meta"), models.example().to("meta"), EAGER, verify=True)


def test_parts_that_are_compiled_already() -> None:
    model = models.build()
    model.encoder.layers[1].compile(backend="eager")
    with pytest.raises(
        ac.AttnResError, match=r"the copy of a compiled part is not compiled \(module encoder\.layers\.1"
    ):
        ac.transform(model, models.example(), EAGER, verify=True)


def test_what_is_transformed_already_or_holds_no_stream() -> None:
    model = ac.transform(models.build(), models.example(), EAGER)
    with pytest.raises(ac.AlreadyTransformedError):
        ac.transform(model, models.example(), EAGER, verify=True)
    with pytest.raises(ac.NoStreamError):
        ac.transform(nn.Linear(5, 4), models.example(), EAGER, verify=True)


def hurried(x: Tensor) -> Tensor:
    """Leaves something out when it is traced, as masks are left out by some models."""
    return x if torch.compiler.is_compiling() else x.tril()


def test_a_model_that_tracing_changes_is_told_from_a_wrong_conversion() -> None:
    """Compiling it, without any conversion, changes what it computes: no bug of the rewriting, and still refused."""
    model, x = models.build(between=hurried), models.example()
    before = model(x)
    with pytest.raises(ac.InexactError, match="the original itself computes something else") as told:
        ac.transform(model, x, EAGER, verify=True)
    assert "is_compiling" in str(told.value.remedy) and "bug of this package" not in str(told.value)
    assert torch.equal(model(x), before)
    assert exactness.verify(model, x, EAGER, traced=True).holds
    assert not exactness.verify(model, x, EAGER).holds


def test_a_wrong_conversion_is_no_matter_of_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    break_rewriting(monkeypatch)
    with pytest.raises(ac.InexactError, match="bug of this package") as told:
        ac.transform(models.build(), models.example(), EAGER, verify=True)
    assert "itself computes something else" not in str(told.value)


def test_a_traced_original_that_fails_hides_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Run:
        raise RuntimeError("dynamo cannot")

    break_rewriting(monkeypatch)
    monkeypatch.setattr(tracing, "run", fails)
    model = models.build()
    with pytest.raises(ac.InexactError, match="bug of this package"):
        ac.transform(model, models.example(), EAGER, verify=True)
    assert not [name for name in model.state_dict() if "attnres" in name]
