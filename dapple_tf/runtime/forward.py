"""Functions of a batch that run forward over the stages of a training step, without training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapple_tf.autoplan.autoplan import Autoplan
from dapple_tf.autoplan.batch_fit import fit_plan
from dapple_tf.autoplan.forward_plan import without_cuts
from dapple_tf.backend.build_times import BuildTimes
from dapple_tf.compiler import PlannedModel, StepVariant
from dapple_tf.frontend.batch import Batch, batch_form
from dapple_tf.frontend.capture import Captured
from dapple_tf.frontend.deferred_statistics import trace_statistics
from dapple_tf.frontend.trace import report_exactness
from dapple_tf.graph_passes.analysis.layers import Layers
from dapple_tf.graph_passes.analysis.variable_use import find_variables
from dapple_tf.graph_passes.ir.graph import Function
from dapple_tf.graph_passes.passes.backward import StageGradients, split_backward
from dapple_tf.graph_passes.passes.loss_head_function import build_loss_head
from dapple_tf.graph_passes.passes.once import build_once
from dapple_tf.graph_passes.passes.partition import partition
from dapple_tf.plans import Plan
from dapple_tf.runtime.compile_step import CompiledStep, CompiledSteps, Target, find_program, read_batch, trace_loss_of
from dapple_tf.runtime.exclusive import compiling, exclusive
from dapple_tf.runtime.forked import check_not_forked
from dapple_tf.runtime.rehearsal import compare_first
from dapple_tf.runtime.variable_homes import VariableHomes
from dapple_tf.staged_model import ForPasses, Interface, StagedModel, stage_graph
from dapple_tf.xla.choice import Xla, make_xla


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
        return self._compiled.all_models()

    def run(self, arguments: Sequence[Any], target: Target, gather: Callable[[], None]) -> Any:
        """Return what the function returns for the whole batch: the loss, or (loss, aux).

        ``gather``: brings the variables of all ranks of a job here. Raises ExactnessError as ``compare_first`` does.
        """
        check_not_forked()
        batch = read_batch(arguments)
        with compiling():
            compiled = self.compile(batch, target)
        variables = compiled.planned.model.variables.values()
        with exclusive(variables), self._compiled.running(compiled):
            compare_first(compiled, self._compiled, batch.tensors, self.function, arguments, gather)
            outputs = compiled.program.run(batch.tensors)
        return compiled.planned.model.pack(outputs)

    def compile(self, batch: Batch, target: Target) -> CompiledStep:
        """Return the program for batches like ``batch``; raises what ``compile_step`` raises."""
        if self.autoplan.planned and not self._planned:
            self._compiled, self._plans, self._planned = self._fresh(self._compiled.xla), {}, True
        size = batch.size
        model = self._find(batch, size, target, uncut=self.autoplan.runs_uncut(size))
        whole = self._plans[id(model)]
        plan = fit_plan(whole, size)
        if plan.uncut and not model.exact_uncut:
            model = self._find(batch, size, target, uncut=True)
            whole = self._plans[id(model)]
            plan = fit_plan(whole, size)
        target.check_plan(whole, plan, size)
        planned = PlannedModel(model, plan, size)
        program = find_program(planned, target, StepVariant.PLAIN, self._compiled, "forward")
        return CompiledStep(planned, program, batch_form(batch.arguments, model.interface.signature))

    def _find(self, batch: Batch, size: int, target: Target, *, uncut: bool) -> StagedModel:
        """Return the model for batches like this one, traced if there is none; ``uncut``: see ``compile_step``."""
        model = self._compiled.find(batch, uncut=uncut)
        if model is None:
            target.announce("trace the model to run forward", size, batch.key[1])
            model, made = target.run_on_all(lambda: self._trace(batch, uncut=uncut))
            self._compiled.add(batch.sized_key if model.interface.uncut else batch.key, model)
            self._plans = {id(kept): self._plans[id(kept)] for kept in self.models if kept is not model}
            self._plans[id(model)] = made
        return model

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
        if autoplan.window is not None and dependence is not None:
            if dependence.exactness.reasons:  # the minibatches have none, nor has the whole batch if it is not cut
                plan = without_cuts(plan)
            if max(plan.replicas) > 1:
                report_exactness(traced.captured.graph.name, dependence.exactness.undocumented, autoplan.user_inexact)
        return _stage_forward(traced.captured, traced.layers, plan.starts), plan


# --- Cut a captured function into stages that only run forward: without gradients, stashes or an optimizer


def _stage_forward(captured: Captured, layers: Layers, starts: Sequence[int]) -> StagedModel:
    """Cut the captured graph before the layers ``starts``; what forward writes it writes, and nothing is trained.

    Raises PartitionError where the graph cannot be cut there.
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
    return StagedModel(
        graph=called.replace(functions=(*called.functions, *statistics.functions)),
        stages=len(stages.stages),
        interface=Interface.of(captured),
        for_passes=ForPasses(
            shared=frozenset(map(str, stages.shared)),
            runs=((),) * len(stages.stages),
            head_inputs=stages.head_inputs,
            statistics=bool(statistics.functions),
        ),
        updates=None,
        global_clipnorm=None,
        variables=captured.variables,
        model_variables=captured.variables,
        constants=dict(captured.constants) | dict(statistics.constants),
        library=dict(graph.library) | dict(statistics.library),
        trained=(),
        trained_objects=(),
        untrained=(),
        stateful=captured.stateful,
        traces=(captured.func_graph, *statistics.traces),
    )
