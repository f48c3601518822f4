"""Weight updates of an asynchronous window: a stage updates its weights as soon as a group's gradients are there.

No barrier holds an update back, and no stage waits for another's (PipeDream, section 3.2). So the optimizer's step
counter cannot be shared: each stage has its own, which it sets before each update to the value of the optimizer's
counter plus the number of the group's last minibatch. At the end of the window the optimizer's counter increases by W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Control, Function, Graph, Node, make_node
from dapple_tf.graph_passes.ir.names import Site, at, find_minibatch, nodes_of, of_minibatch
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.apply import Gradients, complete_gradients, update_inputs
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract
from dapple_tf.graph_passes.passes.split_update import Updates
from dapple_tf.graph_passes.schedules.window import Window

_BEGIN, _DONE, _COUNT = "update/begin", "update/done", "update/count"


@dataclass(frozen=True)
class UpdateGroups(BuiltInPass):
    """Add each stage's updates, in the order of the minibatches; ``counter``: the variable of the step counter."""

    window: Window
    updates: Updates
    counter: str
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD, OpName.MINIBATCH}),
        requires_if_trained=frozenset({OpName.REDUCED_GRADIENTS}),
        requires_if_sparse=frozenset({OpName.GATHER_SLICES}),
        forbids=frozenset({OpName.UPDATE, OpName.BARRIER, OpName.TIMESTAMP}),
        produces=frozenset({OpName.SET_UPDATING, OpName.COUNT_UPDATE}),
        may_produce=frozenset({OpName.UPDATE}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with the updates, and ``update/done`` after all of them and all commits.

        Raises GraphError for updates that need more than a stage's own gradients, and where a gradient is missing.
        """
        check_updates(self.updates, self.counter)
        begin = _begin(graph)
        gradients = _gradients(graph)
        functions = {place.stage: function for place, function in self.updates.stages}
        added: list[Node] = [begin]
        ends: list[Control] = []
        for stage, groups in enumerate(self.window.updates):
            if stage not in functions:  # nothing of it is trained
                continue
            previous = Control(_BEGIN, "update: from here on a failure leaves the window half-applied")
            for update in range(len(groups)):
                own = gradients.get((stage, self.window.last_minibatch(stage, update)), {})
                pair = _update(functions[stage], self.window, stage, update, own, self.counter, previous)
                added += pair
                previous = Control(pair[-1].name, f"update: of stage {stage}, one after the other")
            ends.append(Control(previous.source, "the window ends after all updates"))
        nodes = []
        for node in graph.nodes:
            if node.op == OpName.COMMIT:
                node = node.after(_BEGIN, "update: a failure may leave it half-written")
                ends.append(Control(node.name, "the window ends when all state is written"))
            nodes.append(node)
        offset = self.window.minibatches
        count = make_node(_COUNT, OpName.COUNT_UPDATE, (), (), ends, offset=offset, variable=self.counter)
        done = make_node(_DONE, OpName.SET_UPDATING, updating=False)
        added += [count, done.after(_COUNT, "the window ends after its steps are counted")]
        used = tuple(function for _, function in self.updates.stages)
        return graph.replace(nodes=(*nodes, *added), functions=(*graph.functions, *used)).sorted()


def update_name(window: Window, stage: int, update: int) -> str:
    """Return the name of the node of a stage's update: that of the last minibatch whose gradients it has."""
    return of_minibatch(window.last_minibatch(stage, update), at(stage, what=OpName.UPDATE))


def check_updates(updates: Updates, counter: str) -> None:
    """Raise GraphError unless each stage's update needs its own gradients only, and the stages share the counter only.

    The message continues a sentence that begins with "the optimizer".
    """
    if updates.terms or updates.combine is not None or updates.later is not None:
        raise GraphError(
            "decides by the gradients of all stages at once (a global norm, or whether all are finite), but at any "
            "time the stages have gradients of different minibatches"
        )
    for function in (updates.before, updates.after):
        names = {port.name for _, port in function.input_ports("variable")} if function else set()
        if others := sorted(names - {counter}):
            raise GraphError(
                f"keeps {', '.join(others)} for all variables together, but the stages update at different times"
            )


def _begin(graph: Graph) -> Node:
    """Return the node after which variables may have changed.

    If forward writes no variable, it comes after the first backward of the last stage, which precedes every update.
    """
    begin = make_node(_BEGIN, OpName.SET_UPDATING, updating=True)
    backwards = nodes_of(graph, OpName.BACKWARD)
    if not backwards or nodes_of(graph, OpName.COMMIT):
        return begin
    first = max(
        (node for node in backwards if node.integer("micro_batch") == 0), key=lambda node: node.integer("stage")
    )
    return begin.after(first.name, "update: before the first backward no variable changes")


def _gradients(graph: Graph) -> dict[tuple[int, int], Gradients]:
    """Return what the update of each stage and minibatch may take."""
    found: dict[tuple[int, int], Gradients] = {}
    for node in nodes_of(graph, OpName.REDUCED_GRADIENTS, OpName.GATHER_SLICES):
        minibatch = find_minibatch(node.name)
        assert minibatch is not None  # GroupGradients names them so
        found.setdefault((node.integer("stage"), minibatch), {}).update(complete_gradients(node))
    return found


def _update(
    function: Function, window: Window, stage: int, update: int, gradients: Gradients, counter: str, previous: Control
) -> Sequence[Node]:
    """Return the nodes of one update of a stage: that of its step counter, then the update itself."""
    last = window.last_minibatch(stage, update)
    place, inputs = Site(stage).attrs, update_inputs(function, gradients)
    name = of_minibatch(last, at(stage, what=OpName.COUNT_UPDATE))
    count = make_node(name, OpName.COUNT_UPDATE, (), (), [previous], **place, offset=last, variable=counter)
    step = make_node(update_name(window, stage, update), OpName.UPDATE, inputs, **place, function=function.name)
    # An optimizer may write before it takes a gradient (weight decay), and TensorFlow may inline the update.
    for call in last_backwards(window, stage, update):
        step = step.after(call, "update: all its backwards have used the weights")
    return count, step.after(count.name, "update: the step counter is that of its minibatch")


def last_backwards(window: Window, stage: int, update: int) -> Sequence[str]:
    """Return the names of the last backward of each replica before an update of ``stage``."""
    last = window.last_of_update(stage, update)
    return [at(stage, replica, m, OpName.BACKWARD) for m in last for replica in window.replicas_of(stage, m)]
