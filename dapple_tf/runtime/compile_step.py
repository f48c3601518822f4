"""Compile a training step: capture, layers, plan, stages, passes, emit."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import tensorflow as tf

from dapple_tf.autoplan.autoplan import Autoplan
from dapple_tf.autoplan.batch_fit import fit_plan
from dapple_tf.backend.bindings import Buffers
from dapple_tf.backend.build_times import BuildTimes
from dapple_tf.backend.handler import ChooseCompiled
from dapple_tf.backend.program import Program, build_program, follow
from dapple_tf.compiler import PlannedModel, StepVariant, local_graph
from dapple_tf.errors import BatchError, CaptureError, LossError, PlanError, UsageError, warn_user
from dapple_tf.exactness import Inexact
from dapple_tf.frontend.batch import Batch, BatchForm, Key, batch_form
from dapple_tf.frontend.captured import (
    Captured,
    RowlessTargetsError,
    SeveralPhasesError,
    Traced,
    TrainingStep,
    UnexpectedGradientsError,
)
from dapple_tf.frontend.composite import as_rows
from dapple_tf.frontend.phases import HandOver
from dapple_tf.frontend.shapes import infer_batch_axes
from dapple_tf.frontend.trace import report_exactness, trace_batch, trace_uncut
from dapple_tf.graph_passes.analysis.layers import Layers, find_layers, written_variables
from dapple_tf.graph_passes.analysis.variable_use import find_variables, find_writers
from dapple_tf.graph_passes.ir.graph import Shape
from dapple_tf.memory.room import check_room, find_need, predict_process_step
from dapple_tf.plans import Plan
from dapple_tf.profiler.units import format_samples
from dapple_tf.runtime.exclusive import exclusive
from dapple_tf.runtime.variable_homes import VariableHomes
from dapple_tf.sharding import Sharding
from dapple_tf.staged_model import StagedModel, stage_model
from dapple_tf.wording import format_count
from dapple_tf.xla.choice import Xla

# --- Keep the traces of a loss, up to a limit, and find the one that fits a batch

MOST_TRACES = 16
"""The number of traces that are kept for one loss; the next one replaces the trace that has not run for longest."""

_WARN_AT = 3  # warn when a third trace differs from others only in inner lengths, or in Python values


@dataclass
class TracedShapes:
    """The traces of one loss by nesting of arguments and signature, in the order of their last use."""

    _models: dict[Key, StagedModel] = field(default_factory=dict)
    _warned: bool = False

    def __len__(self) -> int:
        """Return the number of traces that are kept."""
        return len(self._models)

    def values(self) -> list[StagedModel]:
        """Return the traces that are kept."""
        return list(self._models.values())

    def find(self, key: Key) -> StagedModel | None:
        """Return a trace whose signature fits this key, and which is valid for its inner lengths, or None."""
        for kept in [key, *self._models]:
            if kept in self._models and _serves(kept, self._models[kept], key):
                model = self._models[kept] = self._models.pop(kept)  # moved to the end: it is used last
                return model
        return None

    def alike(self, key: Key) -> list[tuple[tf.TensorSpec, ...]]:
        """Return the signatures of the traces that differ from this key in inner lengths only."""
        return [kept[1] for kept in self._models if _is_alike(kept, key)]

    def add(self, key: Key, model: StagedModel) -> StagedModel | None:
        """Keep a new trace, made for a batch of this key; return the trace that is dropped for it, or None.

        Warn once if many lengths, or many Python values, have been traced.
        """
        signature = model.interface.signature
        self._models[key[0], signature] = model
        dropped = self._models.pop(next(iter(self._models))) if len(self._models) > MOST_TRACES else None
        alike = [kept for kept in self._models if _is_alike(kept, key)]
        nestings = [kept[0].text for kept in self._models if kept[1] == signature]
        if max(len(alike), len(nestings)) >= _WARN_AT and not self._warned:
            self._warned = True
            warn_user(_advice(alike, key) if len(alike) >= _WARN_AT else _advice_on_values(nestings))
        return dropped


def _serves(kept: Key, model: StagedModel, key: Key) -> bool:
    fits = [a.dtype == b.dtype and a.shape.is_compatible_with(b.shape) for a, b in zip(kept[1], key[1], strict=False)]
    if kept[0] != key[0] or len(kept[1]) != len(key[1]) or not all(fits):
        return False
    return model.interface.serves is None or model.interface.serves(key[1])


def _is_alike(kept: Key, key: Key) -> bool:
    """Return whether the batches differ in inner lengths only."""
    return kept[0] == key[0] and _dtypes_and_ranks(kept[1]) == _dtypes_and_ranks(key[1])


def _dtypes_and_ranks(specs: Sequence[tf.TensorSpec]) -> list[Any]:
    return [(spec.dtype, spec.shape.rank) for spec in specs]


def _advice(alike: Sequence[Key], key: Key) -> str:
    return (
        f"the step has been built for {len(alike)} inner shapes of the batch, the last one "
        f"{', '.join(str(spec.shape) for spec in key[1])}, and is built for each further one that no build serves (the "
        f"{MOST_TRACES} used last are kept). If the loss is a tf.function with reduce_retracing=True, or whose "
        "input_signature has None for a length that varies (tf.TensorSpec([None, None], tf.int32)), one build serves "
        "all lengths at which the analysis of the loss gives the same result; otherwise pad batches to a few lengths"
    )


def _advice_on_values(nestings: Sequence[str]) -> str:
    return (
        f"the step has been built for {len(nestings)} sets of Python values in its arguments, the last one "
        f"{nestings[-1]}, and is built for each further one (the {MOST_TRACES} used last are kept): give a number that "
        "changes from step to step as a tensor, tf.constant(0.1)"
    )


# --- Compile a training step: capture, layers, plan, stages, passes, emit


T = TypeVar("T")
_PlanKey = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]


class Target(Protocol):
    """The place where steps run: devices of this process (``LocalTarget``), or a rank of a job (``RankTarget``)."""

    def announce(self, what: str, batch_size: int, signature: Sequence[tf.TensorSpec]) -> None:
        """Announce to the other ranks which work this rank begins, for a batch of this size and signature."""

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Return the result of ``work``, once it has succeeded on every rank."""

    def check_plan(self, plan: Plan, fitted: Plan, batch_size: int) -> None:
        """Raise BatchError if ``fitted``, the ``plan`` for a batch of ``batch_size`` samples, cannot run here."""

    def build(
        self,
        planned: PlannedModel,
        variant: StepVariant,
        times: BuildTimes,
        choose: ChooseCompiled | None = None,
        earlier: Program | None = None,
    ) -> Program:
        """Run the passes and build the TensorFlow operations, both measured by ``times``.

        ``choose`` returns the functions that XLA compiles. ``earlier``: the program of the phase before, of a step of
        several, which the new program contains.
        """


@dataclass(frozen=True)
class TracedLoss:
    """A captured loss, its layers, and the shapes of all its values for a micro-batch."""

    captured: Captured
    shapes: Mapping[str, Sequence[Shape]]
    layers: Layers


@dataclass(frozen=True)
class CompiledStep:
    """The program of a step, and the planned model and the form of the batches that it was compiled for."""

    planned: PlannedModel
    program: Program
    form: BatchForm

    @property
    def phases(self) -> int:
        """The number of phases of the training step that this phase belongs to."""
        phase = self.planned.model.interface.phase
        return 1 if phase is None else phase.count


@dataclass
class CompiledSteps:
    """Everything compiled for one loss: the traced ``models``, and the ``programs``.

    ``uncut``: the models that were traced for one micro-batch on one replica; their keys contain the batch size too.
    The key of a program consists of the identity of its model, M, the replicas of each stage, the sizes of
    micro-batches if they are given, the variant, whether it takes local rows, and the program of the phase before.
    ``times``: of all builds.
    ``started``: the programs that have run, by their identity. ``homes``: the devices of variables before the programs
    moved them. ``xla``: compiles stage functions, or None. ``compared``: for each model, by its identity, the largest
    batch (samples) for which a step was compared with the loss of the whole batch. ``warned``: whether the user has
    been warned of layers that train in another way than on one device.
    """

    models: TracedShapes = field(default_factory=TracedShapes)
    uncut: TracedShapes = field(default_factory=TracedShapes)
    programs: dict[tuple[_PlanKey, StepVariant, bool, Program | None], Program] = field(default_factory=dict)
    times: BuildTimes = field(default_factory=BuildTimes)
    started: set[int] = field(default_factory=set)
    homes: VariableHomes = field(default_factory=VariableHomes)
    xla: Xla | None = None
    compared: dict[int, int] = field(default_factory=dict)
    warned: bool = False

    def add(self, key: Key, model: StagedModel) -> None:
        """Keep a new trace for batches of this key; if another trace is dropped for it, drop its programs."""
        dropped = (self.uncut if model.interface.uncut else self.models).add(key, model)
        for program in [program for program in self.programs if program[0][0] == id(dropped)]:
            self.started.discard(id(self.programs.pop(program)))
        self.compared.pop(id(dropped), None)

    def find(self, batch: Batch, *, uncut: bool) -> StagedModel | None:
        """Return a model for ``batch``, or None; ``uncut``: one micro-batch on one replica will run the batch."""
        model = self.models.find(batch.key)
        if uncut and (model is None or not model.exact_uncut):
            return self.uncut.find(batch.sized_key)
        return model

    def all_models(self) -> list[StagedModel]:
        """Return the models that are kept."""
        return [*self.models.values(), *self.uncut.values()]

    @contextlib.contextmanager
    def running(self, compiled: CompiledStep) -> Iterator[None]:
        """Run a program in this context: its variables are moved to its stages, and a first run counts as building.

        Other threads that use the variables wait.
        """
        program, variables = compiled.program, compiled.program.variables
        with exclusive(variables):
            self.homes.return_to_stages(variables)
            first = id(program) not in self.started
            with self.times.phase("first run") if first else contextlib.nullcontext():
                yield
            self.started.add(id(program))


def compile_step(
    loss_fn: Traced,
    batch: Batch,
    optimizer: Any,
    autoplan: Autoplan,
    target: Target,
    variant: StepVariant,
    compiled: CompiledSteps,
    earlier: Program | None = None,
) -> CompiledStep:
    """Return the step that trains on batches like ``batch``; new traces and programs are added to ``compiled``.

    ``earlier``: of a phase of a step, the program of the phase before. Every rank of a job must compile the same steps
    in the same order. Raises UsageError inside a tf.function, and subclasses of ValueError if the batch, the loss or
    the plan cannot be compiled.
    """

    def find(uncut: bool) -> tuple[StagedModel, Plan]:
        model = _find_model(loss_fn, batch, optimizer, autoplan, target, compiled, uncut=uncut)
        return model, autoplan.plan

    planned = plan_model(find, batch.size, target, uncut=autoplan.runs_uncut(batch.size))
    _report_writes(planned, autoplan, compiled)
    _warn_of_documented(planned, autoplan, compiled)
    return CompiledStep(
        planned,
        find_program(planned, target, variant, compiled, earlier=earlier),
        batch_form(batch.arguments, planned.model.interface.signature),
    )


def plan_model(
    find: Callable[[bool], tuple[StagedModel, Plan]], samples: int, target: Target, *, uncut: bool
) -> PlannedModel:
    """Return the model for a batch of ``samples``, with the plan fitted to it.

    ``find`` returns a model and its plan. It is called with ``uncut``: whether one micro-batch on one replica may run
    the batch. If only the fitted plan does so, and the model is not exact then, it is called again.
    """
    model, plan = find(uncut)
    fitted = fit_plan(plan, samples)
    if fitted.uncut and not model.exact_uncut:
        model, plan = find(True)
        fitted = fit_plan(plan, samples)
    target.check_plan(plan, fitted, samples)
    return PlannedModel(model, fitted, samples)


def _find_model(
    loss_fn: Traced,
    batch: Batch,
    optimizer: Any,
    autoplan: Autoplan,
    target: Target,
    compiled: CompiledSteps,
    *,
    uncut: bool,
) -> StagedModel:
    """Return the model for batches like ``batch``; if there is none, trace it and add it to ``compiled``.

    ``uncut``: one micro-batch on one replica may run the batch, so a model is not refused because it cannot be cut.
    """
    if (known := compiled.find(batch, uncut=uncut)) is not None:
        return known
    key, size, times = batch.key, batch.size, compiled.times

    def trace(function: Traced) -> StagedModel:
        autoplan.check_first_batch(size)
        to_plan, to_run = trace_loss_of(function, batch, autoplan, compiled, uncut=uncut)
        captured, name = to_run.captured, to_run.captured.graph.name
        if autoplan.options.training.in_turn and captured.dependence is not None:
            reasons = captured.dependence.exactness.of_minibatches.undocumented
            report_exactness(name, reasons, autoplan.options.inexact)
        micro_batch = autoplan.micro_batch_size(size)
        if not to_run.shapes and micro_batch != size and not uncut:
            # If the whole batch cannot be traced either, its error says what is wrong, not the size of a micro-batch.
            trace_uncut(function, batch.arguments, size)
            raise LossError(
                f"{name} cannot run on a micro-batch of {format_samples(micro_batch)}: it needs more samples or a "
                f"multiple of some number, or it holds something with as many rows as the batch, {size} (pass that as "
                "an argument); use fewer micro-batches, or micro_batches=1"
            )
        shared = function.hand_over if isinstance(function, TrainingStep) else None
        with times.phase("profile"):
            if not autoplan.planned:
                autoplan.decide(to_plan.captured, to_plan.layers, to_plan.shapes, batch.arguments)
                if shared is not None:
                    autoplan.move_cuts(_find_homes(shared, to_plan.captured, to_plan.layers), to_plan.layers)
            cuts = autoplan.decide(captured, to_run.layers, to_run.shapes, batch.arguments)
        with times.phase("differentiate"):
            plan, known = autoplan.plan, compiled.homes.shares
            sharding = Sharding(plan.replicas, known) if plan.shard_optimizer else None
            owners = {} if shared is None else _stages_of(shared, captured, to_run.layers, cuts.starts, plan)
            model = stage_model(
                captured,
                to_run.layers,
                cuts.starts,
                optimizer,
                cuts.recomputed,
                sparse=autoplan.options.keeps_sparse_gradients,
                windows=autoplan.options.window is not None,
                owners=owners,
                sharding=sharding,
            )
            compiled.homes.share(model)
            if shared is not None:
                _check_writers(captured, model, owners, plan)
                _note_owners(shared, model, plan)
        autoplan.choose_schedule(model, size)
        return model

    def trace_all() -> StagedModel | SeveralPhasesError:
        function = loss_fn
        while True:
            try:
                return trace(function)
            except UnexpectedGradientsError:
                assert isinstance(function, TrainingStep), "only such expect gradients"
                function = replace(function, certain=True)
            except RowlessTargetsError as error:
                assert isinstance(function, TrainingStep), "only such have targets"
                function = replace(function, rowless=function.rowless | error.calls)
            except SeveralPhasesError as several:  # no failure, which each rank would report to the others
                return several

    target.announce("trace the model", size, key[1])
    model = target.run_on_all(trace_all)
    if isinstance(model, SeveralPhasesError):
        raise model
    compiled.add(batch.sized_key if model.interface.uncut else key, model)
    _warn_of_untrained(model)
    if note := model.interface.exactness.note:
        times.note(f"{model.graph.name}: {note}")
    return model


def _find_writing_layers(captured: Captured, layers: Layers) -> dict[str, int]:
    """Return, for each variable that micro-batches change, the position of the layer that does."""
    graph = captured.graph
    return {
        variable: position
        for position, layer in enumerate(layers.layers)
        for node in map(graph.node, layer.nodes)
        for variable in node.written
    }


def _find_homes(shared: HandOver, captured: Captured, layers: Layers) -> dict[int, int]:
    """Return the device of each layer, by position, that changes a variable which an earlier phase has placed."""
    placed = {name: shared.owners.get(id(variable)) for name, variable in captured.variables.items()}
    written = _find_writing_layers(captured, layers)
    return {layer: device for name, layer in written.items() if (device := placed.get(name)) is not None}


def _stages_of(
    shared: HandOver, captured: Captured, layers: Layers, starts: Sequence[int], plan: Plan
) -> dict[int, int]:
    """Return the stages that own the variables which earlier phases of a step have placed, by identity.

    Of several stages on one device it is the one that changes the variable, or the first one. Raises PlanError where a
    variable that the phase uses lives on a device on which none of its stages begins.
    """
    devices = [stage.devices[0] for stage in plan.stages]
    for name, variable in captured.variables.items():
        device = shared.owners.get(id(variable))
        if device is not None and device not in devices:
            raise PlanError(
                f"{captured.graph.name}: variable {name!r} lives on device {device} for the gradients taken earlier in "
                f"the step, and the plan for the later ones has no stage there ({plan.headline}): give stages=n, "
                "without a plan"
            )
    owners = {key: devices.index(device) for key, device in shared.owners.items() if device in devices}
    for name, position in _find_writing_layers(captured, layers).items():
        key, stage = id(captured.variables[name]), bisect.bisect_right(starts, position)
        if key in owners and devices[stage] == shared.owners[key]:
            owners[key] = stage
    return owners


def _check_writers(captured: Captured, model: StagedModel, owners: Mapping[int, int], plan: Plan) -> None:
    """Raise PlanError where no stage that changes a variable is its owner.

    ``owners``: of the variables that earlier phases have placed, by identity. Each stage changes a copy of its own, and
    only the copy of the owner is kept.
    """
    for name, stages in find_writers(model.graph).items():
        owner = owners.get(id(model.variables[name]))
        if owner is not None and owner not in stages:
            lives, stage = plan.stages[owner].devices[0], min(stages)
            assert captured.after is not None, "it is a training step"
            place = next(captured.after.place_of(node.name) for node in captured.graph.nodes if name in node.written)
            raise PlanError(
                f"{place}: variable {name!r} lives on device {lives}, where a loss of the step uses it, and "
                f"a later loss changes it in stage {stage}, on device {plan.stages[stage].devices[0]}: use fewer "
                "stages, or change the variable after the gradients of the later loss"
            )


def _note_owners(shared: HandOver, model: StagedModel, plan: Plan) -> None:
    """Note on which devices a phase of a step has placed variables."""
    found = {name: stages[0] for name, stages in find_variables(model.graph).users}
    for part in () if model.updates is None else model.updates.rounds:
        for site, function in part.stages:
            for name in written_variables(function.graph):
                found.setdefault(name, site.stage)
    for name, stage in found.items():
        shared.owners.setdefault(id(model.variables[name]), plan.stages[stage].devices[0])


def trace_loss_of(
    function: Traced, batch: Batch, autoplan: Autoplan, compiled: CompiledSteps, *, uncut: bool, trains: bool = True
) -> tuple[TracedLoss, TracedLoss]:
    """Return the traced function on which to plan, and the one to run; in most cases these are the same.

    ``uncut``: one micro-batch on one replica may run the batch; a loss that is not exact in micro-batches is then
    traced again, without a rewrite. Raises the errors of ``trace_batch``.
    """
    key, size, times = batch.key, batch.size, compiled.times
    captured, cut = None, None
    if not (uncut and compiled.models.find(key)):  # else a model of this key exists, but is not exact uncut
        inexact: Inexact = "allow" if uncut else autoplan.inexact
        options = inexact, autoplan.batch_loss, autoplan.options.batch_norm
        earlier, by_xla = compiled.models.alike(key), compiled.xla is not None
        with times.phase("trace"), contextlib.suppress(CaptureError) if uncut else contextlib.nullcontext():
            captured = trace_batch(
                function, batch.arguments, size, *options, trains=trains, earlier=earlier, compiled=by_xla
            )
    if captured is not None:
        cut = _with_layers(captured, autoplan.micro_batch_size(size), times)
        if not uncut or not captured.needs_uncut:
            return cut, cut
    with times.phase("trace"):
        captured = trace_uncut(function, batch.arguments, size, trains=trains)
    whole = _with_layers(captured, size, times)
    if cut is None:
        return whole, whole
    return replace(cut, layers=cut.layers.cut_only_as(whole.layers)), whole


def _with_layers(captured: Captured, samples: int, times: BuildTimes) -> TracedLoss:
    """Return the captured loss with its layers, and with its shapes for this number of samples."""
    with times.phase("trace"):
        captured, shapes = infer_batch_axes(captured, samples)
    with times.phase("layers"):
        return TracedLoss(captured, shapes, find_layers(captured.graph))


def compile_for_rows(
    last: CompiledStep, samples: int, autoplan: Autoplan, target: Target, variant: StepVariant, compiled: CompiledSteps
) -> CompiledStep:
    """Return the step by which ranks train on their own rows of a batch of ``samples``, for the ``last`` step's model.

    Every rank must call this. Raises BatchError if the batch leaves a rank without samples.
    """
    plan = fit_plan(autoplan.plan, samples)
    target.check_plan(autoplan.plan, plan, samples)
    planned = PlannedModel(last.planned.model, plan, samples, local=True)
    _report_writes(planned, autoplan, compiled)
    return CompiledStep(planned, find_program(planned, target, variant, compiled, "local"), last.form)


def read_batch(arguments: Sequence[Any]) -> Batch:
    """Return the batch of these arguments; UsageError inside a tf.function, BatchError if they are not a batch."""
    check_eager()
    return Batch.of(as_rows(arguments))


def check_eager() -> None:
    """Raise UsageError inside a tf.function."""
    if not tf.executing_eagerly():
        raise UsageError("a pipelined step is a whole training step: call it outside of any tf.function")


def find_program(
    planned: PlannedModel,
    target: Target,
    variant: StepVariant,
    compiled: CompiledSteps,
    *kinds: str,
    earlier: Program | None = None,
) -> Program:
    """Return the program that runs ``planned``; if there is none, build it and add it to ``compiled``.

    ``kinds``: words that describe the program in the announcement to other ranks. ``earlier``: see ``Target.build``.
    The function of a phase that others follow is not emitted: the last phase's runs all of them.
    """
    model, phase = planned.model, planned.model.interface.phase
    key = _plan_key(planned), variant, planned.local, earlier
    if key not in compiled.programs:
        words = ", ".join([*kinds, *([] if variant is StepVariant.PLAIN else [str(variant.value)])])
        extra = f" ({words})" if words else ""
        target.announce(f"build another program{extra}", planned.batch_size, model.interface.signature)
        with exclusive(model.variables.values()):  # building moves them to the devices of their stages
            compiled.homes.return_to_stages(model.variables.values())
            compiled.homes.remember(model.variables.values())
            choose = None if compiled.xla is None else compiled.xla.chooser(planned)
            program = target.build(planned, variant, compiled.times, choose, earlier)
            if phase is None or phase.number == phase.count - 1:
                with compiled.times.phase("emit"):
                    _ = program.function  # the program keeps it
            compiled.programs[key] = program
    return compiled.programs[key]


def _plan_key(planned: PlannedModel) -> _PlanKey:
    """Return the parts of a plan that ``fit_plan`` may change for a small batch, which then needs another program."""
    plan = planned.plan
    return id(planned.model), plan.micro_batches, plan.replicas, plan.sizes, plan.shares


def _report_writes(planned: PlannedModel, autoplan: Autoplan, compiled: CompiledSteps) -> None:
    """Refuse variables that backward writes several times under this plan, or warn once for each M and replicas."""
    model = planned.model
    if model.pass_facts.backward_writes and not any(key[0] == _plan_key(planned) for key in compiled.programs):
        writes = planned.exactness.reasons[len(model.interface.exactness.reasons) :]
        report_exactness(model.graph.name, writes, autoplan.inexact)


def _warn_of_documented(planned: PlannedModel, autoplan: Autoplan, compiled: CompiledSteps) -> None:
    """Warn once of layers that train in another way than on one device."""
    found = planned.exactness.documented
    if found and not compiled.warned and autoplan.options.inexact != "allow":
        compiled.warned = True
        warn_user(f"{planned.model.graph.name} does not train as on one device: {found}")


def _warn_of_untrained(model: StagedModel) -> None:
    if model.untrained:
        warn_user(
            f"no gradient reaches {', '.join(model.untrained)}: the loss does not depend on it differentiably, and it "
            "will not be trained"
        )


# --- Build the programs of a pipeline whose devices all belong to this process


class LocalTarget:
    """Builds programs for the ``devices`` of one process: their names, in the order of the plan's numbers.

    ``home``: the device of the batch, the loss and everything else that belongs to no stage.
    """

    def __init__(self, devices: Sequence[str], home: str) -> None:
        self._devices = tuple(devices)
        self._home = home
        self._buffers = Buffers(home)

    def announce(self, what: str, batch_size: int, signature: Sequence[tf.TensorSpec]) -> None:
        """Do nothing: there are no other ranks."""

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Return the result of ``work``."""
        return work()

    def check_plan(self, plan: Plan, fitted: Plan, batch_size: int) -> None:
        """Raise BatchError if a batch is too small for all replicas of a stage whose update is sharded over them.

        In one process a batch may be too small for all replicas of other stages.
        """
        if plan.shard_optimizer and fitted.replicas != plan.replicas:
            raise BatchError(
                f"the batch has {format_samples(batch_size)}, too few for the {max(plan.replicas)} replicas of a "
                "stage, over which shard_optimizer=True shards the update: leave this batch out, or join it to another"
            )

    def build(
        self,
        planned: PlannedModel,
        variant: StepVariant,
        times: BuildTimes,
        choose: ChooseCompiled | None = None,
        earlier: Program | None = None,
    ) -> Program:
        """Return the program that runs ``planned``; see ``Target``, and ``compiler.local_graph`` for what it raises.

        Raises NoFitError where what is yet to be allocated does not fit this process. One process takes all
        rows of a batch, also where ``planned`` is local.
        """
        with times.phase("passes"):
            graph = local_graph(planned.model, planned.plan, self._devices, self._home, variant=variant)
            graph = follow(graph, planned.model, earlier)
        variables = planned.model.variables
        stages = len(planned.plan.stages)
        where = f"this process, which runs {format_count(stages, 'stage')},"
        check_room(find_need(graph, variables, variables, where, lambda: predict_process_step(planned)))
        with times.phase("emit"):
            return build_program(graph, planned.model, self._buffers, choose=choose, earlier=earlier)
