#!/usr/bin/env python3
"""Print the size and some figures of the structure of the source as a Markdown table.

    python scripts/source_figures.py [COMMIT]

With COMMIT it measures the tree of that commit instead of the working tree, so that two outputs can be compared. The
figures are the lines and modules of each folder, small modules that a single module imports, import cycles ("circles of
files"), branches that depend on whether there is an asynchronous window, and signatures that repeat options of
``dapple.pipeline``.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from io import BytesIO
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parent.parent
SOURCE = ("dapple_tf", "graph_passes", "profiler")
USERS = ("models", "examples", "benchmarks", "tests")
# A module with one importer should have more lines than this, or be a part of its importer.
SMALL_MODULE_LINES = 100
# A function with this many parameters that are named like options repeats the declaration of the options.
REPEATED_OPTIONS = 5
# Names in a condition which show that it asks for an asynchronous window.
WINDOW_NAMES = {"window", "in_turn"}


def main() -> int:
    """Print the table of the working tree, or of the commit in the first argument."""
    if len(sys.argv) == 1:
        print_figures(ROOT)
        return 0
    done = subprocess.run(
        ["git", "archive", "--end-of-options", sys.argv[1]], cwd=ROOT, capture_output=True, check=False
    )
    if done.returncode:
        print(f"there is no commit {sys.argv[1]}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        print_figures(Path(folder))
    return 0


def print_figures(root: Path) -> None:
    """Print the table of the tree at ``root``."""
    files = {path: path.read_text("utf-8") for folder in SOURCE for path in _python_files(root / folder)}
    modules = {_module(root, path): text for path, text in files.items()}
    graph = nx.DiGraph((a, b) for a, text in modules.items() for b in _imports(text, modules) if a != b)
    small = [
        name
        for name, text in modules.items()
        if len(text.splitlines()) <= SMALL_MODULE_LINES and name in graph and graph.in_degree(name) == 1
    ]
    cycles = [part for part in nx.strongly_connected_components(graph) if len(part) > 1 and "dapple_tf" not in part]
    rows = [("figure", "value"), ("---", "---")]
    rows.append(("source: lines of Python, modules", f"{_lines(files.values()):,}, {len(files)}"))
    folders = Counter[str]()
    for path, text in files.items():
        parts = path.relative_to(root).parts
        folders["/".join(parts[: 2 if parts[0] != "profiler" and len(parts) > 2 else 1])] += len(text.splitlines())
    rows += [(f"lines in {folder}", f"{lines:,}") for folder, lines in sorted(folders.items())]
    native = [p for folder in SOURCE for pattern in ("*.cc", "*.h") for p in (root / folder).rglob(pattern)]
    rows.append(("source: lines of C++", f"{_lines(p.read_text('utf-8') for p in native):,}"))
    for folder in USERS:
        found = [path.read_text("utf-8") for path in _python_files(root / folder)]
        rows.append((f"{folder}: lines of Python, files", f"{_lines(found):,}, {len(found)}"))
    rows.append((f"modules of at most {SMALL_MODULE_LINES} lines with one importer", str(len(small))))
    rows.append(("circles of files", str(len(cycles))))
    outside = {path: text for path, text in files.items() if "window" not in str(path.relative_to(root))}
    branches = sum(map(_window_branches, outside.values()))
    rows.append(("branches on the window in files without it in their path", str(branches)))
    trees = [ast.parse(text) for text in files.values()]
    options = {name for tree in trees for name in _option_names(tree)}
    repeating = sum(len(options & names) >= REPEATED_OPTIONS for tree in trees for names in _parameters(tree))
    rows.append((f"signatures with {REPEATED_OPTIONS} or more options of dapple.pipeline", str(repeating)))
    for left, right in rows:
        print(f"| {left} | {right} |")


def _python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if not path.is_symlink())


def _lines(texts: Iterable[str]) -> int:
    return sum(len(text.splitlines()) for text in texts)


def _module(root: Path, path: Path) -> str:
    """Return the dotted name of a module from its path, such as ``dapple_tf.plans``."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _imports(text: str, modules: Collection[str]) -> Iterator[str]:
    """Yield the names of the project's modules that a file imports, as ``_module`` returns them."""
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            linked = name.startswith(("dapple_tf.graph_passes", "dapple_tf.profiler"))
            if (home := name.removeprefix("dapple_tf.") if linked else name) in modules:
                yield home


def _option_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the fields of a class ``Options`` in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == "Options":
            yield from (
                part.target.id
                for part in node.body
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
            )


def _parameters(tree: ast.Module) -> Iterator[set[str]]:
    """Yield the names of each function's parameters in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield {part.arg for part in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def _window_branches(text: str) -> int:
    """Return how many conditions in a file ask for a window: of if, if expressions, while, comprehensions, cases."""
    conditions: list[ast.AST] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            conditions.append(node.test)
        elif isinstance(node, ast.comprehension):
            conditions += node.ifs
        elif isinstance(node, ast.match_case) and node.guard is not None:
            conditions.append(node.guard)
    return sum(any(_names_window(part) for part in ast.walk(condition)) for condition in conditions)


def _names_window(node: ast.AST) -> bool:
    """Return whether a node is a name or an attribute of ``WINDOW_NAMES``."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in WINDOW_NAMES


if __name__ == "__main__":
    sys.exit(main())
