"""The calls of the README: what they take, change, return and refuse."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import attnres_compile as ac
from tests.helpers import outputs_and_gradients, randomize_queries, relative_error
from tests.models import SITES, SUBLAYERS, WIDTH, Model, build, example

CONFIG = ac.AttnResConfig(num_blocks=2, lowering="eager")


def test_transform_is_in_place_and_changes_nothing_until_the_queries_move() -> None:
    model, x = build(), example()
    want = model(x)
    assert ac.transform(model, x, config=CONFIG) is model
    assert type(model) is Model
    assert relative_error(model(x), want) < 1e-6
    queries = ac.pseudo_queries(model)
    assert len(queries) == SITES
    assert all(query.shape == (WIDTH,) and not query.any() for query in queries.values())
    parameters = {id(p) for p in model.parameters()}
    assert all(isinstance(q, nn.Parameter) and id(q) in parameters for q in queries.values())
    randomize_queries(queries)
    assert relative_error(model(x), want) > 1e-2


@pytest.mark.parametrize("form", ["tensor", "tuple", "list", "dict", "inputs"])
def test_every_form_of_example_inputs(form: str) -> None:
    model, x, scale = build(), example(), torch.tensor(2.0)
    given = {
        "tensor": x,
        "tuple": (x, scale),
        "list": [x, scale],
        "dict": {"x": x, "scale": scale},
        "inputs": ac.Inputs((x,), {"scale": scale}),
    }[form]
    report = ac.explain(model, given, CONFIG)
    assert [len(stream.sublayers) for stream in report.streams] == [SUBLAYERS]


def test_example_inputs_of_no_known_form() -> None:
    with pytest.raises(ac.InputsError, match="int"):
        ac.explain(build(), 3, CONFIG)


def test_the_models_own_error_is_raised_as_it_is() -> None:
    model = build()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ac.transform(model, torch.zeros(2, 3, 7), config=CONFIG)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        ac.explain(model, {"x": example(), "nothing": 1}, CONFIG)
    assert "attnres" not in dict(model.encoder.named_children())


def test_state_dict_gains_one_prefix_and_loses_nothing() -> None:
    model, x = build(), example()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ac.transform(model, x, config=CONFIG)
    after = model.state_dict()
    added = set(after) - set(before)
    assert len(added) == SITES
    assert all(name.startswith("encoder.attnres.") for name in added)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_names_in_the_report_are_the_keys_of_the_queries() -> None:
    model, x = build(), example()
    planned = ac.explain(model, x, CONFIG)
    ac.transform(model, x, config=CONFIG)
    done = ac.report(model)
    assert done == planned
    names = [site.query for stream in done.streams for site in stream.sites if site.query]
    assert names == list(ac.pseudo_queries(model))
    assert names[0] == "encoder.layers.0.norm2"
    assert names[-1] == "encoder.norm"
    assert done.parameters_added == SITES * WIDTH
    assert sum(q.numel() for q in ac.pseudo_queries(model).values()) == done.parameters_added


def test_report_says_where_in_the_users_code() -> None:
    stream = ac.explain(build(), example(), CONFIG).streams[0]
    assert [s.module for s in stream.sublayers] == [f"encoder.layers.{i // 2}" for i in range(SUBLAYERS)]
    for number, sublayer in enumerate(stream.sublayers):
        file, line = sublayer.where.rsplit(":", 1)
        with open(file, encoding="utf-8") as handle:
            text = handle.read().splitlines()[int(line) - 1]
        assert ("self.mixer" if number % 2 == 0 else "self.mlp") in text


def test_report_round_trip_and_shape() -> None:
    report = ac.explain(build(), example(), CONFIG)
    values = report.to_dict()
    assert ac.TransformReport.from_dict(values) == report
    assert list(values) == ["streams", "rejections", "graph_breaks", "parameters_added", "phases", "fusions"]
    (stream,) = values["streams"]
    assert {"name", "feature_dim", "sublayers", "blocks", "sites"} <= stream.keys()
    assert stream["blocks"] == [[0, 1, 2], [3, 4, 5]]
    assert {"module", "where", "add"} <= stream["sublayers"][0].keys()
    assert stream["sites"][0] == {
        "name": "encoder.layers.0.norm1",
        "readers": ["encoder.layers.0.norm1"],
        "sources": ["root"],
        "query": None,
        "index": 0,
        "kind": "other",  # a cumulative sum over tokens is no attention, and no MLP
        "shape": [2, 3, 12],
        "dtype": "float32",
    }
    assert stream["sites"][-1]["sources"] == ["root", "block 1", "block 2"]


def test_revert_restores_the_object_bit_for_bit() -> None:
    model, x = build(), example()
    keys, want, attributes = list(model.state_dict()), model(x), set(vars(model.encoder))
    ac.transform(model, x, config=CONFIG)
    randomize_queries(ac.pseudo_queries(model))
    model(x)
    assert ac.revert(model) is model
    assert list(model.state_dict()) == keys
    assert set(vars(model.encoder)) == attributes
    assert torch.equal(model(x), want)
    ac.transform(model, x, config=CONFIG)  # and again
    assert relative_error(model(x), want) < 1e-6


def test_revert_keeps_a_forward_that_was_on_the_instance_before() -> None:
    model, x = build(), example()
    original = model.encoder.forward

    def doubled(value: torch.Tensor) -> torch.Tensor:
        return 2 * original(value)

    model.encoder.forward = doubled  # type: ignore[method-assign]
    want = model(x)
    ac.transform(model, x, config=CONFIG)
    assert relative_error(model(x), want) < 1e-6
    ac.revert(model)
    assert model.encoder.forward is doubled
    assert torch.equal(model(x), want)


def test_revert_refuses_where_it_would_lose_somebody_elses_wrapper() -> None:
    model, x = build(), example()
    ac.transform(model, x, config=CONFIG)
    inner = model.encoder.forward
    model.encoder.forward = lambda *a, **k: inner(*a, **k)  # type: ignore[method-assign]
    with pytest.raises(ac.AttnResError, match="wrapped or replaced"):
        ac.revert(model)


def test_twice_is_refused_and_says_what_to_do() -> None:
    model, x = build(), example()
    ac.transform(model, x, config=CONFIG)
    with pytest.raises(ac.AlreadyTransformedError, match="revert"):
        ac.transform(model, x, config=CONFIG)


@pytest.mark.parametrize("how", ["wrapped", "in place", "inner"])
def test_a_compiled_model_is_refused(how: str) -> None:
    model: nn.Module = build()
    if how == "wrapped":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    elif how == "in place":
        model.compile(backend="eager")
    else:
        model.encoder.layers[1].compile(backend="eager")  # type: ignore[union-attr, index, operator]
    with pytest.raises(ac.AlreadyCompiledError, match="original module first"):
        ac.transform(model, example(), config=CONFIG)


def test_untransformed_models_have_nothing_to_show() -> None:
    for call in (ac.report, ac.pseudo_queries, ac.revert):
        with pytest.raises(ac.NotTransformedError, match="transform"):
            call(build())


def test_a_model_without_a_stream_says_why() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    assert ac.explain(model, torch.zeros(2, 5)).streams == ()
    with pytest.raises(ac.NoStreamError, match="adds no two tensors"):
        ac.transform(model, torch.zeros(2, 5))
    short = build(layers=1)
    with pytest.raises(ac.NoStreamError) as caught:
        ac.transform(short, example(), config=CONFIG)
    assert {r.reason for r in caught.value.report.rejections} == {"too_few_sublayers"}
    assert all(r.where.split(":")[0].endswith("models.py") for r in caught.value.report.rejections)


def test_strict_raises_where_a_stream_would_be_left_alone() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good = build()
            self.tail = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.good(x).sigmoid()
            for layer in self.tail:
                y = nn.functional.layer_norm(y + layer(y), [4])
            return y

    model = Two()
    assert len(ac.explain(model, example(), CONFIG).streams) == 1
    with pytest.raises(ac.RejectedStreamError, match="post-norm") as caught:
        ac.transform(model, example(), config=ac.AttnResConfig(strict=True, lowering="eager"))
    assert "test_api.py" in caught.value.where
    ac.transform(model, example(), config=CONFIG)


def test_a_sequential_that_owns_its_stream() -> None:
    from tests.models import Block

    model = nn.Sequential(*(Block() for _ in range(3))).eval()
    x = torch.randn(2, 3, WIDTH)
    want = model(x)
    ac.transform(model, x, config=CONFIG)
    assert relative_error(model(x), want) < 1e-6
    assert len(ac.pseudo_queries(model)) == SITES


def test_an_attribute_in_the_way_is_named() -> None:
    model = build()
    model.encoder.attnres = nn.Identity()
    with pytest.raises(ac.AttnResError, match="'attnres' already"):
        ac.transform(model, example(), config=CONFIG)


def test_forward_hooks_and_signature_stay() -> None:
    import inspect

    model, x = build(), example()
    want = inspect.signature(model.encoder.forward)
    calls: list[tuple[int, ...]] = []
    model.encoder.register_forward_hook(lambda module, args, out: calls.append(tuple(out.shape)))
    model.encoder.layers[1].register_forward_hook(lambda module, args, out: out * 1.5)
    before = model(x)
    ac.transform(model, x, config=CONFIG)
    assert inspect.signature(model.encoder.forward) == want
    calls.clear()
    assert relative_error(model(x), before) < 1e-6
    assert calls == [(2, 3, WIDTH)]


@pytest.mark.parametrize("option", ["key_norm_weight", "reader", "full", "block_size"])
def test_options_keep_zero_queries_exact_and_train(option: str) -> None:
    config = {
        "key_norm_weight": ac.AttnResConfig(num_blocks=2, key_norm_weight=True, lowering="eager"),
        "reader": ac.AttnResConfig(num_blocks=2, queries="reader", lowering="eager"),
        "full": ac.AttnResConfig(num_blocks=None, lowering="eager"),
        "block_size": ac.AttnResConfig(block_size=4, lowering="eager"),
    }[option]
    model, x = build(), example()
    names = dict(model.named_parameters())
    want = outputs_and_gradients(model, names, (x,))
    ac.transform(model, x, config=config)
    got = outputs_and_gradients(model, names, (x,))
    assert relative_error(got.outputs, want.outputs) < 1e-5
    assert max(relative_error(got.gradients[n], want.gradients[n]) for n in names) < 1e-5
    extra = [p for n, p in model.named_parameters() if ".attnres." in n]
    assert len(extra) == SITES * (2 if option == "key_norm_weight" else 1)
    randomize_queries(ac.pseudo_queries(model))
    model(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in extra)


def test_a_copy_has_queries_of_its_own() -> None:
    model, x = build(), example()
    ac.transform(model, x, config=CONFIG)
    twin = copy.deepcopy(model)
    randomize_queries(ac.pseudo_queries(twin))
    assert not any(query.any() for query in ac.pseudo_queries(model).values())
    assert relative_error(model(x), twin(x)) > 1e-2
