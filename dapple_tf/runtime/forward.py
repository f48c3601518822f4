"""Functions of a batch that run forward over the stages of a training step, without training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dapple_tf.autoplan.autoplan import Autoplan
from dapple_tf.autoplan.forward_plan import without_cuts
from dapple_tf.backend.build_times import BuildTimes
from dapple_tf.compiler import StepVariant
from dapple_tf.frontend.batch import Batch, batch_form
from dapple_tf.frontend.captured import Captured
from dapple_tf.frontend.deferred_statistics import trace_statistics
from dapple_tf.frontend.trace import report_exactness
from dapple_tf.graph_passes.analysis.layers import Layers
from dapple_tf.graph_passes.analysis.variable_use import find_variables
from dapple_tf.graph_passes.ir.graph import Function
from dapple_tf.graph_passes.passes.backward import StageGradients, build_loss_head, split_backward
from dapple_tf.graph_passes.passes.once import build_once
from dapple_tf.graph_passes.passes.partition import partition
from dapple_tf.plans import Plan
from dapple_tf.runtime.compile_step import (
    CompiledStep,
    CompiledSteps,
    Target,
    find_program,
    plan_model,
    read_batch,
    trace_loss_of,
)
from dapple_tf.runtime.exclusive import compiling
from dapple_tf.runtime.rehearsal import compare_first
from dapple_tf.runtime.variable_homes import VariableHomes
from dapple_tf.staged_model import StagedModel, model_without_optimizer, stage_graph
from dapple_tf.xla.choice import Xla, make_xla


@dataclass
class Forward:
    """A function of a batch that runs forward over the stages that ``autoplan`` has chosen for training.

    ``function``: as for ``dapple.pipeline``, but it need not use a trainable variable. It writes the same variables as
    a call on one device (seeds of draws, batch norm's statistics). In a job every rank must make the same calls.

    Once training has a plan, functions are traced again, so that variables need not move. ``homes``: the devices of
    variables before a program of the training step, or of this function, moved them. ``times``: of all builds of the
    training step and its forward runs.
    """

    function: Callable[..., Any]
    autoplan: Autoplan
    homes: VariableHomes
    times: BuildTimes
    _compiled: CompiledSteps = field(init=False)
    _plans: dict[int, Plan] = field(default_factory=dict)
    _planned: bool = False

    def __post_init__(self) -> None:
        self._compiled = self._fresh(make_xla(self.autoplan.options.jit_compile, self.function))

    def _fresh(self, xla: Xla | None) -> CompiledSteps:
        return CompiledSteps(times=self.times, homes=self.homes, xla=xla)

    @property
    def models(self) -> list[StagedModel]:
        """The traced models that are still used."""
        return self._compiled.all_models()

    def run(self, arguments: Sequence[Any], target: Target, gather: Callable[[], None]) -> Any:
        """Return the function's result for the whole batch: the loss, or (loss, aux).

        ``gather`` brings the variables of all ranks of a job to this one. Raises ExactnessError as ``compare_first``
        does.
        """
        batch = read_batch(arguments)
        with compiling():
            compiled = self.compile(batch, target)
        with self._compiled.running(compiled):
            compare_first(compiled, self._compiled, batch.tensors, self.function, arguments, gather)
            outputs = compiled.program.run(batch.tensors)
        return compiled.planned.model.pack(outputs)

    def compile(self, batch: Batch, target: Target) -> CompiledStep:
        """Return the program for batches like ``batch``; raises the errors of ``compile_step``."""
        if self.autoplan.planned and not self._planned:
            self._compiled, self._plans, self._planned = self._fresh(self._compiled.xla), {}, True
        find = partial(self._find, batch, target)
        planned = plan_model(find, batch.size, target, uncut=self.autoplan.runs_uncut(batch.size))
        program = find_program(planned, target, StepVariant.PLAIN, self._compiled, "forward")
        return CompiledStep(planned, program, batch_form(batch.arguments, planned.model.interface.signature))

    def _find(self, batch: Batch, target: Target, uncut: bool) -> tuple[StagedModel, Plan]:
        """Return the model for batches like this one, and its plan; if there is none, trace it.

        ``uncut``: see ``plan_model``.
        """
        model = self._compiled.find(batch, uncut=uncut)
        if model is None:
            target.announce("trace the model to run forward", batch.size, batch.key[1])
            model, made = target.run_on_all(lambda: self._trace(batch, uncut=uncut))
            self._compiled.add(batch.sized_key if model.interface.uncut else batch.key, model)
            self._plans = {id(kept): self._plans[id(kept)] for kept in self.models if kept is not model}
            self._plans[id(model)] = made
        return model, self._plans[id(model)]

    def _trace(self, batch: Batch, *, uncut: bool) -> tuple[StagedModel, Plan]:
        autoplan = self.autoplan
        to_cut, traced = trace_loss_of(self.function, batch, autoplan, self._compiled, uncut=uncut, trains=False)
        with self.times.phase("profile"):
            plan = autoplan.plan_forward(traced.layers, traced.shapes)
        dependence = to_cut.captured.dependence
        if traced.captured.uncut and max(plan.replicas) > 1:
            traced, plan = to_cut, autoplan.plan_forward(to_cut.layers, to_cut.shapes)
            if dependence is not None:
                report_exactness(traced.captured.graph.name, dependence.exactness.undocumented, autoplan.inexact)
        elif traced.captured.uncut:
            plan = without_cuts(plan)
        if autoplan.options.window is not None and dependence is not None:
            if dependence.exactness.reasons:  # each minibatch is exact, and so is the whole batch if it is not cut
                plan = without_cuts(plan)
            if max(plan.replicas) > 1:
                report_exactness(
                    traced.captured.graph.name, dependence.exactness.undocumented, autoplan.options.inexact
                )
        return _stage_forward(traced.captured, traced.layers, plan.starts, self.homes.shares), plan


# --- Cut a captured function into stages that only run forward: without gradients, stashes or an optimizer


def _stage_forward(captured: Captured, layers: Layers, starts: Sequence[int], shares: Mapping[int, int]) -> StagedModel:
    """Cut the captured graph before the layers ``starts``; forward writes its variables, and nothing is trained.

    ``shares``: the replica that updates each variable in training, by the identity of the variable, where the update is
    sharded. Raises PartitionError if the graph cannot be cut there.
    """
    stages = partition(layers, starts)
    graph, none = stages.graph, StageGradients()
    functions: list[tuple[Function, ...]] = [
        (forward,) for forward, _ in split_backward(stages, graph, [none] * len(stages.stages))
    ]
    if loss_head := build_loss_head(stages, graph, none):
        functions[-1] = (*functions[-1], loss_head)
    called = stage_graph(captured, functions, build_once(stages, graph, functions))
    statistics = trace_statistics(captured, stages, {name: users[0] for name, users in find_variables(called).users})
    model = model_without_optimizer(captured, stages, called, statistics, graph.library)
    own = tuple((name, shares[id(v)]) for name, v in captured.variables.items() if id(v) in shares)
    return replace(model, pass_facts=replace(model.pass_facts, shares=own))
