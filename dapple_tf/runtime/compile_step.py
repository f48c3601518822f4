"""Compile a training step: capture, layers, plan, stages, passes, emit."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import tensorflow as tf

from dapple_tf.autoplan.autoplan import Autoplan
from dapple_tf.autoplan.batch_fit import fit_plan
from dapple_tf.backend.build_times import BuildTimes
from dapple_tf.backend.handler import ChooseCompiled
from dapple_tf.backend.program import Program
from dapple_tf.compiler import PlannedModel, StepVariant
from dapple_tf.errors import DappleWarning, LossError, UsageError
from dapple_tf.frontend.batch import BatchForm, batch_form, batch_key, batch_size
from dapple_tf.frontend.shapes import infer_batch_axes
from dapple_tf.frontend.trace import report_exactness, trace_batch
from dapple_tf.plan import Plan
from dapple_tf.runtime.exclusive import exclusive
from dapple_tf.runtime.traced_shapes import Key, TracedShapes
from dapple_tf.runtime.variable_homes import VariableHomes
from dapple_tf.staged_model import StagedModel, stage_model
from dapple_tf.xla.choice import Xla
from graph_passes.analysis.layers import find_layers
from profiler.units import format_samples

T = TypeVar("T")
_PlanKey = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]


class Target(Protocol):
    """The place where steps run: devices of this process (``LocalTarget``), or a rank of a job (``RankTarget``)."""

    def announce(self, what: str, batch_size: int, signature: Sequence[tf.TensorSpec]) -> None:
        """Tell the other ranks what this rank begins to do, for a batch of this size and signature."""

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, once it has succeeded on every rank."""

    def check_plan(self, plan: Plan, fitted: Plan, batch_size: int) -> None:
        """Raise BatchError where ``fitted``, the ``plan`` for a batch of ``batch_size`` samples, cannot run here."""

    def build(
        self,
        model: StagedModel,
        plan: Plan,
        variant: StepVariant,
        times: BuildTimes,
        *,
        local: bool = False,
        choose: ChooseCompiled | None = None,
    ) -> Program:
        """Run the passes and emit the TensorFlow function, both measured by ``times``.

        ``local``: it takes the rows that this process needs. ``choose`` returns the functions that XLA compiles.
        """


@dataclass(frozen=True)
class CompiledStep:
    """The program of a step, and the planned model and the form of the batches that it was compiled for."""

    planned: PlannedModel
    program: Program
    form: BatchForm


@dataclass
class CompiledSteps:
    """Everything compiled for one loss: the ``models`` that were traced, and ``programs`` by what they run.

    The key of a program: identity of its model, M, replicas of each stage, sizes of micro-batches where they are given,
    variant, and whether it takes local rows.
    ``times``: of all builds. ``started``: the programs that have run, by their identity. ``homes``: where variables
    were before the programs moved them. ``xla``: compiles stage functions, or None. ``compared``: the
    models whose first step was compared with the loss of the whole batch, by their identity.
    """

    models: TracedShapes = field(default_factory=TracedShapes)
    programs: dict[tuple[_PlanKey, StepVariant, bool], Program] = field(default_factory=dict)
    times: BuildTimes = field(default_factory=BuildTimes)
    started: set[int] = field(default_factory=set)
    homes: VariableHomes = field(default_factory=VariableHomes)
    xla: Xla | None = None
    compared: set[int] = field(default_factory=set)

    def add(self, key: Key, model: StagedModel) -> None:
        """Keep a new trace for batches of this key; drop the programs of one that is dropped for it."""
        dropped = self.models.add(key, model)
        for program in [program for program in self.programs if program[0][0] == id(dropped)]:
            self.started.discard(id(self.programs.pop(program)))
        self.compared.discard(id(dropped))

    @contextlib.contextmanager
    def running(self, compiled: CompiledStep) -> Iterator[None]:
        """Prepare and mark a run of a program: its variables are at its stages; its first run is a phase of the build.

        The caller has the variables for itself.
        """
        program = compiled.program
        self.homes.return_to_stages(compiled.planned.model.variables.values())
        first = id(program) not in self.started
        with self.times.phase("first run") if first else contextlib.nullcontext():
            yield
        self.started.add(id(program))


def compile_step(
    loss_fn: Callable[..., Any],
    batch: Sequence[Any],
    optimizer: Any,
    autoplan: Autoplan,
    target: Target,
    variant: StepVariant,
    compiled: CompiledSteps,
) -> CompiledStep:
    """Return the step that trains on batches like ``batch``; what is new is compiled and added to ``compiled``.

    Every rank of a job must compile the same steps in the same order. Raises UsageError inside a tf.function, and
    subclasses of ValueError for a batch, a loss or a plan that cannot be compiled.
    """
    check_eager()
    key, size, times = batch_key(batch), batch_size(batch), compiled.times

    def trace() -> StagedModel:
        autoplan.check_first_batch(size)
        with times.phase("trace"):
            options = autoplan.inexact, autoplan.batch_loss, autoplan.batch_norm
            earlier, by_xla = compiled.models.alike(key), compiled.xla is not None
            captured = trace_batch(loss_fn, batch, size, *options, earlier=earlier, compiled=by_xla)
            if autoplan.runs_whole_minibatches and captured.dependence is not None:
                reasons = captured.dependence.exactness.of_minibatches.undocumented
                report_exactness(captured.graph.name, reasons, autoplan.user_inexact)
            micro_batch = autoplan.micro_batch_size(size)
            captured, shapes = infer_batch_axes(captured, micro_batch)
        if not shapes and micro_batch != size:
            raise LossError(
                f"{captured.graph.name} cannot run on a micro-batch of {format_samples(micro_batch)}: it holds "
                f"something with as many rows as the batch, {size}; pass that as an argument, or use micro_batches=1"
            )
        with times.phase("layers"):
            layers = find_layers(captured.graph)
        with times.phase("profile"):
            cuts = autoplan.decide(captured, layers, shapes, batch)
        with times.phase("differentiate"):
            kinds = {"sparse": autoplan.keeps_slices, "windows": autoplan.window is not None}
            model = stage_model(captured, layers, cuts.starts, optimizer, cuts.recomputed, **kinds)
        autoplan.choose_schedule(model, size)
        return model

    model = compiled.models.find(key)
    if model is None:
        target.announce("trace the model", size, key[1])
        model = target.run_on_all(trace)
        compiled.add(key, model)
        _warn_of_untrained(model)
        if note := model.exactness.note:
            times.note(f"{model.graph.name}: {note}")
    plan = fit_plan(autoplan.plan, size)
    target.check_plan(autoplan.plan, plan, size)
    planned = PlannedModel(model, plan, size)
    _report_writes(planned, autoplan, compiled)
    return CompiledStep(planned, find_program(planned, target, variant, compiled), batch_form(batch, model.signature))


def compile_for_rows(
    last: CompiledStep, samples: int, autoplan: Autoplan, target: Target, variant: StepVariant, compiled: CompiledSteps
) -> CompiledStep:
    """Return the step that ranks run on their own rows of a batch of ``samples``, for the model of the ``last`` step.

    Every rank must call it. Raises BatchError where the batch leaves a rank without samples.
    """
    plan = fit_plan(autoplan.plan, samples)
    target.check_plan(autoplan.plan, plan, samples)
    planned = PlannedModel(last.planned.model, plan, samples, local=True)
    _report_writes(planned, autoplan, compiled)
    return CompiledStep(planned, find_program(planned, target, variant, compiled, "local"), last.form)


def check_eager() -> None:
    """Raise UsageError inside a tf.function."""
    if not tf.executing_eagerly():
        raise UsageError("a pipelined step is a whole training step: call it outside of any tf.function")


def find_program(
    planned: PlannedModel, target: Target, variant: StepVariant, compiled: CompiledSteps, *kinds: str
) -> Program:
    """Return the program that runs ``planned``; a new one is built and added to ``compiled``.

    ``kinds``: what kind of program it is, for the announcement to other ranks.
    """
    model, plan, local = planned.model, planned.plan, planned.local
    key = _plan_key(planned), variant, local
    if key not in compiled.programs:
        words = ", ".join([*kinds, *([] if variant is StepVariant.PLAIN else [str(variant.value)])])
        extra = f" ({words})" if words else ""
        target.announce(f"build another program{extra}", planned.batch_size, model.signature)
        with exclusive(model.variables.values()):  # they move to the devices of their stages
            compiled.homes.return_to_stages(model.variables.values())
            compiled.homes.remember(model.variables.values())
            choose = None if compiled.xla is None else compiled.xla.chooser(planned)
            compiled.programs[key] = target.build(model, plan, variant, compiled.times, local=local, choose=choose)
    return compiled.programs[key]


def _plan_key(planned: PlannedModel) -> _PlanKey:
    """Return what ``fit_plan`` may change for a short batch, which is then run by another program."""
    plan = planned.plan
    return id(planned.model), plan.micro_batches, plan.replicas, plan.sizes, plan.shares


def _report_writes(planned: PlannedModel, autoplan: Autoplan, compiled: CompiledSteps) -> None:
    """React to writes in backward that this plan repeats: refuse them, or warn once for each M and replicas."""
    model = planned.model
    if model.backward_writes and not any(key[0] == _plan_key(planned) for key in compiled.programs):
        writes = planned.exactness.reasons[len(model.exactness.reasons) :]
        report_exactness(model.graph.name, writes, autoplan.inexact)


def _warn_of_untrained(model: StagedModel) -> None:
    if model.untrained:
        warnings.warn(
            f"no gradient reaches {', '.join(model.untrained)}: the loss does not depend on it differentiably, and it "
            "will not be trained",
            DappleWarning,
            stacklevel=7,
        )
