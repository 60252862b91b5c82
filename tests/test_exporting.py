"""Exported converted models: plain ATen programs with the transformed model's numbers and keys."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import attnres_compile as ac
from attnres_compile.exporting import export
from tests import models
from tests.helpers import (
    gradient_error,
    outputs_and_gradients,
    random_state,
    randomize,
    randomize_queries,
    relative_error,
)

CONFIG = ac.AttnResConfig(num_blocks=2, lowering="eager")
X = models.example().double()
IDS = torch.arange(10).view(2, 5)


def toy(**options: Any) -> nn.Module:
    return randomize(models.Model(**options).double()).eval()


def llama(use_cache: bool = True) -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, use_cache=use_cache, tie_word_embeddings=True)
    return randomize(LlamaForCausalLM(config).double()).eval()


class Image(nn.Module):
    """Features are the second of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.branches = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for branch in self.branches:
            x = x + branch(x).relu().mul(0.5)
        return x


class Returning(models.Model):
    """Returns the stream itself too: the program's signature names a node that goes away."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(x)
        for layer in self.encoder.layers:
            x = layer(x)
        return x, self.head(self.encoder.norm(x))


def transformed(model: nn.Module, inputs: Any, config: ac.AttnResConfig = CONFIG) -> nn.Module:
    result = ac.transform(copy.deepcopy(model), inputs, config)
    randomize_queries(ac.pseudo_queries(result))
    return result


def operators(program: torch.export.ExportedProgram) -> set[str]:
    return {str(node.target).partition(".")[0] for node in program.graph.nodes if node.op == "call_function"}


KEY_NORMS = ac.AttnResConfig(num_blocks=2, key_norm_weight=True, value="normalized", lowering="eager")
CASES: dict[str, tuple[Any, Any, ac.AttnResConfig]] = {
    "toy": (toy, X, CONFIG),
    "key norms, normalized": (toy, X, KEY_NORMS),
    "a query per reader, mean": (toy, X, ac.AttnResConfig(queries="reader", gain="mean", lowering="eager")),
    "two phases, fused": (toy, X, ac.AttnResConfig(num_blocks=2, two_phase="on", fuse="on", lowering="eager")),
    "features not last": (
        lambda: randomize(Image().double()),
        torch.randn(2, 3, 4, 4, dtype=torch.float64),
        CONFIG,
    ),
    "channels last": (
        lambda: randomize(Image().double()).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 4, dtype=torch.float64).to(memory_format=torch.channels_last),
        CONFIG,
    ),
    "returns the stream": (lambda: randomize(Returning().double()).eval(), X, CONFIG),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_keys_and_gradients(case: str) -> None:
    make, inputs, config = CASES[case]
    model = transformed(make(), inputs, config)
    program = export(model, inputs)
    assert operators(program) <= {"aten", "<built-in function getitem>"}
    assert program.state_dict.keys() == model.state_dict().keys()
    parameters = dict(model.named_parameters())
    wanted = outputs_and_gradients(model, parameters, [inputs])
    module = program.module()
    mine = dict(module.named_parameters())
    found = outputs_and_gradients(module, mine, [inputs])
    assert relative_error(found.outputs, wanted.outputs) <= 1e-12
    assert gradient_error(found.gradients, wanted.gradients) <= 1e-10
    queries = [name for name in mine if "attnres" in name]
    assert len(queries) >= len(ac.pseudo_queries(model))
    assert all(float(found.gradients[name].abs().max()) > 0.0 for name in queries)


def test_training_mode_and_further_decomposition() -> None:
    """Dropout draws what it draws in the model; opened up into core operators the program stays what it is."""
    model = transformed(randomize(models.Model(dropout=0.3).double()).train(), X)
    module = export(model, X).module()
    with random_state(3):
        wanted = model(X)
    with random_state(3):
        assert relative_error(module(X), wanted) <= 1e-12
    half = transformed(toy().to(torch.bfloat16), X.bfloat16())
    core = export(half, X.bfloat16()).run_decompositions()
    assert relative_error(core.module()(X.bfloat16()), half(X.bfloat16())) <= 0.02


class Checkpointed(models.Model):
    """The layers are checkpointed."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.encoder.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return self.head(self.encoder.norm(x))


def test_checkpointed_layers() -> None:
    model = transformed(randomize(Checkpointed().double()).eval(), X)
    assert relative_error(export(model, X).module()(X), model(X)) <= 1e-12


def test_an_untouched_model_has_zero_queries_and_stays_untouched() -> None:
    model = toy()
    keys = list(model.state_dict())
    program = export(model, X, CONFIG)
    assert list(model.state_dict()) == keys
    assert "forward" not in vars(model.encoder)
    assert relative_error(program.module()(X), model(X)) <= 1e-12
    queries = {key: value for key, value in program.state_dict.items() if "attnres" in key}
    assert queries.keys() == {
        f"encoder.attnres.{key}" for key in ac.transform(toy(), X, CONFIG).encoder.attnres.state_dict()
    }
    assert all(isinstance(query, nn.Parameter) and not query.any() for query in queries.values())
    # As with torch.export, the program's weights are the model's.
    assert program.state_dict["head.weight"] is model.head.weight


def test_a_transformed_model_stays_transformed() -> None:
    model = transformed(toy(), X)
    before = model(X)
    export(model, X)
    assert torch.equal(model(X), before)
    assert len(ac.pseudo_queries(model)) == models.SITES
    with pytest.raises(ac.ConfigError):
        export(model, X, ac.AttnResConfig(num_blocks=3))
    export(model, X, ac.AttnResConfig(num_blocks=2, lowering="inductor"))


@pytest.mark.parametrize("where", ["toy", "llama"])
def test_dynamic_sizes(where: str) -> None:
    if where == "toy":
        model: nn.Module = transformed(toy(), X)
        inputs: Any = {"x": X}
        others = [{"x": torch.randn(batch, length, 5, dtype=torch.float64)} for batch, length in ((3, 7), (5, 2))]
    else:
        model, inputs = transformed(llama(), {"input_ids": IDS}), {"input_ids": IDS}
        others = [{"input_ids": torch.randint(0, 32, (batch, length))} for batch, length in ((3, 7), (4, 2))]
    program = export(model, inputs, dynamic=True)
    for other in (inputs, *others):
        found = program.module()(**other)
        wanted = model(**other)
        assert relative_error(getattr(found, "logits", found), getattr(wanted, "logits", wanted)) <= 1e-12
    fixed = export(model, inputs).module()
    with pytest.raises((RuntimeError, AssertionError)):
        fixed(**others[0])


def test_a_key_value_cache_is_left_out_of_the_program_alone() -> None:
    model = llama()
    program = export(model, {"input_ids": IDS}, CONFIG)
    assert relative_error(program.module()(input_ids=IDS).logits, model(IDS).logits) <= 1e-12
    assert model.config.use_cache is True
    assert {key for key in program.state_dict if "attnres" in key} == {
        f"model.attnres.{name}"
        for name in (
            "layers_0_post_attention_layernorm",
            "layers_1_input_layernorm",
            "layers_1_post_attention_layernorm",
            "norm",
        )
    }


def test_unflattened_layers_get_queries_and_sources() -> None:
    """A site stands with its reader, so that the program comes apart into layers."""
    model = transformed(toy(), X)
    module = torch.export.unflatten(export(model, X))
    assert relative_error(module(X), model(X)) <= 1e-12
    assert {key for key in module.state_dict() if "attnres" in key} == {
        key for key in model.state_dict() if "attnres" in key
    }


def test_programs_and_graphs() -> None:
    model = toy()
    program = torch.export.export(model, (X,), strict=False)
    text = str(program.graph)
    found = export(program, None, CONFIG)
    assert str(program.graph) == text
    assert relative_error(found.module()(X), model(X)) <= 1e-12
    rewritten, _ = ac.rewrite_graph(program.module(check_guards=False), None, CONFIG)
    randomize_queries(rewritten.attnres.queries())
    again = export(rewritten, X)
    assert operators(again) <= {"aten", "<built-in function getitem>"}
    assert relative_error(again.module()(X), rewritten(X)) <= 1e-12
    # The same keys either way.
    untouched = export(program.module(check_guards=False), X, CONFIG)
    for each in (again, untouched):
        assert {key for key in each.state_dict if "attnres" in key} == {
            key for key in found.state_dict if "attnres" in key
        }
    with torch.no_grad():
        for key, value in found.state_dict.items():
            if "attnres" in key:
                value.copy_(again.state_dict[key])
    assert relative_error(found.module()(X), rewritten(X)) <= 1e-12


class Unexportable(models.Model):
    """dynamo keeps the branch on a value out of the graph by a constant; export would too, but this one raises."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
            raise ValueError("not here\nat all")
        return super().forward(x, scale)


def test_errors() -> None:
    with pytest.raises(ac.NoStreamError):
        export(toy(), X, ac.AttnResConfig(min_sublayers=30))
    with pytest.raises(ac.InputsError):
        export(toy(), 3, CONFIG)
    with pytest.raises(ac.CaptureError, match="ValueError: not here"):
        export(randomize(Unexportable().double()), X, CONFIG)
    late = toy()
    torch.compile(late, backend="attnres", options={"num_blocks": 2, "lowering": "eager"})(X)
    with pytest.raises(ac.AttnResError, match="converted while compiling"):
        export(late, X)


ALONE = """
import sys
sys.modules["attnres_compile"] = None  # any import of it fails
import torch
program = torch.export.load(sys.argv[1])
module = program.module()
values = torch.load(sys.argv[2], weights_only=True)
found = module(values["x"])
assert torch.equal(found, values["y"]), (found - values["y"]).abs().max()
found.square().sum().backward()
queries = {name: p for name, p in module.named_parameters() if "attnres" in name}
assert len(queries) == 6 and all(p.grad.abs().max() > 0 for p in queries.values())
with torch.no_grad():
    for p in queries.values():
        p.zero_()
assert (module(values["x"]) - values["plain"]).abs().max() < 1e-12
assert not [name for name in sys.modules if name.startswith("attnres") and sys.modules[name]]
print("alone")
"""


def test_a_saved_program_runs_without_this_package(tmp_path: Path) -> None:
    plain = toy()
    model = transformed(plain, X)
    torch.export.save(export(model, X), tmp_path / "model.pt2")
    torch.save({"x": X, "y": model(X).detach(), "plain": plain(X).detach()}, tmp_path / "values.pt")
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "model.pt2"), str(tmp_path / "values.pt")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "alone\n", done.stderr


def test_example_inputs_do_not_drag_their_storage_along(tmp_path: Path) -> None:
    whole = torch.zeros(100_000, 5, dtype=torch.float64)
    program = export(toy(), whole[:6].view(2, 3, 5), CONFIG)
    torch.export.save(program, tmp_path / "model.pt2")
    assert (tmp_path / "model.pt2").stat().st_size < 1_000_000
