"""``torch.func`` on converted models, forward mode, and second derivatives: equal to what the definition gives.

The expected values come from the same converted model by plain autograd, one sample or one row at a time, or, for
second derivatives, from a model whose depth attention is the reference's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

import attnres_compile as ac
from attnres_compile.kernels import reference
from tests.helpers import randomize, randomize_queries, relative_error
from tests.models import build, example

BATCH = 4


def converted(form: str = "off", dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    model = build().to(dtype)
    config = ac.AttnResConfig(**{"num_blocks": 2, "lowering": "eager", "two_phase": form, "fuse": form, **options})
    ac.transform(model, example().to(dtype), config=config)
    randomize_queries(ac.pseudo_queries(model))
    return model


def inputs(batch: int = BATCH) -> Tensor:
    return example(batch).double()


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(relative_error(got[name], want[name]) for name in want)


def loss_of(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,)).square().sum()

    return loss


def by_autograd(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    names = dict(model.named_parameters())
    return dict(zip(names, torch.autograd.grad(model(x).square().sum(), list(names.values())), strict=True))


@pytest.mark.parametrize("form", ["off", "on"])
def test_grad_and_vmap_and_both(form: str) -> None:
    model = converted(form)
    x = inputs()
    got = grad(loss_of(model))(state(model), x)
    assert any("attnres" in name for name in got)
    assert worst(got, by_autograd(model, x)) < 1e-11
    # Rows of a batch as samples of their own, in one call.
    assert relative_error(vmap(model)(x[:, None])[:, 0], model(x)) < 1e-12
    each = vmap(grad(loss_of(model)), (None, 0))(state(model), x[:, None])
    want = [by_autograd(model, row[None]) for row in x]
    assert worst(each, {name: torch.stack([row[name] for row in want]) for name in want[0]}) < 1e-10
    # Transforms leave nothing behind.
    assert worst(by_autograd(model, x), {n: torch.stack([r[n] for r in want]).sum(0) for n in want[0]}) < 1e-10
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_an_ensemble_of_weights() -> None:
    """vmap over parameters, queries included: as many models as there are rows."""
    models = [converted() for _ in range(3)]
    for seed, model in enumerate(models):
        randomize(model, seed)
        randomize_queries(ac.pseudo_queries(model), seed)
    parameters, buffers = torch.func.stack_module_state(models)
    x = inputs(2)
    got = vmap(lambda p, b: functional_call(models[0], (p, b), (x,)))(parameters, buffers)
    assert relative_error(got, torch.stack([model(x) for model in models])) < 1e-12


def test_forward_mode() -> None:
    """Both ways to ask for it, with gradients on, off, and with frozen parameters: no tangent is dropped."""
    model = converted("on")
    x, direction = inputs(2), torch.ones_like(inputs(2))
    leaf = x.clone().requires_grad_()
    projection = torch.randn(model(x).shape, dtype=torch.float64)
    (slope,) = torch.autograd.grad((model(leaf) * projection).sum(), leaf)
    want = (slope * direction).sum()

    def dual() -> Tensor:
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, direction))).tangent
        assert tangent is not None
        return (tangent * projection).sum()

    assert relative_error((jvp(model, (x,), (direction,))[1] * projection).sum(), want) < 1e-11
    for prepare in (lambda: None, lambda: model.requires_grad_(False)):
        prepare()
        assert relative_error(dual(), want) < 1e-11
        with torch.no_grad():
            assert relative_error(dual(), want) < 1e-11


class ByHand(nn.Module):
    """The full form over the model's own layers, with the definition at every site."""

    def __init__(self, model: nn.Module, queries: list[Tensor]) -> None:
        super().__init__()
        self.model, self.queries = model, queries

    def forward(self, x: Tensor) -> Tensor:
        model: Any = self.model
        sources = [model.embed(x)]
        sites = iter(self.queries)
        for at, layer in enumerate(model.encoder.layers):
            read = sources[0] if at == 0 else reference.mix(next(sites), sources)
            sources.append(layer.mixer(layer.norm1(read)).cumsum(1))
            sources.append(layer.mlp(layer.norm2(reference.mix(next(sites), sources))))
        return model.head(model.encoder.norm(reference.mix(next(sites), sources)))


def second_derivatives(run: Callable[[Tensor], Tensor], x: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    """Of a gradient penalty, as in WGAN-GP."""
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(run(leaf).square().sum(), leaf, create_graph=True)
    found = torch.autograd.grad(slope.square().sum(), wanted, allow_unused=True)
    return [torch.zeros_like(w) if value is None else value for w, value in zip(wanted, found, strict=True)]


def test_double_backward() -> None:
    model = converted("on", num_blocks=None)
    queries = list(ac.pseudo_queries(model).values())
    wanted = [parameter for name, parameter in model.named_parameters() if "attnres" not in name] + queries
    x = inputs(2)
    by_hand = ByHand(model, queries)
    got = second_derivatives(model, x, wanted)
    ac.revert(model)
    assert relative_error(by_hand(x), converted("on", num_blocks=None)(x)) < 1e-12
    want = second_derivatives(by_hand, x, wanted)
    assert all(bool(value.any()) for value in got[-len(queries) :])
    assert max(relative_error(a, b) for a, b in zip(got, want, strict=True) if bool(b.any())) < 1e-9


def test_hessians() -> None:
    """Forward over reverse, reverse over reverse, and by autograd alone."""
    model = converted()
    x = inputs(1)[:, :2]

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum()

    want = torch.autograd.functional.hessian(loss, x)
    assert relative_error(hessian(loss)(x), want) < 1e-10
    assert relative_error(jacrev(jacrev(loss))(x), want) < 1e-10
    (found,) = vjp(model, x)[1](torch.ones_like(model(x)))
    assert relative_error(found, torch.autograd.functional.vjp(model, x, torch.ones_like(model(x)))[1]) < 1e-11


def test_samples_with_dropout_draw_masks_of_their_own() -> None:
    """vmap's rule for random numbers holds inside the graph: an error unless it is told what to do."""
    model = build(dropout=0.5).double()
    ac.transform(model, inputs(1), config=ac.AttnResConfig(num_blocks=2, lowering="eager"))
    model.train()
    x = inputs(1).expand(BATCH, 1, *inputs(1).shape[1:])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(model)(x)
    different = vmap(model, randomness="different")(x)
    assert not torch.equal(different[0], different[1])
    same = vmap(model, randomness="same")(x)
    assert torch.equal(same[0], same[1])
    model.eval()
    assert relative_error(vmap(model)(x)[0], model(inputs(1))) < 1e-12


def test_a_model_that_is_lowered_to_inductor_is_transformed_op_by_op() -> None:
    """Nothing is compiled for it: the transforms need the graph itself."""
    model = converted(lowering="inductor")
    x = inputs()
    with torch._inductor.config.patch(force_disable_caches=True):
        got = grad(loss_of(model))(state(model), x)
        rows = vmap(model)(x[:, None])[:, 0]
    twin = converted()
    assert worst(got, by_autograd(twin, x)) < 1e-11
    assert relative_error(rows, twin(x)) < 1e-12
