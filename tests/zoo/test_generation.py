"""``generate`` on converted models: a KV cache changes nothing, zero queries give the original's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import randomize_queries, relative_error
from tests.zoo.families import CONVERTED, Family, each
from tests.zoo.support import convert, example, prepare

NEW_TOKENS = 5
# Logits of cached and uncached runs come from attention over different layouts; tokens must be the same.
LOGITS = 1e-4

FAMILIES = [family for family in CONVERTED if family.generates]


def generate(model: nn.Module, inputs: dict[str, Tensor], use_cache: bool) -> tuple[Tensor, Tensor]:
    """New tokens and their logits, greedily."""
    name = "input_features" if "input_features" in inputs else "input_ids"
    generator: Any = model
    result = generator.generate(
        **{name: inputs[name]},
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        use_cache=use_cache,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
    )
    return result.sequences[:, -NEW_TOKENS:], torch.stack(result.logits)


@pytest.mark.parametrize("family", each(FAMILIES, ("llama", "bloom", "gemma3", "gptj", "t5", "whisper")), ids=str)
# Each length is a new shape until dynamo makes it dynamic, for prompts and for single tokens apart.
@torch._dynamo.config.patch(recompile_limit=32)
def test_cache_and_no_cache_agree(family: Family) -> None:
    inputs = example(family, length=9)
    original_tokens, original_logits = generate(prepare(family), inputs, use_cache=True)
    model, queries = convert(family)

    tokens, logits = generate(model, inputs, use_cache=True)
    assert torch.equal(tokens, original_tokens)
    assert relative_error(logits, original_logits) <= LOGITS

    randomize_queries(queries)
    cached_tokens, cached_logits = generate(model, inputs, use_cache=True)
    tokens, logits = generate(model, inputs, use_cache=False)
    assert torch.equal(cached_tokens, tokens)
    assert relative_error(cached_logits, logits) <= LOGITS
    assert relative_error(logits[0], original_logits[0]) > 1e-2, "random queries change nothing"
