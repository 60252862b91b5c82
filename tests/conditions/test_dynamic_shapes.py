"""Sizes that change from call to call: a converted model is compiled as often as the original would be, and no more.

Both are compiled by dynamo and given the same calls; what is counted is the graphs that it hands to a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import StaticCache

import attnres_compile as ac
from tests.helpers import floats, randomize_queries, relative_error
from tests.models import build, example
from tests.zoo.families import BY_NAME
from tests.zoo.support import eager_config, prepare

# What one model is called with in turn: it yields the arguments of a call, and is sent the result.
Calls = Callable[[nn.Module], Iterator[dict[str, Any]]]


def counted(model: nn.Module, run: Callable[..., Any], calls: Calls) -> tuple[int, list[Tensor]]:
    """The graphs that the calls compile, and all that they return."""
    torch._dynamo.reset()
    counters.clear()
    outputs: list[Tensor] = []
    with torch.no_grad():
        for arguments in calls(model):
            outputs += [value.clone() for value in floats(run(**arguments))]
    return counters["stats"]["unique_graphs"], outputs


def compare(name: str, calls: Calls) -> tuple[int, int]:
    """Graphs of the original and of the converted model, whose outputs are compared."""
    family = BY_NAME[name]
    original = prepare(family)
    original.get_submodule("model").compile(backend="eager")  # the owner of the stream
    theirs, want = counted(original, original, calls)
    model = prepare(family)
    ac.transform(model, family.inputs(2, 11, 0), config=eager_config())
    ours, got = counted(model, model, calls)
    assert relative_error(got, want) < 1e-5
    return theirs, ours


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, 40, (batch, length), generator=torch.Generator().manual_seed(batch + 100 * length))


def test_lengths_and_batches() -> None:
    def calls(model: nn.Module) -> Iterator[dict[str, Any]]:
        for batch, length in ((2, 6), (2, 9), (2, 7), (3, 12), (4, 5), (5, 17)):
            yield {"input_ids": ids(batch, length), "use_cache": False}

    theirs, ours = compare("llama", calls)
    assert 1 < theirs < 6
    assert ours <= theirs


def test_sizes_marked_dynamic() -> None:
    """One graph for all of them, with a mark on both sizes of the first input."""

    def calls(model: nn.Module) -> Iterator[dict[str, Any]]:
        for batch, length in ((2, 6), (3, 9), (4, 12), (7, 5)):
            given = ids(batch, length)
            torch._dynamo.mark_dynamic(given, 0)
            torch._dynamo.mark_dynamic(given, 1)
            # Without a cache and with the hidden states made outside, these are the owner's own inputs.
            yield {"input_ids": given, "use_cache": False}

    theirs, ours = compare("llama", calls)
    assert ours <= theirs == 1


def test_decoding_with_a_growing_cache() -> None:
    def calls(model: nn.Module) -> Iterator[dict[str, Any]]:
        cache = None
        for step in range(6):
            given: dict[str, Any] = {"input_ids": ids(2, 5 if step == 0 else 1), "use_cache": True}
            if cache is not None:
                given["past_key_values"] = cache
            yield given
            cache = model.seen

    theirs, ours = compare("llama", keeping_the_cache(calls))
    assert 1 < theirs < 6
    assert ours <= theirs


def keeping_the_cache(calls: Calls) -> Calls:
    """``calls`` that find the last call's cache at ``model.seen``."""

    def kept(model: Any) -> Iterator[dict[str, Any]]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            object.__setattr__(model, "seen", output.past_key_values)

        handle = model.register_forward_hook(keep)
        yield from calls(model)
        handle.remove()

    return kept


def test_decoding_with_a_static_cache() -> None:
    """Fixed shapes, as CUDA graphs want them: a graph for the prompt and one for a token, however many steps."""

    def calls(model: Any) -> Iterator[dict[str, Any]]:
        cache = StaticCache(config=model.config, max_cache_len=16)
        position = 0
        for length in (5, *[1] * 6):
            at = torch.arange(position, position + length)
            position += length
            yield {
                "input_ids": ids(2, length),
                "position_ids": at[None],
                "past_key_values": cache,
                "use_cache": True,
            }

    theirs, ours = compare("llama", calls)
    assert theirs <= 3
    assert ours <= theirs


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_from_outside(dynamic: bool | None) -> None:
    """``torch.compile(model, dynamic=...)`` around a transformed and around an untouched model."""
    sizes = ((2, 3), (2, 4), (3, 5), (4, 6))

    def calls(model: nn.Module) -> Iterator[dict[str, Any]]:
        for batch, length in sizes:
            yield {"x": example(batch, length)}

    original = build()
    theirs, want = counted(original, torch.compile(original, backend="eager", dynamic=dynamic), calls)
    options = {"lowering": "eager", "num_blocks": 2}
    model = build()
    ac.transform(model, example(), config=ac.AttnResConfig(**options))  # type: ignore[arg-type]
    for each in (model, build()):
        run = torch.compile(each, backend="attnres", dynamic=dynamic, options=options)
        ours, got = counted(each, run, calls)
        assert ours <= theirs
        assert relative_error(got, want) < 1e-5
    if dynamic:
        assert theirs == 1


def test_one_row_of_queries_serves_all_sizes() -> None:
    """What a graph with sizes of its own computes is what each size gives compiled alone."""
    sizes = ((2, 3), (3, 7), (5, 2))

    def made() -> nn.Module:
        model = build()
        ac.transform(model, example(), config=ac.AttnResConfig(num_blocks=2, lowering="eager"))
        randomize_queries(ac.pseudo_queries(model))
        return model

    model = made()
    for batch, length in sizes:
        x = example(batch, length)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
        got = model(x)
        assert relative_error(got, made()(example(batch, length))) < 1e-6
