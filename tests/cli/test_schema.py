"""The JSON of every command, against the schema in docs/attnres.schema.json."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from attnres_compile.cli.main import app
from tests.cli.processes import attnres
from tests.test_report import REPORT

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = json.loads((DOCS / "attnres.schema.json").read_text(encoding="utf-8"))
DEMO = "attnres_compile.demo"
CALLS: dict[str, tuple[str, ...]] = {
    "inspect": (DEMO,),
    "transform": (DEMO, "--out", "converted"),
    "verify": (DEMO, "--num-blocks", "2", "--no-inductor"),
    "diff": (DEMO, "--num-blocks", "2"),
    "weights": (DEMO, "--num-blocks", "2"),
    "bench": (DEMO, "--eager", "--rounds", "2"),
    "kernels": ("--sources", "3", "--dim", "64"),
}


def problems(name: str, document: Any) -> list[str]:
    """What the schema's definition ``name`` says against ``document``."""
    schema = {"$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]}
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(document)]


def ask(*arguments: str) -> tuple[int, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """One document of each command."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("documents"))
    try:
        found = {}
        for command, arguments in CALLS.items():
            code, found[command] = ask(command, *arguments)
            assert code == 0, command
        done = attnres("run", "--json", "-m", DEMO, "--steps", "2", "--layers", "2")
        assert done.returncode == 0
        found["run"] = json.loads(done.stdout)
        yield found
    finally:
        os.chdir(before)


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("command", [*CALLS, "run"])
def test_documents_are_as_the_schema_says(command: str, documents: dict[str, Any]) -> None:
    assert problems(command, documents[command]) == []


def test_compiled_kernels() -> None:
    code, document = ask("kernels", *CALLS["kernels"], "--arch", "sm_90")
    assert code == 0
    assert problems("kernels", document) == []
    assert document[0]["registers"] > 0


def test_failures(script: str) -> None:
    for command in ("inspect", "transform", "verify", "diff", "weights", "bench"):
        more = ("--out", "folder") if command == "transform" else ()
        code, document = ask(command, "missing.py", *more)
        assert (code, problems("failure", document)) == (2, []), command
        assert "report" not in document
    for command in ("verify", "weights", "kernels"):
        code, document = ask(command, f"{script}:NoStream")
        assert (code, problems("failure", document)) == (3, []), command
        assert document["report"]["streams"] == []


def test_reports_with_everything_in_them() -> None:
    assert problems("report", REPORT.to_dict()) == []


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every object in ``document``; of a list the first element stands for all."""
    if isinstance(document, dict):
        yield path
        for key, value in document.items():
            yield from places(value, (*path, key))
    elif isinstance(document, list) and document:
        yield from places(document[0], (*path, 0))


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


@pytest.mark.parametrize("command", [*CALLS, "run"])
def test_nothing_may_be_missing_or_unknown(command: str, documents: dict[str, Any]) -> None:
    checked = 0
    for path in places(documents[command]):
        if path and path[-1] == "query_norms":  # its keys are names of sites
            continue
        changed = copy.deepcopy(documents[command])
        at(changed, path)["of no meaning"] = 1
        assert problems(command, changed), path
        for key in at(documents[command], path):
            changed = copy.deepcopy(documents[command])
            del at(changed, path)[key]
            assert problems(command, changed), (*path, key)
            checked += 1
    assert checked >= 3


def test_the_report_is_as_documented() -> None:
    sections = {"streams": "stream", "sublayers": "sublayer", "sites": "site", "rejections": "rejection"}
    sections |= {"graph_breaks": "graph_break", "phases": "phase", "fusions": "fusion"}
    documented: dict[str, list[str]] = {}
    name = ""
    for line in (DOCS / "report.md").read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## .*`(\w+)`", line):
            name = sections.get(heading[1], heading[1])
        elif row := re.match(r"\| `(\w+)` \|", line):
            documented.setdefault(name, []).append(row[1])
    for name, keys in documented.items():
        assert list(SCHEMA["$defs"][name]["properties"]) == keys, name
