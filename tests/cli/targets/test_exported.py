"""Programs of ``torch.export.save``: the same report and numbers as the module, and nothing in the file that runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attnres_compile as ac
from attnres_compile.cli.targets import Target, load_target
from attnres_compile.errors import NoStreamError, RejectedStreamError, TargetError
from tests.helpers import randomize

CONFIG = ac.AttnResConfig(num_blocks=2, lowering="eager")


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mixer = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 16), nn.GELU(), nn.Linear(16, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, depth: int = 3, dim: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 20)
        self.register_buffer("shift", torch.randn(dim))

    def forward(self, ids: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x) * scale + self.shift)}


IDS = torch.arange(10).reshape(2, 5)
SCALE = torch.tensor(1.5)


@pytest.fixture
def net() -> nn.Module:
    return randomize(Net()).eval()


@pytest.fixture
def saved(net: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    dynamic = {"ids": {1: Dim.DYNAMIC}, "scale": None}
    torch.export.save(torch.export.export(net, (IDS,), {"scale": SCALE}, dynamic_shapes=dynamic), "net.pt2")
    return "net.pt2"


def fails(path: str, *specs: str) -> str:
    with pytest.raises(TargetError) as caught:
        load_target(path, specs)
    return str(caught.value)


def seen(report: ac.TransformReport) -> list[Any]:
    """What a report says that does not hang on the names of graph nodes."""
    return [
        (
            [(each.module, each.where) for each in stream.sublayers],
            stream.blocks,
            [(site.name, site.readers, site.sources, site.query) for site in stream.sites],
            stream.feature_dim,
        )
        for stream in report.streams
    ]


# --- the same as the module


def test_the_report_is_that_of_the_module(net: nn.Module, saved: str) -> None:
    found = load_target(saved)
    assert found.name == "net.pt2" and found.inputs_from == "the program net.pt2"
    assert torch.equal(found.inputs.args[0], IDS) and torch.equal(found.inputs.kwargs["scale"], SCALE)
    report = found.explain(CONFIG)
    assert seen(report) == seen(ac.explain(net, ac.Inputs((IDS,), {"scale": SCALE}), CONFIG))
    (stream,) = report.streams
    assert len(stream.sublayers) == 6
    assert stream.sublayers[0].module == "blocks.0" and stream.sublayers[0].where.startswith(__file__)
    assert report.parameters_added == 6 * 12


@pytest.mark.parametrize("two_phase", ["auto", "on"])
def test_the_numbers_are_those_of_the_module(net: nn.Module, saved: str, two_phase: str) -> None:
    found = load_target(saved)
    copy = found.converted(ac.AttnResConfig(num_blocks=2, lowering="eager", two_phase=two_phase))
    queries = ac.pseudo_queries(copy)
    assert list(queries) == list(ac.pseudo_queries(ac.transform(Net(), found.inputs, CONFIG)))
    assert all(not query.any() for query in queries.values())
    assert {id(query) for query in queries.values()} <= {id(parameter) for parameter in copy.parameters()}
    for ids in (IDS, torch.arange(14).reshape(2, 7)):
        plain = net(ids, scale=SCALE)["logits"]
        for module in (found.model, copy):
            mixed = module(ids, scale=SCALE)["logits"]
            assert float(((plain - mixed).abs().max() / plain.abs().max()).detach()) < 1e-5


def test_queries_that_moved_do_what_they_do_in_the_module(net: nn.Module, saved: str) -> None:
    found = load_target(saved)
    copies = found.converted(CONFIG), ac.transform(net, found.inputs, CONFIG)
    for copy in copies:
        torch.manual_seed(5)
        with torch.no_grad():
            for query in ac.pseudo_queries(copy).values():
                query.normal_()
    first, second = (copy(IDS, scale=SCALE)["logits"] for copy in copies)
    assert float((first - found.model(IDS, scale=SCALE)["logits"]).detach().abs().max()) > 0.1
    assert float(((first - second).abs().max() / second.abs().max()).detach()) < 1e-5
    first.square().sum().backward()
    assert all(query.grad is not None and query.grad.any() for query in ac.pseudo_queries(copies[0]).values())


def test_the_copy_shares_nothing_with_the_program(saved: str) -> None:
    found = load_target(saved)
    before = found.model(IDS, scale=SCALE)["logits"]
    copy = found.converted(CONFIG)
    with torch.no_grad():
        for tensor in [*copy.parameters(), *copy.buffers()]:
            tensor.fill_(0.3)
    assert torch.equal(found.model(IDS, scale=SCALE)["logits"], before)
    with pytest.raises(ac.NotTransformedError):
        ac.pseudo_queries(found.model)
    assert not found.model.train(False).training, "modes can be asked for, as of any module"


def test_a_model_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = ["hidden_size=48", "intermediate_size=80", "num_attention_heads=4", "num_hidden_layers=2", "vocab_size=97"]
    origin = load_target("hf:llama", (), sizes, weights=True)
    path = str(tmp_path / "llama.pt2")
    torch.export.save(torch.export.export(origin.model, (), origin.inputs.kwargs, strict=False), path)
    found = load_target(path)
    report = found.explain(CONFIG)
    assert seen(report) == seen(origin.explain(CONFIG))
    assert [len(stream.sublayers) for stream in report.streams] == [4]
    plain, mixed = origin.model(**origin.inputs.kwargs).logits, found.converted(CONFIG)(**origin.inputs.kwargs)
    logits = mixed["logits"] if isinstance(mixed, dict) else mixed.logits
    assert float(((plain - logits).abs().max() / plain.abs().max()).detach()) < 1e-5


# --- inputs and streams


def test_input_is_tried_at_once(saved: str) -> None:
    found = load_target(saved, ["i64[2,8]<20", "scale=f32[]"])
    assert found.inputs.args[0].shape == (2, 8) and found.inputs_from == "--input"
    assert len(found.explain(CONFIG).streams) == 1
    message = fails(saved, "i64[3,8]<20", "scale=f32[]")
    assert "net.pt2 called with --input failed: " in message and "shape[0] to be equal to 2, but got 3" in message
    assert "net.pt2 called with --input failed: " in fails(saved, "i64[2,8]<20")


def test_a_program_without_inputs(net: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = torch.export.export(net, (IDS,), {"scale": SCALE})
    program.example_inputs = None
    torch.export.save(program, "bare.pt2")
    assert "bare.pt2 was saved without inputs. Give --input for each" in fails("bare.pt2")
    assert load_target("bare.pt2", ["i64[2,5]", "scale=f32[]"]).inputs.args[0].shape == (2, 5)


def test_a_program_without_a_stream(tmp_path: Path) -> None:
    path = str(tmp_path / "linear.pt2")
    torch.export.save(torch.export.export(nn.Linear(3, 3), (torch.ones(2, 3),)), path)
    found = load_target(path)
    assert found.explain(CONFIG).streams == ()
    with pytest.raises(NoStreamError):
        found.converted(CONFIG)


def test_strict_is_for_conversion(tmp_path: Path) -> None:
    class Mixed(Net):
        def forward(self, ids: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
            x = super().forward(ids, scale=scale)["logits"][..., :12]
            for block in self.blocks:
                x = self.norm(x + block.mixer(x))
            return {"logits": x}

    path = str(tmp_path / "mixed.pt2")
    torch.export.save(torch.export.export(Mixed(), (IDS,), {"scale": SCALE}), path)
    found = load_target(path)
    strict = ac.AttnResConfig(lowering="eager", strict=True)
    assert len(found.explain(strict).streams) == 1
    with pytest.raises(RejectedStreamError):
        found.converted(strict)


# --- files that are not what they should be


def test_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str) -> None:
    assert fails("nest.pt2") == "nest.pt2 does not exist. The folder holds net.pt2"
    Path("text.pt2").write_text("no zip")
    assert "text.pt2 is no program saved by this torch.export.save. Save it again: " in fails("text.pt2")
    Path("folder.pt2").mkdir()
    assert "folder.pt2 is a folder, not a program" in fails("folder.pt2")
    torch.save({"a": torch.ones(2)}, "weights.pt2")
    assert "weights.pt2 is no program saved by this torch.export.save" in fails("weights.pt2")
    Path("cut.pt2").write_bytes(Path(saved).read_bytes()[:-200])
    assert "cut.pt2 is no program" in fails("cut.pt2")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


Records = dict[str, bytes]


def changed(source: str, change: Callable[[Records], None]) -> str:
    """A copy of a program file with other records, in the alignment that torch reads."""
    from torch.export.pt2_archive import PT2ArchiveReader, PT2ArchiveWriter

    reader = PT2ArchiveReader(source)
    own = (".data/", "byteorder", "version")
    records = {name: reader.read_bytes(name) for name in reader.get_file_names() if not name.startswith(own)}
    change(records)
    with PT2ArchiveWriter("changed.pt2") as writer:
        for name, data in records.items():
            writer.write_bytes(name, data)
    return "changed.pt2"


def edited(records: Records, name: str, change: Callable[[Any], None]) -> None:
    value = json.loads(records[name])
    change(value)
    records[name] = json.dumps(value).encode()


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _inputs(records: Records) -> None:
    records["data/sample_inputs/model.pt"] = pickled(((Bomb(),), {}))


def _weight(records: Records) -> None:
    records["data/weights/weight_0"] = pickled(Bomb())
    edited(
        records,
        "data/weights/model_weights_config.json",
        lambda value: value["config"]["embed.weight"].update(use_pickle=True),
    )


def _legacy_weights(records: Records) -> None:
    records["data/weights/model.pt"] = pickled({"embed.weight": Bomb()})


def _object(records: Records) -> None:
    from torch.export.pt2_archive.constants import OPAQUE_OBJ_FILENAME_PREFIX

    path = f"{OPAQUE_OBJ_FILENAME_PREFIX}0"
    records[f"data/constants/{path}"] = pickle.dumps(Bomb())
    payload = {"path_name": path, "is_param": False, "use_pickle": True, "tensor_meta": None}
    edited(records, "data/constants/model_constants_config.json", lambda value: value["config"].update(x=payload))


def _machine_code(records: Records) -> None:
    records["data/aotinductor/model/model.so"] = b"\x7fELF"


def _expression(records: Records) -> None:
    name = "models/model.json"
    text = records[name].decode()
    at = text.index('"expr_str": "') + len('"expr_str": "')
    records[name] = (text[:at] + "__import__('os').mkdir('exploded')" + text[text.index('"', at) :]).encode()


def _call(records: Records) -> None:
    name = "models/model.json"
    records[name] = records[name].replace(b'"torch.ops.aten.gelu.default"', b'"torch.os.system"', 1)


def _guard(records: Records) -> None:
    edited(records, "models/model.json", lambda v: v.update(guards_code=["__import__('os').mkdir('exploded')"]))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_inputs, "changed.pt2 holds pickled objects that are neither tensors nor plain values"),
        (_weight, "changed.pt2 holds pickled objects that are neither tensors nor plain values"),
        (_legacy_weights, "changed.pt2 holds pickled objects that are neither tensors nor plain values"),
        (_object, "changed.pt2 holds a pickled object (x), which is not loaded"),
        (_machine_code, "changed.pt2 holds compiled machine code"),
        (_expression, "changed.pt2 holds a size that is no arithmetic: \"__import__('os')"),
        (_call, "changed.pt2 cannot be loaded: SpecViolationError: Operator '<built-in function system>' is not"),
    ],
)
def test_what_a_file_holds_is_not_run(saved: str, change: Callable[[Records], None], what: str) -> None:
    assert what in fails(changed(saved, change))
    assert not os.path.exists("exploded")


def test_guards_are_not_run_either(saved: str) -> None:
    found = load_target(changed(saved, _guard))
    assert len(found.explain(CONFIG).streams) == 1
    found.converted(CONFIG)(IDS, scale=SCALE)
    found.model(IDS, scale=SCALE)
    assert not os.path.exists("exploded")


def test_a_changed_file_that_is_harmless_loads(saved: str) -> None:
    assert isinstance(load_target(changed(saved, lambda records: None)), Target)


def test_older_formats_are_refused(saved: str) -> None:
    with zipfile.ZipFile("old.pt2", "w") as archive:
        archive.writestr("version", "8.1")
        archive.writestr("serialized_exported_program.json", "{}")
        for name in ("state_dict", "constants", "example_inputs"):
            archive.writestr(f"serialized_{name}.pt", pickled(Bomb()))
    assert "old.pt2 is in an older format of torch.export.save, which is not loaded" in fails("old.pt2")
    assert not os.path.exists("exploded")


def test_the_settings_of_torch_are_as_before(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    load_target(saved)
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
