"""The public names of gdq: they load, say what they are, and name nothing that is not public."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import gdq

PACKAGE = Path(gdq.__file__).parent
PUBLIC = set(gdq.__all__)

# Words that a docstring writes as CamelCase, as a call or in backquotes.
CAMEL_CASE = re.compile(r"(?<![\w.])(?:gdq\.)?((?:[A-Z][a-z]+){2,})\b")
CALLED = re.compile(r"(?<![\w.])(?:gdq\.)?([a-z_]+)\(\)")
QUOTED = re.compile(r"`(?:gdq\.)?(\w+)(?:\(\))?`")
MODULE = re.compile(r"\bgdq\.(\w+)")


@functools.cache
def defined() -> set[str]:
    """The names of all classes and functions that modules of gdq define, unless they begin with an underscore."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py") if path.parent.name != "cli")
    kinds = (ast.ClassDef, ast.FunctionDef)
    return {node.name for tree in trees for node in tree.body if isinstance(node, kinds) and node.name[0] != "_"}


def members(thing: Any) -> dict[str, Any]:
    """What a class defines for its user."""
    return {name: value for name, value in vars(thing).items() if name[0] != "_"} if inspect.isclass(thing) else {}


def docstrings(name: str) -> Iterator[tuple[str, str]]:
    """The docstrings of a public name and of its members, each with a name for it."""
    thing = getattr(gdq, name)
    yield name, inspect.getdoc(thing) or ""
    for member, value in members(thing).items():
        yield f"{name}.{member}", inspect.getdoc(value) or ""


def arguments(name: str) -> set[str]:
    """What a docstring of `name` may name beside: its members, and the arguments of it and of its members."""
    thing = getattr(gdq, name)
    functions = [value for value in (thing, *members(thing).values()) if inspect.isfunction(value)]
    if inspect.isclass(thing):
        functions += [thing.__init__] if inspect.isfunction(thing.__init__) else []
    own = {parameter for function in functions for parameter in inspect.signature(function).parameters}
    return own | set(members(thing)) | set(getattr(thing, "__annotations__", {}))


def test_names() -> None:
    assert gdq.__all__ == sorted(gdq.__all__, key=lambda name: (name.lower() == name, name))
    for name in gdq.__all__:
        assert getattr(gdq, name).__name__ == name
        assert getattr(gdq, name).__doc__, name
    missing = "nothing"
    with pytest.raises(AttributeError, match=missing):
        getattr(gdq, missing)


def test_first_comes_the_connection() -> None:
    """Functions take a connection; those that need a session of their own, and classes that keep one, also a string."""
    sync, either = psycopg.Connection[Any], psycopg.Connection[Any] | str | None
    own_session = {
        "Consumer": either,
        "AsyncConsumer": psycopg.AsyncConnection[Any] | str | None,
        "Refresher": either,
        "compare_tables": either,
        "copy_in_chunks": either,
        "copy_table": either,
        "copy_tables": either,
        "install": either,
        "repair_tables": either,
        "verify_view": either,
    }
    functions = {name: getattr(gdq, name) for name in gdq.__all__ if inspect.isfunction(getattr(gdq, name))}
    del functions["connect"], functions["open_spool"]  # makes one; needs none
    callables = functions | {name: getattr(gdq, name).__init__ for name in own_session if name not in functions}
    for name, function in callables.items():
        parameters = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
        assert parameters[0] == "connection", name
        plain = inspect.unwrap(function)
        assert eval(plain.__annotations__["connection"], plain.__globals__) == own_session.get(name, sync), name
        scope = [parameter for parameter in parameters if parameter in ("queue", "consumer", "member")]
        assert scope == ["queue", "consumer", "member"][: len(scope)], name


def test_submodules_hide_no_public_name() -> None:
    assert PUBLIC & {path.stem for path in PACKAGE.iterdir()} == set()


def test_errors_are_public() -> None:
    from gdq import errors

    kinds = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == "gdq.errors"
    }
    assert kinds <= PUBLIC
    for name in kinds:
        assert name in (errors.__doc__ or ""), "the tree in the docstring lacks it"


@pytest.mark.parametrize("name", gdq.__all__)
def test_docstrings_name_public_things(name: str) -> None:
    known = defined()
    for where, text in docstrings(name):
        promised = {*CAMEL_CASE.findall(text), *CALLED.findall(text), *QUOTED.findall(text)} & known
        assert promised - PUBLIC - arguments(name) == set(), where
        private = {path.stem for path in PACKAGE.iterdir()} - {"consumers"}
        assert private.isdisjoint(MODULE.findall(text)), where
