"""Queries survive whatever a model is saved and loaded with; what does not fit is refused, never re-initialised."""

from __future__ import annotations

import copy
import functools
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.writing import save_weights
from tests.helpers import floats, randomize_queries, relative_error
from tests.models import SITES, build, example
from tests.zoo.families import BY_NAME
from tests.zoo.support import eager_config, prepare
from tests.zoo.support import example as family_example

CONFIG = ac.AttnResConfig(num_blocks=2, lowering="eager")


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    """A warning of ours that a test does not expect fails it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*pseudo-queries")
        yield


@functools.cache
def converted(config: ac.AttnResConfig) -> nn.Module:
    return ac.transform(build(), example(), config)


def fresh(seed_of_queries: int | None = None, config: ac.AttnResConfig = CONFIG) -> nn.Module:
    model = copy.deepcopy(converted(config))
    if seed_of_queries is not None:
        randomize_queries(ac.pseudo_queries(model), seed_of_queries)
    return model


def run(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(example())


def queries_of(model: nn.Module) -> list[Tensor]:
    return [query.detach().clone() for query in ac.pseudo_queries(model).values()]


def equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


# ------------------------------------------------------------------ whole state_dicts


def test_safetensors_of_the_whole_model(tmp_path: Path) -> None:
    model = fresh(1)
    want = run(model)
    save_model(model, str(tmp_path / "model.safetensors"))
    other = fresh(2)
    assert relative_error(run(other), want) > 1e-2
    assert load_model(other, str(tmp_path / "model.safetensors")) == (set(), [])
    assert torch.equal(run(other), want)


def test_a_state_dict_of_weights_only(tmp_path: Path) -> None:
    model = fresh(1)
    want = run(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = fresh(2)
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(run(other), want)


OTHERS = {
    "num_blocks": {"num_blocks": 3},
    "gain": {"gain": "mean"},
    "value": {"value": "normalized"},
    "eps": {"eps": 1e-3},
    "logit_scale": {"logit_scale": 0.5},
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("strict", [True, False])
def test_queries_of_another_conversion_are_not_loaded(what: str, strict: bool, tmp_path: Path) -> None:
    """Their names and sizes are the same: only the record in the state_dict tells."""
    torch.save(fresh(1).state_dict(), tmp_path / "model.pt")
    other = fresh(2, ac.AttnResConfig(**{"num_blocks": 2, "lowering": "eager", **OTHERS[what]}))
    before = queries_of(other)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    with pytest.raises(ac.CheckpointError, match="another conversion") as caught:
        other.load_state_dict(state, strict=strict)
    assert ("blocks of 3, 3 sublayers" if what == "num_blocks" else what) in str(caught.value)
    assert caught.value.module == "encoder"
    assert equal(queries_of(other), before)
    with pytest.raises(ac.CheckpointError, match="another conversion"):
        ac.load_queries(other, tmp_path / "model.pt")


def test_the_same_blocks_by_another_option_are_the_same() -> None:
    model = fresh(1, ac.AttnResConfig(num_blocks=None, lowering="eager"))
    other = fresh(2, ac.AttnResConfig(block_size=1, lowering="eager", two_phase="on"))
    other.load_state_dict(model.state_dict())
    assert relative_error(run(other), run(model)) < 1e-6


def test_a_part_of_the_queries_is_warned_of(tmp_path: Path) -> None:
    model, other = fresh(1), fresh(2)
    kept = queries_of(other)
    state = dict(model.state_dict())
    (gone, *_) = [name for name in state if ".attnres." in name]
    del state[gone]
    with pytest.warns(UserWarning, match=f"lacks {gone}. What it lacks stays as it is"):
        other.load_state_dict(state, strict=False)
    assert equal(queries_of(other)[:1], kept[:1]) and equal(queries_of(other)[1:], queries_of(model)[1:])
    with pytest.raises(ac.CheckpointError, match=f"lacks {gone}"):
        ac.load_queries(other, state)
    strange = {**model.state_dict(), "encoder.attnres.nowhere": torch.ones(3)}
    with pytest.warns(UserWarning, match=r"holds encoder\.attnres\.nowhere"):
        other.load_state_dict(strange, strict=False)


def test_a_checkpoint_from_before_leaves_the_queries_without_a_word() -> None:
    other = fresh(2)
    before = queries_of(other)
    result = other.load_state_dict(build().state_dict(), strict=False)
    assert len(result.missing_keys) == SITES and not result.unexpected_keys
    assert equal(queries_of(other), before)


# ------------------------------------------------------------------ the queries alone


def test_queries_alone_in_a_file_or_folder(tmp_path: Path) -> None:
    model = fresh(1)
    want = run(model)
    assert ac.save_queries(model, tmp_path / "deep" / "folder") == tmp_path / "deep" / "folder" / "attnres.safetensors"
    assert ac.save_queries(model, tmp_path / "q.safetensors") == tmp_path / "q.safetensors"
    for place in (tmp_path / "deep" / "folder", tmp_path / "q.safetensors", str(tmp_path / "q.safetensors")):
        config = ac.saved_config(place)
        assert config == CONFIG.layout()
        other = fresh(None, ac.AttnResConfig(**{**config.to_dict(), "lowering": "eager"}))
        loaded = ac.load_queries(other, place)
        assert list(loaded) == list(ac.pseudo_queries(model)) and len(loaded) == SITES
        assert all(a is b for a, b in zip(loaded.values(), ac.pseudo_queries(other).values(), strict=True))
        assert torch.equal(run(other), want)


def test_key_norm_weights_are_part_of_them(tmp_path: Path) -> None:
    config = ac.AttnResConfig(num_blocks=2, lowering="eager", key_norm_weight=True)
    model = fresh(1, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_key_norm"):
                parameter.uniform_(0.5, 1.5)
    ac.save_queries(model, tmp_path)
    other = fresh(None, config)
    ac.load_queries(other, tmp_path)
    assert torch.equal(run(other), run(model))
    with pytest.raises(ac.CheckpointError, match="another conversion"):
        ac.load_queries(fresh(2), tmp_path)


def test_weights_that_the_command_line_writes_say_it_too(tmp_path: Path) -> None:
    save_weights(fresh(1), tmp_path / "weights.safetensors")
    assert ac.saved_config(tmp_path) == CONFIG.layout()
    other = fresh(2)
    ac.load_queries(other, tmp_path)
    assert equal(queries_of(other), queries_of(fresh(1)))
    with pytest.raises(ac.CheckpointError, match="blocks of 3, 3 sublayers, not 2, 2, 2"):
        ac.load_queries(fresh(2, ac.AttnResConfig(num_blocks=3, lowering="eager")), tmp_path)


def test_nothing_else_is_loaded_and_dtypes_stay(tmp_path: Path) -> None:
    model = fresh(1)
    ac.save_queries(model, tmp_path)
    other = fresh(2).double()
    before = {name: value.clone() for name, value in other.state_dict().items() if ".attnres." not in name}
    ac.load_queries(other, tmp_path)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in before.items())
    assert all(query.dtype == torch.float64 for query in queries_of(other))
    assert equal([query.float() for query in queries_of(other)], queries_of(model))


def test_after_the_first_call_and_into_a_compiled_or_wrapped_model(tmp_path: Path) -> None:
    model = fresh(1)
    want = run(model)
    ac.save_queries(model, tmp_path)
    other = fresh(2)
    run(other)
    ac.load_queries(other, tmp_path)
    assert torch.equal(run(other), want)
    wrapped = nn.ModuleDict({"net": nn.ModuleDict({"inner": fresh(2)})})
    ac.load_queries(wrapped, tmp_path)
    assert torch.equal(run(wrapped["net"]["inner"]), want)
    compiled = torch.compile(fresh(2), backend="attnres", options={"lowering": "eager"})
    ac.load_queries(compiled, tmp_path)
    assert relative_error(run(compiled), want) < 1e-6
    ac.save_queries(compiled, tmp_path / "again")
    assert equal(queries_of(model), list(ac.load_queries(fresh(2), tmp_path / "again").values()))


PREFIXES: dict[str, Callable[[str], str]] = {
    "as it is": lambda name: name,
    "compiled": lambda name: f"_orig_mod.{name}",
    "parallel": lambda name: f"module.{name}",
    "two levels": lambda name: f"base_model.model.{name}",
    "sharded": lambda name: name.replace("encoder.", "encoder._fsdp_wrapped_module."),
    "the part that owns the stream": lambda name: name.removeprefix("encoder."),
}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_names_under_what_wrappers_put_in_front(prefix: str, tmp_path: Path) -> None:
    model = fresh(1)
    state = {PREFIXES[prefix](name): value for name, value in model.state_dict().items()}
    torch.save({"model": state, "step": 3}, tmp_path / "checkpoint.ckpt")
    other = fresh(2)
    with pytest.warns(UserWarning, match="does not say how its model was transformed"):
        ac.load_queries(other, tmp_path)
    assert equal(queries_of(other), queries_of(model))


# ------------------------------------------------------------------ folders


def shards(state: dict[str, Tensor], folder: Path, suffix: str) -> None:
    """Two shards and an index, as transformers writes them; queries in both."""
    names = list(state)
    places = {name: f"model-{1 + index % 2}{suffix}" for index, name in enumerate(names)}
    for file in set(places.values()):
        part = {name: state[name].clone() for name in names if places[name] == file}
        save_file(part, folder / file) if suffix == ".safetensors" else torch.save(part, folder / file)
    index = f"{'model.safetensors' if suffix == '.safetensors' else 'pytorch_model.bin'}.index.json"
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_shards_with_an_index(suffix: str, tmp_path: Path) -> None:
    model, other = fresh(1), fresh(2)
    shards(dict(model.state_dict()), tmp_path, suffix)
    torch.save({"state": {}}, tmp_path / "optimizer.pt")
    with pytest.warns(UserWarning, match="does not say"):
        ac.load_queries(other, tmp_path)
    assert equal(queries_of(other), queries_of(model))
    (tmp_path / f"model-2{suffix}").unlink()
    with pytest.raises(ac.CheckpointError, match="does not exist"):
        ac.load_queries(other, tmp_path)


def test_a_folder_that_holds_them_twice(tmp_path: Path) -> None:
    model = fresh(1)
    save_model(model, str(tmp_path / "model.safetensors"))
    ac.save_queries(model, tmp_path)
    other = fresh(2)
    ac.load_queries(other, tmp_path)  # and the record comes from the file of the queries
    assert equal(queries_of(other), queries_of(model))
    randomize_queries(ac.pseudo_queries(model), 5)
    save_model(model, str(tmp_path / "model.safetensors"))
    with pytest.raises(ac.CheckpointError, match=r"twice.*they differ"):
        ac.load_queries(other, tmp_path)


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('run')",))


def refused(folder: Path) -> dict[str, tuple[Any, str]]:
    state = dict(fresh(1).state_dict())
    query = next(name for name in state if ".attnres." in name)
    for name in ("empty", "evil", "outside"):
        (folder / name).mkdir()
    torch.save({"a": Evil()}, folder / "evil" / "pytorch_model.bin")
    (folder / "outside" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {query: "../elsewhere.safetensors"}}), encoding="utf-8"
    )
    save_file({query: state[query]}, folder / "later.safetensors", {"attnres": json.dumps({"": {"config": {"a": 1}}})})
    return {
        "nothing there": (folder / "nowhere", "does not exist"),
        "no weights": (folder / "empty", "holds no weights"),
        "code": (folder / "evil", "could run code"),
        "an index that leaves its folder": (folder / "outside", "outside of its folder"),
        "a plain checkpoint": (build().state_dict(), "holds no pseudo-queries"),
        "other sizes": ({**state, query: torch.ones(3)}, "1 pseudo-queries .* is \\[3\\], not \\[12\\]"),
        "a record of a later version": (folder / "later.safetensors", "cannot be read"),
        "no state_dict": ({"step": 3}, "holds no state_dict"),
    }


@pytest.mark.parametrize(
    "case",
    [
        "nothing there", "no weights", "code", "an index that leaves its folder", "a plain checkpoint", "other sizes",
        "a record of a later version", "no state_dict",
    ],
)  # fmt: skip
def test_what_cannot_be_loaded(case: str, tmp_path: Path) -> None:
    source, message = refused(tmp_path)[case]
    model = fresh(2)
    before = queries_of(model)
    with pytest.raises(ac.CheckpointError, match=message):
        ac.load_queries(model, source)
    assert equal(queries_of(model), before)


def test_models_without_queries_and_without_memory(tmp_path: Path) -> None:
    with pytest.raises(ac.NotTransformedError):
        ac.save_queries(build(), tmp_path)
    with pytest.raises(ac.NotTransformedError):
        ac.load_queries(build(), tmp_path)
    ac.save_queries(fresh(1), tmp_path)
    meta = fresh(1).to("meta")
    with pytest.raises(ac.CheckpointError, match="meta device"):
        ac.save_queries(meta, tmp_path)
    with pytest.raises(ac.CheckpointError, match="meta device"):
        ac.load_queries(meta, tmp_path)
    save_model(fresh(1), str(tmp_path / "w.safetensors"))
    with pytest.raises(ac.CheckpointError, match="does not say how its model was transformed"):
        ac.saved_config(tmp_path / "w.safetensors")


# ------------------------------------------------------------------ transformers


def test_save_pretrained_and_from_pretrained(tmp_path: Path) -> None:
    """``from_pretrained`` names the queries as unexpected and drops them; ``load_queries`` brings them back."""
    family = BY_NAME["llama"]
    inputs = family_example(family)
    model = ac.transform(prepare(family), inputs, eager_config())
    randomize_queries(ac.pseudo_queries(model))
    with torch.no_grad():
        want = floats(model(**inputs))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded, said = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert len(said["unexpected_keys"]) == len(ac.pseudo_queries(model)) and not said["missing_keys"]
    ac.transform(loaded.eval(), inputs, eager_config())
    with pytest.warns(UserWarning, match="does not say"):
        ac.load_queries(loaded, tmp_path)
    with torch.no_grad():
        assert relative_error(floats(loaded(**inputs)), want) == 0.0
    # With the file of the queries beside it nothing has to be taken on trust.
    ac.save_queries(model, tmp_path)
    assert ac.saved_config(tmp_path) == eager_config().layout()
    # The model without its head finds the same queries under shorter names.
    body = type(model.model).from_pretrained(tmp_path).eval()
    ac.transform(body, inputs, eager_config())
    ac.load_queries(body, tmp_path)
    assert equal(queries_of(body), queries_of(model))


def test_a_checkpoint_with_queries_serves_the_plain_model(tmp_path: Path) -> None:
    """Whoever wants the original back has its weights, bit for bit, in the same folder."""
    family = BY_NAME["llama"]
    original = prepare(family)
    model = ac.transform(prepare(family), family_example(family), eager_config())
    randomize_queries(ac.pseudo_queries(model))
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(held[name], value) for name, value in original.state_dict().items() if name in held)
    with torch.no_grad():
        loaded = type(model).from_pretrained(tmp_path).eval()
        inputs = family_example(family)
        assert relative_error(floats(loaded(**inputs)), floats(original(**inputs))) == 0.0
