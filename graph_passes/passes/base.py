"""Passes: frozen dataclasses whose fields are their options, run in order, checked, and observed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.ir.ops import OPS, OpName
from dapple_tf.graph_passes.ir.verify import verify


@dataclass(frozen=True)
class Contract:
    """The call-level ops that a pass needs, and those that it leaves.

    ``requires``: the graph must have nodes of these ops before the pass. ``requires_if_trained``: also of these, if a
    stage gives dense gradients of variables; ``requires_if_sparse``: also of these, if a stage gives sparse gradients.
    ``forbids``: the graph must have no nodes of these ops before the pass, which would not change them, or adds them
    itself. ``produces``: the graph has nodes of these ops after the pass. ``may_produce``: the pass adds nodes of these
    ops to some graphs; it adds nodes of no other op.
    """

    requires: frozenset[OpName] = frozenset()
    requires_if_trained: frozenset[OpName] = frozenset()
    requires_if_sparse: frozenset[OpName] = frozenset()
    forbids: frozenset[OpName] = frozenset()
    produces: frozenset[OpName] = frozenset()
    may_produce: frozenset[OpName] = frozenset()


@runtime_checkable
class Pass(Protocol):
    """A pure function from a valid graph to a valid graph, which keeps its ``contract``.

    A pass is a frozen dataclass whose fields are its options.
    """

    @property
    def name(self) -> str:
        """The name of the pass in errors and dumps."""

    @property
    def contract(self) -> Contract:
        """The ops that the pass needs before it, and those that it leaves."""

    def __call__(self, graph: Graph) -> Graph: ...


class BuiltInPass:
    """A pass of this library. Its name is that of its class: ``add_in_place`` for ``AddInPlace``."""

    @property
    def name(self) -> str:
        """The name of the pass in errors and dumps."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()


Observer = Callable[[str, Graph], None]
"""Called after each pass with the name of the pass and the graph that it returned."""


def run_passes(
    graph: Graph, passes: Sequence[Pass], observers: Sequence[Observer] = (), *, verified: Graph | None = None
) -> Graph:
    """Return what ``passes`` make of ``graph``, in order. The graph is verified after each of them.

    ``verified``: a graph that has been verified; see ``verify``.
    Raises GraphError that names the pass, the one before it, and the op or node, if a pass breaks its contract or
    returns an invalid graph.
    """
    previous = "the input"
    for step in passes:
        name = f"pass {step.name!r} (after {previous})"
        before = graph
        _check_before(name, step.contract, before)
        graph = step(before)
        try:
            verify(graph, verified)
        except GraphError as error:
            raise GraphError(f"{name} returned an invalid graph: {error}") from error
        _check_after(name, step.contract, before, graph)
        verified = graph
        for observe in observers:
            observe(step.name, graph)
        previous = repr(step.name)
    return graph


def _check_before(name: str, contract: Contract, graph: Graph) -> None:
    found = {node.op for node in graph.nodes}
    trained = any(function.output_ports("variable") for function in graph.functions)
    sparse = any(function.output_ports("slices") for function in graph.functions)
    required = contract.requires | (contract.requires_if_trained if trained else frozenset())
    required |= contract.requires_if_sparse if sparse else frozenset()
    for op in sorted(required - found):
        raise GraphError(f"{name} requires {op!r} nodes, and the graph has none: run it after the pass that adds them")
    for op in sorted(contract.forbids & found):
        raise GraphError(f"{name} forbids {op!r} nodes, and the graph has some: run it before the pass that adds them")


def _check_after(name: str, contract: Contract, before: Graph, after: Graph) -> None:
    old, new = {node.op for node in before.nodes}, {node.op for node in after.nodes}
    for op in sorted(contract.produces - new):
        raise GraphError(f"{name} must produce {op!r} nodes, and it returned a graph without any")
    for added in sorted((new & OPS.keys()) - old - contract.produces - contract.may_produce):
        raise GraphError(f"{name} added {added!r} nodes, which its contract does not name")
