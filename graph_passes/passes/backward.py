"""Split the differentiated graph of each stage into a forward and a backward function (DAPPLE, section V.A.1).

TensorFlow differentiates (``dapple_tf.frontend.gradients``), which leaves forward and backward in one *joint* graph.
Here it is cut into the two functions, and the *stash* is found: the values of forward that backward takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dapple_tf.errors import PartitionError
from dapple_tf.graph_passes.analysis.layers import CAPTURED_INPUTS, SMALL_OPS, dependents
from dapple_tf.graph_passes.ir.extract import extract_function, results_of, values_between
from dapple_tf.graph_passes.ir.graph import Effect, Function, Graph, Port, Role, TensorType, Value, ancestors
from dapple_tf.graph_passes.ir.names import at, without_target
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.gather_slices import Combine, SparsePart
from dapple_tf.graph_passes.passes.partition import Stage, StageGraph

_NOT_SENT = (
    "another stage computes and does not send: a custom gradient of this stage uses it. Start the stage before {}"
)


@dataclass(frozen=True)
class SparseUse:
    """One lookup of rows of a variable: ``slices``, the gradients of the rows, and ``indices``, the rows' numbers.

    ``kinds``: the types of both. ``rows``: the number of rows of the variable. ``combine``: how micro-batches are put
    together (see ``gather_slices``). ``position``: the position of the use among all uses of the variable when the
    model runs on one device; uses of several stages have the same position if the stages run the same lookup.
    ``lookup``: the name of the op that looks the rows up; empty if it is unknown.
    """

    variable: str
    rows: int
    slices: Value
    indices: Value
    kinds: tuple[TensorType, TensorType]
    combine: Combine
    position: int
    lookup: str = ""

    @property
    def ports(self) -> tuple[Port, Port]:
        """The ports that carry both out of backward."""
        return Port("slices", self.variable, self.kinds[0]), Port("indices", self.variable, self.kinds[1])


@dataclass(frozen=True)
class StageGradients:
    """The gradients of one stage in the joint graph.

    ``seeds``: (output of the stage, the placeholder of its gradient); ``boundary``: (tensor that enters the stage, its
    gradient); ``variables``: (variable, its gradient), where it is dense; ``slices``: the uses of variables whose
    gradient is sparse. Where there are several targets, gradients by the later ones have names of ``names.of_target``.
    ``acting``: the nodes added by differentiation that write variables or act on the outside world (prints and checks
    of a custom gradient).
    """

    seeds: tuple[tuple[Value, str], ...] = ()
    boundary: tuple[tuple[Value, Value], ...] = ()
    variables: tuple[tuple[str, Value], ...] = ()
    slices: tuple[SparseUse, ...] = ()
    acting: tuple[str, ...] = ()

    @property
    def trained(self) -> tuple[str, ...]:
        """The variables that have a gradient, each once."""
        return tuple(dict.fromkeys([*(name for name, _ in self.variables), *(use.variable for use in self.slices)]))

    @property
    def results(self) -> tuple[Value, ...]:
        """The values that backward returns."""
        return (*(gradient for _, gradient in self.boundary), *self.of_variables)

    @property
    def of_variables(self) -> tuple[Value, ...]:
        """The values that backward returns for variables."""
        sparse = (value for use in self.slices for value in (use.slices, use.indices))
        return (*(value for _, value in self.variables), *sparse)


def sparse_parts(gradients: Sequence[StageGradients]) -> tuple[SparsePart, ...]:
    """Return the uses of all sparse gradients, those of a variable in the order of one device."""
    uses = [(use, stage, i) for stage, found in enumerate(gradients) for i, use in enumerate(found.slices)]
    uses.sort(key=lambda entry: entry[0].position)
    return tuple(SparsePart(use.variable, use.rows, use.position, stage, i, use.combine) for use, stage, i in uses)


def prune_gradients(joint: Graph, gradients: Sequence[StageGradients]) -> tuple[StageGradients, ...]:
    """Return ``gradients`` without the boundary gradients that the stage before does not use, and their seeds."""
    pruned: list[StageGradients] = []
    used: set[Value] | None = None
    for found in gradients:
        boundary = tuple((x, g) for x, g in found.boundary if used is None or x in used)
        needed = ancestors(joint, [g.node for g in (*(g for _, g in boundary), *found.of_variables)] + [*found.acting])
        seeds = tuple((value, name) for value, name in found.seeds if name in needed)
        pruned.append(dataclasses.replace(found, seeds=seeds, boundary=boundary))
        used = {value for value, _ in seeds}
    return tuple(pruned)


def send_captured(stages: StageGraph, joint: Graph, gradients: Sequence[StageGradients]) -> StageGraph:
    """Return the stages that also send each other the tensors which the gradients of later stages capture.

    A custom gradient may use any tensor that was computed before it. Where a stage computes that tensor, and a later
    one the gradient, it becomes a boundary tensor of both, and of the stages in between. ``joint``: the graph after
    differentiation. Raises PartitionError for a tensor that cannot leave its device.
    """
    inputs = [dict.fromkeys(stage.inputs) for stage in stages.stages]
    outputs = [dict.fromkeys(stage.outputs) for stage in stages.stages]
    for stage in stages.stages:
        for value in _captured(stages, stage, joint, gradients[stage.index]):
            if not (dtype := joint.type_of(value).dtype).transferable:
                raise PartitionError(
                    f"stage {stage.index} has a custom gradient that uses {value} of another stage, and a {dtype.name} "
                    f"tensor cannot leave its device: start the stage before {value.node!r}"
                )
            for index in range(stages.stage_of(value.node) or 0, stage.index):
                outputs[index][value] = inputs[index + 1][value] = None
    return dataclasses.replace(
        stages,
        stages=tuple(
            dataclasses.replace(stage, inputs=tuple(inputs[stage.index]), outputs=tuple(outputs[stage.index]))
            for stage in stages.stages
        ),
    )


def _captured(stages: StageGraph, stage: Stage, joint: Graph, gradients: StageGradients) -> list[Value]:
    """Return the values of earlier stages that the gradients of a stage use and that do not enter it, in order."""
    foreign, outside = _foreign(stages, stage), _outside_of_backward(stages, stage, gradients)
    needed = ancestors(joint, _backward_roots(stage, gradients), stop=outside)
    used = [value for node in joint.nodes if node.name in needed for value in node.inputs]
    used += gradients.results
    earlier = (v for v in used if v.node in foreign and (stages.stage_of(v.node) or 0) < stage.index)
    return [value for value in dict.fromkeys(earlier) if value not in stage.inputs]


def _foreign(stages: StageGraph, stage: Stage) -> set[str]:
    """Return the nodes of the other stages."""
    return {name for other in stages.stages if other.index != stage.index for name in other.nodes}


def _outside_of_backward(stages: StageGraph, stage: Stage, gradients: StageGradients) -> set[str]:
    """Return the nodes that a stage's backward does not compute: of other stages, run once, or seeds."""
    return _foreign(stages, stage) | stages.layers.once | {placeholder for _, placeholder in gradients.seeds}


def _backward_roots(stage: Stage, gradients: StageGradients) -> list[str]:
    """Return the nodes whose results a stage's backward gives, and those that write or act."""
    return [*(value.node for value in gradients.results if value not in stage.inputs), *gradients.acting]


def split_backward(
    stages: StageGraph, joint: Graph, gradients: Sequence[StageGradients]
) -> tuple[tuple[Function, Function], ...]:
    """Return the forward and the backward function of each stage.

    ``joint``: the graph after differentiation; ``gradients``: an entry for each stage, and for the loss head. Raises
    PartitionError if a gradient needs a tensor of another stage that does not cross the boundary.
    """
    return tuple(_split_stage(stages, stage, joint, gradients[stage.index]) for stage in stages.stages)


def _split_stage(
    stages: StageGraph, stage: Stage, joint: Graph, gradients: StageGradients
) -> tuple[Function, Function]:
    results = _forward_results(stages, stage, joint)
    acting = [n for n in stage.nodes if joint.node(n).effect in (Effect.WRITE, Effect.SIDE)]
    floating = stages.layers.floating - _changed_by_backward(stages, joint)
    foreign = _foreign(stages, stage) | stages.layers.once  # computed once a step, by a function of its own
    forward = ancestors(joint, [*(v.node for _, v in results if v not in stage.inputs), *acting], stop=foreign)

    outside = _outside_of_backward(stages, stage, gradients)
    roots = _backward_roots(stage, gradients)
    needed = ancestors(joint, roots, stop=outside)
    small = _find_small(joint, needed - forward, forward | floating | stages.layers.once, stage.inputs)
    forward |= ancestors(joint, small, stop=foreign)
    backward = needed - forward
    # Both functions have the floating nodes that both use, except for those that depend on tensors of the batch.
    used = ancestors(joint, [*backward, *roots], stop=outside | (forward - floating))
    of_batch = dependents(joint, [node.name for node in joint.nodes if node.op == "arg"], by_controls=True)
    repeated = (used & forward & floating) - of_batch
    backward |= repeated

    between = values_between(joint, forward - repeated, backward, gradients.results)
    stash = [v for v in between if v not in stage.inputs and joint.node(v.node).op not in CAPTURED_INPUTS]
    entering: dict[Value, tuple[Role, str]] = {value: ("boundary", str(value)) for value in stage.inputs}
    name = at(stage.index, what=OpName.FORWARD)
    results += results_of(joint, "stash", stash)
    forward_function = _extract(name, stages, joint, forward, entering, results)

    of_tensors = ((x, Value(without_target(x.node), x.index)) for x, _ in gradients.boundary)
    ports = [Port("gradient", str(x), joint.type_of(value)) for x, value in of_tensors]
    ports += [Port("variable", name, joint.type_of(g)) for name, g in gradients.variables]
    ports += [port for use in gradients.slices for port in use.ports]
    entering |= {value: ("stash", str(value)) for value in stash}
    loss = stages.graph.outputs[0]
    for value, placeholder in gradients.seeds:
        entering[Value(placeholder)] = ("seed", "loss") if value == loss else ("gradient", str(value))
    name = at(stage.index, what=OpName.BACKWARD)
    results = list(zip(ports, gradients.results, strict=True))
    return forward_function, _extract(name, stages, joint, backward, entering, results)


def _changed_by_backward(stages: StageGraph, joint: Graph) -> set[str]:
    """Return the nodes that depend on a variable that backward writes: backward must not compute them again."""
    added = [node for node in joint.nodes if node.name not in stages.graph.by_name]
    return dependents(joint, {name for node in added for name in node.written})


def _forward_results(stages: StageGraph, stage: Stage, joint: Graph) -> list[tuple[Port, Value]]:
    """Return what forward gives besides the stash: boundary tensors, the model's outputs, and statistics of the stage.

    Outputs that no stage computes (constants) are given by the last stage.
    """
    found: list[tuple[Role, str, Value]] = [("boundary", str(value), value) for value in stage.outputs]
    for role, name, value in stages.results:
        if value.node in stages.layers.loss_head:
            continue
        owner = stages.stage_of(value.node)
        if (len(stages.stages) - 1 if owner is None else owner) == stage.index:
            found.append((role, name, value))
    statistics = stages.statistics.items()
    found += [("statistic", name, value) for name, value in statistics if stages.stage_of(value.node) == stage.index]
    return [(Port(role, name, joint.type_of(value)), value) for role, name, value in found]


def _find_small(joint: Graph, candidates: set[str], known: set[str], inputs: Sequence[Value]) -> set[str]:
    """Return the candidates that are small integers computed from values that forward has."""
    entering = set(inputs)
    found: set[str] = set()
    for node in joint.nodes:
        available = all(v in entering or v.node in known or v.node in found for v in node.inputs)
        if node.name in candidates and node.op in SMALL_OPS and available:
            found.add(node.name)
    return found


def _extract(
    name: str,
    stages: StageGraph,
    joint: Graph,
    members: set[str],
    entering: Mapping[Value, tuple[Role, str]],
    results: Sequence[tuple[Port, Value]],
    problem: str = _NOT_SENT,
) -> Function:
    """Return a function that takes the values ``entering``, those that run once, arguments and variables.

    ``problem``: what is wrong with any other value that it needs, with braces for the name of the value's node. The
    other parameters: see ``extract_function``.
    """

    def port_of(value: Value) -> tuple[Role, str] | None:
        source = joint.node(value.node)
        if value in entering:
            return entering[value]
        if value.node in stages.layers.once:
            return "once", str(value)
        match source.op:
            case "arg" | "rows" | "variable":
                return source.op, source.name
        if value.node in members:
            return None
        raise PartitionError(f"{name} needs {value}, which {problem.format(repr(value.node))}")

    return extract_function(name, joint, members, port_of, results)


def build_loss_head(stages: StageGraph, joint: Graph, gradients: StageGradients) -> Function | None:
    """Return the function that gives the outputs and all gradients of the loss head; None without a loss head.

    The function takes the gradient of the loss where ``gradients`` have a seed; otherwise the gradient is 1.
    ``joint``: the graph after differentiation. Raises PartitionError if a gradient needs a tensor that the loss head
    does not get.
    """
    if not stages.layers.loss_head:
        return None
    name = at(len(stages.stages) - 1, what=OpName.LOSS_HEAD)
    head_inputs = [entry.value for entry in stages.layers.head_inputs]
    entering: dict[Value, tuple[Role, str]] = {value: ("boundary", str(value)) for value in head_inputs}
    entering |= {Value(placeholder): ("seed", "loss") for _, placeholder in gradients.seeds}
    outputs = [result for result in stages.results if result[0] == "loss" or result[2].node in stages.layers.loss_head]
    outputs += [("gradient", str(value), gradient) for value, gradient in gradients.boundary]
    outputs += [("variable", variable, gradient) for variable, gradient in gradients.variables]
    results = [(Port(role, label, joint.type_of(value)), value) for role, label, value in outputs]
    results += [pair for use in gradients.slices for pair in zip(use.ports, (use.slices, use.indices), strict=True)]
    loss_head = stages.layers.loss_head
    acting = [n for n in loss_head if joint.node(n).effect in (Effect.WRITE, Effect.SIDE)]
    stop = {value.node for value in entering} - loss_head | stages.layers.once
    roots = [*(value.node for _, value in results), *acting, *gradients.acting]
    members = ancestors(joint, roots, stop=stop)
    return _extract(name, stages, joint, members, entering, results, "is not an output of the last stage")
