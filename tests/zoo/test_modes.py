"""Other modes, shapes and precisions of one model bind the same queries to the same sites."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.helpers import (
    TOLERANCE,
    floats,
    gradient_error,
    main_output,
    outputs_and_gradients,
    randomize_queries,
    relative_error,
)
from tests.zoo.families import BY_NAME, Family, named
from tests.zoo.support import convert, eager_config, example, original_parameters, prepare

# Logits then spread by 3 or so: sources are told apart, and rounding is not blown up by a hard choice.
DISTINCT = 0.5


def run(
    model: nn.Module, inputs: dict[str, Tensor], context: AbstractContextManager[object] | None = None
) -> list[Tensor]:
    with context or nullcontext():
        return [out.detach().clone() for out in floats(model(**inputs))]


def without_dropout(model: nn.Module) -> nn.Module:
    """Training mode then differs from evaluation by nothing random."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "activation_dropout", "attn_pdrop", "drop_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def rotated(queries: dict[str, nn.Parameter]) -> None:
    """Give each site the query of the next one of the same width."""
    with torch.no_grad():
        for width in {query.shape for query in queries.values()}:
            same = [query for query in queries.values() if query.shape == width]
            values = [query.clone() for query in same]
            for query, value in zip(same, values[1:] + values[:1], strict=True):
                query.copy_(value)


@pytest.mark.parametrize("family", named("llama", "gpt_neox_parallel", "t5", "whisper", "swin", "convnext"), ids=str)
def test_modes_shapes_and_autocast_bind_the_same_queries(family: Family) -> None:
    model = without_dropout(prepare(family))
    ac.transform(model, example(family), config=eager_config())
    queries = ac.pseudo_queries(model)
    randomize_queries(queries, std=DISTINCT)
    names = list(queries)
    inputs = example(family, batch=3)
    one = {name: value[1:2] for name, value in inputs.items()}

    want = run(model, inputs)
    for context in (torch.no_grad(), torch.inference_mode()):
        assert relative_error(run(model, inputs, context), want) <= TOLERANCE[torch.float32]
    model.train()
    assert relative_error(run(model, inputs), want) <= TOLERANCE[torch.float32]
    model.eval()
    # A batch of one row is that row of the batch; at batch size 1 dynamo always compiles anew.
    row = [out[1:2] for out in want]
    assert relative_error(run(model, one), row) <= TOLERANCE[torch.float32]
    if family.kind == "causal":
        prefix = {name: value[:, :6] for name, value in inputs.items()}
        got = main_output(model(**prefix)).detach()
        assert relative_error(got, want[0][:, :6]) <= TOLERANCE[torch.float32]

    low = relative_error(run(model, inputs, torch.autocast("cpu", dtype=torch.bfloat16)), want)
    assert list(ac.pseudo_queries(model)) == names
    assert all(a is b for a, b in zip(ac.pseudo_queries(model).values(), queries.values(), strict=True))
    rotated(queries)
    wrong = relative_error(run(model, inputs), want)
    assert low < 0.15, "bfloat16 keeps eight bits"
    assert wrong > 3 * low, f"autocast off by {low}, but queries at the wrong sites only by {wrong}"


@pytest.mark.parametrize("family", named("llama", "vit"), ids=str)
def test_each_query_counts_in_each_mode(family: Family) -> None:
    """One query at a time away from zero changes the output, wherever the model runs."""
    model, queries = convert(family)
    inputs = example(family)
    other = example(family, batch=3, length=9)

    def everywhere() -> list[Tensor]:
        outputs = []
        for given in (inputs, other):
            outputs += run(model, given, torch.no_grad())
            outputs += run(model, given, torch.autocast("cpu", dtype=torch.bfloat16))
        return outputs

    before = everywhere()
    for name, query in queries.items():
        with torch.no_grad():
            query.fill_(DISTINCT).mul_(torch.arange(len(query)) % 3 - 1.0)
        after = everywhere()
        same = [i for i, (a, b) in enumerate(zip(after, before, strict=True)) if torch.equal(a, b)]
        assert not same, f"query {name} is not read in runs {same}"
        with torch.no_grad():
            query.zero_()


@pytest.mark.parametrize("name", ["opt", "gpt2", "whisper"])
def test_converted_in_training_mode_it_serves_evaluation(name: str) -> None:
    family = BY_NAME[name]
    inputs = example(family)
    want = run(prepare(family), inputs)
    model = prepare(family).train()
    ac.transform(model, inputs, config=eager_config())
    assert model.training
    run(model, inputs)
    model.eval()
    assert relative_error(run(model, inputs), want) <= TOLERANCE[torch.float32]


def test_the_fast_path_of_torch_s_encoder_is_not_taken_silently() -> None:
    """Without gradients ``nn.TransformerEncoderLayer`` calls one fused op, in which no add can be seen."""
    family = BY_NAME["torch_encoder_norm_first"]
    model, queries = convert(family)
    randomize_queries(queries)
    inputs = example(family)
    want = run(model, inputs)
    try:
        got = run(model, inputs, torch.no_grad())
    except ac.AttnResError:
        return  # said so
    assert relative_error(got, want) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("family", named("llama", "t5", "swin"), ids=str)
def test_returned_hidden_states_are_one_more_reader(family: Family) -> None:
    """States that are asked for later are read at the same sites: nothing moves, and zero queries are exact."""
    inputs = example(family)
    model = prepare(family)
    with torch.no_grad():  # transformers installs its recording hooks at the first such call
        want = floats(model(**inputs, output_hidden_states=True))
    ac.transform(model, inputs, config=eager_config())
    queries = ac.pseudo_queries(model)
    with torch.no_grad():
        got = floats(model(**inputs, output_hidden_states=True))
        assert relative_error(got, want) <= TOLERANCE[torch.float32]
        randomize_queries(queries)
        with_states = main_output(model(**inputs, output_hidden_states=True))
        without = main_output(model(**inputs))
    assert relative_error(with_states, without) <= TOLERANCE[torch.float32]
    assert list(ac.pseudo_queries(model)) == list(queries)


def test_hidden_states_asked_for_first_after_conversion_are_right_or_refused() -> None:
    """transformers then installs its hooks under a lock, which dynamo cannot trace: a graph break."""
    family = BY_NAME["llama"]
    inputs = example(family)
    with torch.no_grad():
        want = floats(prepare(family)(**inputs, output_hidden_states=True))
    model, _ = convert(family)
    try:
        with torch.no_grad():
            got = floats(model(**inputs, output_hidden_states=True))
    except ac.AttnResError:
        return
    assert relative_error(got, want) <= TOLERANCE[torch.float32]


def test_a_plan_that_depends_on_the_dtype_is_refused() -> None:
    """In float16 alone T5 clamps the stream itself, which no sum of sources can replay."""
    family = BY_NAME["t5"]
    model, _ = convert(family)
    with pytest.raises(ac.PlanMismatchError), torch.no_grad():
        model.half()(**example(family, torch.float16))
    with pytest.raises(ac.NoStreamError) as raised:
        convert(family, torch.float16)
    assert "clamp_on_stream" in {left.reason for left in raised.value.report.rejections}


def test_masks_labels_and_embeddings_are_passed_on() -> None:
    """Arguments that the example did not have, and a forward that starts after the embedding."""
    family = BY_NAME["llama"]
    original = prepare(family)
    model, queries = convert(family)
    inputs = example(family)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :4] = 0
    padded = {**inputs, "attention_mask": mask, "labels": inputs["input_ids"]}
    want = outputs_and_gradients(original, dict(original.named_parameters()), padded)
    got = outputs_and_gradients(model, original_parameters(model, queries), padded)
    assert len(got.outputs) == 2, "loss and logits"
    assert relative_error(got.outputs, want.outputs) <= TOLERANCE[torch.float32]
    assert gradient_error(got.gradients, want.gradients) <= TOLERANCE[torch.float32]
    embeddings = original.get_parameter("model.embed_tokens.weight")[inputs["input_ids"]].detach()
    given = {"inputs_embeds": embeddings}
    assert relative_error(run(model, given), run(original, given)) <= TOLERANCE[torch.float32]


def test_the_inner_module_alone_runs_converted() -> None:
    family = BY_NAME["llama"]
    model, queries = convert(family)
    randomize_queries(queries)
    inputs = example(family)
    body, head = model.get_submodule("model"), model.get_submodule("lm_head")
    with torch.no_grad():
        assert relative_error(head(body(**inputs).last_hidden_state), model(**inputs).logits) <= 1e-6
