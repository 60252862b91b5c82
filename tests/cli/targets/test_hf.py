"""``hf:`` targets: classes, inputs and streams of known architectures, settings, weights, memory, no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.cli.targets import Target, hf_model_types, load_target
from attnres_compile.cli.targets.hf import MetaTarget
from attnres_compile.cli.targets.hf_model import HfModel
from attnres_compile.errors import TargetError

transformers = pytest.importorskip("transformers")

CONFIG = ac.AttnResConfig(num_blocks=2, lowering="eager")

LLAMA = ["hidden_size=48", "intermediate_size=80", "num_attention_heads=4", "num_hidden_layers=3", "vocab_size=97"]


def load(name: str, *settings: str, weights: bool = False, inputs: tuple[str, ...] = ()) -> Target:
    return load_target(f"hf:{name}", inputs, settings, weights=weights)


def fails(name: str, *settings: str, weights: bool = False) -> str:
    with pytest.raises(TargetError) as caught:
        load(name, *settings, weights=weights)
    return str(caught.value)


# --- what is built: sublayers and widths are the architecture's own, written down by hand


@pytest.mark.parametrize(
    ("name", "settings", "kind", "sublayers", "inputs"),
    [
        ("llama", ["num_hidden_layers=3"], "LlamaForCausalLM", [6], {"input_ids": [2, 16]}),
        ("gpt2", ["n_layer=2"], "GPT2LMHeadModel", [4], {"input_ids": [2, 16]}),
        ("gpt2", ["num_hidden_layers=4"], "GPT2LMHeadModel", [8], {"input_ids": [2, 16]}),
        # The encoder adds attention and MLP, the decoder cross-attention as well.
        (
            "t5",
            ["num_layers=2", "num_decoder_layers=3"],
            "T5ForConditionalGeneration",
            [4, 9],
            {"input_ids": [2, 16], "decoder_input_ids": [2, 16]},
        ),
        (
            "whisper",
            ["encoder_layers=2", "decoder_layers=2", "num_mel_bins=16", "max_source_positions=20"],
            "WhisperForConditionalGeneration",
            [4, 6],
            {"input_features": [2, 16, 40], "decoder_input_ids": [2, 16]},
        ),
        (
            "vit",
            ["num_hidden_layers=3", "image_size=32", "num_channels=1"],
            "ViTForImageClassification",
            [6],
            {"pixel_values": [2, 1, 32, 32]},
        ),
        ("bert", ["num_hidden_layers=2"], "BertForMaskedLM", [], {"input_ids": [2, 16]}),
        (
            "clip",
            ["text_config.num_hidden_layers=2", "vision_config.num_hidden_layers=3", "vision_config.image_size=64"],
            "CLIPModel",
            [6, 4],
            {"input_ids": [2, 16], "pixel_values": [2, 3, 64, 64]},
        ),
        (
            "llava",
            ["text_config.num_hidden_layers=2"],
            "LlavaForConditionalGeneration",
            [4],
            {"input_ids": [2, 16]},
        ),
    ],
)
def test_architectures(
    name: str, settings: list[str], kind: str, sublayers: list[int], inputs: dict[str, list[int]]
) -> None:
    found = load(name, *settings)
    assert type(found.model).__name__ == kind
    assert {key: list(value.shape) for key, value in found.inputs.kwargs.items()} == inputs
    assert not found.model.training
    assert all(tensor.is_meta for tensor in [*found.model.parameters(), *found.inputs.kwargs.values()])
    report = found.explain(CONFIG)
    assert [len(stream.sublayers) for stream in report.streams] == sublayers
    assert report.graph_breaks == ()
    assert found.inputs_from == f"the configuration of hf:{name}"


def test_a_giant_takes_no_memory() -> None:
    found = load("llama", "num_hidden_layers=4", "hidden_size=65536", "intermediate_size=262144")
    # Three matrices of the MLP and four of attention per layer; the head is no smaller than this leaves out.
    assert sum(p.numel() for p in found.model.parameters()) > 4 * (3 * 65536 * 262144 + 4 * 65536**2)
    assert all(tensor.is_meta for tensor in [*found.model.parameters(), *found.model.buffers()])
    (stream,) = found.explain(CONFIG).streams
    assert (len(stream.sublayers), stream.feature_dim) == (8, 65536)
    copy = found.converted(CONFIG)
    assert all(query.is_meta and query.shape == (65536,) for query in ac.pseudo_queries(copy).values())


def test_a_model_that_cannot_be_traced_on_meta_needs_no_weights_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: HfModel) -> None:
        raise AssertionError("weights were made")

    monkeypatch.setattr(HfModel, "with_numbers", refuse)
    # Falcon indexes with a list, which torch's fake tensors on the meta device do not take.
    found = load("falcon", "num_hidden_layers=4", "hidden_size=1420", "num_attention_heads=71")
    (stream,) = found.explain(CONFIG).streams
    assert (len(stream.sublayers), stream.feature_dim) == (4, 1420)


class Reads(nn.Module):
    """A stream behind a question that only numbers answer."""

    def __init__(self, reads: bool = True) -> None:
        super().__init__()
        self.reads = reads
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.reads and float(x.sum()) > 1e9:
            raise ValueError("too much")
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_a_model_that_reads_numbers_gets_some() -> None:
    made: list[str] = []

    def target(device: str, kind: str, reads: bool) -> Target:
        made.append(kind)
        return Target("it", Reads(reads).to(device), ac.Inputs((torch.ones(2, 4, device=device),)), "here")

    def broken() -> Target:
        made.append("broken")
        raise RuntimeError("not even this")

    first = target("meta", "meta", True)
    for pretended, kinds in ((lambda: target("meta", "pretended", False), ["pretended"]), (broken, ["broken", "real"])):
        made.clear()
        found = MetaTarget(
            first.name, first.model, first.inputs, "here", pretended, lambda: target("cpu", "real", False)
        )
        assert [len(stream.sublayers) for stream in found.explain(CONFIG).streams] == [4]
        assert made == kinds
        assert found.converted(CONFIG)(torch.ones(2, 4, device="meta" if kinds == ["pretended"] else "cpu")).shape == (
            2,
            4,
        )


def test_inputs_that_do_not_fit_make_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfModel, "with_numbers", lambda self: pytest.fail("weights were made"))
    monkeypatch.setattr(HfModel, "random", lambda self: pytest.fail("it was built once more"))
    found = load("llama", *LLAMA, inputs=("input_ids=f32[2,3]",))
    with pytest.raises(TargetError, match="hf:llama called with its inputs failed: RuntimeError") as caught:
        found.explain(CONFIG)
    assert "The inputs came from --input" in str(caught.value)


# --- inputs


def test_ids_are_below_the_vocabulary_and_no_longer_than_positions() -> None:
    found = load("gpt2", "n_layer=1", "vocab_size=5", "n_positions=7", weights=True)
    ids = found.inputs.kwargs["input_ids"]
    assert ids.shape == (2, 7) and ids.dtype == torch.int64
    assert int(ids.min()) >= 0 and int(ids.max()) < 5 and len(ids.unique()) > 2


def test_input_comes_first() -> None:
    found = load("llama", *LLAMA, inputs=("input_ids=i64[3,4]<97",))
    assert list(found.inputs.kwargs) == ["input_ids"]
    assert found.inputs.kwargs["input_ids"].is_meta and found.inputs_from == "--input"


def test_images_have_the_dtype_of_the_model() -> None:
    found = load("vit", "num_hidden_layers=1", "dtype=bfloat16")
    assert found.inputs.kwargs["pixel_values"].dtype == torch.bfloat16 == next(found.model.parameters()).dtype


def test_no_inputs_are_invented() -> None:
    message = fails("encodec")
    assert "no inputs for EncodecModel, whose forward takes (input_values, " in message
    assert "Give --input for each" in message


# --- settings


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("num_hidden_layers=2", "num_hidden_layers", 2),
        ("num_hidden_layers = 2", "num_hidden_layers", 2),
        ("rms_norm_eps=1e-3", "rms_norm_eps", 1e-3),
        ("hidden_act=gelu", "hidden_act", "gelu"),
        ('hidden_act="gelu"', "hidden_act", "gelu"),
        ("tie_word_embeddings=true", "tie_word_embeddings", True),
        ("tie_word_embeddings=True", "tie_word_embeddings", True),
        ("head_dim=null", "head_dim", 12),
        ("use_cache=true", "use_cache", True),
        ("bos_token_id=3", "use_cache", False),
        ("rope_parameters.rope_theta=5000", "rope_parameters", {"rope_theta": 5000, "rope_type": "default"}),
    ],
)
def test_values(setting: str, name: str, value: Any) -> None:
    config = load("llama", *LLAMA, setting).model.config if "layers" not in setting else load("llama", setting)
    config = getattr(getattr(config, "model", None), "config", config)
    assert getattr(config, name) == value


def test_what_follows_from_a_field_follows_the_setting() -> None:
    config = load("llama", "num_attention_heads=8", "hidden_size=64").model.config
    assert (config.num_key_value_heads, config.head_dim) == (8, 8)


def test_the_class_can_be_set() -> None:
    found = load("llama", *LLAMA, 'architectures=["LlamaModel"]')
    assert type(found.model).__name__ == "LlamaModel"


def test_parts() -> None:
    config = load("llava", "text_config.num_hidden_layers=2", "text_config.hidden_size=64").model.config
    assert (config.text_config.num_hidden_layers, config.text_config.hidden_size) == (2, 64)
    assert config.text_config.model_type == "llama"
    assert config.text_config.use_cache is False
    default = transformers.LlavaConfig()
    assert config.vision_config.to_dict() == default.vision_config.to_dict()


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (["num_hiden_layers=3"], "LlamaConfig has no field 'num_hiden_layers'. Did you mean num_hidden_layers?"),
        (["zzz=3"], "LlamaConfig has no field 'zzz'. It has architectures, attention_bias, "),
        (["num_hidden_layers=x"], "TypeError: Field 'num_hidden_layers' expected int, got str (value: 'x')"),
        (["num_hidden_layers=2.5"], "TypeError: Field 'num_hidden_layers' expected int, got float (value: 2.5)"),
        (["num_attention_heads=7"], "The hidden size (4096) is not a multiple of the number of attention heads (7)"),
        (["hidden_act=none_such"], "transformers cannot build hf:llama: KeyError: 'none_such'"),
        (["vocab_size=-3"], "transformers cannot build hf:llama: RuntimeError: "),
        (["num_hidden_layers"], "--set num_hidden_layers is not NAME=VALUE. As --set num_hidden_layers=4"),
        (["=3"], "--set =3 is not NAME=VALUE"),
        (["a-b=3"], "--set a-b=3 is not NAME=VALUE"),
        (["hidden_size=4", "hidden_size=8"], "--set hidden_size is given twice"),
        (["hidden_size.x=2"], "--set hidden_size.x: hidden_size is 4096, which has no fields"),
        (["rope_parameters.rope_theto=2"], "rope_parameters has no field 'rope_theto'. Did you mean rope_theta?"),
        (
            ["rope_parameters=3", "rope_parameters.rope_theta=2"],
            "rope_parameters and rope_parameters.rope_theta contra",
        ),
        (["model_type=gpt2"], "model_type cannot be set"),
        (["to_dict=3"], "LlamaConfig has no field 'to_dict'"),
    ],
)
def test_wrong_settings(settings: list[str], what: str) -> None:
    assert what in fails("llama", *settings)


def test_unknown_types() -> None:
    message = fails("lama")
    assert "hf:lama is neither a model type of transformers nor a folder. Did you mean hf:llama?" in message
    message = fails("meta-llama/Llama-2-7b-hf")
    assert "nor a folder. Nothing is downloaded: give a model type, as hf:llama, or the folder" in message
    assert "hf: is neither" in fails("")


def test_model_types() -> None:
    types = hf_model_types()
    assert {"llama", "gpt2", "t5", "vit", "whisper"} <= set(types) and types == sorted(types)


# --- weights


def test_random_weights_are_always_the_same_and_leave_the_generator_alone() -> None:
    state = torch.get_rng_state()
    first, second = (load("llama", *LLAMA, weights=True).model for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert pairs and all(a.device.type == "cpu" and torch.equal(a, b) for a, b in pairs)
    assert all(float(a.detach().std()) > 0 for a in first.parameters() if a.ndim == 2)


def test_converted_computes_what_the_model_computes() -> None:
    found = load("llama", *LLAMA, weights=True)
    copy = found.converted(CONFIG)
    assert len(ac.pseudo_queries(copy)) == 6
    with torch.no_grad():
        plain, mixed = found.model(**found.inputs.kwargs).logits, copy(**found.inputs.kwargs).logits
    assert float((plain - mixed).abs().max() / plain.abs().max()) < 1e-5
    with pytest.raises(ac.NotTransformedError):
        ac.report(found.model)


def test_too_large_for_the_memory_is_said_before_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnres_compile.cli.targets import hf_model

    monkeypatch.setattr(hf_model, "_free_memory", lambda: 2**30)
    message = fails("llama", "hidden_size=8192", "intermediate_size=28672", "num_hidden_layers=80", weights=True)
    # 32-bit numbers: 80 layers of 4 * 8192^2 + 3 * 8192 * 28672, twice 32000 * 8192, norms of 161 * 8192.
    gigabytes = 4 * (80 * (4 * 8192**2 + 3 * 8192 * 28672) + 2 * 32000 * 8192 + 161 * 8192) / 2**30
    assert f"hf:llama has {gigabytes:.1f} GiB of weights, and 1.0 GiB of memory are free" in message
    assert "--set num_hidden_layers=2" in message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of a small Llama with known weights, as transformers saves it."""
    made = load("llama", *LLAMA, weights=True).model
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3)
    made.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_a_folder_with_weights(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    found = load(str(folder), weights=True)
    assert type(found.model).__name__ == "LlamaForCausalLM"
    state = found.model.state_dict()
    assert stored and all(torch.equal(state[name], tensor) for name, tensor in stored.items())
    planned = load(str(folder))
    assert all(parameter.is_meta for parameter in planned.model.parameters())
    assert [len(stream.sublayers) for stream in planned.explain(CONFIG).streams] == [6]
    assert load(str(folder / "config.json")).model.config.num_hidden_layers == 3


def test_a_folder_without_weights_and_settings_over_it(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    found = load(str(folder), "num_hidden_layers=2", weights=True)
    assert len(found.model.model.layers) == 2 and found.model.config.hidden_size == 48
    assert float(next(found.model.parameters()).std()) == pytest.approx(0.02, rel=0.1), "fresh weights"


def test_settings_that_change_shapes_do_not_fit_stored_weights(folder: Path) -> None:
    message = fails(str(folder), "intermediate_size=40", weights=True)
    assert "cannot be loaded: " in message and "with --set, no shape may change" in message
    assert load(str(folder), "intermediate_size=40").model.config.intermediate_size == 40


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


def test_pickled_weights_run_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    stored = load_file("model.safetensors")
    os.remove("model.safetensors")
    torch.save({**stored, "bomb": Bomb()}, "pytorch_model.bin")
    assert "cannot be loaded" in fails(".", weights=True)
    assert not os.path.exists("exploded")
    torch.save(stored, "pytorch_model.bin")
    state = load(".", weights=True).model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())
    # Both: what cannot hold code is what is read.
    save_file({name: tensor + 1 for name, tensor in stored.items()}, "model.safetensors", {"format": "pt"})
    torch.save({"bomb": Bomb()}, "pytorch_model.bin")
    state = load(".", weights=True).model.state_dict()
    assert all(torch.equal(state[name], tensor + 1) for name, tensor in stored.items())
    assert not os.path.exists("exploded")


def test_code_in_a_folder_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    stored = json.loads(Path("config.json").read_text())
    stored |= {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}, "architectures": ["M"]}
    Path("evil.py").write_text("import os\nos.mkdir('exploded')\n")
    Path("config.json").write_text(json.dumps(stored))
    assert type(load(".", weights=True).model).__name__ == "LlamaForCausalLM"
    Path("config.json").write_text(json.dumps(stored | {"model_type": "lllama"}))
    message = fails(".")
    assert "names the model type 'lllama', which transformers does not have. Did you mean llama?" in message
    assert "Code that comes with a checkpoint is not run" in message
    assert not os.path.exists("exploded")


def test_folders_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "other.txt").touch()
    message = fails(str(tmp_path))
    assert "has no config.json that can be read: No such file or directory. It holds other.txt" in message
    (tmp_path / "config.json").write_text("{")
    assert "config.json is no JSON: " in fails(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    assert "names the model type ''" in fails(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    assert "Field 'hidden_size' expected int, got str" in fails(str(tmp_path))


# --- the world outside


def test_transformers_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "hf:llama needs the transformers library: " in (message := fails("llama"))
    assert message.endswith("pip install 'transformers>=5.0'")
    assert hf_model_types() == []


def test_no_socket_is_opened(folder: Path) -> None:
    program = """
        import sys
        def watch(event, arguments):
            if event.startswith("socket."):
                print("SOCKET", event, arguments)
        sys.addaudithook(watch)
        from attnres_compile.cli.targets import load_target
        from attnres_compile.errors import TargetError
        small = ["num_hidden_layers=1", "hidden_size=32", "intermediate_size=32", "num_attention_heads=2"]
        load_target("hf:llama", (), small)
        load_target("hf:" + sys.argv[1], (), (), weights=True)
        try:
            load_target("hf:gpt2-community/none")
        except TargetError:
            print("done")
        import socket
        socket.socket().close()
    """
    environment = {key: value for key, value in os.environ.items() if "OFFLINE" not in key}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    # The socket at the end shows that the watch sees one.
    lines = done.stdout.splitlines()
    assert lines[0] == "done" and len(lines) == 2 and lines[1].startswith("SOCKET socket.__new__"), done.stdout
    assert done.stderr == "", "transformers' advice, bars and logs are not the user's"
