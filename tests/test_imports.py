"""Imports of our own packages stand at the top of a file: one inside a function or under TYPE_CHECKING needs a reason.

Such an import can hide a cycle from the linter and from readers. The reasons are listed here, and the test computes
that none of the imports is there because of a cycle between folders.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

from tests.paths import ROOT

PACKAGE = "dapple_tf"

NESTED = {
    "dapple_tf": "a name is loaded when it is first used, so that the command line answers before TensorFlow starts",
    "dapple_tf.commands.*": "help, plans and simulations answer before TensorFlow starts",
}
"""The modules that may import our own packages elsewhere than at their top, each with the reason."""

USERS, LINES = 2, 100
ALONE = {
    "dapple_tf.__main__": "Python runs it: python -m dapple_tf",
    "dapple_tf.cli": "the installed command",
    "dapple_tf.commands.*": "the command line imports a command when it is called",
    "dapple_tf.distributed.horovod.*": "a script of the installation",
    "dapple_tf.distributed.native.build": "a script of the installation",
    "dapple_tf.examples.*": "models that users start from",
    "dapple_tf.frontend.tensorflow_version": "runs before TensorFlow is imported",
    "dapple_tf.graph_passes.passes.*": "a pass per file, each with its tests of text before and after",
}
"""The modules of at most 100 lines that one module or none may import, each with the reason."""


@dataclass(frozen=True)
class Import:
    """An import of module ``target`` by ``source``; ``top``: at the top of the file; ``types``: for types alone."""

    source: str
    target: str
    line: int
    top: bool
    types: bool

    def __str__(self) -> str:
        return f"{self.source}, line {self.line}: {self.target}"


def folder(module: str, package: str) -> str:
    """The folder of a module inside ``package``, or the module itself: dapple_tf.planner, dapple_tf.plans."""
    return ".".join(module.split(".")[: package.count(".") + 2])


def source_files() -> list[Path]:
    """The package's files, also those of graph_passes and profiler, which the package holds as links."""
    found = (Path(at, name) for at, _, names in os.walk(ROOT / PACKAGE, followlinks=True) for name in names)
    return sorted(path for path in found if path.suffix == ".py")


@cache
def imports() -> tuple[Import, ...]:
    return tuple(
        found
        for path in source_files()
        for found in _imports_of(
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path.read_text()
        )
    )


def _imports_of(module: str, text: str) -> Iterator[Import]:
    tree = ast.parse(text)
    for_types = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if _is_module(name) else str(node.module) for name in names]
        else:
            continue
        for name in dict.fromkeys(names):
            if name.split(".")[0] == PACKAGE:
                yield Import(module, name, node.lineno, node in tree.body, node in for_types)


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def named(module: str, patterns: dict[str, str]) -> bool:
    return any(fnmatch(module, pattern) for pattern in patterns)


def test_an_import_inside_a_function_or_for_types_alone_has_a_reason() -> None:
    unlisted = [found for found in imports() if not (found.top or named(found.source, NESTED))]
    assert not unlisted, "move to the top of the file, or list with a reason: " + "; ".join(map(str, unlisted))


def test_each_listed_reason_is_needed() -> None:
    sources = [found.source for found in imports() if not found.top]
    assert all(any(fnmatch(source, pattern) for source in sources) for pattern in NESTED)


@pytest.mark.parametrize("package", [PACKAGE, "dapple_tf.graph_passes"])
def test_no_folders_form_a_cycle_whatever_the_imports_that_join_them(package: str) -> None:
    """Imports inside functions and for types alone count. The package itself, which loads names late, does not."""
    edges = {
        (folder(i.source, package), folder(i.target, package)): i
        for i in imports()
        if i.source.startswith(f"{package}.")
        and i.target.startswith(f"{package}.")
        and folder(i.source, package) != folder(i.target, package)
    }
    graph = nx.DiGraph(list(edges))
    cycles = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    shown = [str(found) for (a, b), found in edges.items() for part in cycles if a in part and b in part]
    assert not cycles, f"{cycles}: {'; '.join(shown)}"


def test_no_files_form_a_cycle_wherever_their_imports_stand() -> None:
    """Imports inside functions and for types alone count. The package itself, which loads names late, does not."""
    graph = nx.DiGraph((i.source, i.target) for i in imports() if i.source != PACKAGE and i.source != i.target)
    assert [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1] == []


def test_nested_imports_of_every_kind_are_found() -> None:
    text = """
import typing
from dapple_tf import plans
if TYPE_CHECKING:
    from dapple_tf.plans import Plan
def f():
    import dapple_tf.errors
    from dapple_tf.profiler.units import format_bytes
"""
    found = list(_imports_of("dapple_tf.made_up", text))
    assert [(i.target, i.line, i.top, i.types) for i in sorted(found, key=lambda i: i.line)] == [
        ("dapple_tf.plans", 3, True, False),
        ("dapple_tf.plans", 5, False, True),
        ("dapple_tf.errors", 7, False, False),
        ("dapple_tf.profiler.units", 8, False, False),
    ]


def test_a_module_has_two_users_or_more_than_a_hundred_lines() -> None:
    users: dict[str, set[str]] = {}
    for found in imports():
        users.setdefault(found.target, set()).add(found.source)
    small = [
        f"{module} ({lines} lines; {', '.join(users.get(module, ())) or 'no user'})"
        for module, lines in _lines_of_modules().items()
        if lines <= LINES and len(users.get(module, ())) < USERS and not named(module, ALONE)
    ]
    assert not small, "merge into their users, or list with a reason: " + "; ".join(small)


def test_each_module_that_may_stand_alone_exists() -> None:
    modules = _lines_of_modules()
    assert all(any(fnmatch(module, pattern) for module in modules) for pattern in ALONE)


def _lines_of_modules() -> dict[str, int]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): len(path.read_text().splitlines())
        for path in source_files()
        if path.name != "__init__.py"
    }
