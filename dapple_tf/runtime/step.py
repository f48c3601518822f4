"""The training step that users call."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import tensorflow as tf
from typing_extensions import Unpack

from dapple_tf.autoplan.autoplan import Autoplan
from dapple_tf.autoplan.batch_fit import fit_plan
from dapple_tf.autoplan.option_help import document_options, make_options
from dapple_tf.autoplan.options import Options, OptionTypes
from dapple_tf.autoplan.schedule_auto import ScheduleChoice
from dapple_tf.backend.build_times import BuildTimes
from dapple_tf.backend.program import Program
from dapple_tf.compiler import PlannedModel, StepVariant
from dapple_tf.devices import home_device, list_devices
from dapple_tf.distributed import membership
from dapple_tf.distributed.exit_reporting import report_uncaught_exceptions
from dapple_tf.distributed.rank_programs import RankTarget
from dapple_tf.distributed.variable_transfer import gather_arrays, share_variables
from dapple_tf.errors import CaptureError, ExactnessError, PlanError, UsageError
from dapple_tf.exactness import Exactness
from dapple_tf.frontend.batch import Batch, in_order
from dapple_tf.frontend.captured import SeveralPhasesError, Traced, TrainingStep, plain_function
from dapple_tf.frontend.optimizers import as_keras_optimizer
from dapple_tf.frontend.phases import HandOver
from dapple_tf.graph_passes.analysis.input_needs import InputNeeds
from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.ir.text import print_graph
from dapple_tf.graph_passes.passes.expose_gradients import exposed_gradients
from dapple_tf.launcher.restart import starts_again
from dapple_tf.memory.report import PhasesReport, Report
from dapple_tf.plans import Plan
from dapple_tf.runtime.compile_step import CompiledStep, CompiledSteps, LocalTarget, Target, compile_step, read_batch
from dapple_tf.runtime.exclusive import compiling
from dapple_tf.runtime.forward import Forward
from dapple_tf.runtime.local_batch import compile_local, find_needs
from dapple_tf.runtime.memory_recorder import MemoryRecorder, rehearse_phases
from dapple_tf.runtime.op_profile import Runs, profile_ops
from dapple_tf.runtime.recorder import Recorder, join_timelines
from dapple_tf.runtime.rehearsal import can_rehearse, compare_first
from dapple_tf.runtime.variable_homes import VariableHomes, name_variables
from dapple_tf.staged_model import StagedModel
from dapple_tf.timeline.recording import Recording
from dapple_tf.timeline.timeline import Timeline
from dapple_tf.window_check import check_optimizer
from dapple_tf.xla.choice import make_xla


@dataclass(frozen=True)
class ExposedOutputs:
    """The results of a step, in NumPy: ``aux``, the flattened aux outputs; ``gradients``, by variable."""

    loss: Any
    aux: tuple[Any, ...]
    gradients: dict[str, Any]


def check_window_variant(variant: StepVariant) -> None:
    """Raise UsageError for a variant of a step that does not exist for asynchronous windows."""
    if variant is StepVariant.WITH_GRADIENTS:
        raise UsageError(
            "the gradients of a step with mode='async': each minibatch of a window has gradients of its own, which are "
            "not kept after its update; to see gradients, train with mode='sync'"
        )
    if variant is StepVariant.CHECKED:
        raise UsageError(
            "check_numerics with mode='async': a window changes variables after every minibatch, so it could not leave "
            "them as they were. step.losses says which minibatch went wrong; to find out why, train with mode='sync'"
        )


def check_phases(compiled: Sequence[CompiledStep]) -> None:
    """Raise an error where the compiled phases of a training step do not fit together.

    CaptureError where they are not of one trace, ExactnessError for ops that were tried by experiment.
    """
    if len(compiled) == 1:
        return
    given: set[str] = set()
    traces = set()
    for step in compiled:
        model = step.planned.model
        phase = model.interface.phase
        assert phase is not None, "each is one of several"
        traces.add((phase.trace, phase.count))
        if len(traces) > 1 or phase.count != len(compiled) or not phase.taken <= given:
            raise CaptureError(
                f"{model.graph.name} does other things each time that it is traced, and a step that takes gradients "
                "of several targets is traced once for each: let it depend on its arguments and on variables only"
            )
        given |= phase.given
        if tried := step.planned.exactness.tried:
            ops = ", ".join(f"{item.op} of {item.layer}, which gives {item.gives}" for item in tried)
            raise ExactnessError(
                f"{model.graph.name} takes gradients of several targets, and holds ops that are only known by "
                f"experiment ({ops}): such a step is not compared with one device at its first run, so it is refused: "
                "compute it by other ops, or give micro_batches=1 (with one replica of each stage)"
            )


def check_options_of_phases(options: Options) -> None:
    """Raise PlanError for options that a training step of several phases does not have."""
    refused = {
        "plan": options.plan is not None,
        "shard_optimizer": options.shard_optimizer,
        f"batch_norm={options.batch_norm!r}": options.batch_norm != "micro-batch",
    }
    for name, given in refused.items():
        if given:
            raise PlanError(
                f"{name}: the step takes gradients of several targets, and such steps do not have this option: leave "
                "it out"
            )


class PipelinedStep:
    """A training step over a pipeline: call it with a batch, it trains and returns the loss (and aux).

    The plan is made at the first batch, or at once if ``example_batch`` is given. Arguments of new dtypes or inner
    shapes are traced again under the same plan. A batch smaller than the plan's is cut into fewer micro-batches if that
    is necessary.

    With ``check_numerics = True`` (on every rank of a job) a step whose loss or gradients are not finite raises
    StepError, which names them, and changes no variable. Recorded steps are not checked. Asynchronous windows change
    variables after every minibatch, so they cannot be checked, and raise UsageError.

    ``before_training`` is called before each step, or window, that trains; ``dapple.Checkpoints`` sets it where the
    step has the option ``snapshot_every``.
    """

    def __init__(
        self,
        loss_fn: Traced,
        optimizer: Any,
        options: Options,
        example_batch: Sequence[Any] | None = None,
        homes: VariableHomes | None = None,
    ) -> None:
        if not isinstance(loss_fn, TrainingStep):
            optimizer = as_keras_optimizer(optimizer)
        elif options.batch_loss:
            loss_fn = dataclasses.replace(loss_fn, joined=False)  # a loss head has one target
        if options.window is not None:
            check_optimizer(optimizer)
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._wanted_devices = options.devices
        self._job = membership.current()
        self._autoplan = Autoplan(loss_fn, optimizer, options, self._job)
        self._options = options
        self._homes = VariableHomes() if homes is None else homes
        self._later: tuple[PipelinedStep, ...] = ()
        self._times = BuildTimes(silent=self._job.rank != 0)
        self._compiled = self._nothing_compiled()
        self._forwards = [Forward(plain_function(loss_fn), self._autoplan, self._homes, self._times)]
        self._last: CompiledStep | None = None
        self._named: tuple[list[StagedModel], dict[str, tf.Variable]] = ([], {})
        self._lock = threading.RLock()
        self._recorder = Recorder(self._job)
        self._memory = MemoryRecorder(self._job)
        self.check_numerics = False
        self.before_training: Callable[[], None] | None = None
        self._losses: Any = None
        if example_batch is not None:
            self.build(*example_batch)

    def _nothing_compiled(self) -> CompiledSteps:
        xla = make_xla(self._options.jit_compile, plain_function(self._loss_fn))
        return CompiledSteps(times=self._times, homes=self._homes, xla=xla)

    # --- the plan and the compiled step

    @property
    def snapshot_every(self) -> int | None:
        """The steps from a snapshot to the next; None where the step takes none."""
        return self._options.snapshot_every

    @property
    def is_elastic(self) -> bool:
        """Whether the step is planned anew where the job has another number of ranks."""
        return self._options.elastic

    def predict_on(self, hosts: Sequence[tuple[str, int]]) -> tuple[float, float] | None:
        """Return the simulated seconds of a step of this plan, and on other ``hosts``, each with its number of ranks.

        None where they are not known; see ``Autoplan.predict_on``.
        """
        return self._autoplan.predict_on(hosts)

    @property
    def optimizer(self) -> Any:
        """The Keras optimizer that trains, also if only its name or configuration was given."""
        return self._optimizer

    @property
    def plan(self) -> Plan:
        """The plan; UsageError before the first batch."""
        return self._autoplan.plan

    @property
    def choice(self) -> ScheduleChoice | None:
        """The simulated candidates for the schedule and M, if these were left "auto"; else None."""
        return self._autoplan.choice

    @property
    def exactness(self) -> Exactness:
        """Why the step that ran last differs from a step on one device: a table of layers, reasons and remedies.

        Empty for most models. An asynchronous window is compared minibatch by minibatch, with the weights that each
        uses. UsageError before the first batch.
        """
        return self._compiled_last().planned.exactness

    @property
    def build_times(self) -> dict[str, float]:
        """Wall seconds that building took, by phase, over all shapes, batch sizes, variants and forward runs.

        The phases, in their order: trace, layers, profile (and plan), differentiate, passes, emit, first run. Those
        that have not run are left out.
        """
        return self._times.seconds

    @property
    def build_cpu_times(self) -> dict[str, float]:
        """CPU seconds (user and system, all threads) of the phases of ``build_times``.

        Other work on the machine hardly changes them.
        """
        return self._times.cpu_seconds

    @property
    def needs(self) -> InputNeeds:
        """The rows of each argument that this rank uses (in one process: all rows); see ``InputNeeds``.

        They are for the batch size that ran, or was built, last. UsageError before the first batch.
        """
        return find_needs(self._compiled_last(), self.plan)[self._job.rank]

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the model's layers, in the plan's order; empty before the first batch."""
        return self._autoplan.layer_names

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of the step, in order; a single one, unless the step takes gradients that depend on earlier ones.

        Each has its own plan, graph, timeline and report. The plan and the graph of the step itself are the first
        phase's. UsageError before the first batch.
        """
        self._compiled_last()
        return tuple(map(Phase, self._last_phases))

    @property
    def _last_phases(self) -> tuple[PipelinedStep, ...]:
        """The phases of the step that ran or was built last; with other arguments the step may have more."""
        return self._all_phases[: 1 if self._last is None else self._last.phases]

    @property
    def _all_phases(self) -> tuple[PipelinedStep, ...]:
        """The most phases that the step has had so far, over all arguments."""
        return (self, *self._later)

    def summary(self) -> str:
        """Return the plan with the names of layers, why its schedule was chosen, and the predicted memory, as text.

        Those of several phases follow each other. UsageError before the first batch.
        """
        if len(self._last_phases) > 1:
            parts = [phase._described_plan for phase in self._last_phases]
            plans = [f"phase {i} of {len(parts)}:\n{part}" for i, part in enumerate(parts, 1)]
            return "\n".join([*plans, str(self.report)])
        return "\n".join([self._described_plan, str(self.report)])

    @property
    def _described_plan(self) -> str:
        plan = self.plan.describe(self.layer_names)
        return "\n".join([plan, *([str(self.choice)] if self.choice is not None else [])])

    def __repr__(self) -> str:
        function = plain_function(self._loss_fn)
        name = getattr(function, "__name__", type(function).__name__)
        how = self.plan.headline if self._last is not None else "no plan before the first batch"
        return f"<PipelinedStep of {name}: {how}>"

    @property
    def graph_def(self) -> Any:
        """The GraphDef of the step that ran last."""
        self._compiled_last()
        return self._last_phases[-1]._compiled_last().program.function.graph.as_graph_def()

    @property
    def graph(self) -> Graph:
        """The pipelined graph of the step that ran last."""
        return self._compiled_last().program.graph

    @property
    def text(self) -> str:
        """The pipelined graph of the step that ran last, one call a line."""
        return print_graph(self.graph, functions=False)

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """The variables of the model and of the optimizer, by names that are the same under every plan."""
        self._compiled_last()
        models = [model for phase in self._all_phases for model in phase._compiled.all_models()]
        if list(map(id, models)) != list(map(id, self._named[0])):  # other arguments may use other variables
            held = () if self._hand_over is None else self._hand_over.variables.values()
            between = {id(variable) for variable in held}
            found = name_variables(models, self._optimizer).items()
            self._named = models, {name: variable for name, variable in found if id(variable) not in between}
        return self._named[1]

    def model(self, batch: Sequence[Any]) -> StagedModel:
        """Return the stages for batches like this one, before they are called on micro-batches."""
        return self._compile(read_batch(batch), StepVariant.PLAIN)[0].planned.model

    @property
    def planned(self) -> PlannedModel:
        """The model and the plan of the step, or the phase, that ran or was built last; UsageError before that."""
        return self._compiled_last().planned

    def build_exposed(self, *batch: Any) -> PlannedModel:
        """Compile the step that ``run_exposed`` runs for batches like this one; return its planned model."""
        return self._compile(read_batch(batch), StepVariant.WITH_GRADIENTS)[0].planned

    def build(self, *batch: Any, record: bool = False, **named: Any) -> None:
        """Make the plan and compile the step for batches like this one, without running it.

        ``record``: compile the step that ``record`` runs, and rehearse it (see there). ``named``: as in a call.
        """
        batch = in_order(plain_function(self._loss_fn), batch, named)
        if record:
            with self._lock:
                self._compile_recorded(batch)
        else:
            self._compile(read_batch(batch), self._variant)

    # --- training

    def __call__(self, *batch: Any, local: bool = False, **named: Any) -> Any:
        """Train on one batch, and return the mean loss over it, or (loss, aux).

        The arguments are those of the function, and may be given by name, too: arrays and tensors with the samples on
        axis 0; numbers without axes (``tf.constant(0.1)``), which are one number for the whole batch; and Python values
        (models, optimizers, variables, True, 0.5, None). These are part of the trace, and the step is built anew for
        others, as a tf.function is traced anew.

        ``local``: in a job, each rank gives only the rows that it ``needs``, and None or anything else for arguments
        that it does not need. Every rank must do so. With mode="async" every rank needs all rows. Raises UsageError if
        the step was not built from a whole batch before, BatchError on all ranks if the rows of all ranks are not one
        batch.
        """
        batch = in_order(plain_function(self._loss_fn), batch, named)
        self._begin_training()
        with self._lock:
            return self._pack(*self._run(batch, self._variant, local))

    def _begin_training(self) -> None:
        if self.before_training is not None:
            self.before_training()

    def _pack(self, compiled: Sequence[CompiledStep], outputs: Sequence[list[Any]]) -> Any:
        """Return what the step returns; ``outputs``: of each phase, which has None for the results of the others."""
        first, *later = (
            step.planned.model.pack(self._keep_losses(step, own)) for step, own in zip(compiled, outputs, strict=True)
        )
        for more in later:
            leaves = zip(tf.nest.flatten(first), tf.nest.flatten(more), strict=True)
            first = tf.nest.pack_sequence_as(first, [b if a is None else a for a, b in leaves])
        return first

    @property
    def losses(self) -> Any:
        """The loss of each minibatch of the asynchronous window that ran last, a tensor [W] in the loss's dtype.

        Raises UsageError before the first window, and where training is synchronous.
        """
        if self._losses is None:
            raise UsageError("there are no losses of minibatches: train a window first, with mode='async'")
        return self._losses

    def _keep_losses(self, step: CompiledStep, outputs: list[Any]) -> list[Any]:
        """Keep the losses of a window's minibatches, its last output; return the other outputs."""
        if step.planned.plan.window is None:
            return outputs
        *outputs, self._losses = outputs
        return outputs

    def forward(self, *batch: Any) -> Any:
        """Return the loss of one batch, or (loss, aux), from a pipeline that only runs forward; nothing is trained.

        The loss function writes the same variables as when it is called. In a job every rank must call this. Raises
        UsageError for a training step, which has no such part.
        """
        if isinstance(self._loss_fn, TrainingStep):
            raise UsageError(
                "step.forward of a training step: such a step runs as a whole; to compute the loss alone, give "
                "step.forward_of a function that returns it"
            )
        with self._lock:
            return self._forwards[0].run(batch, self._target, self._gather_variables)

    def forward_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` of a batch as a pipeline that only runs forward, over the stages of this step.

        ``function`` returns a scalar, or (scalar, aux), as a loss function does. It takes tensors batched on axis 0.
        """
        pipeline = Forward(function, self._autoplan, self._homes, self._times)
        self._forwards.append(pipeline)

        def run(*batch: Any) -> Any:
            with self._lock:
                return pipeline.run(batch, self._target, self._gather_variables)

        return run

    def run_exposed(self, *batch: Any, local: bool = False) -> tuple[Any, dict[str, Any]]:
        """Train on one batch, and return the loss and the gradient of every trained variable by name (NumPy).

        In a job every rank must call this, and each gets the gradients of all stages. ``local``: as in a call. Raises
        UsageError with mode="async", where every minibatch has gradients of its own.
        """
        outputs = self.expose(*batch, local=local)
        return outputs.loss, outputs.gradients

    def expose(self, *batch: Any, local: bool = False) -> ExposedOutputs:
        """Train on one batch as ``run_exposed`` does, and also return the aux outputs."""
        if not local:
            self.build_exposed(*batch)
        if len(self._last_phases) > 1 or self._compiled_last().planned.model.interface.targets > 1:
            raise UsageError(
                "the gradients of a training step of several targets: let the step return those that you want to see"
            )
        self._begin_training()
        ((step,), (tensors,)) = self._run(batch, StepVariant.WITH_GRADIENTS, local)
        names = exposed_gradients(step.program.graph)
        loss, *values = (tensor.numpy() for tensor in tensors)
        aux = len(values) - len(names)
        gradients = dict(zip(names, values[aux:], strict=True))
        self._job.announce_call("gather the gradients")
        self._job.check_call_history()
        return ExposedOutputs(loss, tuple(values[:aux]), gather_arrays(self._job, gradients))

    def gather(self) -> None:
        """Give this process the values that other ranks have trained, until the next step; every rank must call this.

        In one process all variables always hold the trained values.
        """
        if not self._job.is_alone:
            if not self.built:
                self._compiled_last()
            self._job.announce_call("gather the variables")
            self._job.check_call_history()  # variables trained on different batches are no model
            with self._lock:
                self._gather_variables()

    def release(self) -> None:
        """Move every variable back to the device where it was before its stage took it; in a job, gather the variables.

        Then functions that run on one device work, such as functions compiled by XLA, which cannot read a variable of
        another device. The next step, or another run over the pipeline, moves the variables to their stages again.

        In a job a rank has one device, so this does the same as ``gather``, and every rank must call it.
        """
        if self._job.is_alone:
            with self._lock:
                self._homes.release()
        else:
            self.gather()

    @property
    def built(self) -> bool:
        """Whether a batch has been compiled, for training or to run forward; then variables may have moved."""
        return bool(self._models)

    @property
    def _models(self) -> list[StagedModel]:
        later = [model for phase in self._later for model in phase._models]
        forwards = [model for forward in self._forwards for model in forward.models]
        return [*self._compiled.all_models(), *forwards, *later]

    @property
    def _hand_over(self) -> HandOver | None:
        return self._loss_fn.hand_over if isinstance(self._loss_fn, TrainingStep) else None

    # --- recorded steps

    def record(self, *batch: Any, local: bool = False, ops: bool = False) -> Any:
        """Train on one batch as a call does, and record the times of all actions and the memory.

        See ``timeline`` and ``report`` afterwards. Before the first recorded step of a batch size, the step is
        rehearsed: it runs twice, to warm up and to measure memory, and then all variables are restored. A step that
        prints, runs Python code or draws from a random generator's hidden state cannot be rehearsed, and the note of
        its first timelines says so. In a job every rank must call this, and each gets the times of all ranks.
        ``local``: as in a call. ``ops``: also record the ops inside of each action with TensorFlow's profiler, which
        slows the step down a little; UsageError where a profiler runs already.
        """
        self._begin_training()
        devices = list_devices(self._wanted_devices)
        with self._lock:
            compiled, tensors = self._compile_recorded(batch, local)
            phases = list(zip(self._last_phases, compiled, strict=True))
            with contextlib.ExitStack() as running:
                running.enter_context(self._compiled.running(compiled[-1]))
                memories = [phase._memory.recorded_run(own.planned, devices) for phase, own in phases]
                notes = [running.enter_context(memory) for memory in memories]
                runs = running.enter_context(profile_ops() if ops else contextlib.nullcontext())
                outputs = compiled[-1].program.run_parts(tensors)
            for (phase, own), note, (*_, times) in zip(phases, notes, outputs, strict=True):
                phase._keep_times(own, times, note, runs)
            return self._pack(compiled, [values[:-1] for values in outputs])

    def _keep_times(self, compiled: CompiledStep, times: Any, note: str, runs: Runs | None) -> None:
        """Keep the times of the recorded step, or of this phase of it; for ``note`` and ``runs`` see ``Recorder``."""
        size = compiled.planned.batch_size
        plan, simulated = self.plan, self._autoplan.simulated
        if size != plan.global_batch_size:  # the prediction is for another number of samples
            plan, simulated = dataclasses.replace(fit_plan(plan, size), predicted=None), None
        memory = self._memory.curves(compiled.planned)
        self._recorder.keep(compiled.program.graph, times, plan, simulated, note=note, memory=memory, runs=runs)

    @property
    def timeline(self) -> Any:
        """The timeline of the last recorded step; its ``str`` explains which events determine the step time.

        A ``Timeline``; of a step of several phases a ``PhasesTimeline``. Raises UsageError before ``record``.
        """
        if len(self._last_phases) == 1:
            return self._recorder.timeline
        models = [phase.planned.model.graph for phase in self._last_phases]
        return join_timelines([phase._recorder for phase in self._last_phases], models)

    @property
    def recording(self) -> Recording:
        """The last recorded step beside its prediction; UsageError before ``record``."""
        return self._recorder.recording

    @property
    def recording_seconds(self) -> float:
        """About how many seconds recording has added to the last recorded step."""
        return self._recorder.cost_seconds

    @property
    def report(self) -> Any:
        """The memory of a step on every device: predicted, and measured if a step was recorded; ``str`` is a table.

        A ``Report``; of a step of several phases a ``PhasesReport``.
        """
        reports = tuple(phase._report for phase in self._last_phases)
        return reports[0] if len(reports) == 1 else PhasesReport(reports)

    @property
    def _report(self) -> Report:
        recorded = self._memory.planned
        if recorded is not None:
            return self._memory.report(recorded, self._recorder.timeline)
        return self._memory.report(self._compiled_last().planned, None)

    # --- compiling

    @property
    def _variant(self) -> StepVariant:
        return StepVariant.CHECKED if self.check_numerics else StepVariant.PLAIN

    @cached_property
    def _target(self) -> Target:
        """The place where steps run; it is made at the first batch, since ``dapple.init`` may come after the step."""
        if starts_again():  # dapple.init does this, too, but it may not have been called
            report_uncaught_exceptions()
        if self._job.is_alone:
            return LocalTarget(list_devices(self._wanted_devices), home_device())
        return RankTarget(self._job, list_devices()[0], home_device())

    def _compiled_last(self) -> CompiledStep:
        if self._last is None:
            raise UsageError(
                "nothing has been built: call the step with a batch first, or give example_batch to dapple.pipeline, "
                "dapple.train_step or dapple.keras.pipeline"
            )
        return self._last

    def _run(
        self, batch: Sequence[Any], variant: StepVariant, local: bool = False
    ) -> tuple[Sequence[CompiledStep], Sequence[list[Any]]]:
        """Run the step; return its compiled phases, and the outputs of each."""
        with self._lock:  # steps share buffers
            compiled, tensors = self._prepare(batch, variant, local)
            last = compiled[-1]
            with self._compiled.running(last):
                if not local and len(compiled) == 1:
                    compare_first(last, self._compiled, tensors, self._loss_fn, batch, self._gather_variables)
                return compiled, last.program.run_parts(tensors)

    def _gather_variables(self) -> None:
        if not self._job.is_alone:
            share_variables(self._job, [v for model in self._models for v in model.variables.values()])

    def _compile_recorded(
        self, batch: Sequence[Any], local: bool = False
    ) -> tuple[Sequence[CompiledStep], Sequence[Any]]:
        compiled, tensors = self._prepare(batch, StepVariant.TIMED, local)
        recorders = [phase._memory for phase in self._last_phases]
        devices = list_devices(self._wanted_devices)
        if all(can_rehearse(step.planned.model) for step in compiled):
            with self._compiled.running(compiled[-1]):
                rehearse_phases(recorders, compiled, tensors, devices, self._job)
        return compiled, tensors

    def _prepare(
        self, batch: Sequence[Any], variant: StepVariant, local: bool
    ) -> tuple[Sequence[CompiledStep], Sequence[Any]]:
        """Return the compiled phases of the step, and their program's inputs; one process always has all rows."""
        if not local or self._job.is_alone or self._options.window is not None:  # all ranks need whole windows
            rows = read_batch(batch)
            return self._compile(rows, variant), rows.tensors
        if isinstance(self._loss_fn, TrainingStep) and self._loss_fn.phase is not None:
            raise UsageError(
                "local=True: each phase of a training step needs other rows: give every rank the whole batch"
            )
        with compiling():
            self._last, tensors = compile_local(
                self._job, batch, self._last, self._autoplan, self._target, variant, self._compiled
            )
        return [self._last], tensors

    def _compile(self, batch: Batch, variant: StepVariant) -> Sequence[CompiledStep]:
        """Return the compiled phases of the step; the last one's program runs all of them."""
        if self._options.window is not None:
            check_window_variant(variant)
        more = False
        while True:
            compiled: list[CompiledStep] = []
            try:
                for phase in self._all_phases:
                    earlier = compiled[-1].program if compiled else None
                    compiled.append(phase._compile_phase(batch, variant, earlier))
                    count = compiled[0].phases
                    if count > len(self._all_phases) and not more:
                        more = True  # once: a step that does other things at each trace may have more each time
                        assert isinstance(self._loss_fn, TrainingStep), "only such have phases"
                        raise SeveralPhasesError(count, joined=self._loss_fn.joined)
                    if len(compiled) == count:
                        break
            except SeveralPhasesError as several:
                self._divide(several)
            else:
                check_phases(compiled)
                return compiled

    def _compile_phase(self, batch: Batch, variant: StepVariant, earlier: Program | None) -> CompiledStep:
        with compiling():
            self._last = compile_step(
                self._loss_fn, batch, self._optimizer, self._autoplan, self._target, variant, self._compiled, earlier
            )
        return self._last

    def _divide(self, several: SeveralPhasesError) -> None:
        """Make this step the first of several phases. Raises PlanError where options do not allow several."""
        check_options_of_phases(self._options)
        assert isinstance(self._loss_fn, TrainingStep), "only such have phases"
        whole = dataclasses.replace(self._loss_fn, certain=True, joined=several.joined, hand_over=HandOver())
        self._loss_fn = dataclasses.replace(whole, phase=0)
        self._autoplan.train(self._loss_fn)
        self._compiled = self._nothing_compiled()
        later = [dataclasses.replace(whole, phase=number) for number in range(1, several.count)]
        self._later = tuple(PipelinedStep(phase, None, self._options, homes=self._homes) for phase in later)


@dataclass(frozen=True, eq=False)
class Phase:
    """A phase of a step: what one forward computes, its gradients, and what is done with them; see ``step.phases``."""

    _step: PipelinedStep

    @property
    def plan(self) -> Plan:
        """Its plan."""
        return self._step.plan

    @property
    def planned(self) -> PlannedModel:
        """Its model and plan, as they ran or were built last."""
        return self._step.planned

    @property
    def graph(self) -> Graph:
        """Its pipelined graph."""
        return self._step.graph

    @property
    def timeline(self) -> Timeline:
        """Its timeline in the last recorded step; UsageError before ``record``."""
        return self._step._recorder.timeline

    @property
    def recording(self) -> Recording:
        """Its timeline in the last recorded step beside its prediction; UsageError before ``record``."""
        return self._step._recorder.recording

    @property
    def report(self) -> Report:
        """Its memory on every device."""
        return self._step._report


@overload
def pipeline(
    loss_fn: Callable[..., Any],
    *,
    optimizer: Any,
    example_batch: Sequence[Any] | None = None,
    **options: Unpack[OptionTypes],
) -> PipelinedStep: ...


@overload
def pipeline(
    *,
    optimizer: Any,
    example_batch: Sequence[Any] | None = None,
    **options: Unpack[OptionTypes],
) -> Callable[[Callable[..., Any]], PipelinedStep]: ...


@document_options()
def pipeline(
    loss_fn: Callable[..., Any] | None = None,
    *,
    optimizer: Any,
    example_batch: Sequence[Any] | None = None,
    **options: Unpack[OptionTypes],
) -> PipelinedStep | Callable[[Callable[..., Any]], PipelinedStep]:
    """Return a training step over a pipeline that computes what the same step on one device computes.

    Without ``loss_fn`` it returns a decorator.

    Args:
        loss_fn: A tf.function or callable of the batch's tensors, each batched on axis 0, and of other values (see
            ``PipelinedStep.__call__``). Returns the mean loss over the batch, or (loss, aux).
        optimizer: A Keras optimizer, or its name or configuration, as in ``model.compile``. One that scales the loss
            (LossScaleOptimizer, ``loss_scale_factor``) does so here: the gradients are those of
            ``optimizer.scale_loss(loss)``, and the loss that is returned is not scaled. So ``loss_fn`` must not scale
            it. One of Keras 2 (tf_keras) is replaced by one of Keras 3, if that has its configuration.
        example_batch: A batch like those to come: the plan is made and the step built now, not at the first call.
        {options}

    Raises:
        ValueError: One of its subclasses in ``dapple_tf.errors``; the message says what cannot be done and what can.
    """
    made = make_options("dapple.pipeline", options)

    def wrap(function: Callable[..., Any]) -> PipelinedStep:
        return PipelinedStep(function, optimizer, made, example_batch)

    return wrap if loss_fn is None else wrap(loss_fn)


@document_options("mode", "minibatches", "weights", "depth")
def train_step(
    function: Callable[..., Any] | None = None,
    *,
    example_batch: Sequence[Any] | None = None,
    **options: Unpack[OptionTypes],
) -> Any:
    """Return a training step, as it is written for one device, that runs as a pipeline and computes the same.

    Without ``function`` it returns a decorator. What the target of ``tape.gradient`` needs runs in stages and
    micro-batches; the gradients that the function gets are those of the whole batch; and what comes after them
    (clipping, optimizers, averages, metrics) runs once a step, each part on the stage of its variables. Where it takes
    gradients of several targets, such as a critic and a generator, each of them is a phase, which sees the variables as
    the one before has left them.

    Args:
        function: A tf.function or callable of the batch's tensors, each batched on axis 0, and of other values (see
            ``PipelinedStep.__call__``). It takes gradients with tf.GradientTape and changes variables with them. The
            step returns what it returns: tensors of the whole batch.
        example_batch: A batch like those to come: the plan is made and the step built now, not at the first call.
        {options}

    Raises:
        ValueError: One of its subclasses in ``dapple_tf.errors``; the message says what cannot be done and what can.
    """
    made = make_options("dapple.train_step", options)
    if made.window is not None:
        raise PlanError("mode='async' of dapple.train_step: windows need dapple.pipeline with a loss and an optimizer")

    def wrap(step: Callable[..., Any]) -> PipelinedStep:
        return PipelinedStep(TrainingStep(step), None, made, example_batch)

    return wrap if function is None else wrap(function)
