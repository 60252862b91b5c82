"""Long additive skips between states of one stream, and states that a model returns: each is a read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.conditions.depth_stream import DepthStream
from tests.helpers import (
    floats,
    gradient_error,
    outputs_and_gradients,
    randomize,
    randomize_queries,
    relative_error,
    seeded,
)
from tests.zoo.families import BY_NAME
from tests.zoo.support import eager_config, prepare
from tests.zoo.support import example as family_example

WIDTH, LAYERS = 6, 6


class Skips(nn.Module):
    """Six branches. ``how``: ``inside`` adds an old state with each branch of the second half, ``between`` after it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.weights = nn.ParameterList(torch.ones(()) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def f(self, i: int, x: Tensor) -> Tensor:
        return self.branches[i](self.norms[i](x))

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        saved = []
        for i in range(LAYERS):
            if i < LAYERS // 2:
                saved.append(x)
                x = x + self.f(i, x)
            elif self.how == "inside":
                x = x + self.f(i, x) + self.weights[i] * saved.pop()
            else:
                x = x + self.weights[i] * saved.pop()
                x = x + self.f(i, x)
        return self.norm(x)

    def by_hand(self, x: Tensor, sizes: list[int], queries: list[Tensor]) -> Tensor:
        stream = DepthStream(self.embed(x), sizes, queries)
        saved: list[Tensor] = []
        added: list[Tensor] = []  # since the sum was last read: what nobody reads in between is one branch
        for i in range(LAYERS):
            if i >= LAYERS // 2 and self.how == "between":
                added.append(self.weights[i] * saved.pop())
            if added:
                stream.add(sum(added[1:], added[0]))
            x = stream.read()
            added = [self.f(i, x)]
            if i < LAYERS // 2:
                saved.append(x)
            elif self.how == "inside":
                added.append(self.weights[i] * saved.pop())
        stream.add(sum(added[1:], added[0]))
        return self.norm(stream.read())


@pytest.mark.parametrize("how", ["inside", "between"])
def test_long_skips_by_hand(how: str) -> None:
    model = randomize(Skips(how)).double()
    x = torch.randn(2, 3, WIDTH, generator=seeded(1), dtype=torch.float64)
    names = dict(model.named_parameters())
    plain = outputs_and_gradients(model, names, (x,))
    ac.transform(model, x, ac.AttnResConfig(num_blocks=3, lowering="eager"))
    (stream,) = ac.report(model).streams
    count = len(stream.sublayers)
    queries = ac.pseudo_queries(model)
    used = {name: p for name, p in names.items() if plain.gradients[name].any()}
    got = outputs_and_gradients(model, used, (x,))
    assert relative_error(got.outputs, plain.outputs) < 1e-12
    assert gradient_error(got.gradients, {name: plain.gradients[name] for name in used}) < 1e-12
    randomize_queries(queries, std=1.0)
    used |= {name: p for name, p in model.named_parameters() if "attnres" in name}
    got = outputs_and_gradients(model, used, (x,))
    sizes = [count // 3, count // 3, count - 2 * (count // 3)]
    want = outputs_and_gradients(lambda x: model.by_hand(x, sizes, list(queries.values())), used, (x,))
    assert relative_error(want.outputs, plain.outputs) > 1e-2
    assert relative_error(got.outputs, want.outputs) < 1e-12
    assert gradient_error(got.gradients, want.gradients) < 1e-12


class Returning(Skips):
    """Returns all of its states, in a list in a dict, as models do that are asked for hidden states."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.embed(x)
        states = [x]
        for i in range(LAYERS):
            x = x + self.f(i, x)
            states.append(x)
        return {"last": self.norm(x), "states": states, "some": (states[2], states[4] * 2)}

    def by_reads(self, x: Tensor, queries: list[Tensor], own: bool) -> list[Tensor]:
        """The last state's norm, all states, and two of them once more; ``own``: readers have queries of their own."""
        stream = DepthStream(self.embed(x), [2] * 3, queries)
        states = []
        doubled = stream.read()
        for i in range(LAYERS + 1):
            inner = stream.read_alone() if own else stream.read()
            branch = self.norm(inner) if i == LAYERS else self.f(i, inner)
            if own and i == 4:
                doubled = stream.read_alone()  # the product stands in the network itself
            states.append(stream.read_alone() if own and i > 0 else stream.read())
            if i < LAYERS:
                stream.add(branch)
        return [branch, *states, states[2], (doubled if own else states[4]) * 2]


@pytest.mark.parametrize("queries", ["state", "reader"])
def test_returned_states_by_hand(queries: str) -> None:
    model = randomize(Returning("")).double()
    x = torch.randn(2, 3, WIDTH, generator=seeded(1), dtype=torch.float64)
    plain = floats(model(x))
    ac.transform(model, x, ac.AttnResConfig(num_blocks=3, lowering="eager", queries=queries))
    assert relative_error(floats(model(x)), plain) < 1e-12
    found = ac.pseudo_queries(model)
    assert sum("output" in name for name in found) == (LAYERS if queries == "reader" else 0)
    randomize_queries(found, std=1.0)
    got = floats(model(x))
    want = model.by_reads(x, list(found.values()), queries == "reader")
    assert relative_error(want[1:], plain[1:]) > 1e-2
    assert relative_error(got, want) < 1e-12


@pytest.mark.parametrize("training", [False, True])
def test_asked_for_first_after_conversion(training: bool) -> None:
    """transformers then registers its hooks, once, under a lock: a set-up, and nothing of the network."""
    family = BY_NAME["llama"]
    inputs = family_example(family)
    asked = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}
    original = prepare(family).train(training)
    original.set_attn_implementation("eager")
    want = floats(original(**inputs, **asked))
    model = prepare(family).train(training)
    model.set_attn_implementation("eager")
    ac.transform(model, inputs, eager_config())
    queries = ac.pseudo_queries(model)
    got = floats(model(**inputs, **asked))
    layers = model.config.num_hidden_layers
    assert len(got) == len(want) == 1 + (layers + 1) + layers
    assert relative_error(got, want) < 1e-5
    randomize_queries(queries)
    moved = model(**inputs, **asked)
    # The last state is the norm's result; what it reads is returned by nobody.
    head = model.lm_head(moved.hidden_states[-1])
    assert relative_error(moved.logits, head) < 1e-5
    assert relative_error(moved.logits, model(**inputs).logits) < 1e-5
    assert relative_error(moved.hidden_states[1:], floats(original(**inputs, **asked).hidden_states[1:])) > 1e-2
    assert list(ac.pseudo_queries(model)) == list(queries)
