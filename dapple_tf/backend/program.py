"""One pipelined graph made ready to run: its variables placed, its TensorFlow function built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.backend.bindings import Buffers, StepVariables, move_to_device, move_to_stages
from dapple_tf.backend.emit import emit
from dapple_tf.backend.failure_cause import find_cause
from dapple_tf.backend.operations import Operations, Ranks
from dapple_tf.backend.replay import find_failure
from dapple_tf.compiler import StagedModel
from dapple_tf.errors import StepError
from graph_passes.ir.graph import Graph
from graph_passes.passes.project import TOKENS_NAME


@dataclass(frozen=True)
class Program:
    """A graph and the function that runs it; ``alone``: all of it runs in this process."""

    graph: Graph
    function: Any
    operations: Operations
    alone: bool = True

    def run(self, batch: Sequence[Any]) -> list[Any]:
        """Run one step on the batch's flattened tensors; the graph's outputs.

        Raises StepError when the step fails, saying whether any variable was changed, and where and why it failed.
        """
        try:
            with internals.without_specialisation():
                outputs = self.function(*batch)
        except tf.errors.OpError as error:
            damage, found = self._damage(), find_cause(error.message)
            if self.alone:
                with internals.without_specialisation():
                    found = find_failure(self.graph, self.operations, batch)
            raise StepError(f"{damage} The step failed: {found or error.message}") from error
        # What a rank has sent is nothing to the user.
        return [tensor for value, tensor in zip(self.graph.outputs, outputs, strict=True) if value.node != TOKENS_NAME]

    def _damage(self) -> str:
        updating = self.operations.bindings.updating
        if bool(updating.numpy()):
            updating.assign(False)
            return "SOME VARIABLES HAVE CHANGED, others have not: go back to the last checkpoint."
        return "All variables are as they were before the step."


def build_program(graph: Graph, model: StagedModel, buffers: Buffers, *, inline: bool = True) -> Program:
    """Move the variables to their stages, make copies and buffers, and emit the TensorFlow function.

    ``inline``: TensorFlow may inline stage functions that are called once, as it does in a step of one micro-batch.
    """
    move_to_stages(graph, model.variables)
    bindings = StepVariables(graph, model.variables, buffers)
    operations = Operations(graph, bindings, model.constants, model.library, inline)
    return Program(graph, emit(graph, model.signature, operations), operations)


def build_rank_program(graph: Graph, model: StagedModel, buffers: Buffers, ranks: Ranks, device: str) -> Program:
    """``build_program`` for one rank's graph, on its ``device``.

    Stage functions are not inlined, but where their calls ask for it: an exchange of what TensorFlow could fold into a
    constant would run too early.
    """
    move_to_device(graph, model.variables, device)
    bindings = StepVariables(graph, model.variables, buffers)
    operations = Operations(graph, bindings, model.constants, model.library, inline=False, ranks=ranks)
    return Program(graph, emit(graph, model.signature, operations), operations, alone=False)
