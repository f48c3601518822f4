"""Predict the memory of one device of each stage from the pipelined graph and its schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from dapple_tf import variable_values
from dapple_tf.compiler import PlannedModel, pipeline_graph
from dapple_tf.graph_passes.analysis.row_bounds import micro_batch_sizes
from dapple_tf.graph_passes.analysis.variable_use import Variables, find_variables
from dapple_tf.graph_passes.ir.graph import Function, Value
from dapple_tf.graph_passes.ir.names import Site, at, without_target
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.gather_slices import SparsePart, slice_ports
from dapple_tf.internals import LOOP_OPS
from dapple_tf.memory.in_flight import StageState, stage_states, window_states
from dapple_tf.memory.liveness import peak_bytes
from dapple_tf.memory.sizes import FunctionSizes, infer_sizes, stage_functions
from dapple_tf.memory.stash import StashedTensor, find_stashed_tensors, transfer_bytes
from dapple_tf.staged_model import StagedModel


@dataclass(frozen=True)
class StageMemory:
    """Predicted bytes of one device of a stage: of the replica with the most memory.

    Between steps: ``weights`` that the device keeps; ``gradients``, the accumulated sums of several micro-batches (the
    gradients of a single one count in ``working``, and sparse ones in ``slices``); ``slots`` of the optimizer;
    ``copies`` of variables that other devices own or that forward writes; ``versions``, the ``version_count`` versions
    of its weights that a window stores. A stored version shares its memory with the weights until their next update,
    and stays until another version takes its place: at the end of a window the device holds ``version_count`` copies of
    the weights beside the weights themselves.

    During a step: ``stashed``, the tensors stashed of each micro-batch, of which at most ``in_flight`` are in flight;
    ``waiting``, tensors received from neighbours before they are used; ``transit``, messages that a rank sends and
    receives; ``arriving``, gradients that replicas on other ranks have sent before this one's last backward ends;
    ``working``, the peak of a function's other tensors, by kind of action; ``slices``, the sparse gradients of one
    micro-batch, which stay until the update; ``update``, the weight update, which runs when the others are freed (in a
    window beside stashes), with all slices. ``in_step``: the peak of all these at one time. ``tail``: what the loss
    head takes (see ``batch_loss``), which runs on the whole batch while all micro-batches are stashed. ``loops``: the
    number of While loops; tensors inside of them are not counted. ``held``: the bytes of each variable that ``weights``
    and ``slots`` count, by the variable's ``id``.
    """

    stage: int
    weights: int
    gradients: int
    slots: int
    copies: int
    in_flight: int
    stashed: tuple[StashedTensor, ...]
    waiting: int
    transit: int
    working: Mapping[str, int]
    update: int
    in_step: int
    loops: int = 0
    slices: int = 0
    arriving: int = 0
    tail: int = 0
    versions: int = 0
    version_count: int = 0
    held: Mapping[int, int] = field(default_factory=dict)

    @property
    def stash(self) -> int:
        """Bytes stashed of one micro-batch from its forward to the action that releases it."""
        return sum(tensor.bytes for tensor in self.stashed if tensor.is_activation and tensor.last_use != "F")

    @property
    def fixed(self) -> int:
        """Bytes that stay allocated between steps."""
        return self.weights + self.gradients + self.slots + self.copies + self.versions

    @property
    def peak(self) -> int:
        """Peak bytes."""
        return self.fixed + self.in_step


def predict_plan_memory(planned: PlannedModel, *, ranks: bool, packs: bool = False) -> tuple[StageMemory, ...]:
    """Return the predicted memory of one device of each stage of a planned model; in a window, of replica 0.

    Slices of the batch's arguments are views and count nothing. Every micro-batch counts as the largest. ``ranks``:
    each device is a process of a job, so messages between stages take memory. ``packs``: see ``packs_operands``.
    """
    plan, model = planned.plan, planned.model
    micro_batches = plan.micro_batches // plan.training.minibatches
    kept_versions: Sequence[int | None]
    if plan.window is None:
        states_of, kept_versions = partial(stage_states, plan.build_schedule()), (None,) * model.stages
    else:
        states_of, kept_versions = partial(window_states, plan.versions.window), plan.versions.slots
    # Predict from the graph of all stages, on made-up device names: a rank's own graph lacks the other stages.
    graph = pipeline_graph(model, plan, [f"device:{number}" for number in plan.device_numbers], "home")
    largest = max(micro_batch_sizes(planned.batch_size, plan.micro_batches, plan.sizes))
    shares = [stage.row_shares or (1,) * sharing for stage, sharing in zip(plan.stages, plan.sharing, strict=True)]
    bytes_of = infer_sizes(graph, model, [-(-largest * max(own) // sum(own)) for own in shares])
    variables = find_variables(graph, model.pass_facts.shares)
    functions = [
        {kind: bytes_of[f.name] for kind, f in stage_functions(graph, stage).items()} for stage in range(model.stages)
    ]
    slices = _find_slices(
        list(map(_one_backward, functions)), model.pass_facts.sparse, variables, micro_batches, plan.replicas
    )
    stages = [
        _predict_stage(
            stage,
            own,
            slices[stage],
            states_of(stage),
            model,
            variables,
            micro_batches,
            plan.replicas[stage],
            ranks,
            packs,
            kept_versions[stage],
        )
        for stage, own in enumerate(functions)
    ]
    if model.pass_facts.head_inputs:
        loss_head = graph.function(at(model.stages - 1, what=OpName.LOSS_HEAD))
        stages[-1] = _with_loss_head(stages[-1], loss_head, planned.batch_size)
    return tuple(stages)


def _with_loss_head(memory: StageMemory, function: Function, batch_size: int) -> StageMemory:
    """Return the memory of the last stage with that of the loss head; unknown lengths count as ``batch_size``.

    The rows and their gradients exist twice: in micro-batches, and put together.
    """
    sizes = FunctionSizes(function, {}, batch_size)
    rows = sum(sizes.bytes_of(Value(function.graph.inputs[i])) for i, _ in function.input_ports("boundary"))
    gradients = sum(sizes.bytes_of(function.graph.outputs[i]) for i, _ in function.output_ports("gradient"))
    tail = 2 * rows + gradients + peak_bytes(function.graph, sizes.bytes_of)
    in_step = max(memory.in_step, memory.in_flight * memory.stash + tail)
    return dataclasses.replace(memory, tail=tail, in_step=in_step)


def _predict_stage(
    stage: int,
    functions: Mapping[str, FunctionSizes],
    slices: _StageSlices,
    states: Sequence[StageState],
    model: StagedModel,
    variables: Variables,
    micro_batches: int,
    replicas: int,
    ranks: bool,
    packs: bool,
    kept_versions: int | None,
) -> StageMemory:
    """Return the memory of a stage that runs these ``states``; ``micro_batches``: those of one update.

    ``kept_versions``: in a window, the versions of the trained weights that a replica keeps at once; None in a
    synchronous step. In a window an update runs while other micro-batches are stashed.
    """
    one_backward = _one_backward(functions)
    stashed = find_stashed_tensors(one_backward)
    if stage == model.stages - 1:  # gradients that the loss head gives count there
        stashed = tuple(tensor for tensor in stashed if tensor.origin != "next stage")
    transit = transfer_bytes(one_backward, stashed) if ranks else 0
    working = {kind: _working_bytes(sizes, kind, stashed, packs) for kind, sizes in functions.items()}
    gradients = sum(
        _variable_bytes(model, [without_target(name)])
        for function in (sizes.function for sizes in one_backward.values())
        for name in {port.name for _, port in (*function.output_ports("variable"), *function.input_ports("sum"))}
    )
    site = _fullest_site(stage, model, variables, replicas)
    updates = () if model.updates is None else model.updates.of_site(site)
    kept = [name for name in variables.owned(stage) if variables.home(name) == site or name not in variables.keepers]
    slots = _slot_names(model, updates)
    copied = variables.copied(stage, site.replica if stage in variables.sharded else 0)
    reduced = gradients
    if stage in variables.sharded:
        reduced = _variable_bytes(model, [name for name in kept if name in model.trained])
    update_bytes = _update_bytes(model, updates, gradients, reduced, slices, micro_batches, replicas, ranks)
    arriving = 0
    if ranks and kept_versions is None:
        arriving = _arriving_bytes(gradients, reduced, replicas, sharded=stage in variables.sharded)
    # As a step starts, a rank receives the values of variables that other ranks keep, before it stores them.
    received = _variable_bytes(model, [name for name in copied if name in variables.keepers]) * ranks
    in_step, waiting, in_flight = 0, 0, 0
    for state in states:
        if state.action.stage == stage:
            held = held_bytes(state, stashed, slices.per_micro_batch, arriving)
            in_step = max(in_step, held + transit + working[state.action.kind])
            if kept_versions is not None and state.action.kind == "F":  # an update comes before it
                in_step = max(in_step, held + update_bytes)
            in_flight = max(in_flight, state.in_flight)
            waiting = max(waiting, sum(tensor.bytes * state.queued(tensor.origin) for tensor in stashed))
    trained = _variable_bytes(model, [name for name in variables.used(stage) if name in model.trained])
    version_count = (kept_versions or 0) if trained else 0
    return StageMemory(
        stage=stage,
        weights=_variable_bytes(model, kept),
        gradients=gradients if micro_batches > 1 else 0,
        slots=_variable_bytes(model, slots),
        copies=_variable_bytes(model, copied),
        in_flight=in_flight,
        stashed=stashed,
        waiting=waiting,
        transit=transit,
        working=working,
        update=update_bytes,
        in_step=max(in_step, update_bytes, received),
        loops=sum(node.op in LOOP_OPS for sizes in one_backward.values() for node in sizes.function.graph.nodes),
        slices=slices.per_micro_batch,
        arriving=arriving,
        versions=version_count * trained,
        version_count=version_count,
        held={id(v): variable_values.variable_bytes(v) for v in (model.variables[name] for name in (*kept, *slots))},
    )


def held_bytes(state: StageState, stashed: Sequence[StashedTensor], slices: int, arriving: int) -> int:
    """Return the bytes that a stage holds of micro-batches, and of other replicas' gradients.

    ``slices``: bytes of a micro-batch's sparse gradients. ``arriving``: see ``StageMemory``.
    """
    tensors = sum(tensor.bytes * state.stashed(tensor.origin, tensor.last_use) for tensor in stashed)
    return tensors + slices * state.kept + arriving * state.ending


def _arriving_bytes(gradients: int, reduced: int, replicas: int, *, sharded: bool) -> int:
    """Return the bytes of gradients that a rank receives from replicas that have ended their backwards before it.

    Where the update is sharded, all other replicas send this one the gradients that it sums (``reduced``). A ring of r
    ranks cuts the gradients into r messages, and the second one arrives only after the rank has sent its own first one.
    """
    if replicas == 1:
        return 0
    return (replicas - 1) * reduced if sharded else -(-gradients // replicas)


def _one_backward(functions: Mapping[str, FunctionSizes]) -> dict[str, FunctionSizes]:
    """Return a stage's functions without B where it also has I and W, which take at least as much memory."""
    return {kind: sizes for kind, sizes in functions.items() if kind != "B" or "I" not in functions}


def _working_bytes(sizes: FunctionSizes, kind: str, stashed: Sequence[StashedTensor], packs: bool) -> int:
    """Return the peak bytes of a function's tensors beside those that it stashes."""
    own = sum(tensor.bytes for tensor in stashed if tensor.origin == kind or (tensor.origin, kind) == ("I", "B"))
    return max(0, peak_bytes(sizes.function.graph, sizes.bytes_of, packs=packs) - own)


def _fullest_site(stage: int, model: StagedModel, variables: Variables, replicas: int) -> Site:
    """Return the replica with most slots: replica 0 where the stage's update is not sharded."""
    if model.updates is None or stage not in variables.sharded:
        return Site(stage)
    of_site = model.updates.of_site
    sites = [Site(stage, r) for r in range(replicas)]
    return max(sites, key=lambda site: _variable_bytes(model, _slot_names(model, of_site(site))))


def _slot_names(model: StagedModel, updates: Sequence[Function]) -> list[str]:
    """Return the optimizer's variables that only these updates use, those of one stage."""
    if not updates or model.updates is None:
        return []
    own = {port.name for update in updates for _, port in update.input_ports("variable")}
    others = (function for function in model.updates.functions if function not in updates)
    shared = {port.name for function in others for port in function.inputs}
    return sorted(name for name in own - shared if name not in model.model_variables)


def _update_bytes(
    model: StagedModel,
    updates: Sequence[Function],
    gradients: int,
    reduced: int,
    slices: _StageSlices,
    micro_batches: int,
    replicas: int,
    ranks: bool,
) -> int:
    """Return the bytes of the update: its own tensors, and copies of the gradients outside the accumulation buffers.

    There is one such copy where a single micro-batch has no buffers, one for the sum over replicas, and one for the
    clipped gradients. ``reduced``: bytes of the gradients of the variables that the device updates. If these are fewer
    than ``gradients``, the update is sharded, and a rank receives them from all other replicas. Before the update,
    slices exist twice: as backward returned them, and gathered. Clipped slices are dense.
    """
    gathering = slices.pieces + slices.complete
    if not updates:
        return gradients * (micro_batches == 1) + gathering
    clips = model.global_clipnorm is not None
    received = max(1, replicas - 1) if ranks and reduced < gradients else 1
    copies = gradients * (micro_batches == 1) + reduced * (received * (replicas > 1) + clips)
    sparse = slices.complete + clips * _variable_bytes(model, slices.variables)
    sizes = [FunctionSizes(update, {}, slices.rows) for update in updates]
    own = max(peak_bytes(each.function.graph, each.bytes_of) for each in sizes)
    return copies + max(gathering, sparse + own)


def _variable_bytes(model: StagedModel, names: Sequence[str]) -> int:
    return sum(variable_values.variable_bytes(model.variables[name]) for name in dict.fromkeys(names))


# --- Bytes of sparse gradients: the slices of all micro-batches stay until they are gathered for the update


@dataclass(frozen=True)
class _StageSlices:
    """Bytes of the slices of sparse gradients, and of their indices, on one device of a stage.

    ``per_micro_batch``: what its backward gives. ``pieces``: what is gathered for the variables that the stage owns,
    from all micro-batches, replicas and stages. ``complete``: the gathered slices. ``rows``: the most rows that the
    gathered slices of a variable have. ``variables``: the variables that the stage owns and whose gradients are sparse.
    """

    per_micro_batch: int = 0
    pieces: int = 0
    complete: int = 0
    rows: int = 1
    variables: tuple[str, ...] = ()


def _find_slices(
    functions: Sequence[Mapping[str, FunctionSizes]],
    parts: Sequence[SparsePart],
    variables: Variables,
    micro_batches: int,
    replicas: Sequence[int],
) -> tuple[_StageSlices, ...]:
    """Return the slices of every stage; ``functions``: the sizes in the stages' functions by kind of action."""
    pairs = [[pair for sizes in by_kind.values() for pair in _pair_sizes(sizes)] for by_kind in functions]
    found = []
    for stage in range(len(functions)):
        owned = [part for part in parts if variables.owner(part.variable) == stage]
        pieces = complete = 0
        rows: dict[str, int] = {}
        seen: set[tuple[str, int]] = set()
        for part in owned:
            size, count = pairs[part.stage][part.pair]
            number = micro_batches * replicas[part.stage]
            pieces += number * size
            if (part.variable, part.position) not in seen:
                seen.add((part.variable, part.position))
                kept = 1 if part.combine == "sum" else number
                complete += kept * size
                rows[part.variable] = rows.get(part.variable, 0) + kept * count
        per_micro_batch = sum(size for size, _ in pairs[stage])
        found.append(_StageSlices(per_micro_batch, pieces, complete, max(rows.values(), default=1), tuple(rows)))
    return tuple(found)


def _pair_sizes(sizes: FunctionSizes) -> list[tuple[int, int]]:
    """Return for each pair of slices and indices that a function gives its bytes, and its number of rows."""
    graph, found = sizes.function.graph, []
    for slices, indices in slice_ports(sizes.function):
        of_slices, of_indices = (sizes.bytes_of(graph.outputs[place]) for place in (slices, indices))
        found.append((of_slices + of_indices, of_indices // sizes.function.outputs[indices].type.dtype.size))
    return found
