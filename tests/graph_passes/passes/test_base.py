"""Passes run in order, are observed, and are blamed by name; none of the middle end needs TensorFlow."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from graph_passes.errors import GraphError
from graph_passes.ir.graph import Graph, Node
from graph_passes.passes.base import Pass, run_passes
from tests.graph_passes.builders import assert_graph, graph, refused
from tests.paths import ROOT


@dataclass(frozen=True)
class Append:
    """Append a node."""

    node: str
    name: str = "append"

    def __call__(self, graph: Graph) -> Graph:
        return graph.replace(nodes=(*graph.nodes, Node(self.node, "Op")))


def test_passes_run_in_order_and_each_is_observed_with_what_it_left() -> None:
    seen: list[tuple[str, int]] = []
    result = run_passes(
        graph("%a = Op()"),
        [Append("b", "first"), Append("c", "second")],
        [lambda name, left: seen.append((name, len(left.nodes)))],
    )
    assert_graph(result, "%a = Op()\n%b = Op()\n%c = Op()")
    assert seen == [("first", 2), ("second", 3)]


def test_the_pass_that_left_an_invalid_graph_is_named_with_the_one_before() -> None:
    with refused(GraphError, "pass 'second' (after 'first') left an invalid graph: graph 'f' has two nodes called 'b'"):
        run_passes(graph("%a = Op()"), [Append("b", "first"), Append("b", "second")])


def test_the_first_pass_comes_after_the_input() -> None:
    with refused(GraphError, "pass 'append' (after the input) left an invalid graph"):
        run_passes(graph("%a = Op()"), [Append("a")])


def test_an_invalid_graph_is_not_shown_to_observers() -> None:
    seen: list[str] = []
    with refused(GraphError, "append"):
        run_passes(graph("%a = Op()"), [Append("a")], [lambda name, left: seen.append(name)])
    assert seen == []


def test_a_pass_is_known_by_its_shape() -> None:
    assert isinstance(Append("b"), Pass)
    assert not isinstance(graph("%a = Op()"), Pass)


BLOCKED = """
import importlib, pkgutil, sys
for name in ("tensorflow", "keras", "horovod"):
    sys.modules[name] = None  # importing it raises ImportError
import graph_passes
names = [module.name for module in pkgutil.walk_packages(graph_passes.__path__, "graph_passes.")]
for name in names:
    importlib.import_module(name)
print(*names)
"""


def test_no_module_of_the_middle_end_imports_tensorflow() -> None:
    run = subprocess.run([sys.executable, "-c", BLOCKED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    files = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "graph_passes").rglob("*.py")]
    modules = {".".join(path.parts).removesuffix(".__init__") for path in files}
    assert set(run.stdout.split()) == modules - {"graph_passes"}
