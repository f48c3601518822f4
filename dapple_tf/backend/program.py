"""Build the program of a pipelined graph, and run steps of it."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dapple_tf import internals, variable_values
from dapple_tf.backend.bindings import Buffers, StepVariables
from dapple_tf.backend.emit import emit
from dapple_tf.backend.handler import Bindings, ChooseCompiled, Compiled, RankCommunication
from dapple_tf.backend.operations import Operations
from dapple_tf.backend.saved_variables import unchanged_variables
from dapple_tf.errors import StepError
from dapple_tf.graph_passes.analysis.input_needs import RankInputs, whole_batch
from dapple_tf.graph_passes.analysis.variable_use import find_variables, resident_variables
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value
from dapple_tf.graph_passes.ir.names import BATCH_SIZE_NAME, find_minibatch, nodes_of, site_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.project import TOKENS_NAME
from dapple_tf.staged_model import StagedModel

UNCHANGED = "All variables are as they were before the step."
"""The first words of a step's error where the failed step has changed no variable."""


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
            state, cause = self._describe_variables(), find_cause(error.message, self.operations.running)
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
        return UNCHANGED


def build_program(
    graph: Graph, model: StagedModel, buffers: Buffers, *, inline: bool = True, choose: ChooseCompiled | None = None
) -> Program:
    """Move the variables to their stages, create copies and buffers, and emit the TensorFlow function.

    ``inline``: TensorFlow may inline stage functions where each is called once, as in a step of one micro-batch.
    ``choose`` returns the functions that XLA compiles; without it, none.
    """
    move_to_stages(graph, model.variables, model.for_passes.shares)
    bindings = StepVariables(graph, model.variables, buffers)
    compiled = {} if choose is None else choose(graph, bindings, graph.functions)
    operations = Operations(graph, bindings, model.constants, model.library, inline, compiled=compiled)
    return Program(
        graph,
        emit(graph, model.interface.signature, operations, loops=True),
        operations,
        (whole_batch(len(model.interface.signature)),),
    )


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
    signature = (
        *model.interface.signature,
        *([tf.TensorSpec((), tf.int64)] if BATCH_SIZE_NAME in graph.inputs else []),
    )
    function = emit(graph, signature, operations, loops=ranks.fits_loops)
    return Program(graph, function, operations, inputs, replayable=False)


# --- Find the cause of a failed step in TensorFlow's error message


# Every failure cancels the op that detects hangs (``distributed.progress``); that is not the cause.
_CANCELLED = "Dequeue operation was cancelled"
# Before the error itself: where the graph was built, with the lines of the stack, which are indented.
_PLACES = re.compile(
    r"\A(?:Graph execution error:\s*)?"
    r"(?:Detected at node [^\n]* defined at \(most recent call last\):\n"
    r"(?:<stack traces unavailable>\n|[ \t]+[^\n]*\n)*)+"
)


# The number in the name of an op in a loop: of the first micro-batch for which it runs.
_IN_LOOP = re.compile(r"(while/\S*/mb)\d+(?=/)")


def find_cause(message: str, running: int | None = None) -> str:
    """Return the first root error in TensorFlow's ``message`` that is not a cancellation, without its stack trace.

    Where it lists no root errors, return ``message`` without the places at which its graph was built. ``running``: the
    micro-batch for which a loop ran last, which takes the place of the number in names of the loop's ops.
    """
    if running is not None:
        message = _IN_LOOP.sub(rf"\g<1>{running}", message)
    roots = re.findall(r"^\s*\(\d+\) [A-Z_]+:\s*(.*?)(?=^\s*\(\d+\) [A-Z_]+:|^\d+ successful|\Z)", message, re.M | re.S)
    causes = [root.strip() for root in roots if not root.startswith(_CANCELLED)]
    return causes[0] if causes else _PLACES.sub("", message)


# --- Locate the failure of a step: run the step again, call by call
# When several devices run at once, TensorFlow often reports a transfer that was cancelled because of the failure
# instead of the failure.


# Ops that write the user's variables, and ops without a result that others use.
_SKIPPED = frozenset(
    {
        OpName.UPDATE,
        OpName.COMMIT,
        OpName.WRITE_STATISTICS,
        OpName.SET_UPDATING,
        OpName.COUNT_UPDATE,
        OpName.BARRIER,
        OpName.TIMESTAMP,
        OpName.STACK_TIMESTAMPS,
    }
)


def find_failure(graph: Graph, operations: Operations, batch: Sequence[Any]) -> str:
    """Return where a step on ``batch`` fails and why: stage, replica, micro-batch, op and message.

    "" where it does not fail again. Runs everything up to the weight update in the graph's order, and writes only
    replicas' copies of variables and accumulated gradients.
    """
    values = {Value(name): tf.convert_to_tensor(tensor) for name, tensor in zip(graph.inputs, batch, strict=True)}
    for node in graph.nodes:
        if node.op in _SKIPPED or Value(node.name) in values:
            continue
        if any(value not in values for value in node.inputs):  # computed from a skipped node
            continue
        try:
            with tf.device(node.device):
                outputs, _ = operations.run(node, [values[value] for value in node.inputs])
        except tf.errors.OpError as error:
            return f"{_describe_place(node, _count_micro_batches(graph))}: {error.message}"
        values.update(zip(node.values(), outputs, strict=True))
    return ""


def _count_micro_batches(graph: Graph) -> int:
    """Return into how many micro-batches each minibatch of an asynchronous window is cut; 0 for a synchronous step."""
    minibatches = len(nodes_of(graph, OpName.MINIBATCH))
    numbers = {node.integer("micro_batch") for node in nodes_of(graph, OpName.FORWARD)}
    return len(numbers) // minibatches if minibatches else 0


def _describe_place(node: Node, of_minibatch: int) -> str:
    """Return the place of a call; ``of_minibatch``: the micro-batches of a minibatch, 0 for a synchronous step."""
    words = {"stage": "stage", "replica": "replica", "micro_batch": "micro-batch"}
    op = node.string("of") if node.op == OpName.PART else node.op
    places = [f"{word} {node.integer(key)}" for key, word in words.items() if node.has(key)]
    if of_minibatch and node.has("micro_batch"):
        minibatch, micro_batch = divmod(node.integer("micro_batch"), of_minibatch)
        places[-1] = f"minibatch {minibatch}" + (f", micro-batch {micro_batch}" if of_minibatch > 1 else "")
    elif (number := find_minibatch(node.name)) is not None:
        places.append(f"minibatch {number}")
    return ", ".join([*places, op])


# --- Move variables to the devices of the stages that use them


def move_to_device(graph: Graph, variables: Mapping[str, tf.Variable], device: str) -> None:
    """Move the variables that a rank's stage functions and updates use, and that the rank holds, to its ``device``."""
    resident = resident_variables(graph)
    calls = [node for node in graph.nodes if node.has("function") and node.has("stage")]
    used = dict.fromkeys(name for node in calls for name in _variables_of(graph, node) if name in resident)
    _move((variables[name], device) for name in used)
    variable_values.make_values(variables.values())


def move_to_stages(
    graph: Graph, variables: Mapping[str, tf.Variable], shares: tuple[tuple[str, int], ...] = ()
) -> None:
    """Move each variable to the device that writes it: weights to the one that keeps them, slots to their update's.

    ``shares``: see ``Variables``. Variables that the updates of several places share (the step counter, the learning
    rate) stay where they are.
    """
    device_of = {site_of(node): node.device for node in nodes_of(graph, OpName.FORWARD)}
    used_by_stages = find_variables(graph, shares)
    devices = {name: device_of[used_by_stages.home(name)] for name, _ in used_by_stages.users}
    updates = nodes_of(graph, OpName.UPDATE)
    used = [_variables_of(graph, node) for node in updates]
    of_updates = [site_of(node) if node.has("stage") else None for node in updates]
    places = {(place, name) for place, names in zip(of_updates, used, strict=True) for name in names}
    uses = Counter(name for _, name in places)
    for node, names in zip(updates, used, strict=True):
        if node.has("stage"):
            devices |= {name: node.device for name in names if uses[name] == 1 and name not in devices}
    _move((variables[name], device) for name, device in devices.items())
    variable_values.make_values(variables.values())


def _variables_of(graph: Graph, node: Node) -> dict[str, None]:
    """Return the names of the variables that a call's function takes, each once, in order."""
    ports = graph.function(node.string("function")).input_ports("variable")
    return dict.fromkeys(port.name for _, port in ports)


def _move(moves: Iterable[tuple[tf.Variable, str]]) -> None:
    variable_values.move_variables(
        [(variable, device) for variable, device in moves if not _same(variable.device, device)]
    )


def _same(first: str, second: str) -> bool:
    """Return whether two names, which may give the job and the host or not, are of one device of this process."""
    a, b = tf.DeviceSpec.from_string(first), tf.DeviceSpec.from_string(second)
    return (a.device_type, a.device_index) == (b.device_type, b.device_index)
