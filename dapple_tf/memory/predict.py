"""Predicted bytes of one device of each stage, from the pipelined graph and its schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dapple_tf.compiler import PlannedModel, StagedModel, pipeline_graph
from dapple_tf.memory.in_flight import moments, most_held
from dapple_tf.memory.liveness import peak_bytes
from dapple_tf.memory.sizes import Sizes, measure_functions, stage_functions
from dapple_tf.memory.stash import Kept, find_kept, find_transit
from graph_passes.analysis.op_costs import value_bytes
from graph_passes.analysis.variable_use import Variables, find_variables
from graph_passes.ir.graph import Function, Graph
from graph_passes.ir.names import micro_batch_count, replica_counts
from graph_passes.schedules.policies import build_schedule
from graph_passes.schedules.schedule import Schedule

_LOOPS = frozenset({"While", "StatelessWhile"})


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one device of a stage (the one that holds most: it owns the weights).

    Always there: ``weights`` that the stage owns, ``gradients`` (the sums of several micro-batches; those of a single
    one are in ``working``), ``slots`` of the optimizer, ``copies`` of variables that other devices own or that forward
    writes. During a step: ``stash`` of each of ``most_held`` micro-batches; ``kept`` says what it consists of;
    ``waiting``, what neighbours have sent before it is taken; ``transit``, what a rank is sending and receiving;
    ``working``, the most that a function takes beside, by kind of action; ``update``, the update of the weights, when
    all else is gone. ``in_step``: the most of all these at one time. ``loops``: While loops, what each of which holds
    inside is not counted.
    """

    stage: int
    weights: int
    gradients: int
    slots: int
    copies: int
    most_held: int
    kept: tuple[Kept, ...]
    waiting: int
    transit: int
    working: Mapping[str, int]
    update: int
    in_step: int
    loops: int = 0

    @property
    def stash(self) -> int:
        """Bytes that a micro-batch holds from its forward to the action behind which it is done."""
        return sum(piece.bytes for piece in self.kept if piece.birth in ("sent forward", "F") and piece.until != "F")

    @property
    def fixed(self) -> int:
        """Bytes that are there between steps too."""
        return self.weights + self.gradients + self.slots + self.copies

    @property
    def peak(self) -> int:
        """The most bytes at one time."""
        return self.fixed + self.in_step


def predict_plan_memory(planned: PlannedModel, *, ranks: bool) -> tuple[StageMemory, ...]:
    """Return the predicted memory of one device of each stage of a planned model.

    ``ranks``: the devices are the processes of a job, and what a rank sends and receives takes memory on the way.
    """
    plan = planned.plan
    schedule = build_schedule(plan.schedule, len(plan.stages), plan.micro_batches)
    # The graph of all stages, whatever their devices are: a rank's own graph lacks the other stages.
    devices = [f"device:{i}" for i in range(1 + max(d for stage in plan.stages for d in stage.devices))]
    graph = pipeline_graph(planned.model, plan, devices, "home")
    return predict_memory(graph, schedule, planned.model, planned.batch_size, ranks=ranks)


def predict_memory(
    graph: Graph,
    schedule: Schedule,
    model: StagedModel,
    batch_size: int,
    *,
    ranks: bool = False,
) -> tuple[StageMemory, ...]:
    """What one device of each stage holds when ``graph``, which runs ``schedule``, takes ``batch_size`` samples.

    Slices of the batch's arguments are views and count nothing. ``ranks``: each device is a
    process's, and what it sends and receives takes memory on the way.
    """
    replicas, micro_batches = replica_counts(graph), micro_batch_count(graph)
    samples = [-(-batch_size // micro_batches // r) for r in replicas]
    sizes = measure_functions(graph, model, samples)
    variables = find_variables(graph)
    found = []
    for stage, count in enumerate(replicas):
        functions = {k: sizes[f.name] for k, f in stage_functions(graph, stage).items()}
        found.append(_predict_stage(stage, functions, schedule, model, variables, micro_batches, count, ranks))
    return tuple(found)


def _predict_stage(
    stage: int,
    functions: Mapping[str, Sizes],
    schedule: Schedule,
    model: StagedModel,
    variables: Variables,
    micro_batches: int,
    replicas: int,
    ranks: bool,
) -> StageMemory:
    kept = find_kept(functions)
    transit = find_transit(functions, kept) if ranks else 0
    working = {kind: _working(sizes, kind, kept) for kind, sizes in functions.items()}
    gradients = sum(
        _bytes_of(model, [port.name for _, port in sizes.function.output_ports("variable")])
        for sizes in functions.values()
    )
    update = dict(model.updates.stages).get(stage) if model.updates is not None else None
    slots = _slots(model, update)
    buffers = gradients if micro_batches > 1 else 0
    in_update = _in_update(model, update, gradients, micro_batches, replicas)
    in_actions, waiting = 0, 0
    for moment in moments(schedule, stage):
        taken = sum(piece.bytes * moment.held(piece.birth, piece.until) for piece in kept)
        ahead = sum(piece.bytes * moment.waiting(piece.birth) for piece in kept)
        in_actions = max(in_actions, taken + transit + working[moment.action.kind])
        waiting = max(waiting, ahead)
    return StageMemory(
        stage=stage,
        weights=_bytes_of(model, variables.owned(stage)),
        gradients=buffers,
        slots=slots,
        copies=_bytes_of(model, variables.copied(stage, 0)),
        most_held=most_held(schedule, stage),
        kept=kept,
        waiting=waiting,
        transit=transit,
        working=working,
        update=in_update,
        in_step=max(in_actions, in_update),
        loops=sum(node.op in _LOOPS for sizes in functions.values() for node in sizes.function.graph.nodes),
    )


def _working(sizes: Sizes, kind: str, kept: Sequence[Kept]) -> int:
    """What a function takes beyond what it makes for later ones."""
    made = sum(piece.bytes for piece in kept if piece.birth == kind)
    return max(0, peak_bytes(sizes.function.graph, sizes) - made)


def _slots(model: StagedModel, update: Function | None) -> int:
    """Bytes of the optimizer's variables that the stage's update alone uses."""
    if update is None or model.updates is None:
        return 0
    others = [model.updates.before, model.updates.after, *(f for _, f in model.updates.stages if f is not update)]
    shared = {port.name for function in others if function is not None for port in function.inputs}
    own = [port.name for _, port in update.input_ports("variable") if port.name not in shared]
    return _bytes_of(model, [name for name in own if name not in model.model_variables])


def _in_update(model: StagedModel, update: Function | None, gradients: int, micro_batches: int, replicas: int) -> int:
    """Bytes at the update: gradients that are in no buffer, sums over replicas, clipped ones, and its own work."""
    if update is None:
        return gradients * (micro_batches == 1)
    extra = (micro_batches == 1) + (replicas > 1) + (model.global_clipnorm is not None)
    return gradients * extra + peak_bytes(update.graph, lambda value: value_bytes(update.graph, value, {}))


def _bytes_of(model: StagedModel, names: Sequence[str]) -> int:
    kinds = [(model.variables[name].shape, model.variables[name].dtype) for name in dict.fromkeys(names)]
    return sum(int(shape.num_elements() or 0) * dtype.size for shape, dtype in kinds)
