"""Compile a captured model and a plan into a pipelined graph. The order of the passes is defined here and only here."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import keras
import tensorflow as tf

from dapple_tf.errors import GraphError, PlanError
from dapple_tf.exactness import Exactness, Inexactness
from dapple_tf.frontend.backward_writes import find_write_reasons
from dapple_tf.frontend.capture import Captured, Serves
from dapple_tf.frontend.deferred_statistics import trace_statistics
from dapple_tf.frontend.gradients import differentiate
from dapple_tf.frontend.loss_scale import scales_loss, trace_loss_scale
from dapple_tf.frontend.optimizer_update import trace_update
from dapple_tf.plan import Plan, check_workers
from graph_passes.analysis.layers import Layers
from graph_passes.analysis.tail import TailInput
from graph_passes.analysis.variable_use import find_variables
from graph_passes.ir.graph import DType, Function, Graph, Node, Shape, TensorType, attributes
from graph_passes.ir.names import at
from graph_passes.ir.ops import OpName
from graph_passes.passes.accumulate import Accumulate
from graph_passes.passes.allreduce import AllReduce
from graph_passes.passes.apply import Apply
from graph_passes.passes.backward import StageGradients, prune_gradients, sparse_parts, split_backward
from graph_passes.passes.base import Observer, Pass, run_passes
from graph_passes.passes.batch_loss import check_forwards_first
from graph_passes.passes.check_numerics import CheckNumerics
from graph_passes.passes.combine_statistics import CombineStatistics
from graph_passes.passes.copy_variables import CopyVariables
from graph_passes.passes.expose_gradients import ExposeGradients
from graph_passes.passes.function_parts import has_joins
from graph_passes.passes.gather_slices import GatherSlices, SparsePart
from graph_passes.passes.group_gradients import GroupGradients
from graph_passes.passes.instrument import Instrument
from graph_passes.passes.join_replicas import JoinReplicas
from graph_passes.passes.local_input import LocalInput
from graph_passes.passes.look_up_rows import LookUpRows
from graph_passes.passes.microbatch import MergeKind, Microbatch, merge_kind
from graph_passes.passes.once import build_once
from graph_passes.passes.order import Order
from graph_passes.passes.order_window import OrderWindow
from graph_passes.passes.overlap import Overlap
from graph_passes.passes.partition import Stage, partition
from graph_passes.passes.place import Place
from graph_passes.passes.project import Project
from graph_passes.passes.rank_variables import RankVariables
from graph_passes.passes.recompute import Recompute, find_runs
from graph_passes.passes.repeat_minibatches import RepeatMinibatches
from graph_passes.passes.round_gradients import Narrow, RoundGradients, find_narrow
from graph_passes.passes.send_together import SendTogether
from graph_passes.passes.share_statistics import ShareStatistics
from graph_passes.passes.split_concat import SplitConcat
from graph_passes.passes.split_update import Updates, cut_updates
from graph_passes.passes.split_weights import SplitWeights
from graph_passes.passes.tail_function import build_tail
from graph_passes.passes.update_groups import UpdateGroups, check_updates
from graph_passes.passes.use_versions import UseVersions
from graph_passes.passes.verify_pipeline import VerifyPipeline
from graph_passes.passes.verify_ranks import verify_ranks
from graph_passes.passes.verify_window import VerifyWindow
from graph_passes.passes.write_statistics import WriteStatistics
from graph_passes.schedules.policies import build_schedule, forward_only


@dataclass(frozen=True)
class StagedModel:
    """A loss cut into stages and differentiated: everything that does not depend on micro-batches or replicas.

    Graph: ``graph`` holds the input nodes and the stage functions of ``stages`` stages; ``library`` the serialised
    functions that their ops call; ``constants`` the tensors from outside of the functions, by node. ``updates``: the
    optimizer's update cut into stages, and ``global_clipnorm`` its option; both None without an optimizer.

    Interface: ``signature``, the specs of the batch's flattened tensors, with axis 0 and perhaps inner lengths unknown,
    and ``example``, the same with the inner lengths of the batch for which it was traced; ``serves``, whether it serves
    other lengths (see ``Captured``); ``aux``, the nesting of the
    aux outputs (None where the loss has no aux), and ``merges``, how each is put together from the micro-batches';
    ``loss``, whether the loss is the mean or the sum of the micro-batches'; ``exactness``, why a step differs from one
    device's.

    Variables, by name: ``variables``, the model's and the optimizer's; ``model_variables``. ``trained``: names of the
    trained variables; ``trained_objects``: the same as the optimizer knows them; ``untrained``: names of trainable
    variables that no gradient reaches.

    For passes: ``shared``, the boundary tensors that do not depend on the batch (see ``SplitConcat``); ``sparse``, the
    uses of variables whose gradients are sparse (see ``GatherSlices``), and ``lookups``, their ops (see
    ``LookUpRows``); ``runs``, the nodes of each stage to re-compute (see ``Recompute``); ``frontier``, the tensors that
    the tail takes, empty where there is none (see ``batch_loss``); ``statistics``, whether moving statistics are
    written from sums (see ``WriteStatistics``); ``narrow``, the gradients to round (see ``RoundGradients``). ``skips``:
    whether the optimizer itself skips steps whose gradients are not finite. ``stateful``: see ``Captured``.
    ``counter``: the name of the optimizer's step counter. ``backward_writes``: the stages whose backward writes
    variables, each with the reason why that is inexact with several micro-batches or replicas.

    ``traces``: the FuncGraphs of the loss, of statistics, and of the optimizer's functions. TensorFlow removes
    functions that are nested in a trace (bodies of If and While) once the trace is garbage, and stage functions still
    call them.
    """

    graph: Graph
    stages: int
    signature: tuple[tf.TensorSpec, ...]
    example: tuple[tf.TensorSpec, ...]
    merges: tuple[MergeKind, ...]
    loss: Literal["mean", "sum"]
    exactness: Exactness
    aux: Any
    updates: Updates | None
    global_clipnorm: float | None
    variables: Mapping[str, tf.Variable]
    model_variables: Mapping[str, tf.Variable]
    constants: Mapping[str, tf.Tensor]
    library: Mapping[str, bytes]
    trained: tuple[str, ...]
    trained_objects: tuple[Any, ...]
    untrained: tuple[str, ...]
    stateful: bool
    shared: frozenset[str]
    sparse: tuple[SparsePart, ...]
    lookups: frozenset[str]
    runs: tuple[tuple[frozenset[str], ...], ...]
    frontier: tuple[TailInput, ...]
    statistics: bool
    traces: tuple[Any, ...]
    serves: Serves | None = None
    narrow: tuple[Narrow, ...] = ()
    skips: bool = False
    counter: str = ""
    backward_writes: tuple[tuple[int, Inexactness], ...] = ()

    @property
    def joins(self) -> bool:
        """Whether the replicas of a stage join what they compute from a micro-batch (see ``JoinReplicas``)."""
        return any(map(has_joins, self.graph.functions))

    @property
    def trains(self) -> bool:
        """Whether there are functions of backward; without them only forward runs."""
        return at(0, what=OpName.BACKWARD) in self.graph.function_by_name

    def pack(self, outputs: Sequence[Any]) -> Any:
        """Return what the user's function would return: the loss, or (loss, aux)."""
        return outputs[0] if self.aux is None else (outputs[0], tf.nest.pack_sequence_as(self.aux, outputs[1:]))


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """A staged model, and the ``plan`` under which it runs a batch of ``batch_size`` samples.

    ``local``: the ranks of a job are given only the rows that they need.
    """

    model: StagedModel
    plan: Plan
    batch_size: int
    local: bool = False

    @property
    def exactness(self) -> Exactness:
        """Why a step differs from one device's under this plan."""
        if self.plan.window is not None and self.plan.window.in_turn:
            return Exactness()  # every minibatch is computed whole, on one replica
        many, replicas = self.plan.micro_batches > 1, self.plan.replicas
        writes = (reason for stage, reason in self.model.backward_writes if many or replicas[stage] > 1)
        return Exactness((*self.model.exactness.reasons, *writes))

    def same(self, other: PlannedModel) -> bool:
        """Return whether both run the same steps."""
        mine, others = ((p.plan, p.batch_size, p.local) for p in (self, other))
        return self.model is other.model and mine == others


class StepVariant(Enum):
    """The purpose of a step's graph besides training."""

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
    *,
    sparse: bool = True,
) -> StagedModel:
    """Cut the captured graph before the layers ``starts``, differentiate each stage, trace the optimizer's update.

    ``recompute``: the layers to re-compute in backward. ``sparse``: gradients of embeddings stay sparse. Without an
    optimizer the pipelined graph computes gradients, and writes only the state that forward writes. Raises
    PartitionError where the graph cannot be cut there, CaptureError where it cannot be differentiated, PlanError for an
    unsuitable optimizer.
    """
    stages = partition(layers, starts)
    scaled = optimizer is not None and scales_loss(optimizer)
    joint, gradients = differentiate(captured, stages, sparse=sparse, scaled=scaled)
    pruned = prune_gradients(joint, gradients)
    functions: list[tuple[Function, ...]] = [*split_backward(stages, joint, pruned)]
    if tail := build_tail(stages, joint, pruned[-1]):
        functions[-1] = (*functions[-1], tail)
    graph = stage_graph(captured, functions, build_once(stages, joint, functions))
    reached = {name for stage in gradients for name in stage.trained}
    trained = tuple(name for name in captured.trainable if name in reached)
    indices = _index_types(gradients)
    update = None if optimizer is None else trace_update(optimizer, trained, captured.variables, indices)
    scale = trace_loss_scale(optimizer, captured, update.variables) if update is not None and scaled else None
    use = find_variables(graph)
    writes = find_write_reasons(captured, joint, gradients[: len(stages.stages)], dict(use.users))
    statistics = trace_statistics(captured, stages, {name: users[0] for name, users in use.users})
    own = () if scale is None else (scale.function,)
    graph = graph.replace(functions=(*graph.functions, *statistics.functions, *own))
    return StagedModel(
        graph=graph,
        stages=len(stages.stages),
        signature=captured.signature,
        example=captured.example,
        serves=captured.serves,
        merges=merge_kinds(captured),
        loss="mean" if captured.dependence is None else captured.dependence.loss,
        exactness=Exactness() if captured.dependence is None else captured.dependence.exactness,
        aux=captured.aux,
        updates=None if update is None else cut_updates(update.graph, {name: use.owner(name) for name in trained}),
        global_clipnorm=None if update is None else update.global_clipnorm,
        variables=dict(captured.variables) if update is None else update.variables,
        model_variables=captured.variables,
        constants=dict(captured.constants) | dict(statistics.constants) | ({} if update is None else update.constants),
        library=dict(joint.library)
        | dict(statistics.library)
        | ({} if update is None else dict(update.graph.library))
        | ({} if scale is None else dict(scale.library)),
        trained=trained,
        trained_objects=() if update is None else update.trained,
        untrained=tuple(name for name in captured.trainable if name not in reached),
        stateful=captured.stateful,
        shared=frozenset(map(str, stages.shared)),
        sparse=sparse_parts(gradients),
        lookups=frozenset(use.lookup for stage in gradients for use in stage.slices),
        frontier=stages.frontier,
        statistics=bool(statistics.functions),
        runs=tuple(_recomputed_nodes(layers, stage, recompute) for stage in stages.stages),
        traces=(
            captured.func_graph,
            *statistics.traces,
            *([] if update is None else [update.func_graph]),
            *([] if scale is None else [scale.func_graph]),
        ),
        narrow=find_narrow(joint, gradients[: len(stages.stages)]),
        skips=isinstance(optimizer, keras.optimizers.LossScaleOptimizer),
        counter="" if update is None else update.counter,
        backward_writes=writes,
    )


def merge_kinds(captured: Captured) -> tuple[MergeKind, ...]:
    """Return how to merge each aux output over the micro-batches; by its type where the analysis does not say it."""
    outputs = captured.graph.outputs[1:]
    found = (None,) * len(outputs) if captured.dependence is None else captured.dependence.aux
    return tuple(kind or merge_kind(captured.graph.type_of(v)) for kind, v in zip(found, outputs, strict=True))


def stage_graph(
    captured: Captured, functions: Sequence[tuple[Function, ...]], once: Sequence[Function | None]
) -> Graph:
    """Return the graph of the batch's inputs and the stages' functions, without any calls."""
    inputs = tuple(
        Node(name, OpName.INPUT, (), captured.graph.node(name).outputs, attributes({"index": i}))
        for i, name in enumerate(captured.graph.inputs)
    )
    all_functions = (*itertools.chain.from_iterable(functions), *(function for function in once if function))
    return Graph(captured.graph.name, inputs, captured.graph.inputs, functions=all_functions)


def _index_types(gradients: Sequence[StageGradients]) -> dict[str, str]:
    """Return the dtype of the indices of each sparse gradient: int64 where uses differ, as TensorFlow does."""
    found: dict[str, set[str]] = {}
    for use in itertools.chain.from_iterable(stage.slices for stage in gradients):
        found.setdefault(use.variable, set()).add(use.kinds[1].dtype.name)
    return {name: kinds.pop() if len(kinds) == 1 else "int64" for name, kinds in found.items()}


def _recomputed_nodes(layers: Layers, stage: Stage, recompute: Collection[int]) -> tuple[frozenset[str], ...]:
    """Return the nodes of each run of consecutive layers of ``stage`` that backward re-computes."""
    return tuple(
        frozenset(name for layer in run for name in layers.layers[layer].nodes)
        for run in find_runs(recompute, stage.first_layer, stage.last_layer + 1)
    )


def passes(model: StagedModel, plan: Plan, devices: Sequence[str], home: str, variant: StepVariant) -> tuple[Pass, ...]:
    """Return the passes of ``plan`` in order; the comments say what each needs. See ``pipeline_graph``."""
    placed = _place_stages(plan, devices)
    if not model.trains:
        return _forward_passes(model, plan, placed, home)
    if plan.window is not None:
        return window_passes(model, plan, placed, home, variant)
    schedule = build_schedule(plan.schedule, len(plan.stages), plan.micro_batches)
    check_workers(plan)
    if model.frontier:
        check_forwards_first(schedule)
    order: list[Pass] = [
        *([Recompute(model.runs)] if any(model.runs) else []),  # changes what stages take; what it adds can be split
        *([LookUpRows(model.lookups)] if model.lookups else []),  # in what Recompute repeats too
        *(
            [SplitWeights(schedule.split, plan.micro_batches)] if schedule.split else []
        ),  # rewrites stage functions; their calls come next
        # calls of stages exist from here on
        Microbatch(
            model.stages, plan.micro_batches, model.merges, model.loss, model.frontier, schedule.split, plan.sizes
        ),
        SplitConcat(plan.replicas, model.shared),  # before anything that has one node a replica
        *([SendTogether(schedule)] if schedule.together else []),  # needs the tensors of every replica
        CopyVariables(),  # needs the replicas
        Accumulate(),  # needs every replica's backward, and its weights' part
        *([Overlap()] if plan.overlap else []),  # cuts the sums that AllReduce will take
        AllReduce(),  # needs every replica's sum
        *([RoundGradients(model.narrow)] if _sums_gradients(plan) and model.narrow else []),  # the complete sums
        *([GatherSlices(model.sparse)] if model.sparse else []),  # needs every replica's backward, and weights' part
        *([WriteStatistics()] if model.statistics else []),  # needs every replica's forward; AllReduce takes other sums
        Order(schedule),  # needs all calls; before timing, which repeats its edges
    ]
    if model.updates is not None:
        order.append(Apply(model.updates, model.global_clipnorm))  # behind a barrier of all that is there
    if variant is StepVariant.WITH_GRADIENTS:
        order.append(ExposeGradients())  # needs what AllReduce left
    if variant is StepVariant.CHECKED:
        order.append(CheckNumerics(gradients=not model.skips))  # needs what AllReduce left, and the loss
    if variant is StepVariant.TIMED:
        order.append(Instrument())  # last of the rewrites: stamps what the others made
    order += [Place(placed, home), VerifyPipeline(schedule)]
    return tuple(order)


def window_passes(
    model: StagedModel, plan: Plan, placed: tuple[tuple[str, ...], ...], home: str, variant: StepVariant
) -> tuple[Pass, ...]:
    """Return the passes of asynchronous windows in order; they repeat the graph of one minibatch."""
    check_window_model(model, plan)
    versions = plan.versions
    window, trained = versions.window, frozenset(model.trained)
    assert model.updates is not None  # check_window_model refuses models without an optimizer
    return (
        *([Recompute(model.runs)] if any(model.runs) else []),
        *([LookUpRows(model.lookups)] if model.lookups else []),
        Microbatch(model.stages, window.micro_batches, model.merges, model.loss),  # the calls of one minibatch
        *([] if window.in_turn else [SplitConcat(plan.replicas, model.shared)]),
        Accumulate(),  # needs every backward; its sums are repeated too
        RepeatMinibatches(window, model.merges),  # gives calls their replicas, where these take minibatches in turn
        CopyVariables(trained),  # needs the replicas of all minibatches
        GroupGradients(window, model.sparse),  # needs the sums of all minibatches
        UpdateGroups(window, model.updates, model.counter),  # needs complete gradients, and commits
        UseVersions(versions, trained),  # needs the updates, between which versions are stored
        OrderWindow(versions),  # needs all calls and updates; before timing, which repeats its edges
        *([Instrument()] if variant is StepVariant.TIMED else []),
        Place(placed, home),
        VerifyWindow(versions, trained),
    )


def check_window_model(model: StagedModel, plan: Plan) -> None:
    """Raise PlanError where the model or its optimizer cannot train in asynchronous windows under ``plan``.

    Stages update at different times, so no trained variable can be in two of them, and no optimizer can decide by all
    gradients. Replicas that take minibatches in turn cannot write state in the order of the minibatches.
    """
    if model.updates is None:
        raise PlanError("mode='async' without an optimizer: a window updates the weights after every minibatch")
    try:
        check_updates(model.updates, model.counter)
    except GraphError as error:
        raise PlanError(f"mode='async': the optimizer {error}; use another one, such as SGD or Adam") from error
    variables = find_variables(model.graph)
    for name, users in variables.users:
        if name in model.trained and len(users) > 1:
            raise PlanError(
                f"mode='async': {name!r} is trained and used by stages {list(users)}, which update at different times, "
                "so there is no one version of it: cut the model so that one stage has all uses, or train with "
                "mode='sync'"
            )
        if name in model.trained and name in variables.state:
            raise PlanError(f"mode='async': {name!r} is trained, and forward writes it too")
    assert plan.window is not None
    for stage, replicas in enumerate(plan.replicas if plan.window.in_turn else ()):
        written = [name for name in variables.used(stage) if name in variables.state - variables.once]
        if replicas > 1 and written:
            raise PlanError(
                f"mode='async': forward of stage {stage} writes {written[0]!r}, and its {replicas} replicas take "
                "minibatches in turn, so it cannot be written in the order of the minibatches: give this stage one "
                "device"
            )


def _sums_gradients(plan: Plan) -> bool:
    """Return whether some gradient is a sum of several micro-batches' or replicas'."""
    return plan.micro_batches > 1 or max(plan.replicas) > 1


def _forward_passes(model: StagedModel, plan: Plan, placed: tuple[tuple[str, ...], ...], home: str) -> tuple[Pass, ...]:
    """Return the passes of a model that only runs forward, whatever the plan's schedule of training is."""
    schedule = forward_only(plan.worker_map, plan.micro_batches)
    return (
        Microbatch(model.stages, plan.micro_batches, model.merges, model.loss, model.frontier, sizes=plan.sizes),
        SplitConcat(plan.replicas, model.shared),
        CopyVariables(),
        *([WriteStatistics()] if model.statistics else []),
        Order(schedule),
        Place(placed, home),
        VerifyPipeline(schedule),
    )


def _place_stages(plan: Plan, devices: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the devices of each stage; PlanError where there are not as many."""
    try:
        return tuple(tuple(devices[d] for d in stage.devices) for stage in plan.stages)
    except IndexError:
        wanted = sorted({d for stage in plan.stages for d in stage.devices})
        raise PlanError(f"the plan uses devices {wanted}, but there are only {len(devices)}: {list(devices)}") from None


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


def local_graph(
    model: StagedModel,
    plan: Plan,
    devices: Sequence[str],
    home: str,
    *,
    variant: StepVariant = StepVariant.PLAIN,
    observers: Sequence[Observer] = (),
) -> Graph:
    """Return the graph that one process runs: that of ``pipeline_graph``, of which calls may be in parts."""
    graph = pipeline_graph(model, plan, devices, home, variant=variant, observers=observers)
    # After all passes that look at whole calls.
    return run_passes(graph, [JoinReplicas()] if model.joins else [], observers)


def rank_graphs(
    model: StagedModel,
    plan: Plan,
    size: int,
    *,
    variant: StepVariant = StepVariant.PLAIN,
    local: bool = False,
    observers: Sequence[Observer] = (),
) -> tuple[Graph, ...]:
    """Return the graphs of all ranks of a job of ``size`` processes, without devices, checked against each other.

    A rank runs all stages of its device in ``plan``.
    ``local``: each takes only the rows of the batch that it needs, and the batch size as its last input.

    Raises PlanError where the plan is for another number of ranks, and GraphError where two ranks' exchanges do not
    match.
    """
    used = sorted({device for stage in plan.stages for device in stage.devices})
    if used != list(range(size)):
        raise PlanError(
            f"the plan is for {len(used)} ranks, {used}, but the job has {size}: start as many processes, one a device"
        )
    # A rank's exchanges are timed too, so time stamps are added after the projection.
    timed = variant is StepVariant.TIMED
    devices = [f"/rank:{rank}" for rank in range(size)]
    whole = local_graph(model, plan, devices, "/rank:*", variant=StepVariant.PLAIN if timed else variant)
    # After all passes that expect whole calls.
    if plan.window is None:
        whole = run_passes(whole, [CombineStatistics(), ShareStatistics()], observers)
    types = tuple((name, _value_type(variable)) for name, variable in sorted(model.variables.items()))
    ranks = tuple(stage.devices for stage in plan.stages)
    # RankVariables needs the copies that CopyVariables made; Project then finds the values that ranks exchange.
    last: list[Pass] = [*([LocalInput()] if local else []), *([Instrument()] if timed else [])]
    graphs = tuple(
        run_passes(whole, [RankVariables(types, ranks), Project(ranks, rank), *last], observers) for rank in range(size)
    )
    verify_ranks(graphs)
    return graphs


def _value_type(variable: tf.Variable) -> TensorType:
    return TensorType(DType(variable.dtype.name), Shape(tuple(variable.shape.as_list())))
