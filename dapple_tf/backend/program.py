"""Build the program of a pipelined graph, and run steps of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.backend.bindings import Buffers, StepVariables
from dapple_tf.backend.emit import emit
from dapple_tf.backend.failure_cause import find_cause
from dapple_tf.backend.handler import Bindings, ChooseCompiled, Compiled, RankCommunication
from dapple_tf.backend.operations import Operations
from dapple_tf.backend.replay import find_failure
from dapple_tf.backend.saved_variables import unchanged_variables
from dapple_tf.backend.variable_devices import move_to_device, move_to_stages
from dapple_tf.errors import StepError
from dapple_tf.staged_model import StagedModel
from graph_passes.analysis.input_needs import RankInputs, whole_batch
from graph_passes.ir.graph import Graph
from graph_passes.ir.names import BATCH_SIZE_NAME, nodes_of
from graph_passes.ir.ops import OpName
from graph_passes.passes.project import TOKENS_NAME


@dataclass(frozen=True)
class Program:
    """A pipelined graph and the TensorFlow ``function`` that runs it.

    ``inputs``: what each rank uses of the batch; in one process there is one that uses all. ``replayable``: the whole
    graph runs in this process, so a failed step can be run again, call by call.
    """

    graph: Graph
    function: Any
    operations: Operations
    inputs: tuple[RankInputs, ...]
    replayable: bool = True

    def run(self, batch: Sequence[Any]) -> list[Any]:
        """Run one step on the batch's flattened tensors and return the graph's outputs, without tokens of ranks.

        Where the batch size is an input of the graph, it follows the tensors.

        Raises StepError when the step fails: it says whether any variable has changed, and where and why it failed.
        """
        try:
            optimise_caller = not self.operations.inlines_nothing
            with internals.without_specialisation(optimise_caller=optimise_caller), internals.one_grappler_iteration():
                outputs = self.function(*batch)
        except tf.errors.OpError as error:
            state, cause = self._describe_variables(), find_cause(error.message)
            if self.replayable:
                with internals.without_specialisation():
                    cause = find_failure(self.graph, self.operations, batch) or cause
            raise StepError(f"{state} The step failed: {cause or error.message}") from error
        return [tensor for value, tensor in zip(self.graph.outputs, outputs, strict=True) if value.node != TOKENS_NAME]

    @contextlib.contextmanager
    def rehearsal(self, variables: Iterable[tf.Variable]) -> Iterator[None]:
        """Give ``variables`` back the values that they have now, after the steps that run in this context."""
        with unchanged_variables(variables):
            yield

    def _describe_variables(self) -> str:
        updating = self.operations.bindings.updating
        if bool(updating.numpy()):
            updating.assign(False)
            if nodes_of(self.graph, OpName.MINIBATCH):
                return (
                    "SOME VARIABLES HAVE CHANGED, by the minibatches of the window before the one that failed: go back "
                    "to the last checkpoint."
                )
            return "SOME VARIABLES HAVE CHANGED, others have not: go back to the last checkpoint."
        return "All variables are as they were before the step."


def build_program(
    graph: Graph, model: StagedModel, buffers: Buffers, *, inline: bool = True, choose: ChooseCompiled | None = None
) -> Program:
    """Move the variables to their stages, create copies and buffers, and emit the TensorFlow function.

    ``inline``: TensorFlow may inline stage functions where each is called once, as in a step of one micro-batch.
    ``choose`` returns the functions that XLA compiles; without it, none.
    """
    move_to_stages(graph, model.variables)
    bindings = StepVariables(graph, model.variables, buffers)
    compiled = {} if choose is None else choose(graph, bindings, graph.functions)
    operations = Operations(graph, bindings, model.constants, model.library, inline, compiled=compiled)
    return Program(graph, emit(graph, model.signature, operations), operations, (whole_batch(len(model.signature)),))


def build_rank_program(
    graph: Graph,
    model: StagedModel,
    buffers: Buffers,
    ranks: RankCommunication,
    device: str,
    inputs: tuple[RankInputs, ...],
    compiled: Callable[[Bindings], Compiled],
) -> Program:
    """Return the program of one rank's graph, on the rank's ``device``; ``inputs``: what each rank uses of the batch.

    Stage functions are inlined only where their calls have the attribute ``inline``: TensorFlow could fold parts of an
    inlined function into constants, and an exchange of a constant would run while the graph is optimised. ``compiled``
    returns the functions that XLA compiles.
    """
    move_to_device(graph, model.variables, device)
    bindings = StepVariables(graph, model.variables, buffers)
    operations = Operations(
        graph, bindings, model.constants, model.library, inline=False, ranks=ranks, compiled=compiled(bindings)
    )
    signature = (*model.signature, *([tf.TensorSpec((), tf.int64)] if BATCH_SIZE_NAME in graph.inputs else []))
    return Program(graph, emit(graph, signature, operations), operations, inputs, replayable=False)
