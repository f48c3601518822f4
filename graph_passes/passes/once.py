"""Build the functions that run once a step: they compute what a stage needs of the whole batch, not of a micro-batch.

Statistics of the batch (a count of unmasked tokens), seeds of random draws, and writes that do not depend on samples
(counters, moving averages of weights) are computed once, before the micro-batches, from the whole batch. Each stage
computes what it uses: in a job of several processes no rank waits for another.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from dapple_tf.graph_passes.ir.extract import extract_function, results_of
from dapple_tf.graph_passes.ir.graph import Effect, Function, Graph, Role, Value, ancestors
from dapple_tf.graph_passes.ir.names import at
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.partition import StageGraph


def build_once(
    stages: StageGraph,
    joint: Graph,
    functions: Sequence[tuple[Function, ...]],
    *,
    repeated: bool = False,
    owners: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Function | None, ...]:
    """Return, for each stage, the function that computes the inputs of role ``once`` of its ``functions``.

    The function also performs the run-once writes that are assigned to the stage. If ``functions`` read a variable
    directly (in a loop), it performs all run-once writes of that variable too, so that the stage's copy is current.
    None for a stage with neither inputs nor writes. ``joint``: the graph after differentiation. ``repeated``: the
    function runs for one minibatch after another, and the copies of variables are not refreshed in between; it then
    also performs all writes of the variables that it reads itself, including those after its reads. ``owners``: the
    stages that own variables, whichever stage uses them first: these perform the run-once writes of their variables.
    """
    joint = _use_shapes_of_batch(joint)
    values = {str(value): value for name in stages.layers.once for value in joint.node(name).values()}
    taken: list[list[Value]] = []
    for pair in functions:
        names = dict.fromkeys(port.name for function in pair for _, port in function.input_ports("once"))
        taken.append([values[name] for name in names])
    writes = _assign_writes(stages, joint, functions, taken, owners)
    for stage, own in enumerate(functions):
        read = {port.name for function in own for _, port in function.input_ports("variable")}
        _add_writes(stages, joint, [value.node for value in taken[stage]], writes[stage], read, repeated=repeated)
    return tuple(
        _once_function(stages, stage, joint, taken[stage], writes[stage]) if taken[stage] or writes[stage] else None
        for stage in range(len(functions))
    )


def _use_shapes_of_batch(joint: Graph) -> Graph:
    """Return the graph in which the shapes of activations are computed from the batch size.

    A node with the attribute ``stands_for`` computes such a shape; the attribute is the value it replaces, as text.
    """
    of_batch = {node.string("stands_for"): Value(node.name) for node in joint.nodes if node.has("stands_for")}
    nodes = (replace(n, inputs=tuple(of_batch.get(str(value), value) for value in n.inputs)) for n in joint.nodes)
    return joint.replace(nodes=tuple(nodes)).sorted() if of_batch else joint


def _assign_writes(
    stages: StageGraph,
    joint: Graph,
    functions: Sequence[tuple[Function, ...]],
    taken: Sequence[Sequence[Value]],
    given: Mapping[str, int],
) -> list[list[str]]:
    """Return, for each stage, the nodes that run once and write variables or have other side effects.

    A stage uses a variable in its functions, or in a write that is assigned to the stage. A variable is written by its
    ``given`` owner, or else by the first stage that uses it. If no stage uses it, it is written by the first stage that
    uses a variable from which the new value is computed, so that no further stage needs a copy of the latter.
    """
    users: dict[str, int] = {}
    for stage in reversed(range(len(functions))):
        ports = {port.name for function in functions[stage] for _, port in function.input_ports("variable")}
        users.update(dict.fromkeys((*ports, *_variables(stages, joint, [v.node for v in taken[stage]])), stage))
    writes = [n for n in joint.nodes if n.name in stages.layers.once and n.effect in (Effect.WRITE, Effect.SIDE)]
    needed = {node.name: _variables(stages, joint, [node.name]) for node in writes}
    while True:
        found: list[list[str]] = [[] for _ in functions]
        owners = dict(given)
        for node in writes:
            used = [users[name] for name in node.written if name in users]
            used = used or [users[name] for name in needed[node.name] if name in users]
            owned = [owners[name] for name in node.written if name in owners]
            stage = owned[0] if owned else min(used, default=len(functions) - 1)
            owners |= dict.fromkeys(node.written, stage)
            found[stage].append(node.name)
        before = dict(users)
        for stage, names in enumerate(found):
            for name in itertools.chain.from_iterable(needed[name] for name in names):
                users[name] = min(users.get(name, stage), stage)
        if users == before:
            return found


def _variables(stages: StageGraph, joint: Graph, roots: Sequence[str]) -> set[str]:
    """Return the variables that these nodes need."""
    return {name for name in _needed(stages, joint, roots) if joint.node(name).op == "variable"}


def _add_writes(
    stages: StageGraph, joint: Graph, taken: Sequence[str], writes: list[str], read: set[str], *, repeated: bool
) -> None:
    """Add to a stage's ``writes`` the run-once writes, still missing there, of the variables that the stage reads.

    ``taken``: the nodes of the values that its functions take; ``read``: the variables that its functions read.
    """
    while True:
        if repeated:
            read = read | _variables(stages, joint, [*taken, *writes])
        found = [node.name for node in joint.nodes if node.name in stages.layers.once and read & {*node.written}]
        if not (missing := [name for name in found if name not in writes]):
            return
        writes += missing


def _needed(stages: StageGraph, joint: Graph, roots: Sequence[str]) -> set[str]:
    """Return ``roots`` and all nodes that they need: those of control edges only if they run once too."""
    before = {
        node.name: [Value(c.source) for c in node.controls if c.source in stages.layers.once] for node in joint.nodes
    }
    return ancestors(joint, roots, by_controls=False, used=before)


def _once_function(
    stages: StageGraph, stage: int, joint: Graph, values: Sequence[Value], writes: Sequence[str]
) -> Function:
    # Where a value is read after another stage's write, the members include that write, to this stage's own copy.
    members = _needed(stages, joint, [*(value.node for value in values), *writes])

    def port_of(value: Value) -> tuple[Role, str] | None:
        source = joint.node(value.node)
        match source.op:
            case "arg" | "rows" | "variable":
                return source.op, source.name
        return None

    name = at(stage, what=OpName.RUN_ONCE)
    return extract_function(name, joint, members, port_of, results_of(joint, "once", values))
