"""The training step that users call."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from dapple_tf.autoplan.decision import Decision, fit_plan
from dapple_tf.autoplan.estimate import crossing_costs, layer_costs
from dapple_tf.autoplan.request import Costs, Request
from dapple_tf.autoplan.schedule_choice import Choice
from dapple_tf.backend.bindings import Buffers
from dapple_tf.backend.program import Program, build_program
from dapple_tf.compiler import StagedModel, pipeline_graph, stage_model
from dapple_tf.devices import home_device, list_devices
from dapple_tf.distributed import membership
from dapple_tf.distributed.rank_programs import RankPrograms
from dapple_tf.distributed.variable_transfer import gather_variables
from dapple_tf.errors import BatchError, DappleWarning, UsageError
from dapple_tf.frontend.capture import Captured, batch_signature, capture
from dapple_tf.frontend.loss_check import check_loss
from dapple_tf.frontend.shapes import infer_shapes, mark_batch
from dapple_tf.frontend.variable_names import name_variables
from dapple_tf.memory.report import Report
from dapple_tf.plan import Plan
from dapple_tf.runtime.memory_recorder import Built, MemoryRecorder
from dapple_tf.runtime.recorder import Recorder
from dapple_tf.timeline.recording import Recording
from dapple_tf.timeline.timeline import Timeline
from graph_passes.analysis.layers import find_layers
from graph_passes.ir.graph import Graph
from graph_passes.ir.text import print_graph
from graph_passes.passes.expose_gradients import exposed
from profiler.cluster import Cluster


@dataclass
class _Model:
    """A function traced for one kind of batch, and its programs by (micro-batches, replicas, extra outputs)."""

    captured: Captured
    staged: StagedModel
    programs: dict[tuple[Any, ...], Program] = dataclasses.field(default_factory=dict)

    def pack(self, outputs: list[Any]) -> Any:
        """What the user's function would return: the loss, or (loss, aux)."""
        aux = self.captured.aux
        return outputs[0] if aux is None else (outputs[0], tf.nest.pack_sequence_as(aux, outputs[1:]))


class PipelinedStep:
    """A training step over a pipeline: call it with a batch, it returns the loss (and aux) and trains.

    Everything is decided at the first batch, or at once where ``example_batch`` is given. Arguments of new
    dtypes or inner shapes are traced anew under the same plan; a batch smaller than the plan's is cut into
    fewer micro-batches where it must be.

    With ``check_numerics = True`` (on every rank of a job) a step whose loss or gradients are not finite raises
    StepError naming them, and changes nothing.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: Any,
        request: Request,
        plan: Plan | None = None,
        devices: Sequence[str | int] | None = None,
        cluster: Cluster | None = None,
        example_batch: Sequence[Any] | None = None,
    ) -> None:
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._request = request
        self._wanted_devices = devices
        self._models: dict[tuple[str, tuple[tf.TensorSpec, ...]], _Model] = {}
        self._last: Program | None = None
        self._built: Built | None = None
        self._variables: dict[str, tf.Variable] | None = None
        self._buffers: Buffers | None = None
        self._lock = threading.RLock()
        self._job = membership.current()
        self._decision = Decision(loss_fn, optimizer, request, plan, devices, cluster, self._job)
        self._recorder = Recorder(self._job)
        self._memory = MemoryRecorder(self._job)
        self.check_numerics = False
        self._rank_programs = None if self._job is None else RankPrograms(self._job)
        if example_batch is not None:
            self.build(*example_batch)

    # --- what users see

    @property
    def plan(self) -> Plan:
        """What was decided."""
        if self._decision.plan is None:
            raise UsageError("nothing is decided before the first batch: call the step, or give example_batch")
        return self._decision.plan

    @property
    def choice(self) -> Choice | None:
        """Why the plan has its schedule and M, where they were left "auto" and the simulator was asked."""
        return self._decision.choice

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Of the model's layers, in the plan's order; none before the first batch."""
        return self._decision.layer_names

    @property
    def graph_def(self) -> Any:
        """The GraphDef that ran last."""
        return self._program().function.graph.as_graph_def()

    @property
    def graph(self) -> Graph:
        """The pipelined graph that ran last."""
        return self._program().graph

    @property
    def text(self) -> str:
        """The pipelined graph that ran last, one call a line."""
        return print_graph(self.graph, functions=False)

    @property
    def timeline(self) -> Timeline:
        """When everything of the last recorded step ran; see ``record``. Its ``str`` tells what made it so long."""
        return self._recorder.timeline

    @property
    def recording(self) -> Recording:
        """The last recorded step beside its prediction; UsageError before ``record``."""
        return self._recorder.recording

    @property
    def recording_seconds(self) -> float:
        """About what it costs to record a step, as the last one has shown."""
        return self._recorder.cost_seconds

    @property
    def report(self) -> Report:
        """What a step needs of every device's memory: predicted, and measured where one was recorded; print it."""
        recorded = self._memory.built
        if recorded is not None:
            return self._memory.report(recorded, self.timeline)
        if self._built is None:
            raise UsageError("nothing has been built: call the step with a batch first, or give example_batch")
        return self._memory.report(self._built, None)

    def __call__(self, *batch: Any) -> Any:
        """Train on one batch: the mean loss over it, or (loss, aux)."""
        model, outputs = self._run(batch, self._extra)
        return model.pack(outputs)

    def record(self, *batch: Any) -> Any:
        """Like a call, and takes the times of all actions and the memory: see ``timeline`` and ``report`` afterwards.

        In a job every rank must call it, and each finds what all have taken.
        """
        with self._lock:
            self._prepare(batch, "times")  # what building it takes is none of the step's
            assert self._built is not None
            with self._memory.watch(self._built, list_devices(self._wanted_devices)):
                model, (*outputs, stamps) = self._run(batch, "times")
        size = int(tf.nest.flatten(tuple(batch))[0].shape[0])
        if size == self.plan.global_batch_size:
            self._recorder.take(self.graph, stamps, self.plan, self._decision.simulated)
        else:  # what was predicted is not for so many samples
            self._recorder.take(self.graph, stamps, dataclasses.replace(fit_plan(self.plan, size), predicted=None))
        return model.pack(outputs)

    def build(self, *batch: Any, record: bool = False) -> None:
        """Decide and build everything for batches like this one, without running it; ``record``: what records them."""
        self._prepare(batch, "times" if record else self._extra)

    def run_exposed(self, *batch: Any) -> tuple[Any, dict[str, Any]]:
        """Like a call, but returns the loss and the gradient of every trained variable by name (numpy)."""
        _, outputs = self._run(batch, "gradients")
        names = exposed(self.graph)
        values = [value.numpy() for value in outputs]
        return values[0], dict(zip(names, values[len(values) - len(names) :], strict=True))

    def model(self, batch: Sequence[Any]) -> StagedModel:
        """What batches like this one are compiled to, before micro-batches."""
        return self._prepare(batch)[0].staged

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """The model's variables and the optimizer's, by names that are the same under every plan."""
        self._program()
        if self._variables is None:
            self._variables = name_variables([model.staged for model in self._models.values()], self._optimizer)
        return self._variables

    def gather(self) -> None:
        """Give this process the values that other ranks have trained, until the next step; every rank must call it.

        In one process all variables are as trained at any time.
        """
        if self._job is not None:
            self._program()
            self._job.begin("to gather the variables")
            with self._lock:
                gather_variables(self._job, [model.staged for model in self._models.values()])

    # --- how

    def _program(self) -> Program:
        if self._last is None:
            raise UsageError("nothing has been built: call the step with a batch first")
        return self._last

    @property
    def _extra(self) -> str:
        return "check" if self.check_numerics else ""

    def _run(self, batch: Sequence[Any], extra: str = "") -> tuple[_Model, list[Any]]:
        with self._lock:  # steps share buffers, and a step is a whole training step
            model, program = self._prepare(batch, extra)
            return model, program.run(tf.nest.flatten(tuple(batch)))

    def _prepare(self, batch: Sequence[Any], extra: str = "") -> tuple[_Model, Program]:
        if not tf.executing_eagerly():
            raise UsageError("a pipelined step is a whole training step: call it outside of any tf.function")
        structure = repr(tf.nest.map_structure(lambda leaf: None, tuple(batch)))
        key = (structure, batch_signature(batch))
        size = int(tf.nest.flatten(tuple(batch))[0].shape[0])
        if size == 0:
            raise BatchError("the batch is empty")
        if key not in self._models:
            self._begin("to trace the model", size, key[1])
            trace = partial(self._trace, batch, size)
            self._models[key] = trace() if self._job is None else self._job.together(trace)
        model = self._models[key]
        plan = fit_plan(self.plan, size)
        if self._job is not None and plan.replicas != self.plan.replicas:
            raise BatchError(
                f"the batch has {size} samples, too few for the {max(self.plan.replicas)} ranks of a stage: leave it "
                "out, or join it to another"
            )
        wanted = (plan.micro_batches, plan.replicas, extra)
        if wanted not in model.programs:
            self._begin(f"to build another program{f' ({extra})' if extra else ''}", size, key[1])
            self._buffers = self._buffers or Buffers(home_device())
            model.programs[wanted] = self._build(model, plan, extra, self._buffers)
        self._last, self._built = model.programs[wanted], Built(model.captured, model.staged, plan, size)
        return model, self._last

    def _begin(self, what: str, size: int, signature: Sequence[tf.TensorSpec]) -> None:
        if self._rank_programs is not None:
            self._rank_programs.begin(what, size, signature)

    def _build(self, model: _Model, plan: Plan, extra: str, buffers: Buffers) -> Program:
        if self._rank_programs is not None:
            if extra == "gradients":
                raise UsageError("a step of several processes gives no gradients yet: leave them out")
            return self._rank_programs.build(model.staged, model.captured, plan, buffers, extra)
        devices, home = list_devices(self._wanted_devices), home_device()
        graph = pipeline_graph(model.staged, model.captured, plan, devices, home, extra=extra)
        return build_program(graph, model.staged, model.captured.signature, buffers)

    def _trace(self, batch: Sequence[Any], size: int) -> _Model:
        captured = capture(self._loss_fn, batch)
        check_loss(captured)
        probe = max(2, size // max(1, self._request.count_micro_batches(size)))
        shapes = infer_shapes(captured, probe)
        captured = dataclasses.replace(captured, graph=mark_batch(captured.graph, shapes, probe))
        layers = find_layers(captured.graph)
        costs = Costs(layer_costs(layers, shapes), crossing_costs(layers, shapes))
        first = not self._models
        decide = self._decision
        starts = decide.make(captured, layers, costs, batch) if first else decide.find_starts(layers)
        staged = stage_model(captured, layers, starts, self._optimizer, decide.find_recomputed(layers))
        if first:
            decide.settle(Built(captured, staged, self.plan, size), costs, shapes)
        if staged.ungraded:
            warnings.warn(
                f"no gradient reaches {', '.join(staged.ungraded)}: the loss does not depend on it differentiably, and "
                "it will not be trained",
                DappleWarning,
                stacklevel=5,
            )
        return _Model(captured, staged)
