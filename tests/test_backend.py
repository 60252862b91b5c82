"""``torch.compile(model, backend="attnres")``: on transformed models and on untouched ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile import backend
from tests.helpers import outputs_and_gradients, randomize_queries, relative_error
from tests.models import SITES, WIDTH, build, example

OPTIONS = {"num_blocks": 2, "lowering": "eager"}
CONFIG = ac.AttnResConfig(**OPTIONS)


@pytest.fixture(autouse=True)
def warn_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backend, "_WARNED", False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def late(model: nn.Module, **options: object) -> nn.Module:
    return torch.compile(model, backend="attnres", options={**OPTIONS, **options})  # type: ignore[return-value]


def test_untouched_models_compute_what_they_did() -> None:
    model, x = build(), example()
    names = dict(model.named_parameters())
    want = outputs_and_gradients(model, names, (x,))
    got = outputs_and_gradients(late(model), names, (x,))
    assert relative_error(got.outputs, want.outputs) < 1e-6
    assert max(relative_error(got.gradients[n], want.gradients[n]) for n in names) < 1e-5


def test_late_queries_are_found_trained_and_stable_across_recompiles() -> None:
    model, x = build(dropout=0.1), example()
    compiled = late(model)
    want = compiled(x).detach()
    queries = ac.pseudo_queries(compiled)
    assert list(queries) == list(ac.pseudo_queries(model))
    assert len(queries) == SITES
    assert next(iter(queries)) == "encoder.layers.0.norm2"
    compiled(x).square().sum().backward()
    assert all(q.grad is not None and q.grad.abs().sum() > 0 for q in queries.values())
    randomize_queries(queries)
    moved = compiled(x)
    assert relative_error(moved, want) > 1e-2
    for variant in (example(3, 7), example(1, 2)):
        compiled(variant)
    compiled.train()(x)
    with torch.autocast("cpu", torch.bfloat16):
        compiled(x)
    compiled.eval()
    again = ac.pseudo_queries(compiled)
    assert all(again[name] is query for name, query in queries.items())
    assert relative_error(compiled(x), moved) < 1e-6
    assert ac.report(compiled).parameters_added == SITES * WIDTH


def test_late_queries_equal_transformed_ones() -> None:
    model, x = build(), example()
    compiled = late(model)
    compiled(x)
    randomize_queries(ac.pseudo_queries(compiled))
    twin = build()
    ac.transform(twin, x, config=CONFIG)
    randomize_queries(ac.pseudo_queries(twin))
    assert relative_error(compiled(x), twin(x)) < 1e-6


def test_two_untouched_models_have_queries_of_their_own() -> None:
    one, two, x = build(), build(), example()
    late(one)(x)
    late(two)(x)
    a, b = ac.pseudo_queries(one), ac.pseudo_queries(two)
    assert all(a[name] is not b[name] for name in a)


def test_it_warns_once_and_names_transform() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model in (build(), build()):
            late(model)(example())
    ours = [str(w.message) for w in caught if "attnres" in str(w.message)]
    assert len(ours) == 1
    assert "transform" in ours[0] and "optimizer" in ours[0]


def test_a_transformed_model_does_not_warn_and_binds_its_queries() -> None:
    model, x = build(), example()
    ac.transform(model, x, config=CONFIG)
    randomize_queries(ac.pseudo_queries(model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = torch.compile(model, backend="attnres", options={"lowering": "eager"})
        out = compiled(x)
    assert not [w for w in caught if "attnres" in str(w.message)]
    assert relative_error(out, model(x)) < 1e-6
    assert list(ac.pseudo_queries(compiled)) == [f"_orig_mod.{name}" for name in ac.pseudo_queries(model)]


def test_options_that_contradict_a_transformed_model() -> None:
    model, x = build(), example()
    ac.transform(model, x, config=CONFIG)
    with pytest.raises(Exception, match="transformed with other values of num_blocks"):
        torch.compile(model, backend="attnres", options={"num_blocks": 3})(x)


def test_unknown_options_name_the_known_ones() -> None:
    with pytest.raises(Exception, match=r"unknown option 'blocks'.*num_blocks"):
        late(build(), blocks=3)(example())


def test_a_function_without_a_stream_runs_and_says_so() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = torch.compile(lambda a, b: a + b, backend="attnres", options=OPTIONS)
        assert torch.equal(compiled(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))
    assert any("no residual stream" in str(w.message) for w in caught)


def test_strict_on_an_untouched_model() -> None:
    class PostNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = nn.functional.layer_norm(x + layer(x), [4])
            return x

    with pytest.raises(Exception, match="post-norm"):
        late(PostNorm(), strict=True)(torch.zeros(2, 4))


def test_state_assigned_after_compilation_is_honoured() -> None:
    model, x = build(), example()
    ac.transform(model, x, config=CONFIG)
    model(x)
    other = build()
    ac.transform(other, x, config=CONFIG)
    randomize_queries(ac.pseudo_queries(other))
    with torch.no_grad():
        for parameter in other.encoder.parameters():
            parameter.mul_(1.1)
    model.load_state_dict(other.state_dict(), assign=True)
    assert relative_error(model(x), other(x)) < 1e-6


@pytest.mark.inductor
def test_inductor_lowering_of_an_untouched_model_trains() -> None:
    model, x = build(layers=2), example()
    names = dict(model.named_parameters())
    want = outputs_and_gradients(model, names, (x,))
    compiled = late(model, lowering="inductor")
    got = outputs_and_gradients(compiled, names, (x,))
    assert relative_error(got.outputs, want.outputs) < 1e-5
    assert max(relative_error(got.gradients[n], want.gradients[n]) for n in names) < 1e-5
    compiled(x).square().sum().backward()
    assert all(q.grad is not None and q.grad.abs().sum() > 0 for q in ac.pseudo_queries(compiled).values())
