"""Move variables to the devices of the stages that use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import tensorflow as tf

from dapple_tf import internals
from graph_passes.analysis.resident_variables import resident_variables
from graph_passes.analysis.variable_use import find_variables
from graph_passes.ir.graph import Graph, Node
from graph_passes.ir.names import nodes_of
from graph_passes.ir.ops import OpName


def move_to_device(graph: Graph, variables: Mapping[str, tf.Variable], device: str) -> None:
    """Move the variables that a rank's stage functions and updates use, and that the rank holds, to its ``device``."""
    resident = resident_variables(graph)
    calls = [node for node in graph.nodes if node.has("function") and node.has("stage")]
    used = dict.fromkeys(name for node in calls for name in _variables_of(graph, node) if name in resident)
    _move((variables[name], device) for name in used)


def move_to_stages(graph: Graph, variables: Mapping[str, tf.Variable]) -> None:
    """Move each variable to the device that writes it: weights to their owner's, slots to their update's.

    Variables that the updates of several stages share (the step counter, the learning rate) stay where they are.
    """
    first_replica = {n.integer("stage"): n.device for n in nodes_of(graph, OpName.FORWARD) if n.integer("replica") == 0}
    devices = {name: first_replica[stages[0]] for name, stages in find_variables(graph).users}
    updates = nodes_of(graph, OpName.UPDATE)
    used = [_variables_of(graph, node) for node in updates]
    stages = [node.attr("stage") if node.has("stage") else None for node in updates]
    places = {(stage, name) for stage, names in zip(stages, used, strict=True) for name in names}
    uses = Counter(name for _, name in places)
    for node, names in zip(updates, used, strict=True):
        if node.has("stage"):
            devices |= {name: node.device for name in names if uses[name] == 1 and name not in devices}
    _move((variables[name], device) for name, device in devices.items())


def _variables_of(graph: Graph, node: Node) -> dict[str, None]:
    """Return the names of the variables that a call's function takes, each once, in order."""
    ports = graph.function(node.string("function")).input_ports("variable")
    return dict.fromkeys(port.name for _, port in ports)


def _move(moves: Iterable[tuple[tf.Variable, str]]) -> None:
    internals.move_variables([(variable, device) for variable, device in moves if not _same(variable.device, device)])


def _same(first: str, second: str) -> bool:
    """Return whether two names, which may give the job and the host or not, are of one device of this process."""
    a, b = tf.DeviceSpec.from_string(first), tf.DeviceSpec.from_string(second)
    return (a.device_type, a.device_index) == (b.device_type, b.device_index)
