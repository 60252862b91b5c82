"""``attnres weights``: the picture of a target, with and without a checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import attnres_compile as ac
from attnres_compile import demo
from attnres_compile.cli.main import app
from tests.helpers import randomize, randomize_queries

DEMO = ("weights", "attnres_compile.demo", "--num-blocks", "4")


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    result = CliRunner(env={"COLUMNS": "80", **environment}).invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def trained(**options: Any) -> nn.Module:
    """The demo's model, converted, with weights and queries that say something."""
    model = ac.transform(demo.model(), demo.example_inputs(), ac.AttnResConfig(lowering="eager", **options)).eval()
    randomize(model, seed=3)
    randomize_queries(ac.pseudo_queries(model), std=1.0)
    return model


def as_json(*arguments: str) -> dict[str, Any]:
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_the_printed_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = run("weights", "--help", COLUMNS="200")[1].split()
    start = words.index("Example:") + 2
    assert tuple(words[start : start + 4]) == DEMO
    code, out, err = run(*DEMO)
    assert code == 0 and list(tmp_path.iterdir()) == []
    assert out.isascii() and max(map(len, out.splitlines())) <= 80
    assert "read by attention" in out and "read by MLPs" in out and "measured" in out
    assert re.search(r"blocks\.3\.norm1 +\.25 \.25 \.25 \.25 +1\.39 100%", out)
    assert err.strip() == (
        "attnres: all pseudo-queries are zero, so the weights are uniform; --checkpoint loads trained ones"
    )


SAVERS: dict[str, Any] = {
    "weights.safetensors": lambda state, file: save_file({k: v.clone() for k, v in state.items()}, file),
    "plain.pt": torch.save,
    "nanogpt.pt": lambda state, file: torch.save({"model": state, "optimizer": {"state": {}}, "iter_num": 3}, file),
    "lightning.ckpt": lambda state, file: torch.save({"state_dict": {f"net.{k}": v for k, v in state.items()}}, file),
    "compiled.bin": lambda state, file: torch.save({f"_orig_mod.{k}": v for k, v in state.items()}, file),
    "parallel.pth": lambda state, file: torch.save({f"module._orig_mod.{k}": v for k, v in state.items()}, file),
}


@pytest.mark.parametrize("name", SAVERS)
def test_a_checkpoint_gives_the_weights_of_the_model_that_was_saved(tmp_path: Path, name: str) -> None:
    model = trained(num_blocks=4)
    wanted = ac.depth_weights(model, demo.example_inputs())
    file = tmp_path / name
    SAVERS[name](model.state_dict(), file)
    found = as_json(*DEMO, "--checkpoint", str(file))
    assert found["notes"] == []
    (stream,), (mine,) = ac.DepthWeights.from_dict(found).streams, wanted.streams
    assert stream.sites == mine.sites
    assert np.allclose(stream.weights, mine.weights, rtol=0, atol=1e-7, equal_nan=True)
    assert np.nanmax(np.abs(stream.weights - 1 / np.isfinite(stream.weights).sum(1, keepdims=True))) > 0.1


def test_a_few_steps_of_training_move_the_weights(tmp_path: Path) -> None:
    x = demo.example_inputs()
    model = ac.transform(demo.model(), x, ac.AttnResConfig(num_blocks=4, lowering="eager"))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten()).backward()
        optimizer.step()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    found = as_json(*DEMO, "--checkpoint", str(tmp_path / "model.pt"))
    (wanted,) = ac.depth_weights(model.eval(), x).streams
    assert np.allclose(ac.DepthWeights.from_dict(found).streams[0].weights, wanted.weights, atol=1e-7, equal_nan=True)
    assert found["streams"][0]["entropy"] != found["streams"][0]["uniform_entropy"]


def test_a_checkpoint_from_before_the_conversion_is_uniform_and_said_so(tmp_path: Path) -> None:
    torch.save(demo.model().state_dict(), tmp_path / "plain.pt")
    code, _, err = run(*DEMO, "--checkpoint", str(tmp_path / "plain.pt"))
    assert code == 0
    assert "holds no pseudo-queries: it is from before the conversion" in err and "the weights are uniform" in err


def test_what_does_not_match_is_said(tmp_path: Path) -> None:
    state = trained(num_blocks=4).state_dict()
    state["strange.weight"] = torch.ones(2)
    del state["head.weight"]
    torch.save(state, tmp_path / "model.pt")
    notes = as_json(*DEMO, "--checkpoint", str(tmp_path / "model.pt"))["notes"]
    assert [re.sub(r"^\S+ ", "", note) for note in notes] == [
        "lacks 1 tensors, which stay as the model was built: head.weight",
        "holds 1 tensors that the model does not have: strange.weight",
    ]


def test_a_tied_weight_is_not_missed(tmp_path: Path) -> None:
    script = tmp_path / "tied.py"
    script.write_text(
        "from attnres_compile.demo import GPT, example_inputs\n"
        "def model():\n    gpt = GPT()\n    gpt.head.weight = gpt.tokens.weight\n    return gpt\n"
    )
    model = demo.GPT()
    model.head.weight = model.tokens.weight
    ac.transform(model, demo.example_inputs(), ac.AttnResConfig(num_blocks=4, lowering="eager"))
    randomize_queries(ac.pseudo_queries(model))
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "m.safetensors")
    found = as_json("weights", str(script), "--num-blocks", "4", "--checkpoint", str(tmp_path / "m.safetensors"))
    assert found["notes"] == []


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('run')",))


def bad_checkpoints(folder: Path) -> dict[str, tuple[Path, str]]:
    files = {name: folder / f"{name}.pt" for name in ("evil", "empty", "other", "shapes", "layout", "numbers", "text")}
    torch.save(Evil(), files["evil"])
    files["empty"].write_bytes(b"")
    torch.save({"a.weight": torch.ones(2), "b.bias": torch.ones(2)}, files["other"])
    torch.save({**trained(num_blocks=4).state_dict(), "norm.weight": torch.ones(3)}, files["shapes"])
    torch.save(trained(num_blocks=4, key_norm_weight=True).state_dict(), files["layout"])
    torch.save({"step": 3}, files["numbers"])
    torch.save([1], files["text"])
    (folder / "bad.safetensors").write_bytes(b"nothing")
    return {
        "evil": (files["evil"], "could run code when they are loaded"),
        "empty": (files["empty"], "cannot be read"),
        "safetensors": (folder / "bad.safetensors", "cannot be read"),
        "other": (files["other"], "holds none of the"),
        "shapes": (files["shapes"], "norm.weight is [3], not [64]"),
        "layout": (files["layout"], "those of another conversion"),
        "numbers": (files["numbers"], "holds no state_dict: it has step"),
        "text": (files["text"], "holds no state_dict: it has a list"),
        "missing": (folder / "missing.pt", "does not exist"),
        "folder": (folder, "is a folder"),
    }


@pytest.mark.parametrize(
    "case", ["evil", "empty", "safetensors", "other", "shapes", "layout", "numbers", "text", "missing", "folder"]
)
def test_checkpoints_that_cannot_be_used(tmp_path: Path, case: str) -> None:
    file, message = bad_checkpoints(tmp_path)[case]
    code, out, err = run(*DEMO, "--checkpoint", str(file), "--json")
    assert code == 2
    assert message in json.loads(out)["error"]["message"], out
    assert "Traceback" not in err


def test_the_queries_of_another_layout(tmp_path: Path) -> None:
    """A bypass has no query: one block more or less changes which sites have one."""
    model = trained(num_blocks=4, queries="reader")
    state = model.state_dict()
    name = next(key for key in state if key.startswith("attnres."))
    del state[name]
    torch.save(state, tmp_path / "less.pt")
    code, _, err = run(*DEMO, "--checkpoint", str(tmp_path / "less.pt"))
    assert code == 2 and f"lacks {name}" in err and "--num-blocks" in err


def test_pictures_are_written(tmp_path: Path) -> None:
    png, page = tmp_path / "w.png", tmp_path / "w.html"
    code, out, _ = run(*DEMO, "--png", str(png), "--html", str(page), "-q")
    assert code == 0 and len(out.splitlines()) == 1
    assert png.read_bytes().startswith(b"\x89PNG")
    html = page.read_text(encoding="utf-8")
    assert "blocks.3.norm1" in html and '"measured"' in html


def test_folders_that_are_not_there_are_seen_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnres_compile.cli.commands import weights as command

    monkeypatch.setattr(command, "load_target", None)
    for option in ("--png", "--html"):
        code, _, err = run(*DEMO, option, str(tmp_path / "none" / "w"))
        assert code == 2 and "there is no folder" in err


def test_the_model_and_its_mode_stay_and_dropout_is_off(tmp_path: Path) -> None:
    script = tmp_path / "noisy.py"
    script.write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))\n"
        "        self.mix = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(4))\n"
        "    def forward(self, x):\n"
        "        for norm, mix in zip(self.norms, self.mix): x = x + mix(norm(x))\n"
        "        return x\n"
        "def model():\n    torch.manual_seed(0)\n    return Net()\n"
        "example_inputs = torch.arange(48.).view(2, 3, 8).sin()\n"
    )
    first, second = (as_json("weights", str(script), "--full") for _ in range(2))
    assert first == second
    assert first["streams"][0]["sources"] == ["root", "block 1", "block 2", "block 3", "block 4"]


def test_a_model_that_its_script_has_transformed(tmp_path: Path) -> None:
    script = tmp_path / "done.py"
    script.write_text(
        "import torch, attnres_compile as ac\nfrom attnres_compile.demo import model as build, example_inputs\n"
        "model = build()\n"
        "ac.transform(model, example_inputs(), ac.AttnResConfig(num_blocks=2, lowering='eager'))\n"
        "with torch.no_grad():\n"
        "    for query in ac.pseudo_queries(model).values(): query.fill_(0.5)\n"
    )
    found = as_json("weights", str(script))
    assert len(found["streams"][0]["blocks"]) == 2
    assert len(found["notes"]) == 1 and "is transformed already" in found["notes"][0]


def test_an_exported_program(tmp_path: Path) -> None:
    program = torch.export.export(demo.model().eval(), (demo.example_inputs(),))
    torch.export.save(program, tmp_path / "model.pt2")
    found = as_json("weights", str(tmp_path / "model.pt2"), "--num-blocks", "4")
    (stream,) = found["streams"]
    assert stream["tokens"] == 64 and stream["weights"][1][0] == 0.5


def test_a_model_that_cannot_be_converted_shows_the_report(script: str) -> None:
    code, out, err = run("weights", f"{script}:NoStream")
    assert code == 3 and "no residual stream can be converted" in out and err
