"""From a captured model and a plan to a pipelined graph: the only file that knows the order of the passes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
from graph_passes.passes.accumulate import Accumulate
from graph_passes.passes.allreduce import AllReduce
from graph_passes.passes.apply import Apply
from graph_passes.passes.backward import prune_gradients, split_backward
from graph_passes.passes.base import Observer, Pass, run_passes
from graph_passes.passes.check_numerics import CheckNumerics
from graph_passes.passes.copy_variables import Mirror
from graph_passes.passes.expose_gradients import Expose
from graph_passes.passes.instrument import Instrument
from graph_passes.passes.microbatch import Microbatch
from graph_passes.passes.order import Order
from graph_passes.passes.overlap import Overlap
from graph_passes.passes.partition import partition
from graph_passes.passes.place import Place
from graph_passes.passes.project import Project
from graph_passes.passes.rank_variables import Spread
from graph_passes.passes.recompute import Recompute, find_runs
from graph_passes.passes.split_concat import SplitConcat
from graph_passes.passes.split_update import Updates, cut_updates
from graph_passes.passes.split_weights import SplitWeights
from graph_passes.passes.verify_pipeline import VerifyPipeline
from graph_passes.passes.verify_ranks import verify_ranks
from graph_passes.schedules.policies import make_schedule


@dataclass(frozen=True)
class StagedModel:
    """What does not depend on micro-batches or replicas: stage functions, and the optimizer's update.

    ``graph`` holds the input nodes and the stage functions. ``variables`` (the model's and the optimizer's) and
    ``constants`` are by name. ``gradients`` names the variables that are trained (``trained`` are the objects the
    optimizer knows), ``ungraded`` those no gradient reaches. ``shared`` names boundary tensors: see ``SplitConcat``.
    ``stateful``: see ``Captured``. ``runs``: see ``Recompute``.
    """

    graph: Graph
    stages: int
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
        Node(name, "input", (), captured.graph.node(name).outputs, attributes({"index": i}))
        for i, name in enumerate(captured.graph.inputs)
    )
    functions = tuple(function for pair in pairs for function in pair)
    graph = Graph(captured.graph.name, args, captured.graph.inputs, functions=functions)
    reached = {name for gradients in found for name, _ in gradients.variables}
    trained = tuple(name for name in captured.trainable if name in reached)
    variables, constants = dict(captured.variables), dict(captured.constants)
    library, updates, clip, objects = dict(joint.library), None, None, ()
    if optimizer is not None:
        traced = trace_update(optimizer, trained, variables)
        use = find_variables(graph)
        updates = cut_updates(traced.graph, {name: use.owner(name) for name in trained})
        variables, clip, objects = traced.variables, traced.global_clipnorm, traced.trained
        constants |= traced.constants
        library |= dict(traced.graph.library)
    return StagedModel(
        graph=graph,
        stages=len(stages.stages),
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
    )


def passes(
    model: StagedModel, captured: Captured, plan: Plan, devices: Sequence[str], home: str, extra: str
) -> tuple[Pass, ...]:
    """The passes that carry out ``plan``, in order, each for the reason beside it; see ``pipeline_graph``."""
    schedule = make_schedule(plan.schedule, len(plan.stages), plan.micro_batches)
    aux = tuple(captured.graph.type_of(value) for value in captured.graph.outputs[1:])
    try:
        placed = tuple(tuple(devices[d] for d in stage.devices) for stage in plan.stages)
    except IndexError:
        wanted = sorted({d for stage in plan.stages for d in stage.devices})
        raise PlanError(f"the plan uses devices {wanted}, but there are only {len(devices)}: {list(devices)}") from None
    order: list[Pass] = [
        *([Recompute(model.runs)] if any(model.runs) else []),  # changes what stages take; what it adds can be split
        *([SplitWeights()] if schedule.splits else []),  # rewrites stage functions; their calls come next
        Microbatch(model.stages, plan.micro_batches, aux),  # calls of stages exist from here on
        SplitConcat(plan.replicas, model.shared),  # before anything that has one node a replica
        Mirror(),  # needs the replicas
        Accumulate(),  # needs every replica's backward, and its weights' part
        *([Overlap()] if plan.overlap else []),  # cuts the sums that AllReduce will take
        AllReduce(),  # needs every replica's sum
        Order(schedule),  # needs all calls; before timing, which repeats its edges
    ]
    if model.updates is not None:
        order.append(Apply(model.updates, model.global_clipnorm))  # behind a barrier of all that is there
    if extra == "gradients":
        order.append(Expose())  # needs what AllReduce left
    if extra == "check":
        order.append(CheckNumerics())  # needs what AllReduce left, and the loss
    if extra == "times":
        order.append(Instrument())  # last of the rewrites: stamps what the others made
    order += [Place(placed, home), VerifyPipeline(schedule)]
    return tuple(order)


def pipeline_graph(
    model: StagedModel,
    captured: Captured,
    plan: Plan,
    devices: Sequence[str],
    home: str,
    *,
    extra: str = "",
    observers: Sequence[Observer] = (),
) -> Graph:
    """The pipelined graph that carries out ``plan`` on ``devices`` (names, indexed by the plan).

    ``extra`` asks for more outputs: "times" (of every call) or "gradients" (of every variable); or for a "check" that
    loss and gradients are finite.
    """
    return run_passes(model.graph, passes(model, captured, plan, devices, home, extra), observers)


def rank_graphs(
    model: StagedModel,
    captured: Captured,
    plan: Plan,
    size: int,
    *,
    extra: str = "",
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
    shared = "" if extra == "times" else extra  # times are taken of what a rank runs, exchanges included
    whole = pipeline_graph(model, captured, plan, [f"/rank:{rank}" for rank in range(size)], "/rank:*", extra=shared)
    types = tuple((name, _value_type(variable)) for name, variable in sorted(model.variables.items()))
    ranks = tuple(stage.devices for stage in plan.stages)
    # Spread before projection, which then finds the values that travel; it needs the copies that Mirror made.
    timed: list[Pass] = [Instrument()] if extra == "times" else []
    graphs = tuple(run_passes(whole, [Spread(types), Project(ranks, rank), *timed], observers) for rank in range(size))
    verify_ranks(graphs)
    return graphs


def _value_type(variable: tf.Variable) -> TensorType:
    return TensorType(DType(variable.dtype.name), Shape(tuple(variable.shape.as_list())))
