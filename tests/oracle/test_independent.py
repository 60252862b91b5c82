"""The oracle is of no use if it shares what it judges."""

from __future__ import annotations

import ast
from pathlib import Path

import attnres_compile.oracle

ALLOWED = {"comparison", "config", "errors", "inputs", "oracle", "report", "rounding"}


def test_it_imports_nothing_of_what_it_judges() -> None:
    found = set()
    for file in Path(attnres_compile.oracle.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module is not None
                names = (
                    [node.module]
                    if node.module != "attnres_compile"
                    else [f"attnres_compile.{alias.name}" for alias in node.names]
                )
            found |= {name.split(".")[1] for name in names if name.startswith("attnres_compile.")}
    assert found <= ALLOWED
