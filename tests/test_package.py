"""What is installed: the wheel's files, the entry points, and what an import costs."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

import attnres_compile as ac

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def process(code: str, *arguments: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy: setuptools leaves folders behind, and takes up what it finds in them."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "attnres_compile", tree / "attnres_compile", ignore=shutil.ignore_patterns("__pycache__"))
    code = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    process(code, str(tree / "dist"), cwd=tree)
    (built,) = (tree / "dist").glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    tree = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "attnres_compile").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    inside = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert inside == tree
    assert {"attnres_compile/py.typed", "attnres_compile/kernels/templates/depth_mix.cpp"} <= inside


def test_the_wheels_metadata(wheel: zipfile.ZipFile) -> None:
    (metadata,) = [name for name in wheel.namelist() if name.endswith("dist-info/METADATA")]
    text = wheel.read(metadata).decode()
    assert f"Version: {ac.__version__}\n" in text
    assert "License-Expression: Apache-2.0\n" in text
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert set(re.findall(r"Provides-Extra: (\w+)", text)) == {"bench", "test", "examples", "plot", "zoo"}


def test_versions_agree() -> None:
    assert PROJECT["version"] == ac.__version__


def test_requirements() -> None:
    assert PROJECT["requires-python"] == ">=3.11"
    names = {re.split(r"[>=; ]", line)[0]: line for line in PROJECT["dependencies"]}
    assert names.keys() == {"torch", "triton", "jinja2", "networkx", "numpy", "rich", "safetensors", "typer"}
    assert "Linux" in names["triton"]


def test_entry_points() -> None:
    from attnres_compile.backend import attnres
    from attnres_compile.cli.main import run

    (backend,) = set(importlib.metadata.entry_points(group="torch_dynamo_backends", name="attnres"))
    assert backend.load() is attnres
    (script,) = set(importlib.metadata.entry_points(group="console_scripts", name="attnres"))
    assert script.load() is run


def test_dynamo_lists_the_backend() -> None:
    assert "attnres" in torch._dynamo.list_backends(exclude_tags=())


def test_everything_public_is_there() -> None:
    assert sorted(ac.__all__) == list(ac.__all__)
    assert all(hasattr(ac, name) for name in ac.__all__)
    assert all((getattr(ac, name).__doc__ or "").strip() for name in ac.__all__ if name != "__version__")


def test_an_import_loads_no_compiler_and_no_command_line() -> None:
    code = "import sys, torch; before = set(sys.modules); import attnres_compile; print(*set(sys.modules) - before)"
    loaded = {name for name in process(code).split() if name.split(".")[0] != "attnres_compile"}
    heavy = ("torch._inductor", "torch._dynamo", "triton", "typer", "rich", "networkx", "transformers", "torch.onnx")
    heavy += ("jinja2", "matplotlib", "safetensors")
    assert not {name for name in loaded if name.startswith(heavy)}


def test_the_version_command_does_not_need_a_model() -> None:
    code = "import sys; from attnres_compile.cli.main import run; sys.argv[1:] = ['--version']; run()"
    assert process(code).startswith(f"attnres {ac.__version__}, torch {torch.__version__}")
