"""The graphs before and after, kept: they compute what the model and the transformed model compute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import attnres_compile as ac
from attnres_compile.differences import site_diffs
from attnres_compile.readable import source_text, statement
from attnres_compile.rewriting import Rewriting, rewritings
from tests import models
from tests.helpers import randomize, randomize_queries, relative_error

CONFIG = ac.AttnResConfig(num_blocks=2, lowering="eager")


class Checkpointed(models.Model):
    """The layers of the encoder are checkpointed."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.encoder.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return self.head(self.encoder.norm(x))


class InPlace(models.Model):
    """Writes its stream in place, which only the owner's own graph can tell to be safe."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.encoder.layers:
            x += layer.mixer(layer.norm1(x)).cumsum(1)
            x += layer.mlp(layer.norm2(x))
        return self.head(self.encoder.norm(x))


class Broken(models.Model):
    """Tracing breaks before the module that owns the stream."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        torch._dynamo.graph_break()
        return self.head(self.encoder(x))


def built(kind: type[models.Model]) -> nn.Module:
    return randomize(kind().double()).eval()


def llama() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return randomize(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, use_cache=False)).double()).eval()


X = models.example().double()
IDS = {"input_ids": torch.arange(10).view(2, 5)}
KEY_NORMS = ac.AttnResConfig(num_blocks=2, key_norm_weight=True, lowering="eager")
READERS = ac.AttnResConfig(num_blocks=3, queries="reader", gain="mean", lowering="eager")
FORCED = ac.AttnResConfig(num_blocks=2, two_phase="on", fuse="on", lowering="eager")
CASES: dict[str, tuple[Any, Any, ac.AttnResConfig]] = {
    "toy": (lambda: built(models.Model), X, CONFIG),
    "checkpointed": (lambda: built(Checkpointed), X, CONFIG),
    "in place": (lambda: built(InPlace), X, CONFIG),
    "key norms": (lambda: built(models.Model), X, KEY_NORMS),
    "mean, a query per reader": (lambda: built(models.Model), X, READERS),
    "two phases, fused": (lambda: built(models.Model), X, FORCED),
    "llama": (llama, IDS, CONFIG),
}


def value(result: Any) -> Tensor:
    """The main output of a model or of a graph, which gives a tuple."""
    result = getattr(result, "logits", result)
    return result[0] if isinstance(result, tuple) else result


def call(module: nn.Module, inputs: Any) -> Tensor:
    return value(module(**inputs) if isinstance(inputs, dict) else module(inputs))


@pytest.mark.parametrize("case", CASES)
def test_the_graphs_compute_what_the_models_compute(case: str) -> None:
    make, inputs, config = CASES[case]
    model = make()
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    (found,) = rewritings(model, inputs, config)
    original = call(model, inputs)
    assert relative_error(call(found.before, inputs), original) <= 1e-12
    exact = config.gain == "sum"
    assert (relative_error(call(found.after, inputs), original) <= 1e-12) == exact
    # The independent check: what transform makes, compiled from the model anew, with the same random queries.
    transformed = ac.transform(copy.deepcopy(model), inputs, config)
    queries = ac.pseudo_queries(transformed)
    assert list(found.queries) == list(queries)
    assert [k for k in found.after.state_dict() if "attnres" in k] == [
        k for k in transformed.state_dict() if "attnres" in k and k in found.after.state_dict()
    ]
    randomize_queries(queries)
    with torch.no_grad():
        for name, query in queries.items():
            found.queries[name].copy_(query)
        keys = {k: v for k, v in transformed.state_dict().items() if "key_norm" in k}
        for key, weight in keys.items():
            weight.uniform_(0.5, 1.5)
            found.after.get_parameter(key).copy_(weight)
    wanted = call(transformed, inputs)
    assert relative_error(call(found.after, inputs), wanted) <= 1e-10
    assert relative_error(wanted, original) > 1e-3
    # The model is what it was, and the graphs hold its own parameters.
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in state.items())
    own = {id(p) for p in model.parameters()}
    assert all(id(p) in own for p in found.before.parameters())
    assert found.report == ac.report(transformed)


def test_one_rewriting_per_owner_where_tracing_breaks() -> None:
    model = built(Broken)
    (found,) = rewritings(model, X, CONFIG)
    assert found.path == "encoder"
    transformed = ac.transform(copy.deepcopy(model), X, CONFIG)
    randomize_queries(ac.pseudo_queries(transformed))
    with torch.no_grad():
        for name, query in ac.pseudo_queries(transformed).items():
            found.queries[name].copy_(query)
    entering = model.embed(X)
    assert relative_error(found.after(entering)[0], transformed.encoder(entering)) <= 1e-10
    assert {key for key in found.after.state_dict() if "attnres" in key} == {
        key for key in transformed.state_dict() if "attnres" in key
    }


def test_a_program_is_taken_as_the_graph_that_it_is() -> None:
    model = built(models.Model)
    program = torch.export.export(model, (X,), strict=False).module(check_guards=False)
    (found,) = rewritings(program, X, CONFIG)
    assert relative_error(found.before(X), model(X)) <= 1e-12
    assert relative_error(found.after(X), model(X)) <= 1e-12
    rewritten, report = ac.rewrite_graph(program, None, CONFIG)
    assert found.report == report
    randomize_queries(rewritten.attnres.queries())
    with torch.no_grad():
        for name, query in rewritten.attnres.queries().items():
            found.queries[name].copy_(query)
    assert relative_error(found.after(X), rewritten(X)) <= 1e-12
    assert [each.site for each in found.sites] == list(report.streams[0].sites)


def test_a_second_call_with_other_sizes_has_plain_sizes() -> None:
    for length in (3, 4):
        (found,) = rewritings(built(models.Model), models.example(2, length).double(), CONFIG)
        (place,) = [node for node in found.before.graph.nodes if node.op == "placeholder"]
        assert place.name == "x_input"
        assert tuple(place.meta["example_value"].shape) == (2, length, 5)


class Inputs(models.Model):
    """Takes inputs in all ways, and uses them in another order."""

    def forward(self, first: Tensor, batch: dict[str, Tensor], *rest: Tensor, shift: Tensor) -> Tensor:
        x = self.embed(rest[0] + shift)
        for layer in self.encoder.layers:
            x = layer(x)
        return self.head(self.encoder.norm(x)) * batch["scale"] + first


def test_inputs_in_the_order_and_under_the_names_of_the_arguments() -> None:
    model = built(Inputs)
    first, scale, shift = (torch.tensor(value).double() for value in (3.0, 5.0, 7.0))
    given = ac.Inputs((first, {"scale": scale}, X), {"shift": shift})
    (found,) = rewritings(model, given, CONFIG)
    places = [node.name for node in found.after.graph.nodes if node.op == "placeholder"]
    assert places == ["first", "batch_scale", "rest_0", "shift"]
    wanted = model(*given.args, **given.kwargs)
    for graph in (found.before, found.after):
        assert relative_error(graph(first, scale, X, shift), wanted) <= 1e-12


def test_what_cannot_be_converted() -> None:
    with pytest.raises(ac.NoStreamError):
        rewritings(built(models.Model), X, ac.AttnResConfig(min_sublayers=30))
    transformed = ac.transform(built(models.Model), X, CONFIG)
    with pytest.raises(ac.AlreadyTransformedError):
        rewritings(transformed, X, CONFIG)


# ------------------------------------------------------------------ sites, lines and code


def rewriting() -> Rewriting:
    (found,) = rewritings(built(models.Model), X, CONFIG)
    return found


def test_nodes_of_the_sites() -> None:
    found = rewriting()
    (stream,) = found.report.streams
    assert tuple(each.site for each in found.sites) == stream.sites
    before = {node.name: node for node in found.before.graph.nodes}
    after = {node.name: node for node in found.after.graph.nodes}
    for each in found.sites:
        assert each.state in before
        assert each.adds == (stream.sublayers[each.site.index - 1].adds if each.site.index else ())
        assert not set(each.adds) & set(after)
        assert each.where == (stream.sublayers[each.site.index - 1].where if each.site.index else "")
        # Every reader reads the state before, and what stands for it after.
        for reader in each.readers:
            assert before[each.state] in before[reader].all_input_nodes
            assert after[each.mixed] in after[reader].all_input_nodes
        if each.site.query:
            assert after[each.mixed].target is torch.ops.attnres.mix.default
            assert len(after[each.mixed].args[1]) == len(each.site.sources)


def test_differences_of_a_toy_by_hand() -> None:
    """Three blocks of two sublayers; block 1 is the first three of them, block 2 the rest."""
    found = site_diffs(rewriting())
    assert [each.site for each in found] == [
        *(f"encoder.layers.{layer}.norm{n}" for layer in range(3) for n in (1, 2)),
        "encoder.norm",
    ]
    code = {each.site: ([x.code for x in each.before], [x.code for x in each.after]) for each in found}
    first = found[0]
    assert first.before == first.after
    assert first.sources == ("root",)
    assert [line.code for line in first.before] == [
        "linear = linear(x_input, embed.weight, embed.bias)",
        "layer_norm = layer_norm(linear, (12,), encoder.layers.0.norm1.weight, encoder.layers.0.norm1.bias, 1e-05)",
    ]
    norm = "(12,), encoder.layers.0.norm2.weight, encoder.layers.0.norm2.bias, 1e-05)"
    assert code["encoder.layers.0.norm2"] == (
        ["x = linear + cumsum", f"layer_norm_1 = layer_norm(x, {norm}"],
        [
            "mix_layers_0_norm2 = mix(encoder.attnres.layers_0_norm2; root=linear, partial_1=cumsum)",
            f"layer_norm_1 = layer_norm(mix_layers_0_norm2, {norm}",
        ],
    )
    before, after = code["encoder.layers.1.norm2"]
    assert before[0] == "x_2 = x_1 + cumsum_1"
    assert after[:2] == [
        "block_1 = partial_1 + cumsum_1",
        "mix_layers_1_norm2 = mix(encoder.attnres.layers_1_norm2; root=linear, block_1)",
    ]
    before, after = code["encoder.layers.2.norm1"]
    assert before[0] == "x_3 = x_2 + input_8"
    assert (
        after[0] == "mix_layers_2_norm1 = mix(encoder.attnres.layers_2_norm1; root=linear, block_1, partial_2=input_8)"
    )
    norm = "(12,), encoder.norm.weight, encoder.norm.bias, 1e-05)"
    assert code["encoder.norm"] == (
        ["x_5 = x_4 + input_12", f"x_6 = layer_norm(x_5, {norm}"],
        [
            "block_2 = partial_2 + input_12",
            "mix_norm = mix(encoder.attnres.norm; root=linear, block_1, block_2)",
            f"x_6 = layer_norm(mix_norm, {norm}",
        ],
    )
    assert all(line.where.startswith(models.__file__) for each in found[1:] for line in each.before)
    assert found[1].to_dict()["before"][0] == {
        "name": "x",
        "code": "x = linear + cumsum",
        "where": found[1].where,
    }


def test_every_statement_is_one_line() -> None:
    (found,) = rewritings(llama(), IDS, CONFIG)
    for node in found.after.graph.nodes:
        assert "\n" not in statement(node)
        assert node.op in ("output",) or statement(node).startswith(f"{node.name} = ")


def test_source_text_runs() -> None:
    """The code for reading is the code that computes."""
    found = rewriting()
    text = source_text([found], "toy\nimport os")
    space: dict[str, Any] = {}
    exec(compile(text, "graph.py", "exec"), space)
    randomize_queries(found.queries)
    assert torch.equal(space["Rewritten"].forward(found.after, X)[0], found.after(X)[0])
    assert "import os" not in text.splitlines()
    assert "x = x + self.mixer(self.norm1(x)).cumsum(1)" in text
    assert "# float64[2, 3, 12]" in text
