"""Adapters from PEFT, put in before the conversion or after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import attnres_compile as ac
from tests.helpers import gradient_error, outputs_and_gradients, randomize, randomize_queries, relative_error
from tests.models import SUBLAYERS, build, example

CONFIG = ac.AttnResConfig(num_blocks=2, lowering="eager")
TARGETS = ["mixer", "mlp.0"]
KINDS: dict[str, Callable[..., Any]] = {
    "lora": lambda **more: peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False, **more),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, use_dora=True),
    "ia3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["mlp.0"]),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=TARGETS),
}


def with_adapter(model: nn.Module, kind: str, **more: Any) -> Any:
    """With random adapters, for by default they do nothing at first; the model below stays as it is."""
    adapted = peft.get_peft_model(model, KINDS[kind](**more))
    below = {name: p.detach().clone() for name, p in adapted.named_parameters() if not p.requires_grad}
    randomize(adapted)
    adapted.load_state_dict(below, strict=False)
    return adapted.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_first(kind: str) -> None:
    """The queries come after ``get_peft_model`` has frozen the rest, so they are trained with the adapters."""
    x = example()
    model = with_adapter(build(), kind)
    names = dict(model.named_parameters())
    want = outputs_and_gradients(model, names, (x,))
    ac.transform(model, x, CONFIG)
    (stream,) = ac.report(model).streams
    assert len(stream.sublayers) == SUBLAYERS
    got = outputs_and_gradients(model, names, (x,))
    assert relative_error(got.outputs, want.outputs) < 1e-5
    assert gradient_error(got.gradients, want.gradients) < 1e-5
    queries = ac.pseudo_queries(model)
    adapters = sum(p.numel() for p in names.values() if p.requires_grad)
    trainable, whole = model.get_nb_trainable_parameters()
    assert trainable == adapters + sum(q.numel() for q in queries.values())
    assert whole == sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(x).square().mean().backward()
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}


def test_adapters_on_off_and_merged() -> None:
    x = example()
    plain = ac.transform(build(), x, CONFIG)
    model = with_adapter(build(), "lora")
    ac.transform(model, x, CONFIG)
    randomize_queries(ac.pseudo_queries(model))
    randomize_queries(ac.pseudo_queries(plain))
    on = model(x)
    with model.disable_adapter():
        assert relative_error(model(x), plain(x)) < 1e-6
    assert relative_error(on, plain(x)) > 1e-2
    assert torch.equal(model(x), on)
    model.merge_adapter()
    assert relative_error(model(x), on) < 1e-5
    model.unmerge_adapter()
    assert relative_error(model(x), on) < 1e-5
    merged = model.merge_and_unload()
    assert relative_error(merged(x), on) < 1e-5
    assert list(ac.pseudo_queries(merged)) == list(ac.pseudo_queries(plain))


@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_adapters_put_into_a_converted_model(kind: str) -> None:
    """``get_peft_model`` freezes the queries with everything else that is no adapter, and they still count."""
    x = example()
    model = ac.transform(build(), x, CONFIG)
    plain = model(x)
    adapted = with_adapter(model, kind)
    queries = ac.pseudo_queries(adapted)
    assert len(queries) == SUBLAYERS and not any(query.requires_grad for query in queries.values())
    got = adapted(x)
    randomize_queries(queries)
    moved = adapted(x)
    for query in queries.values():
        query.requires_grad_()
    adapted(x).sum().backward()
    assert all(query.grad is not None and query.grad.any() for query in queries.values())
    ac.revert(adapted)
    want = adapted(x)
    assert relative_error(want, plain) > 1e-2
    assert relative_error(got, want) < 1e-5
    assert relative_error(moved, want) > 1e-2


def test_queries_as_modules_to_save(tmp_path: Path) -> None:
    """PEFT then trains and saves a copy of the queries, and brings it back into a converted model."""
    x = example()
    model = ac.transform(build(), x, CONFIG)
    adapted = peft.get_peft_model(model, KINDS["lora"](modules_to_save=["attnres"]))
    queries = ac.pseudo_queries(adapted)
    assert len(queries) == SUBLAYERS and all(query.requires_grad for query in queries.values())
    adapted(x).sum().backward()
    assert all(query.grad is not None and query.grad.any() for query in queries.values())
    randomize_queries(queries)
    want = adapted(x).detach()
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(ac.transform(build(), x, CONFIG), tmp_path)
    assert torch.equal(again(x), want)
    other = ac.transform(build(), x, CONFIG)
    with pytest.warns(UserWarning, match="does not say"):
        ac.load_queries(other, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(ac.pseudo_queries(other).values(), queries.values(), strict=True))
    merged = again.merge_and_unload()
    assert relative_error(merged(x), want) < 1e-5
    assert isinstance(merged.encoder.attnres, type(other.encoder.attnres))


def test_queries_beside_saved_adapters(tmp_path: Path) -> None:
    """What PEFT saves are adapters; the queries go into a file beside them."""
    x = example()
    model = ac.transform(with_adapter(build(), "lora"), x, CONFIG)
    randomize_queries(ac.pseudo_queries(model))
    want = model(x)
    model.save_pretrained(tmp_path)
    with pytest.raises(ac.CheckpointError, match="saves some of the parameters only"):
        ac.load_queries(model, tmp_path)
    ac.save_queries(model, tmp_path)
    again = peft.PeftModel.from_pretrained(build(), tmp_path).eval()
    ac.transform(again, x, CONFIG)
    ac.load_queries(again, tmp_path)
    assert relative_error(again(x), want) == 0.0
