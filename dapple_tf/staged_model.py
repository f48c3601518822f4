"""Cut a captured model into stages and differentiate each stage.

The result, a ``StagedModel``, is the same for any number of micro-batches and replicas.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import keras
import tensorflow as tf

from dapple_tf.errors import CaptureError, PartitionError
from dapple_tf.exactness import Exactness, Inexactness
from dapple_tf.frontend.after_gradients import AfterGradients, trace_of
from dapple_tf.frontend.captured import Captured, PhaseOfStep, Serves, UnexpectedGradientsError
from dapple_tf.frontend.deferred_statistics import TracedStatistics, trace_statistics
from dapple_tf.frontend.gradients import differentiate, find_write_reasons
from dapple_tf.frontend.optimizer_update import TracedUpdate, trace_update
from dapple_tf.frontend.phases import HANDED_OVER
from dapple_tf.frontend.read_graph import read_graph, read_value
from dapple_tf.graph_passes.analysis.layers import Layers
from dapple_tf.graph_passes.analysis.loss_head import LossHeadInput
from dapple_tf.graph_passes.analysis.variable_use import find_variables
from dapple_tf.graph_passes.ir.extract import extract_function
from dapple_tf.graph_passes.ir.graph import Function, Graph, Node, Port, Role, Value, ancestors, make_node
from dapple_tf.graph_passes.ir.names import OWNED, Site, at, without_target
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.backward import (
    StageGradients,
    build_loss_head,
    prune_gradients,
    send_captured,
    sparse_parts,
    split_backward,
)
from dapple_tf.graph_passes.passes.function_parts import has_joins
from dapple_tf.graph_passes.passes.gather_slices import SparsePart
from dapple_tf.graph_passes.passes.microbatch import MergeKind, merge_kind
from dapple_tf.graph_passes.passes.once import build_once
from dapple_tf.graph_passes.passes.partition import Stage, StageGraph, partition
from dapple_tf.graph_passes.passes.recompute import find_runs
from dapple_tf.graph_passes.passes.round_gradients import Narrow, find_narrow
from dapple_tf.graph_passes.passes.split_update import Updates, cut_updates
from dapple_tf.graph_passes.passes.stage_calls import LOSS_SCALE_NAME
from dapple_tf.sharding import Sharding, share_update


@dataclass(frozen=True)
class Returns:
    """The values that a training step returns.

    ``structure``: its nesting (see ``tf.nest``). ``outputs``: for each flattened part the index of the output that it
    is, or None if the step returns None there.
    """

    structure: Any
    outputs: tuple[int | None, ...]


@dataclass(frozen=True)
class Interface:
    """The arguments and results of a staged model.

    ``signature``: the specs of the batch's flattened tensors. Axis 0 is unknown, and other axes may be. ``example``:
    the same specs with the lengths of these other axes in the batch that was traced. ``aux``: the nesting of the aux
    outputs, or None if the loss has none. ``merges``: for each aux output, how the values of the micro-batches are
    combined. ``loss``: whether the losses of the micro-batches are averaged or summed. ``exactness``: the reasons why a
    step differs from a step on one device. ``uncut``: whether the model is only for steps of one micro-batch on one
    replica (see ``BatchDependence``). ``serves``: for which of these lengths the trace is valid (see
    ``Captured``). ``returns``: what a training step returns, or None if the user gave a loss. ``targets``: the number
    of losses that are differentiated. ``phase``: see ``Captured``.
    """

    signature: tuple[tf.TensorSpec, ...]
    example: tuple[tf.TensorSpec, ...]
    aux: Any
    merges: tuple[MergeKind, ...]
    loss: Literal["mean", "sum"]
    exactness: Exactness
    uncut: bool
    serves: Serves | None
    returns: Returns | None = None
    targets: int = 1
    phase: PhaseOfStep | None = None

    @staticmethod
    def of(captured: Captured) -> Interface:
        """Return the interface of a captured loss."""
        dependence = captured.dependence
        return Interface(
            signature=captured.signature,
            example=captured.example,
            aux=captured.aux,
            merges=_merge_kinds(captured),
            loss="mean" if dependence is None else dependence.loss,
            exactness=Exactness() if dependence is None else dependence.exactness,
            uncut=captured.uncut,
            serves=captured.serves,
            returns=None if captured.after is None else _returns(captured.after),
            targets=len(captured.targets),
            phase=captured.phase,
        )


@dataclass(frozen=True)
class PassFacts:
    """Facts about a staged model that passes use and its graph does not have.

    ``shared``: the boundary tensors that do not depend on the batch (see ``SplitConcat``). ``runs``: for each stage,
    the nodes of each run of consecutive layers that backward re-computes (see ``Recompute``). ``head_inputs``: the
    inputs of the loss head; empty if there is none (see ``batch_loss``). ``statistics``: whether moving statistics are
    written from sums over the batch (see ``WriteStatistics``). ``sparse``: the uses of variables with sparse gradients
    (see ``GatherSlices``). ``lookups``: the ops of these uses (see ``LookUpRows``). ``narrow``: the gradients to round
    (see ``RoundGradients``). ``skips``: whether the optimizer itself skips steps whose gradients are not finite.
    ``backward_writes``: the stages whose backward writes variables, each with the reason why that is inexact with
    several micro-batches or replicas. ``shares``: for sharded updates, each variable with the replica of its stage that
    updates it (see ``Variables``).
    """

    shared: frozenset[str]
    runs: tuple[tuple[frozenset[str], ...], ...]
    head_inputs: tuple[LossHeadInput, ...]
    statistics: bool
    sparse: tuple[SparsePart, ...] = ()
    lookups: frozenset[str] = frozenset()
    narrow: tuple[Narrow, ...] = ()
    skips: bool = False
    backward_writes: tuple[tuple[int, Inexactness], ...] = ()
    shares: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class StagedModel:
    """A loss that is cut into stages and differentiated, for any number of micro-batches and replicas.

    ``graph``: the input nodes and the stage functions of ``stages`` stages. ``library``: TensorFlow's functions that
    their ops call, serialised. ``constants``: the tensors that functions use from outside, by node. ``updates``: the
    update cut into stages, or None without an optimizer. ``global_clipnorm``: the optimizer's option. ``counter``: the
    name of its step counter, or "".

    ``variables``: the variables of the model and of the optimizer, by name. ``model_variables``: only those of the
    model. ``trained``: the names of the trained variables. ``trained_objects``: the same variables, as the objects that
    the optimizer has. ``untrained``: the names of trainable variables that have no gradient. ``stateful``: see
    ``Captured``.

    ``traces``: the FuncGraphs of the loss, of statistics, and of the optimizer's functions. They are kept because
    TensorFlow removes the functions nested in a trace (the bodies of If and While) when the trace is garbage collected,
    and stage functions call them.
    """

    graph: Graph
    stages: int
    interface: Interface
    pass_facts: PassFacts
    variables: Mapping[str, tf.Variable]
    model_variables: Mapping[str, tf.Variable]
    constants: Mapping[str, tf.Tensor]
    library: Mapping[str, bytes]
    stateful: bool
    traces: tuple[Any, ...]
    updates: Updates | None = None
    global_clipnorm: float | None = None
    trained: tuple[str, ...] = ()
    trained_objects: tuple[Any, ...] = ()
    untrained: tuple[str, ...] = ()
    counter: str = ""

    @property
    def exact_uncut(self) -> bool:
        """Whether a step of one micro-batch on one replica equals a step on one device."""
        return self.interface.uncut or self.interface.exactness.exact_uncut

    @property
    def joins(self) -> bool:
        """Whether replicas of a stage combine statistics in the middle of a stage function (see ``JoinReplicas``)."""
        return any(map(has_joins, self.graph.functions))

    @property
    def trains(self) -> bool:
        """Whether the stages have backward functions; else only forward runs."""
        return at(0, what=OpName.BACKWARD) in self.graph.function_by_name

    def pack(self, outputs: Sequence[Any]) -> Any:
        """Return outputs as the user's function returns them: as the loss, (loss, aux) or a training step's nesting."""
        returns = self.interface.returns
        if returns is not None:
            found = [None if number is None else outputs[number] for number in returns.outputs]
            return tf.nest.pack_sequence_as(returns.structure, found)
        aux = self.interface.aux
        return outputs[0] if aux is None else (outputs[0], tf.nest.pack_sequence_as(aux, outputs[1:]))


def stage_model(
    captured: Captured,
    layers: Layers,
    starts: Sequence[int],
    optimizer: Any | None,
    recompute: Collection[int] = (),
    *,
    sparse: bool = True,
    windows: bool = False,
    owners: Mapping[int, int] = MappingProxyType({}),
    sharding: Sharding | None = None,
) -> StagedModel:
    """Cut the captured graph before the layers ``starts``, differentiate each stage, and trace the optimizer's update.

    ``recompute``: the layers that backward re-computes. ``sparse``: whether gradients of embeddings stay sparse.
    ``windows``: whether the model is for asynchronous windows; what runs once a step then runs for each minibatch.
    ``owners``: the stage that owns a variable, by the variable's ``id``; the owner of other variables is the first
    stage that uses them. ``sharding``: how the replicas of a stage divide its update; None if replicas do not divide
    it. Without an optimizer the pipelined graph computes gradients, and writes only the state that forward writes.
    Raises PartitionError if the graph cannot be cut there, CaptureError if it cannot be differentiated, PlanError for
    an unsuitable optimizer.
    """
    stages = partition(layers, starts)
    loss = captured.graph.type_of(captured.graph.outputs[0]).dtype.name
    scaled = optimizer is not None and scales_loss(optimizer, loss)
    joint, gradients = differentiate(captured, stages, sparse=sparse, scaled=scaled)
    pruned = prune_gradients(joint, gradients)
    stages = send_captured(stages, joint, pruned)
    functions: list[tuple[Function, ...]] = [*split_backward(stages, joint, pruned)]
    if loss_head := build_loss_head(stages, joint, pruned[-1]):
        functions[-1] = (*functions[-1], loss_head)
    given = {name: owners[id(variable)] for name, variable in captured.variables.items() if id(variable) in owners}
    graph = stage_graph(captured, functions, build_once(stages, joint, functions, repeated=windows, owners=given))
    graph = graph.replace(functions=(*graph.functions, *_owned_functions(captured.graph, given)))
    reached = {name for stage in gradients for name in stage.trained}
    trained = tuple(name for name in captured.trainable if name in reached)
    indices = _index_types(gradients)
    update = _trace_update(captured, optimizer, trained, indices, sparse=sparse)
    scale = trace_loss_scale(optimizer, captured, update.variables) if update is not None and scaled else None
    use = find_variables(graph)
    writes = find_write_reasons(captured, joint, gradients[: len(stages.stages)], dict(use.users))
    statistics = trace_statistics(captured, stages, {name: users[0] for name, users in use.users})
    # The first stage owns trainable variables that no stage uses: they have no gradient, but the optimizer may keep
    # averages of them. The optimizer's own variables, such as its learning rate, belong to the updates even if the loss
    # reads them.
    complete = find_variables(graph.replace(functions=(*graph.functions, *statistics.functions)))
    at_end = {name: stages[0] for name, stages in complete.users if name in complete.at_end}
    state = use.state | at_end.keys()
    own_of_optimizer = frozenset() if update is None else update.own - state
    users = {name: users[0] for name, users in use.users if name not in own_of_optimizer}
    stage_of = dict.fromkeys(captured.trainable, 0) | at_end | users
    if update is not None:
        stage_of |= _owners_of_phase(captured, update, stage_of, owners, own_of_optimizer)
    stage_of |= {name: stage_of[without_target(name)] for name in captured.trainable}
    readers = {name: users[0] for name, users in use.users if name in own_of_optimizer and captured.after is not None}
    shares = {} if update is None or sharding is None else share_update(update, stage_of, readers, state, sharding)
    model = model_without_optimizer(captured, stages, graph, statistics, joint.library)
    facts = dataclasses.replace(
        model.pass_facts,
        runs=tuple(_recomputed_nodes(layers, stage, recompute) for stage in stages.stages),
        sparse=sparse_parts(gradients),
        lookups=frozenset(use.lookup for stage in gradients for use in stage.slices),
        narrow=find_narrow(joint, gradients[: len(stages.stages)]),
        skips=isinstance(optimizer, keras.optimizers.LossScaleOptimizer),
        backward_writes=writes,
        shares=tuple(shares.items()),
    )
    untrained = tuple(name for name in captured.trainable if name not in reached)
    model = dataclasses.replace(model, pass_facts=facts, trained=trained, untrained=untrained)
    if update is None:
        return model
    scales = [] if scale is None else [scale]
    return dataclasses.replace(
        model,
        graph=model.graph.replace(functions=(*model.graph.functions, *(s.function for s in scales))),
        updates=_cut_updates(captured, update, stage_of, readers, state, shares),
        global_clipnorm=update.global_clipnorm,
        variables=update.variables,
        constants={**model.constants, **update.constants},
        library=dict([*model.library.items(), *update.graph.library, *(item for s in scales for item in s.library)]),
        trained_objects=update.trained,
        traces=(*model.traces, update.func_graph, *(s.func_graph for s in scales)),
        counter=update.counter,
    )


def model_without_optimizer(
    captured: Captured,
    stages: StageGraph,
    graph: Graph,
    statistics: TracedStatistics,
    library: Sequence[tuple[str, bytes]],
) -> StagedModel:
    """Return the model with the stage functions of ``graph``; it writes only the state that forward writes.

    ``library``: the functions of TensorFlow that the ops of forward and backward call.
    """
    return StagedModel(
        graph=graph.replace(functions=(*graph.functions, *statistics.functions)),
        stages=len(stages.stages),
        interface=Interface.of(captured),
        pass_facts=PassFacts(
            shared=frozenset(map(str, stages.shared)),
            runs=((),) * len(stages.stages),
            head_inputs=stages.layers.head_inputs,
            statistics=bool(statistics.functions),
        ),
        variables=captured.variables,
        model_variables=captured.variables,
        constants={**captured.constants, **statistics.constants},
        library={**dict(library), **dict(statistics.library)},
        stateful=captured.stateful,
        traces=(captured.func_graph, *statistics.traces),
    )


def _owners_of_phase(
    captured: Captured,
    update: TracedUpdate,
    stage_of: Mapping[str, int],
    owners: Mapping[int, int],
    own_of_optimizer: Collection[str],
) -> dict[str, int]:
    """Return the owners of variables that only the update uses, where the phases of a training step decide them.

    These are the variables that an earlier phase has already given to a stage (``owners``, by ``id``), and the
    variables that hand values over to the next phase: they belong to the stage that computes the value.
    """
    if captured.phase is None:
        return {}
    found = {
        name: owners[id(variable)]
        for name, variable in update.variables.items()
        if id(variable) in owners and name not in stage_of and name not in own_of_optimizer
    }
    known = {**stage_of, **found}
    for node in update.graph.nodes:
        if not node.name.startswith(HANDED_OVER) or node.op != "AssignVariableOp":
            continue
        names = ancestors(update.graph, [value.node for value in node.inputs[1:]])
        nodes = [update.graph.node(name) for name in names]
        sources = [source.string("port") if source.op == "arg" else source.name for source in nodes]
        stages = {known[source] for source in sources if source in known}
        if len(stages) == 1:
            found |= dict.fromkeys(node.strings("writes"), stages.pop())
    return found


def _owned_functions(graph: Graph, owners: Mapping[str, int]) -> list[Function]:
    """Return for each stage a function that has the variables it owns as inputs, and computes nothing (``OWNED``)."""
    found = []
    for stage in sorted(set(owners.values())):
        name = at(stage, what=OWNED)
        ports = [Port("variable", label, graph.type_of(Value(label))) for label, of in owners.items() if of == stage]
        nodes = [port.node(f"variable/{i}") for i, port in enumerate(ports)]
        found.append(Function(name, Graph(name, tuple(nodes), tuple(n.name for n in nodes)), tuple(ports), ()))
    return found


def _returns(after: AfterGradients) -> Returns:
    """Return what a training step returns. Outputs are those of its loss, then those computed after the gradients."""
    number = {value: i for i, value in enumerate(after.whole)}
    for value in after.returned:
        if value is not None:
            number.setdefault(value, len(number))
    return Returns(after.structure, tuple(None if value is None else number[value] for value in after.returned))


def _trace_update(
    captured: Captured, optimizer: Any, trained: Sequence[str], indices: Mapping[str, str], *, sparse: bool
) -> TracedUpdate | None:
    """Return the update of the ``trained`` variables: the optimizer's, or a training step's own; None without either.

    ``indices``: see ``trace_update``; ``sparse``: see ``stage_model``. Raises CaptureError if a gradient is sparse in
    the trace of a training step and dense in the pipeline, or the other way round. Raises UnexpectedGradientsError if
    the trace was made with predicted gradients (not ``certain``) and the prediction was wrong.
    """
    if captured.after is None:
        return None if optimizer is None else trace_update(optimizer, trained, captured.variables, indices)
    if set(captured.after.trained) != set(trained) and not captured.certain:
        raise UnexpectedGradientsError
    update = trace_of(captured.after, captured.func_graph, trained)
    taken = {
        node.string("port"): node
        for node in update.graph.nodes
        if node.op == "arg" and node.string("role") == "indices"
    }
    for name in trained:
        given = taken[name].outputs[0].dtype.name if name in taken else None
        if given != indices.get(name) and sparse and not captured.certain:
            raise UnexpectedGradientsError
        if given is not None and not sparse:
            raise CaptureError(
                f"sparse_gradients='dense': the step gets a sparse gradient of {name!r} (tf.IndexedSlices), as on one "
                "device: leave the option out, or take tf.convert_to_tensor of the gradient in the step"
            )
        if given != indices.get(name):
            raise CaptureError(
                f"on one device the gradient of {name!r} is {_describe_indices(given)}, and over these stages it is "
                f"{_describe_indices(indices.get(name))}: cut the model elsewhere, or take tf.convert_to_tensor of the "
                "variable in the loss, so that its gradient is dense"
            )
    return update


def _cut_updates(
    captured: Captured,
    update: TracedUpdate,
    stage_of: Mapping[str, int],
    readers: Mapping[str, int],
    state: frozenset[str],
    shares: Mapping[str, int],
) -> Updates:
    """Call ``cut_updates``, and return its result; add the line of the training step to its errors."""
    owners, first_readers = (
        {name: Site(stage, shares.get(name, 0)) for name, stage in stages.items()} for stages in (stage_of, readers)
    )
    try:
        return cut_updates(update.graph, owners, first_readers, state)
    except PartitionError as error:
        if shares:
            raise PartitionError(f"{error}; or leave shard_optimizer out", error.node) from None
        if captured.after is None or not error.node:
            raise
        place = captured.after.place_of(error.node)
        raise PartitionError(f"{place}: what the step does after its gradients: {error}", error.node) from None


def _describe_indices(dtype: str | None) -> str:
    return "dense" if dtype is None else f"sparse with indices of {dtype}"


def _merge_kinds(captured: Captured) -> tuple[MergeKind, ...]:
    """Return how to merge each aux output over micro-batches: as the analysis found, else as its type suggests."""
    outputs = captured.graph.outputs[1:]
    found = (None,) * len(outputs) if captured.dependence is None else captured.dependence.aux
    return tuple(kind or merge_kind(captured.graph.type_of(v)) for kind, v in zip(found, outputs, strict=True))


def stage_graph(
    captured: Captured, functions: Sequence[tuple[Function, ...]], once: Sequence[Function | None]
) -> Graph:
    """Return the graph with the batch's input nodes and the stage functions, without calls."""
    inputs = tuple(
        make_node(name, OpName.INPUT, (), captured.graph.node(name).outputs, index=i)
        for i, name in enumerate(captured.graph.inputs)
    )
    all_functions = (*itertools.chain.from_iterable(functions), *(function for function in once if function))
    return Graph(captured.graph.name, inputs, captured.graph.inputs, functions=all_functions)


def _index_types(gradients: Sequence[StageGradients]) -> dict[str, str]:
    """Return, by variable, the dtype of the indices of sparse gradients; int64 if uses differ, as in TensorFlow."""
    found: dict[str, set[str]] = {}
    for use in itertools.chain.from_iterable(stage.slices for stage in gradients):
        found.setdefault(use.variable, set()).add(use.kinds[1].dtype.name)
    return {name: kinds.pop() if len(kinds) == 1 else "int64" for name, kinds in found.items()}


def _recomputed_nodes(layers: Layers, stage: Stage, recompute: Collection[int]) -> tuple[frozenset[str], ...]:
    """Return, for each run of consecutive layers of ``stage`` that backward re-computes, its nodes."""
    return tuple(
        frozenset(name for layer in run for name in layers.layers[layer].nodes)
        for run in find_runs(recompute, stage.first_layer, stage.last_layer + 1)
    )


# --- Trace the factor by which an optimizer scales the loss before gradients are computed
# A training step on one device computes the gradients of ``optimizer.scale_loss(loss)``, and the optimizer divides them
# by the scale (``loss_scale_factor``, ``LossScaleOptimizer``). In a pipeline the factor is the gradient of the loss
# with which backward starts.


@dataclass(frozen=True)
class _LossScale:
    """The function that computes the factor by which the loss is scaled, in the dtype of the loss.

    ``func_graph``: the trace that it was read from.
    """

    function: Function
    library: tuple[tuple[str, bytes], ...]
    func_graph: Any


def scales_loss(optimizer: Any, dtype: str) -> bool:
    """Return whether the optimizer scales a loss of this dtype; False if it is not a Keras optimizer."""
    return isinstance(optimizer, keras.optimizers.Optimizer) and bool(_trace_factor(optimizer, dtype).outputs)


def trace_loss_scale(optimizer: Any, captured: Captured, variables: Mapping[str, tf.Variable]) -> _LossScale:
    """Return the factor by which ``optimizer.scale_loss`` scales the loss ``captured``, as a traced function.

    ``variables``: the variables of the update, by the name of their node. The optimizer must be built, and must scale
    the loss. Raises CaptureError if the scaled loss is not the loss times a factor, if it depends on anything but
    the loss and variables of the optimizer, or if the captured loss is scaled already.
    """
    _check_not_scaled(optimizer, captured.variables, captured.graph.name)
    func_graph = _trace_factor(optimizer, captured.graph.type_of(captured.graph.outputs[0]).dtype.name)
    names = {id(variable.handle): name for name, variable in variables.items() if name not in captured.variables}
    inputs: dict[str, Node] = {}
    for outside, placeholder in func_graph.captures:
        if id(outside) not in names:
            raise CaptureError(
                f"{type(optimizer).__name__}.scale_loss uses a tensor that is no variable of the optimizer: give it a "
                "variable made by add_variable; what else is to be added to the loss belongs in the loss function"
            )
        inputs[placeholder.op.name] = Node(names[id(outside)], "variable")
    loss = func_graph.inputs[0].op.name
    inputs[loss] = Node(loss, "arg")
    graph = read_graph(func_graph, inputs, LOSS_SCALE_NAME)
    (result,) = (read_value(tensor, inputs) for tensor in func_graph.outputs)

    def port_of(value: Value) -> tuple[Role, str] | None:
        return ("variable", value.node) if graph.node(value.node).op == "variable" else None

    members = ancestors(graph, [result.node])
    if loss in members:
        raise CaptureError(
            f"{type(optimizer).__name__}.scale_loss returns something else than the loss times a factor: write what it "
            "computes into the loss function, and return loss * factor"
        )
    port = Port("combined", LOSS_SCALE_NAME, graph.type_of(result))
    function = extract_function(LOSS_SCALE_NAME, graph, members, port_of, [(port, result)])
    return _LossScale(function, graph.library, func_graph)


def _trace_factor(optimizer: Any, dtype: str) -> Any:
    """Return the FuncGraph that computes the factor for a loss of this dtype; without a factor it has no output."""

    def factor(loss: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(loss)
            scaled = optimizer.scale_loss(loss)
        return None if scaled is loss else tape.gradient(scaled, loss, unconnected_gradients="zero")

    return tf.function(factor, autograph=False).get_concrete_function(tf.TensorSpec([], dtype)).graph


def _check_not_scaled(optimizer: Any, variables: Mapping[str, tf.Variable], name: str) -> None:
    """Raise CaptureError if the loss called ``name``, which uses ``variables``, is scaled already."""
    scale = getattr(optimizer, "dynamic_scale", None)
    if scale is not None and any(variable is scale.value for variable in variables.values()):
        raise CaptureError(
            f"{name} scales the loss by {type(optimizer).__name__}'s scale: return the loss as it is. The pipeline "
            "computes the gradients of optimizer.scale_loss(loss), as Keras does"
        )
