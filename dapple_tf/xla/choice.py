"""Choose the stage functions that XLA compiles, and tell which it cannot compile and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.backend.handler import Bindings, ChooseCompiled, Compiled
from dapple_tf.compiler import PlannedModel
from dapple_tf.errors import warn_user
from dapple_tf.graph_passes.analysis.row_bounds import micro_batch_sizes
from dapple_tf.graph_passes.ir.graph import Function, Graph, Node
from dapple_tf.graph_passes.ir.names import BACKWARD_OPS
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.xla.examples import find_examples
from dapple_tf.xla.problems import find_problem

_CALLS = frozenset({OpName.RUN_ONCE, OpName.FORWARD, OpName.LOSS_HEAD, *BACKWARD_OPS, OpName.UPDATE})


@dataclass
class Xla:
    """XLA for all programs of one function of a batch. ``_told``: the problems that the user has been told."""

    _told: set[str] = field(default_factory=set)

    def chooser(self, planned: PlannedModel) -> ChooseCompiled:
        """Return what chooses the functions of a program for ``planned`` that XLA compiles.

        It warns of functions that XLA cannot compile, and of each problem once.
        """
        return partial(self._choose, planned)

    def _choose(
        self, planned: PlannedModel, graph: Graph, bindings: Bindings, functions: Sequence[Function]
    ) -> Compiled:
        model, plan, size = planned.model, planned.plan, planned.batch_size
        largest = max(micro_batch_sizes(size, plan.micro_batches, plan.sizes))
        samples = [-(-largest // replicas) for replicas in plan.replicas]
        examples = find_examples(graph.replace(functions=tuple(functions)), model, samples, size)
        compiled: dict[str, frozenset[str]] = {}
        problems: list[str] = []
        calls = _calls(graph)
        for name, nodes in calls.items():
            function = graph.function(name)
            foreign = frozenset().union(*(_foreign(node, function, bindings) for node in nodes))
            problem = find_problem(
                function,
                examples[name],
                model.constants,
                model.library,
                resource=partial(bindings.resource, nodes[0]),
                foreign=foreign,
                device=_full_name(nodes[0].device),
            )
            if problem is None:
                compiled[name] = foreign
            else:
                problems.append(f"{name}: {problem}")
        self._tell(problems, graph.name, len(calls))
        return compiled

    def _tell(self, problems: Sequence[str], model: str, functions: int) -> None:
        new = [problem for problem in problems if problem not in self._told]
        self._told.update(new)
        if new:
            warn_user(
                f"XLA compiles {functions - len(problems)} of the {functions} stage functions of {model}; these run "
                "without it:\n  " + "\n  ".join(new)
            )


def make_xla(jit_compile: bool | None, function: Callable[..., Any]) -> Xla | None:
    """Return XLA for ``function``, or None where it is not wanted; None for ``jit_compile`` follows the function."""
    wanted = internals.is_compiled_by_xla(function) if jit_compile is None else jit_compile
    return Xla() if wanted else None


def _calls(graph: Graph) -> dict[str, list[Node]]:
    """Return the calls of each stage function in the graph."""
    found: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.op in _CALLS and node.has("stage"):
            found.setdefault(node.string("function"), []).append(node)
    return found


def _foreign(node: Node, function: Function, bindings: Bindings) -> frozenset[str]:
    """Return the variables of a call that live on another device."""
    names = [port.name for _, port in function.input_ports("variable")]
    device = _full_name(node.device)
    return frozenset(name for name in names if bindings.variable(node, name).device != device)


def _full_name(device: str) -> str:
    """Return the name of a device as tensors and variables give it, with job and task."""
    with tf.device(device):
        return str(tf.constant(0.0).device)
