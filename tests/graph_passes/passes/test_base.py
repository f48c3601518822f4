"""Passes run in order, are observed, and are named in errors; each keeps its contract. None needs TensorFlow."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

import pytest

import dapple_tf.graph_passes.passes
from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Graph, Node
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import Contract, Pass, run_passes
from tests.graph_passes.builders import assert_graph, call_graph, function, graph, refused
from tests.paths import ROOT
from tests.processes import run_python

NO_CONTRACT = Contract()


@dataclass(frozen=True)
class Append:
    """Append a node."""

    node: str
    name: str = "append"
    op: str = "Op"
    contract: Contract = NO_CONTRACT

    def __call__(self, graph: Graph) -> Graph:
        return graph.replace(nodes=(*graph.nodes, Node(self.node, self.op)))


def test_passes_run_in_order_and_each_is_observed_with_the_graph_that_it_returned() -> None:
    seen: list[tuple[str, int]] = []
    result = run_passes(
        graph("%a = Op()"),
        [Append("b", "first"), Append("c", "second")],
        [lambda name, left: seen.append((name, len(left.nodes)))],
    )
    assert_graph(result, "%a = Op()\n%b = Op()\n%c = Op()")
    assert seen == [("first", 2), ("second", 3)]


def test_the_pass_that_returned_an_invalid_graph_is_named_with_the_one_before() -> None:
    said = "pass 'second' (after 'first') returned an invalid graph: graph 'f' has two nodes called 'b'"
    with refused(GraphError, said):
        run_passes(graph("%a = Op()"), [Append("b", "first"), Append("b", "second")])


def test_the_first_pass_comes_after_the_input() -> None:
    with refused(GraphError, "pass 'append' (after the input) returned an invalid graph"):
        run_passes(graph("%a = Op()"), [Append("a")])


def test_an_invalid_graph_is_not_shown_to_observers() -> None:
    seen: list[str] = []
    with refused(GraphError, "append"):
        run_passes(graph("%a = Op()"), [Append("a")], [lambda name, left: seen.append(name)])
    assert seen == []


def test_a_class_with_name_contract_and_call_is_a_pass() -> None:
    assert isinstance(Append("b"), Pass)
    assert not isinstance(graph("%a = Op()"), Pass)


# --- contracts

BARRIER = "%a = barrier()"


def barrier(contract: Contract, name: str = "append", node: str = "b") -> Append:
    return Append(node, name, OpName.BARRIER, contract)


def ops(*names: OpName) -> frozenset[OpName]:
    return frozenset(names)


def test_a_pass_whose_required_op_is_missing_is_refused_before_it_runs() -> None:
    first = barrier(Contract(produces=ops(OpName.BARRIER)), "first")
    second = barrier(Contract(requires=ops(OpName.BARRIER, OpName.UPDATE)), "second")
    said = "pass 'second' (after 'first') requires 'update' nodes, and the graph has none: run it after the pass that"
    with refused(GraphError, said):
        run_passes(graph(BARRIER), [first, second])


@pytest.mark.parametrize(("gives", "refuses"), [("gradient h", False), ("gradient h, variable w", True)])
def test_what_a_pass_requires_of_a_trained_model_is_not_required_without_gradients(gives: str, refuses: bool) -> None:
    contract = Contract(requires_if_trained=ops(OpName.GRADIENTS), may_produce=ops(OpName.BARRIER))
    whole = call_graph("", function("stage0/backward", "seed loss", gives))
    if refuses:
        with refused(GraphError, "pass 'append' (after the input) requires 'gradients' nodes, and the graph has none"):
            run_passes(whole, [barrier(contract)])
    else:
        run_passes(whole, [barrier(contract)])


@pytest.mark.parametrize(("gives", "refuses"), [("variable w", False), ("slices w, indices w int64[_]", True)])
def test_what_a_pass_requires_of_sparse_gradients_is_not_required_of_dense_ones(gives: str, refuses: bool) -> None:
    contract = Contract(requires_if_sparse=ops(OpName.GATHER_SLICES), may_produce=ops(OpName.BARRIER))
    whole = call_graph("", function("stage0/backward", "seed loss", gives))
    if refuses:
        with refused(GraphError, "pass 'append' (after the input) requires 'gather_slices' nodes, and the graph has"):
            run_passes(whole, [barrier(contract)])
    else:
        run_passes(whole, [barrier(contract)])


def test_a_pass_whose_forbidden_op_is_there_is_refused_before_it_runs() -> None:
    said = (
        "pass 'append' (after the input) forbids 'barrier' nodes, and the graph has some: run it before the pass that"
    )
    with refused(GraphError, said):
        run_passes(graph(BARRIER), [barrier(Contract(forbids=ops(OpName.BARRIER)))])


def test_a_pass_that_does_not_produce_what_it_must_is_refused() -> None:
    contract = Contract(produces=ops(OpName.BARRIER, OpName.UPDATE))
    with refused(GraphError, "pass 'append' (after the input) must produce 'update' nodes, and it returned a graph"):
        run_passes(graph(""), [barrier(contract)])


def test_a_pass_that_adds_an_op_that_its_contract_does_not_name_is_refused() -> None:
    with refused(GraphError, "pass 'append' (after the input) added 'barrier' nodes, which its contract does not name"):
        run_passes(graph(""), [barrier(NO_CONTRACT)])


@pytest.mark.parametrize("field", ["produces", "may_produce"])
def test_a_pass_may_add_the_ops_that_its_contract_names_and_those_that_are_there(field: str) -> None:
    named = Contract(**{field: ops(OpName.BARRIER)})
    result = run_passes(graph(""), [barrier(named), barrier(NO_CONTRACT, "again", "c")])
    assert [node.name for node in result.nodes] == ["b", "c"]


def all_passes() -> list[Any]:
    modules = [
        importlib.import_module(m.name)
        for m in pkgutil.walk_packages(dapple_tf.graph_passes.passes.__path__, "dapple_tf.graph_passes.passes.")
    ]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return sorted({c for c in classes if isinstance(vars(c).get("contract"), Contract)}, key=lambda c: c.__name__)


def test_the_contract_of_each_pass_is_consistent() -> None:
    """A pass cannot run twice, nor after a pass that must see what it adds."""
    names = [c.__name__ for c in all_passes()]
    assert len(names) == 35
    for c in all_passes():
        contract = c.contract
        required = contract.requires | contract.requires_if_trained | contract.requires_if_sparse
        assert not required & contract.forbids, c
        assert not contract.produces & contract.may_produce, c
        if contract.produces or contract.may_produce:
            assert contract.forbids & (contract.produces | contract.may_produce), c


BLOCKED = """
import importlib, pkgutil, sys
import dapple_tf.graph_passes
for name in ("tensorflow", "keras", "horovod"):
    sys.modules[name] = None  # importing it raises ImportError
names = [module.name for module in pkgutil.walk_packages(dapple_tf.graph_passes.__path__, "dapple_tf.graph_passes.")]
for name in names:
    importlib.import_module(name)
print(*names)
"""


def test_no_module_of_the_middle_end_imports_tensorflow() -> None:
    run = run_python("-c", BLOCKED)
    files = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "graph_passes").rglob("*.py")]
    modules = {".".join(("dapple_tf", *path.parts)).removesuffix(".__init__") for path in files}
    assert set(run.stdout.split()) == modules - {"dapple_tf.graph_passes"}
