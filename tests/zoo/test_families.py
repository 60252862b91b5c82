"""Every family: the streams that are found, exactness at zero queries, and the way back."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import nn

import attnres_compile as ac
from tests.helpers import (
    TOLERANCE,
    floats,
    gradient_error,
    outputs_and_gradients,
    randomize_queries,
    relative_error,
)
from tests.zoo.families import BY_NAME, CONVERTED, REFUSED, Family, each, named
from tests.zoo.support import convert, eager_config, example, original_parameters, prepare, run_original

each_family = pytest.mark.parametrize("family", each(CONVERTED), ids=str)


@each_family
def test_streams_are_found(family: Family) -> None:
    model = prepare(family)
    inputs = example(family)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        before = floats(model(**inputs))
    random_state = torch.get_rng_state()

    report = ac.explain(model, inputs, config=eager_config())

    assert tuple(len(stream.sublayers) for stream in report.streams) == family.sublayers
    assert tuple(stream.feature_dim for stream in report.streams) == family.feature_dims
    for stream in report.streams:
        depth = len(stream.sublayers)
        assert tuple(chain(*stream.blocks)) == tuple(range(depth)), "blocks must partition the sublayers"
        assert len(stream.sites) == depth + 1, "one site before each sublayer and one after the last"
        assert [len(site.sources) for site in stream.sites] == source_counts(depth, len(stream.blocks))
        assert all((site.query is None) == (len(site.sources) == 1) for site in stream.sites)
        assert all(sublayer.where for sublayer in stream.sublayers), "each add names the user's line"
    assert all(left.reason and left.message for left in report.rejections)
    assert not report.graph_breaks
    assert ac.TransformReport.from_dict(report.to_dict()) == report

    # A dry run: nothing about the model, its gradients or the random state has changed.
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        assert same_bits(floats(model(**inputs)), before)


def source_counts(sublayers: int, blocks: int) -> list[int]:
    """Sources of each site by the paper: the root, the finished blocks, and the partial sum if any."""
    size = sublayers // blocks
    counts = []
    for done in range(sublayers):
        finished = min(done // size, blocks - 1)
        counts.append(1 + finished + (done > finished * size))
    return [*counts, 1 + blocks]


def same_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@each_family
def test_conversion_is_exact_real_and_reversible(family: Family) -> None:
    """Equal to the original at zero queries, different at others, and the original again after revert."""
    want = run_original(family)
    model = prepare(family)
    keys = list(model.state_dict())
    inputs = example(family)
    with torch.no_grad():
        plain = floats(model(**inputs))
    ac.transform(model, inputs, config=eager_config())
    queries = ac.pseudo_queries(model)
    check_queries(model, queries, family)

    got = outputs_and_gradients(model, original_parameters(model, queries), inputs)
    assert relative_error(got.outputs, want.outputs) <= TOLERANCE[torch.float32]
    assert gradient_error(got.gradients, want.gradients) <= TOLERANCE[torch.float32]

    randomize_queries(queries)
    mixed = outputs_and_gradients(model, queries, inputs)
    assert relative_error(mixed.outputs, want.outputs) > 1e-2, "random queries change nothing: not rewritten"
    without = [name for name, gradient in mixed.gradients.items() if not gradient.any()]
    assert not without, "queries without a gradient"

    assert ac.revert(model) is model
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        assert same_bits(floats(model(**inputs)), plain)


def check_queries(model: nn.Module, queries: dict[str, nn.Parameter], family: Family) -> None:
    """One zero vector per site that has a choice, all of them ordinary parameters of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    assert all(id(query) in own for query in queries.values())
    assert all(isinstance(query, nn.Parameter) and query.requires_grad for query in queries.values())
    # Every site but the first of each stream, which sees the root alone.
    widths = [width for depth, width in zip(family.sublayers, family.feature_dims, strict=True) for _ in range(depth)]
    assert [tuple(query.shape) for query in queries.values()] == [(width,) for width in widths]
    assert not any(query.any() for query in queries.values())
    report = ac.report(model)
    assert [site.query for stream in report.streams for site in stream.sites if site.query] == list(queries)
    assert report.parameters_added == sum(widths)


@pytest.mark.parametrize("family", named("llama", "gptj", "olmo2", "t5", "vit", "swin", "convnext"), ids=str)
def test_conversion_is_exact_in_float64(family: Family) -> None:
    want = run_original(family, torch.float64)
    model, queries = convert(family, torch.float64)
    got = outputs_and_gradients(model, original_parameters(model, queries), example(family, torch.float64))
    assert relative_error(got.outputs, want.outputs) <= TOLERANCE[torch.float64]
    assert gradient_error(got.gradients, want.gradients) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("family", each([family for family in CONVERTED if family.dropout]), ids=str)
def test_dropout_with_a_fixed_seed_is_the_original_s(family: Family) -> None:
    want = run_original(family, training=True)
    still = run_original(family)
    assert relative_error(want.outputs, still.outputs) > 1e-2, "dropout does nothing"
    model, queries = convert(family)
    model.train()
    got = outputs_and_gradients(model, original_parameters(model, queries), example(family))
    assert relative_error(got.outputs, want.outputs) <= TOLERANCE[torch.float32]
    assert gradient_error(got.gradients, want.gradients) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("family", REFUSED, ids=str)
def test_refused_with_the_reason(family: Family) -> None:
    model = prepare(family)
    inputs = example(family)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        before = floats(model(**inputs))

    report = ac.explain(model, inputs, config=eager_config())
    assert report.streams == ()
    assert family.refused in {left.reason for left in report.rejections}

    with pytest.raises(ac.NoStreamError) as raised:
        ac.transform(model, inputs, config=eager_config())
    assert family.refused in {left.reason for left in raised.value.report.rejections}
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        assert same_bits(floats(model(**inputs)), before)


@pytest.mark.parametrize("name", ["llama", "gpt_neox_parallel", "t5", "vit", "convnext"])
def test_a_model_on_the_meta_device_is_explained(name: str) -> None:
    family = BY_NAME[name]
    with torch.device("meta"):
        model = family.build()
    inputs = {key: value.to("meta") for key, value in example(family).items()}
    report = ac.explain(model, inputs, config=eager_config())
    assert tuple(len(stream.sublayers) for stream in report.streams) == family.sublayers
    assert all(parameter.is_meta for parameter in model.parameters())
