"""From a captured model and a plan to a pipelined graph: the only file that knows the order of the passes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import tensorflow as tf

from dapple_tf.errors import PlanError
from dapple_tf.frontend.capture import Captured
from dapple_tf.frontend.gradients import differentiate
from dapple_tf.frontend.optimizer_update import trace_update
from dapple_tf.plan import Plan
from graph_passes.analysis.layers import Layers
from graph_passes.analysis.variable_use import find_variables
from graph_passes.ir.graph import DType, Graph, Node, Shape, TensorType, attributes
from graph_passes.ir.ops import OpName
from graph_passes.passes.accumulate import Accumulate
from graph_passes.passes.allreduce import AllReduce
from graph_passes.passes.apply import Apply
from graph_passes.passes.backward import prune_gradients, split_backward
from graph_passes.passes.base import Observer, Pass, run_passes
from graph_passes.passes.check_numerics import CheckNumerics
from graph_passes.passes.copy_variables import CopyVariables
from graph_passes.passes.expose_gradients import ExposeGradients
from graph_passes.passes.instrument import Instrument
from graph_passes.passes.microbatch import Microbatch
from graph_passes.passes.order import Order
from graph_passes.passes.overlap import Overlap
from graph_passes.passes.partition import partition
from graph_passes.passes.place import Place
from graph_passes.passes.project import Project
from graph_passes.passes.rank_variables import RankVariables
from graph_passes.passes.recompute import Recompute, find_runs
from graph_passes.passes.split_concat import SplitConcat
from graph_passes.passes.split_update import Updates, cut_updates
from graph_passes.passes.split_weights import SplitWeights
from graph_passes.passes.verify_pipeline import VerifyPipeline
from graph_passes.passes.verify_ranks import verify_ranks
from graph_passes.schedules.policies import build_schedule


@dataclass(frozen=True)
class StagedModel:
    """A loss cut into stages and differentiated: everything that does not depend on micro-batches or replicas.

    ``graph`` holds the input nodes and the stage functions. ``signature``: the specs of the batch's flattened tensors,
    axis 0 unknown. ``aux_types``: types of the aux outputs; ``aux``: their nesting, None where the loss has none.
    ``variables`` (the model's and the optimizer's) and ``constants`` are by name. ``gradients`` names the variables
    that are trained (``trained`` are the objects the optimizer knows), ``ungraded`` those that no gradient reaches.
    ``shared`` names boundary tensors: see ``SplitConcat``. ``stateful``: see ``Captured``. ``runs``: see ``Recompute``.
    ``traces``: the FuncGraphs of the loss and of the optimizer's update. TensorFlow removes functions that are nested
    in a trace (bodies of If and While) once the trace is garbage, and the stage functions still call them.
    """

    graph: Graph
    stages: int
    signature: tuple[tf.TensorSpec, ...]
    aux_types: tuple[TensorType, ...]
    aux: Any
    updates: Updates | None
    global_clipnorm: float | None
    variables: Mapping[str, tf.Variable]
    model_variables: Mapping[str, tf.Variable]
    constants: Mapping[str, tf.Tensor]
    library: Mapping[str, bytes]
    trained: tuple[Any, ...]
    stateful: bool
    gradients: tuple[str, ...]
    ungraded: tuple[str, ...]
    shared: frozenset[str]
    runs: tuple[tuple[frozenset[str], ...], ...]
    traces: tuple[Any, ...]

    def pack(self, outputs: Sequence[Any]) -> Any:
        """Return what the user's function would return: the loss, or (loss, aux)."""
        return outputs[0] if self.aux is None else (outputs[0], tf.nest.pack_sequence_as(self.aux, outputs[1:]))


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """A staged model, and the ``plan`` under which it runs a batch of ``batch_size`` samples."""

    model: StagedModel
    plan: Plan
    batch_size: int

    def same(self, other: PlannedModel) -> bool:
        """Return whether both run the same steps."""
        return self.model is other.model and (self.plan, self.batch_size) == (other.plan, other.batch_size)


class StepVariant(Enum):
    """What the graph of a step does besides training."""

    PLAIN = "plain"
    TIMED = "times"
    """It also returns the start and end of every call, exchange, AllReduce and update."""
    WITH_GRADIENTS = "gradients"
    """It also returns the gradient of every trained variable."""
    CHECKED = "check"
    """It fails, before any variable changes, where the loss or a gradient is not finite."""


def stage_model(
    captured: Captured,
    layers: Layers,
    starts: Sequence[int],
    optimizer: Any | None,
    recompute: Collection[int] = (),
) -> StagedModel:
    """Cut the captured graph before the layers ``starts``, differentiate each stage, trace the optimizer.

    Without an optimizer the pipelined graph gives gradients and changes nothing but state. ``recompute``: the layers
    that backward makes again.
    """
    stages = partition(layers, starts)
    joint, found = differentiate(captured, stages)
    pairs = split_backward(stages, joint, prune_gradients(joint, found))
    args = tuple(
        Node(name, OpName.INPUT, (), captured.graph.node(name).outputs, attributes({"index": i}))
        for i, name in enumerate(captured.graph.inputs)
    )
    functions = tuple(function for pair in pairs for function in pair)
    graph = Graph(captured.graph.name, args, captured.graph.inputs, functions=functions)
    reached = {name for gradients in found for name, _ in gradients.variables}
    trained = tuple(name for name in captured.trainable if name in reached)
    variables, constants = dict(captured.variables), dict(captured.constants)
    library, updates, clip, objects = dict(joint.library), None, None, ()
    traces = [captured.func_graph]
    if optimizer is not None:
        traced = trace_update(optimizer, trained, variables)
        use = find_variables(graph)
        updates = cut_updates(traced.graph, {name: use.owner(name) for name in trained})
        variables, clip, objects = traced.variables, traced.global_clipnorm, traced.trained
        constants |= traced.constants
        library |= dict(traced.graph.library)
        traces.append(traced.func_graph)
    return StagedModel(
        graph=graph,
        stages=len(stages.stages),
        signature=captured.signature,
        aux_types=tuple(captured.graph.type_of(value) for value in captured.graph.outputs[1:]),
        aux=captured.aux,
        updates=updates,
        global_clipnorm=clip,
        variables=variables,
        model_variables=captured.variables,
        constants=constants,
        library=library,
        trained=objects,
        stateful=captured.stateful,
        gradients=trained,
        ungraded=tuple(name for name in captured.trainable if name not in reached),
        shared=frozenset(map(str, stages.shared)),
        runs=tuple(
            tuple(
                frozenset(name for layer in run for name in layers.layers[layer].nodes)
                for run in find_runs(recompute, stage.first_layer, stage.last_layer + 1)
            )
            for stage in stages.stages
        ),
        traces=tuple(traces),
    )


def passes(model: StagedModel, plan: Plan, devices: Sequence[str], home: str, variant: StepVariant) -> tuple[Pass, ...]:
    """The passes that carry out ``plan``, in order, each for the reason beside it; see ``pipeline_graph``."""
    schedule = build_schedule(plan.schedule, len(plan.stages), plan.micro_batches)
    try:
        placed = tuple(tuple(devices[d] for d in stage.devices) for stage in plan.stages)
    except IndexError:
        wanted = sorted({d for stage in plan.stages for d in stage.devices})
        raise PlanError(f"the plan uses devices {wanted}, but there are only {len(devices)}: {list(devices)}") from None
    order: list[Pass] = [
        *([Recompute(model.runs)] if any(model.runs) else []),  # changes what stages take; what it adds can be split
        *([SplitWeights()] if schedule.splits else []),  # rewrites stage functions; their calls come next
        Microbatch(model.stages, plan.micro_batches, model.aux_types),  # calls of stages exist from here on
        SplitConcat(plan.replicas, model.shared),  # before anything that has one node a replica
        CopyVariables(),  # needs the replicas
        Accumulate(),  # needs every replica's backward, and its weights' part
        *([Overlap()] if plan.overlap else []),  # cuts the sums that AllReduce will take
        AllReduce(),  # needs every replica's sum
        Order(schedule),  # needs all calls; before timing, which repeats its edges
    ]
    if model.updates is not None:
        order.append(Apply(model.updates, model.global_clipnorm))  # behind a barrier of all that is there
    if variant is StepVariant.WITH_GRADIENTS:
        order.append(ExposeGradients())  # needs what AllReduce left
    if variant is StepVariant.CHECKED:
        order.append(CheckNumerics())  # needs what AllReduce left, and the loss
    if variant is StepVariant.TIMED:
        order.append(Instrument())  # last of the rewrites: stamps what the others made
    order += [Place(placed, home), VerifyPipeline(schedule)]
    return tuple(order)


def pipeline_graph(
    model: StagedModel,
    plan: Plan,
    devices: Sequence[str],
    home: str,
    *,
    variant: StepVariant = StepVariant.PLAIN,
    observers: Sequence[Observer] = (),
) -> Graph:
    """Return the pipelined graph that carries out ``plan`` on ``devices`` (names, indexed by the plan).

    ``home``: the device of the batch, the loss and everything else that belongs to no stage. Raises PlanError where
    the plan uses devices that there are not, and ScheduleError where its schedule cannot run.
    """
    return run_passes(model.graph, passes(model, plan, devices, home, variant), observers)


def rank_graphs(
    model: StagedModel,
    plan: Plan,
    size: int,
    *,
    variant: StepVariant = StepVariant.PLAIN,
    observers: Sequence[Observer] = (),
) -> tuple[Graph, ...]:
    """The graphs of all ranks of a job of ``size`` processes, proved to fit together; devices are yet to be given.

    Raises PlanError where the plan is not for so many, and GraphError where an exchange does not pair up.
    """
    used = sorted(device for stage in plan.stages for device in stage.devices)
    if used != list(range(size)):
        raise PlanError(
            f"the plan is for {len(used)} ranks, {used}, but the job has {size}: start as many processes, one a device"
        )
    # Times are taken of what a rank runs, its exchanges included: after the projection.
    timed = variant is StepVariant.TIMED
    devices = [f"/rank:{rank}" for rank in range(size)]
    whole = pipeline_graph(model, plan, devices, "/rank:*", variant=StepVariant.PLAIN if timed else variant)
    types = tuple((name, _value_type(variable)) for name, variable in sorted(model.variables.items()))
    ranks = tuple(stage.devices for stage in plan.stages)
    # RankVariables needs the copies that CopyVariables made; Project then finds the values that ranks exchange.
    last: list[Pass] = [Instrument()] if timed else []
    graphs = tuple(
        run_passes(whole, [RankVariables(types), Project(ranks, rank), *last], observers) for rank in range(size)
    )
    verify_ranks(graphs)
    return graphs


def _value_type(variable: tf.Variable) -> TensorType:
    return TensorType(DType(variable.dtype.name), Shape(tuple(variable.shape.as_list())))
