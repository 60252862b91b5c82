"""``attnres transform``: every file is there, right, and never half written or lost."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from safetensors.torch import load_model
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import attnres_compile as ac
from attnres_compile import demo, exporting, writing
from attnres_compile.cli.main import app
from attnres_compile.errors import AttnResError
from attnres_compile.views import html

ALL = {"report.json", "report.html", "config.json", "graph.py", "depth.dot", "depth.graphml", "weights.safetensors"}


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    result = CliRunner(env={"COLUMNS": "80", **environment}).invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_the_printed_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"Example: attnres (.*?) *$", run("transform", "--help")[1], re.MULTILINE)
    code, out, err = run(*example.split())
    assert code == 0, err
    folder = tmp_path / "converted"
    assert names(folder) == ALL | {"model.pt2"}
    assert "8 files in converted" in out
    # Whoever may read one file may read them all.
    assert len({entry.stat().st_mode for entry in folder.iterdir()}) == 1
    inputs, model = demo.example_inputs(), demo.model()
    report = ac.TransformReport.from_dict(json.loads((folder / "report.json").read_text()))
    config = ac.AttnResConfig.from_dict(json.loads((folder / "config.json").read_text()))
    assert config == ac.AttnResConfig(lowering="eager")
    assert report == ac.explain(model, inputs, config)
    # The weights belong into a model transformed in the same way.
    fresh = ac.transform(demo.GPT(), inputs, config)
    assert load_model(fresh, folder / "weights.safetensors") == (set(), [])
    assert torch.equal(fresh(inputs), ac.transform(model, inputs, config)(inputs))
    program = torch.export.load(folder / "model.pt2")
    assert program.state_dict.keys() == fresh.state_dict().keys()
    error = (program.module()(inputs) - fresh(inputs)).abs().max()
    assert error <= 1e-5 * fresh(inputs).abs().max()
    text = (folder / "graph.py").read_text()
    compile(text, "graph.py", "exec")
    assert text.count("torch.ops.attnres.mix.default(") == 8
    assert "demo.py" in text
    graph = nx.read_graphml(folder / "depth.graphml")
    kinds = [data["kind"] for _, data in graph.nodes(data=True)]
    assert (kinds.count("sublayer"), kinds.count("site")) == (8, 9)
    assert (folder / "depth.dot").read_text().startswith("digraph")
    assert "blocks.3.norm2" in (folder / "report.html").read_text()


def test_json(script: str, tmp_path: Path) -> None:
    code, out, _ = run("transform", script, "--out", "deep/er", "--json", "--num-blocks", "2")
    found = json.loads(out)
    assert code == 0
    assert found["folder"] == "deep/er"
    assert {file["name"]: file["bytes"] for file in found["files"]} == {
        entry.name: entry.stat().st_size for entry in (tmp_path / "deep/er").iterdir()
    }
    assert {file["name"] for file in found["files"]} == ALL
    assert ac.TransformReport.from_dict(found["report"]).parameters_added == 48
    assert found["notes"] == []


def test_nothing_is_overwritten_unless_asked(script: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "graph.py").write_text("precious")
    (folder / "mine.txt").write_text("mine")
    code, _, err = run("transform", script, "--out", "out")
    assert code == 2
    assert "out holds graph.py already" in err and "--force" in err
    assert names(folder) == {"graph.py", "mine.txt"}
    assert (folder / "graph.py").read_text() == "precious"
    code, out, _ = run("transform", script, "--out", "out", "--force", "-q")
    assert code == 0
    assert out == "script.py:model: 7 files in out\n"
    assert names(folder) == ALL | {"mine.txt"}
    assert (folder / "graph.py").read_text() != "precious"
    (folder / "model.pt2").write_text("old")
    code, _, err = run("transform", script, "--out", "out", "--force")
    assert code == 0
    assert "model.pt2 is of an earlier call" in err
    assert (folder / "model.pt2").read_text() == "old"


def test_what_is_refused_before_any_work(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("a file")
    (tmp_path / "out/graph.py").mkdir(parents=True)
    loaded: list[str] = []
    monkeypatch.setattr("attnres_compile.cli.commands.transform.load_target", lambda *a, **k: loaded.append("loaded"))
    for folder, text in (
        ("file", "file is a file, not a folder"),
        ("file/below", "file/below cannot be written: Not a directory"),
        ("/proc/nowhere/out", "/proc/nowhere/out cannot be written"),
        ("out", "graph.py is a folder"),
    ):
        code, _, err = run("transform", script, "--out", folder, "--force")
        assert code == 2
        assert text in err
        assert "Traceback" not in err
    code, _, err = run("transform", script, "--out", "new", "--dynamic")
    assert code == 2 and "--export" in err
    assert not loaded
    assert names(tmp_path) == {"file", "out", "script.py"}


def test_a_folder_without_the_right_to_write(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(prefix: str, dir: Path) -> str:
        raise PermissionError(13, "Permission denied", f"{dir}/{prefix}")

    monkeypatch.setattr(tempfile, "mkdtemp", locked)
    code, _, err = run("transform", script, "--out", "locked")
    assert code == 2
    assert "locked cannot be written: Permission denied" in err
    assert names(tmp_path) - {"__pycache__"} == {"script.py"}


def test_a_model_that_cannot_be_converted(script: str, tmp_path: Path) -> None:
    code, out, err = run("transform", f"{script}:NoStream", "--out", "a/b")
    assert code == 3
    assert "no residual stream can be converted" in out
    assert "error: no residual stream was found: the traced graph adds no two tensors" in err
    assert names(tmp_path) - {"__pycache__"} == {"script.py"}
    code, out, _ = run("transform", script, "--out", "a/b", "--min-sublayers", "9", "--json")
    assert code == 3
    assert len(json.loads(out)["report"]["rejections"]) == 6


def test_a_failure_on_the_way_leaves_what_was_there(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("transform", script, "--out", "out", "-q")[0] == 0
    before = {entry.name: entry.read_bytes() for entry in (tmp_path / "out").iterdir()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(html, "write_page", full)
    code, _, err = run("transform", script, "--out", "out", "--force", "--num-blocks", "2")
    assert code == 2
    assert "out cannot be written: No space left on device" in err
    assert {entry.name: entry.read_bytes() for entry in (tmp_path / "out").iterdir()} == before

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(html, "write_page", interrupted)
    CliRunner().invoke(app, ["transform", script, "--out", "fresh/folder"])
    assert {entry.name: entry.read_bytes() for entry in (tmp_path / "out").iterdir()} == before
    assert not (tmp_path / "fresh").exists()


def test_an_error_of_the_model_is_no_error_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="of the model"), writing.staged(tmp_path / "out", ["a"]):
        raise OSError(2, "of the model", "/somewhere/else")
    assert names(tmp_path) == set()


def test_files_that_come_in_the_meantime_stay(tmp_path: Path) -> None:
    def write() -> None:
        with writing.staged(tmp_path, ["a"]) as staging:
            staging.text("a", "ours")
            (tmp_path / "a").write_text("theirs")

    with pytest.raises(AttnResError, match="holds a already"):
        write()
    assert (tmp_path / "a").read_text() == "theirs"
    assert names(tmp_path) == {"a"}


def test_tied_weights_are_stored_once_and_load_again(tmp_path: Path) -> None:
    def llama(seed: int) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 24}
        config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, tie_word_embeddings=True)
        return LlamaForCausalLM(config).eval()

    inputs = {"input_ids": torch.arange(6).view(1, 6)}
    config = ac.AttnResConfig(num_blocks=2, lowering="eager")
    first, second = (ac.transform(llama(seed), inputs, config) for seed in (0, 1))
    with torch.no_grad():
        for query in ac.pseudo_queries(first).values():
            query.normal_()
    writing.save_weights(first, tmp_path / "weights.safetensors")
    size = sum(parameter.numel() * 4 for parameter in first.parameters())
    assert size <= (tmp_path / "weights.safetensors").stat().st_size <= size + 4096
    assert load_model(second, tmp_path / "weights.safetensors") == (set(), [])
    with torch.no_grad():
        assert torch.equal(second(**inputs).logits, first(**inputs).logits)
    assert second.lm_head.weight is second.model.embed_tokens.weight


def test_weights_that_cannot_be_written(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(AttnResError, match="meta device"):
        writing.save_weights(model, tmp_path / "weights.safetensors")


def test_a_program_that_does_not_load_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = exporting.export(demo.model(), demo.example_inputs(), ac.AttnResConfig(num_blocks=2))

    def unreadable(*_: Any) -> None:
        raise RuntimeError("torn\nand more")

    monkeypatch.setattr(torch.export, "load", unreadable)
    with pytest.raises(AttnResError, match="read back the exported program: RuntimeError: torn"):
        writing.save_program(program, tmp_path / "model.pt2")


def test_hugging_face_configurations_get_random_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ("num_hidden_layers=2", "hidden_size=16", "intermediate_size=24", "vocab_size=40")
    sets = [word for size in (*sizes, "num_attention_heads=2", "num_key_value_heads=2") for word in ("--set", size)]
    code, out, err = run("transform", "hf:llama", *sets, "--out", "out", "--export", "--dynamic", "--json")
    assert code == 0, err
    assert json.loads(out)["notes"] == ["the weights are random: hf:llama has none"]
    program = torch.export.load(tmp_path / "out/model.pt2")
    assert "model.attnres.layers_1_input_layernorm" in program.state_dict
    (size, *_) = program.range_constraints.values()
    assert size.upper > 1000


def test_a_program_as_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inputs = demo.example_inputs().clone()
    torch.export.save(torch.export.export(demo.model().eval(), (inputs,), strict=False), "given.pt2")
    code, _, err = run("transform", "given.pt2", "--num-blocks", "2", "--two-phase", "on", "--out", "out", "--export")
    assert code == 0, err
    program = torch.export.load("out/model.pt2")
    wanted = demo.model()(inputs)
    assert (program.module()(inputs) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert "attnres.blocks_1_norm2" in program.state_dict
