"""A transformed model inside an outer ``torch.compile``: every stream finds the queries of its own module."""

from __future__ import annotations

import pytest
import torch

import attnres_compile as ac
from tests.helpers import floats, randomize_queries, relative_error
from tests.zoo.families import BY_NAME
from tests.zoo.support import eager_config, example, prepare


@pytest.mark.parametrize("name", ["llama", "t5", "whisper", "swin", "convnext", "vit", "torch_encoder_norm_first"])
def test_our_backend_around_the_whole_model(name: str) -> None:
    family = BY_NAME[name]
    inputs = example(family)
    model = prepare(family)
    ac.transform(model, inputs, config=eager_config())
    randomize_queries(ac.pseudo_queries(model))
    with torch.no_grad():
        want = floats(model(**inputs))
        compiled = torch.compile(model, backend="attnres", options={"lowering": "eager"}, fullgraph=True)
        got = floats(compiled(**inputs))
    assert relative_error(got, want) <= 1e-5


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_an_untouched_model_through_the_backend(name: str) -> None:
    family = BY_NAME[name]
    inputs = example(family)
    model = prepare(family)
    with torch.no_grad():
        want = floats(model(**inputs))
        compiled = torch.compile(model, backend="attnres", options={"lowering": "eager", "num_blocks": 3})
        assert relative_error(floats(compiled(**inputs)), want) <= 1e-5
        queries = ac.pseudo_queries(compiled)
        assert len(queries) == sum(family.sublayers)
        randomize_queries(queries)
        moved = floats(compiled(**inputs))
    assert relative_error(moved, want) > 1e-2
    twin = prepare(family)
    ac.transform(twin, inputs, config=ac.AttnResConfig(num_blocks=3, lowering="eager"))
    assert list(ac.pseudo_queries(twin)) == list(queries)
    randomize_queries(ac.pseudo_queries(twin))
    with torch.no_grad():
        assert relative_error(floats(twin(**inputs)), moved) <= 1e-5
