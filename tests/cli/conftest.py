"""A report as a 24-layer decoder gives it, and scripts to point the commands at."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attnres_compile.report import LeftAlone, Site, Stream, Sublayer, TransformReport

SCRIPT = """
import torch
from torch import nn
print("noise of the script")
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mixer = nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    def forward(self, x):
        x = x + self.mixer(self.norm(x))
        return x + self.mlp(self.norm(x))
class Net(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(8, 20)
    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
class NoStream(nn.Module):
    def forward(self, ids):
        return ids + 1.0
model = Net()
example_inputs = torch.arange(10).reshape(2, 5)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """``script.py`` in the current folder: ``model`` (3 blocks), ``NoStream``, ``example_inputs``; it prints."""
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "script.py"
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def _make_report(layers: int = 24, size: int = 6, file: str = "/somewhere/model.py") -> TransformReport:
    """Two sublayers per layer, ``size`` sublayers per block, a final norm; one rejected add per layer and one more."""
    sublayers = tuple(
        Sublayer(f"model.layers.{i // 2}", f"{file}:{21 if i % 2 == 0 else 27}", f"add_{i}") for i in range(2 * layers)
    )
    count = len(sublayers)
    sites = []
    for i in range(count + 1):
        sources = ["root", *(f"block {block}" for block in range(1, i // size + 1))]
        sources += [f"partial {i // size + 1}"] if i % size else []
        norm = ("input_layernorm", "post_attention_layernorm")[i % 2]
        reader = f"model.layers.{i // 2}.{norm}" if i < count else "model.norm"
        name = f"model.site_{i}"
        sites.append(Site(name, (reader,), tuple(sources), name if len(sources) > 1 else None))
    rejections = [
        LeftAlone("no_contraction", "no weight lies between skip and branch", f"model.layers.{i}.rope", f"{file}:9")
        for i in range(layers)
    ]
    rejections.append(LeftAlone("unrelated_operands", "neither operand leads to the other", "", f"{file}:5", "add_99"))
    blocks = tuple(tuple(range(start, min(start + size, count))) for start in range(0, count, size))
    stream = Stream("model", 768, sublayers, blocks, tuple(sites), "model")
    return TransformReport((stream,), tuple(rejections), (), 768 * count)


@pytest.fixture
def make_report() -> Callable[..., TransformReport]:
    return _make_report


@pytest.fixture
def report() -> TransformReport:
    return _make_report()
