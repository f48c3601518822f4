"""Extract the loss head of a model (see ``analysis.loss_head``): the function of the loss and of its gradients."""

from __future__ import annotations

from dapple_tf.errors import PartitionError
from dapple_tf.graph_passes.ir.extract import extract_function
from dapple_tf.graph_passes.ir.graph import Effect, Function, Graph, Port, Role, Value, ancestors
from dapple_tf.graph_passes.ir.names import at
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.backward import StageGradients
from dapple_tf.graph_passes.passes.partition import StageGraph


def build_loss_head(stages: StageGraph, joint: Graph, gradients: StageGradients) -> Function | None:
    """Return the function that gives the outputs and all gradients of the loss head; None without a loss head.

    The function takes the gradient of the loss where ``gradients`` have a seed; otherwise the gradient is 1.
    ``joint``: the graph after differentiation. Raises PartitionError if a gradient needs a tensor that the loss head
    does not get.
    """
    if not stages.loss_head:
        return None
    name = at(len(stages.stages) - 1, what=OpName.LOSS_HEAD)
    head_inputs = {entry.value for entry in stages.head_inputs}
    seeds = {placeholder for _, placeholder in gradients.seeds}
    loss, *aux = stages.graph.outputs
    outputs: list[tuple[Role, str, Value]] = [("loss", "loss", loss)]
    outputs += [("aux", str(i), value) for i, value in enumerate(aux) if value.node in stages.loss_head]
    outputs += [("gradient", str(value), gradient) for value, gradient in gradients.boundary]
    outputs += [("variable", variable, gradient) for variable, gradient in gradients.variables]
    ports = [Port(role, label, joint.type_of(value)) for role, label, value in outputs]
    ports += [port for use in gradients.slices for port in use.ports]
    values = [*(value for _, _, value in outputs), *(v for use in gradients.slices for v in (use.slices, use.indices))]
    acting = [n for n in stages.loss_head if joint.node(n).effect in (Effect.WRITE, Effect.SIDE)] + [*gradients.acting]
    stop = {value.node for value in head_inputs} - stages.loss_head | stages.once | seeds
    members = ancestors(joint, [*(value.node for value in values), *acting], stop=stop)

    def port_of(value: Value) -> tuple[Role, str] | None:
        source = joint.node(value.node)
        if value in head_inputs:
            return "boundary", str(value)
        if value.node in seeds:
            return "seed", "loss"
        if value.node in stages.once:
            return "once", str(value)
        match source.op:
            case "arg" | "rows" | "variable":
                return source.op, source.name
        if value.node in members:
            return None
        raise PartitionError(f"{name} needs {value}, which is not an output of the last stage")

    return extract_function(name, joint, members, port_of, ports, values)
