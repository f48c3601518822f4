"""Build the program of a pipelined graph, and run steps of it."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf import internals, variable_values
from dapple_tf.backend.bindings import Buffers, StepVariables
from dapple_tf.backend.emit import Part, emit
from dapple_tf.backend.handler import Bindings, ChooseCompiled, Compiled, RankCommunication
from dapple_tf.backend.operations import Operations
from dapple_tf.backend.saved_variables import unchanged_variables
from dapple_tf.errors import StepError
from dapple_tf.graph_passes.analysis.input_needs import RankInputs, whole_batch
from dapple_tf.graph_passes.analysis.variable_use import find_variables, resident_variables
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value
from dapple_tf.graph_passes.ir.names import BATCH_SIZE_NAME, find_minibatch, nodes_of, site_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import run_passes
from dapple_tf.graph_passes.passes.follow_phases import FollowPhases, PhaseGraph
from dapple_tf.graph_passes.passes.project import TOKENS_NAME
from dapple_tf.staged_model import StagedModel

UNCHANGED = "All variables are as they were before the step."
"""The first words of a step's error where the failed step has changed no variable."""


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled training step. Each of its ``parts`` is the pipelined graph of one phase of the step.

    The program of a phase also runs all phases before it. ``signature``: the specs of the inputs. ``inputs``: what each
    rank uses of the batch in the last part; in one process there is one that uses all. ``loops``: see ``emit``.
    ``replayable``: the whole graphs run in this process, so a failed step can be run again, call by call.
    """

    parts: tuple[Part, ...]
    signature: tuple[tf.TensorSpec, ...]
    inputs: tuple[RankInputs, ...]
    loops: bool = False
    replayable: bool = True

    @property
    def graph(self) -> Graph:
        """The pipelined graph of the last part."""
        return self.parts[-1].graph

    @cached_property
    def variables(self) -> tuple[tf.Variable, ...]:
        """The variables of all parts, each once."""
        return tuple({id(variable): variable for part in self.parts for variable in part.variables.values()}.values())

    @cached_property
    def function(self) -> Any:
        """The TensorFlow function that runs all parts; it is emitted when it is first needed."""
        return emit(self.parts, self.signature, loops=self.loops)

    def run(self, batch: Sequence[Any]) -> list[Any]:
        """Return the outputs of the only part; see ``run_parts``."""
        (outputs,) = self.run_parts(batch)
        return outputs

    def run_parts(self, batch: Sequence[Any]) -> list[list[Any]]:
        """Run one step on the batch's flattened tensors and return each graph's outputs, without tokens of ranks.

        Where the batch size is an input of the graphs, it follows the tensors.

        Raises StepError when the step fails: it says whether any variable has changed, and where and why it failed.
        """
        try:
            optimise_caller = not all(part.operations.inlines_nothing for part in self.parts)
            with internals.without_specialisation(optimise_caller=optimise_caller), internals.one_grappler_iteration():
                outputs = iter(self.function(*batch))
        except tf.errors.OpError as error:
            changed = self._find_changed()
            running = self.parts[min(len(changed), len(self.parts) - 1)].operations.running
            cause = find_cause(error.message, running) or error.message
            found = ""
            if self.replayable:
                with internals.without_specialisation():
                    found = self._replay(len(changed), batch)
                    if changed and not found and isinstance(error, tf.errors.CancelledError):
                        found = self._replay_update(len(changed), batch)
            cause = found or self._with_phase(cause, error.message)
            raise StepError(f"{self._describe_variables(changed)} The step failed: {cause}") from error
        values = [[(value, next(outputs)) for value in part.graph.outputs] for part in self.parts]
        return [[tensor for value, tensor in found if value.node != TOKENS_NAME] for found in values]

    @contextlib.contextmanager
    def rehearsal(self, variables: Iterable[tf.Variable]) -> Iterator[None]:
        """Give ``variables`` back the values that they have now, after the steps that run in this context."""
        with unchanged_variables(variables):
            yield

    def _find_changed(self) -> list[Part]:
        """Return the parts of the failed step that have begun to write variables, and note that none does any more."""
        changed = [part for part in self.parts if bool(part.operations.bindings.updating.numpy())]
        for part in changed:
            part.operations.bindings.updating.assign(False)
        return changed

    def _describe_variables(self, changed: Sequence[Part]) -> str:
        if not changed:
            return UNCHANGED
        if nodes_of(self.graph, OpName.MINIBATCH):
            return (
                "SOME VARIABLES HAVE CHANGED, by the minibatches of the window before the one that failed: go back "
                "to the last checkpoint."
            )
        if len(self.parts) > 1:
            return (
                f"SOME VARIABLES HAVE CHANGED, by {name_phases(len(changed), len(self.parts))}: go back to the last "
                "checkpoint."
            )
        return "SOME VARIABLES HAVE CHANGED, others may not have: go back to the last checkpoint."

    def _replay(self, first: int, batch: Sequence[Any]) -> str:
        """Return where a part fails, from number ``first`` on; "" where none fails again.

        The gradients of the parts before are computed. If only they are left, the last one is run again.
        """
        for number in range(min(first, len(self.parts) - 1), len(self.parts)):
            part = self.parts[number]
            if found := find_failure(part.graph, part.operations, batch):
                return self._in_phase(number, found)
        return ""

    def _replay_update(self, changed: int, batch: Sequence[Any]) -> str:
        """Return where the update of the last ``changed`` part fails; "" where it does not fail again.

        The update is made on the variables as the failed step has left them, and they get their values back.
        """
        part = self.parts[changed - 1]
        with unchanged_variables(part.variables.values()):
            found = find_failure(part.graph, part.operations, batch, updates=True)
        return found and self._in_phase(changed - 1, found)

    def _in_phase(self, number: int, found: str) -> str:
        return found if len(self.parts) == 1 else f"phase {number + 1} of {len(self.parts)}, {found}"

    def _with_phase(self, cause: str, message: str) -> str:
        """Return the ``cause`` with the phase that TensorFlow's ``message`` names, if it names one."""
        named = set(re.findall(r"\bphase(\d+)/", message)) if len(self.parts) > 1 else set()
        return f"phase {named.pop()} of {len(self.parts)}: {cause}" if len(named) == 1 else cause


def build_program(
    graph: Graph,
    model: StagedModel,
    buffers: Buffers,
    *,
    inline: bool = True,
    choose: ChooseCompiled | None = None,
    earlier: Program | None = None,
) -> Program:
    """Move the variables to their stages, create copies and buffers, and return the program.

    ``inline``: TensorFlow may inline stage functions where each is called once, as in a step of one micro-batch, but
    not in a step of several phases (see ``FollowPhases``). ``choose`` returns the functions that XLA compiles; without
    it, none. ``earlier``: the program of the phase before.
    """
    inline = inline and model.interface.phase is None
    move_to_stages(graph, model.variables, model.pass_facts.shares)
    bindings = StepVariables(graph, model.variables, buffers)
    compiled = {} if choose is None else choose(graph, bindings, graph.functions)
    operations = Operations(graph, bindings, model.constants, model.library, inline, compiled=compiled)
    parts, signature = _after(earlier, Part(graph, operations, model.variables), model.interface.signature)
    return Program(parts, signature, (whole_batch(len(model.interface.signature)),), loops=True)


def build_rank_program(
    graph: Graph,
    model: StagedModel,
    buffers: Buffers,
    ranks: RankCommunication,
    device: str,
    inputs: tuple[RankInputs, ...],
    compiled: Callable[[Bindings], Compiled],
    earlier: Program | None = None,
) -> Program:
    """Return the program of one rank's graph, on the rank's ``device``; ``inputs``: what each rank uses of the batch.

    Stage functions are inlined only where their calls have the attribute ``inline``: TensorFlow could fold parts of an
    inlined function into constants, and an exchange of a constant would run while the graph is optimised. ``compiled``
    returns the functions that XLA compiles. ``earlier``: the program of the phase before.
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
    parts, signature = _after(earlier, Part(graph, operations, model.variables), signature)
    return Program(parts, signature, inputs, loops=ranks.fits_loops, replayable=False)


def follow(graph: Graph, model: StagedModel, earlier: Program | None) -> Graph:
    """Return the finished graph of a phase of a step, which waits for the program of the phases before."""
    phase = model.interface.phase
    if phase is None:
        return graph
    parts = () if earlier is None else earlier.parts
    before = tuple(PhaseGraph(part.graph, _keys(part.variables)) for part in parts)
    last = phase.number == phase.count - 1
    return run_passes(graph, [FollowPhases(before, _keys(model.variables), last)], ())


def name_phases(count: int, of: int) -> str:
    """Return the first ``count`` phases of a step in words."""
    return f"phase 1 of {of}" if count == 1 else f"phases 1 to {count} of {of}"


def _keys(variables: Mapping[str, tf.Variable]) -> dict[str, int]:
    return {name: id(variable) for name, variable in variables.items()}


def _after(
    earlier: Program | None, part: Part, signature: tuple[tf.TensorSpec, ...]
) -> tuple[tuple[Part, ...], tuple[tf.TensorSpec, ...]]:
    """Return the parts and the signature of the program of a phase that follows ``earlier``, if there is one."""
    if earlier is None:
        return (part,), signature
    specs = zip(earlier.signature, signature, strict=True)
    return (*earlier.parts, part), tuple(tf.TensorSpec(a.shape.merge_with(b.shape), a.dtype) for a, b in specs)


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


# What TensorFlow adds to the message of an op that runs by itself.
_EAGER = re.compile(r"\{\{function_node [^}]*\}\} ?| \[Op:CheckNumerics\] name: ?$")
# Ops that write the user's variables, and ops without a result that others use.
_SKIPPED = frozenset(
    {
        OpName.UPDATE,
        OpName.COMMIT,
        OpName.WRITE_STATISTICS,
        OpName.SET_UPDATING,
        OpName.COUNT_UPDATE,
        OpName.BARRIER,
        OpName.FOLLOW,
        OpName.TIMESTAMP,
        OpName.STACK_TIMESTAMPS,
    }
)


def find_failure(graph: Graph, operations: Operations, batch: Sequence[Any], *, updates: bool = False) -> str:
    """Return where a step on ``batch`` fails and why: stage, replica, micro-batch, op and message.

    "" where it does not fail again. Runs everything up to the weight update in the graph's order, and writes only
    replicas' copies of variables and accumulated gradients. ``updates``: the updates run, too, and write variables.
    """
    skipped = _SKIPPED - {OpName.UPDATE} if updates else _SKIPPED
    values = {Value(name): tf.convert_to_tensor(tensor) for name, tensor in zip(graph.inputs, batch, strict=True)}
    for node in graph.nodes:
        if node.op in skipped or Value(node.name) in values:
            continue
        if any(value not in values for value in node.inputs):  # computed from a skipped node
            continue
        try:
            with tf.device(node.device):
                outputs, _ = operations.run(node, [values[value] for value in node.inputs])
        except tf.errors.OpError as error:
            place = _describe_place(_find_place(graph, node, values), _count_micro_batches(graph))
            return f"{place}: {_EAGER.sub('', error.message)}"
        values.update(zip(node.values(), outputs, strict=True))
    return ""


def _find_place(graph: Graph, failed: Node, values: Mapping[Value, Any]) -> Node:
    """Return the node to name for a node that ``failed``: for a loss that is not finite, the first that gave such."""
    if failed.op == OpName.MERGE and failed.has("check"):
        for value in failed.inputs[::2]:
            if not np.isfinite(values[value].numpy()).all():
                return graph.node(value.node)
    return failed


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
