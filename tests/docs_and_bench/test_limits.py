"""Limits that keep files readable: modules have at most 400 lines, functions 70."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("gdq", "pyspark_gdq", "tests", "bench", "consumers", "docs_site", "examples")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
LINES_OF_A_MODULE = 400
LINES_OF_A_FUNCTION = 70


def test_modules() -> None:
    long = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {path: lines for path, lines in long.items() if lines > LINES_OF_A_MODULE} == {}


def test_functions() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None
    }
    assert {name: lines for name, lines in long.items() if lines > LINES_OF_A_FUNCTION} == {}
