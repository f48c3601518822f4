"""Functions of a batch that run forward over the stages of a training step, without training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from dapple_tf.autoplan.autoplan import Autoplan
from dapple_tf.autoplan.batch_fit import fit_plan
from dapple_tf.autoplan.forward_plan import without_cuts
from dapple_tf.backend.build_times import BuildTimes
from dapple_tf.compiler import PlannedModel, StepVariant
from dapple_tf.errors import UsageError
from dapple_tf.forward_model import stage_forward
from dapple_tf.frontend.batch import batch_form, batch_key, batch_size
from dapple_tf.frontend.composite import as_rows
from dapple_tf.frontend.shapes import infer_batch_axes
from dapple_tf.frontend.trace import report_exactness, trace_batch
from dapple_tf.plan import Plan
from dapple_tf.runtime.compile_step import CompiledStep, CompiledSteps, Target, find_program
from dapple_tf.runtime.exclusive import COMPILING, exclusive
from dapple_tf.runtime.forked import check_not_forked
from dapple_tf.runtime.traced_shapes import Key
from dapple_tf.runtime.variable_homes import VariableHomes
from dapple_tf.staged_model import StagedModel
from dapple_tf.xla.choice import Xla, make_xla
from graph_passes.analysis.layers import find_layers


@dataclass
class Forward:
    """A function of a batch, run forward over the stages that ``autoplan`` gives to training.

    ``function``: as for ``dapple.pipeline``, but it needs no variable to train. What it writes (seeds of draws, batch
    norm's statistics) is written, as by a call on one device. In a job every rank must make the same calls.

    Traces are made anew once training has a plan, so that variables need not move. ``homes``: where variables were
    before any program of the training step, or of this, moved them. ``times``: of all builds of the training
    step and its forward runs.
    """

    function: Callable[..., Any]
    autoplan: Autoplan
    homes: VariableHomes
    times: BuildTimes
    _compiled: CompiledSteps = field(init=False)
    _plans: dict[int, Plan] = field(default_factory=dict)
    _planned: bool = False

    def __post_init__(self) -> None:
        self._compiled = self._fresh(make_xla(self.autoplan.jit_compile, self.function))

    def _fresh(self, xla: Xla | None) -> CompiledSteps:
        return CompiledSteps(times=self.times, homes=self.homes, xla=xla)

    @property
    def models(self) -> list[StagedModel]:
        """All that was traced and is still used."""
        return self._compiled.models.values()

    def run(self, batch: Sequence[Any], target: Target) -> Any:
        """Return what the function returns for the whole batch: the loss, or (loss, aux)."""
        check_not_forked()
        batch = as_rows(batch)
        with COMPILING:
            compiled = self.compile(batch, target)
        variables = compiled.planned.model.variables.values()
        with exclusive(variables), self._compiled.running(compiled):
            outputs = compiled.program.run(tf.nest.flatten(tuple(batch)))
        return compiled.planned.model.pack(outputs)

    def compile(self, batch: Sequence[Any], target: Target) -> CompiledStep:
        """Return the program for batches like ``batch``; raises what ``compile_step`` raises."""
        if not tf.executing_eagerly():
            raise UsageError("a pipeline runs a whole batch: call it outside of any tf.function")
        if self.autoplan.planned and not self._planned:
            self._compiled, self._plans, self._planned = self._fresh(self._compiled.xla), {}, True
        key, size = batch_key(batch), batch_size(batch)
        model = self._compiled.models.find(key)
        if model is None:
            target.announce("trace the model to run forward", size, key[1])
            model, made = target.run_on_all(lambda: self._trace(key, batch, size))
            self._compiled.add(key, model)
            self._plans = {id(kept): self._plans[id(kept)] for kept in self.models if kept is not model}
            self._plans[id(model)] = made
        whole = self._plans[id(model)]
        plan = fit_plan(whole, size)
        target.check_plan(whole, plan, size)
        planned = PlannedModel(model, plan, size)
        program = find_program(planned, target, StepVariant.PLAIN, self._compiled, "forward")
        return CompiledStep(planned, program, batch_form(batch, model.signature))

    def _trace(self, key: Key, batch: Sequence[Any], size: int) -> tuple[StagedModel, Plan]:
        autoplan = self.autoplan
        options = autoplan.inexact, autoplan.batch_loss, autoplan.batch_norm
        with self.times.phase("trace"):
            earlier, by_xla = self._compiled.models.alike(key), self._compiled.xla is not None
            captured = trace_batch(self.function, batch, size, *options, trains=False, earlier=earlier, compiled=by_xla)
            captured, shapes = infer_batch_axes(captured, autoplan.micro_batch_size(size))
        with self.times.phase("layers"):
            layers = find_layers(captured.graph)
        with self.times.phase("profile"):
            plan = autoplan.plan_forward(layers, shapes)
        if autoplan.window is not None and captured.dependence is not None:
            exactness = captured.dependence.exactness
            if exactness.reasons:  # which minibatches do not have, and which the whole batch has not if it is not cut
                plan = without_cuts(plan)
            if max(plan.replicas) > 1:
                report_exactness(captured.graph.name, exactness.undocumented, autoplan.user_inexact)
        return stage_forward(captured, layers, plan.starts), plan
