"""The things that a profile measures: runs of layers, the model without a pipeline, and calls that do nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.backend.bindings import Buffers
from dapple_tf.backend.handler import call
from dapple_tf.backend.program import Program, build_program
from dapple_tf.compiler import StepVariant, pipeline_graph
from dapple_tf.errors import PartitionError, StepError
from dapple_tf.plans import Plan, StagePlan
from dapple_tf.profiler.measure import Floats, choose_even_starts, split_by_weight
from dapple_tf.profiler.peaks import CPU_CORE
from dapple_tf.profiling.layer_facts import LayerFacts
from dapple_tf.staged_model import stage_model
from dapple_tf.timeline.stamps import read_timeline

_EMPTY_CALLS = 16


class PlainModel:
    """The model without a pipeline, on one device; measures its forward, and its forward and gradients together.

    Measuring raises StepError where the model fails on the batch.
    """

    def __init__(self, loss_fn: Callable[..., Any], arguments: Sequence[Any], device: str) -> None:
        self._arguments = tf.nest.map_structure(tf.convert_to_tensor, tuple(arguments))
        specs = tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), self._arguments)
        self._device = device

        def loss(*batch: Any) -> Any:
            result = loss_fn(*batch)
            return result[0] if isinstance(result, tuple) else result

        def gradients(*batch: Any) -> Any:
            with tf.GradientTape() as tape:
                value = loss(*batch)
            return value, tape.gradient(value, list(tape.watched_variables()))

        self._forward, self._both = (tf.function(f).get_concrete_function(*specs) for f in (loss, gradients))

    def forward(self) -> Floats:
        """Run one forward; return its seconds, of shape [1]."""
        return self._time(self._forward)

    def both(self) -> Floats:
        """Run one forward with gradients; return its seconds, of shape [1]."""
        return self._time(self._both)

    def _time(self, function: Any) -> Floats:
        with tf.device(self._device):
            begin = time.perf_counter()
            try:
                function(*self._arguments)
            except tf.errors.OpError as error:
                raise StepError(f"the model failed on this batch, un-pipelined: {_cause(error.message)}") from error
            tf.test.experimental.sync_devices()
            return np.array([time.perf_counter() - begin])


def _cause(message: str) -> str:
    """Return the line of TensorFlow's message that says what failed: the last one that is not indented."""
    return [line for line in message.splitlines() if line.strip() and not line[0].isspace()][-1]


def empty_calls(device: str) -> Callable[[], Floats]:
    """Return a function that runs calls which do nothing, and returns the seconds of each by time stamps."""
    signature = [tf.TensorSpec([])] * 4  # a few tensors in and out, as for a stage
    identity = internals.trace_function(lambda *x: [tf.identity(value) for value in x], signature, internals.NO_INLINE)

    def chain(*values: Any) -> Any:
        stamps: list[Any] = []
        tensors, last = list(values), [value.op for value in values]
        for _ in range(_EMPTY_CALLS):
            with tf.control_dependencies(last):
                begin = tf.timestamp()
            with tf.control_dependencies([begin.op]):
                tensors, done = call(identity, tensors)
            with tf.control_dependencies(done):
                end = tf.timestamp()
            stamps.append(end - begin)
            last = [end.op]
        return tf.stack(stamps), tensors  # returned, since TensorFlow drops calls whose results are not used

    calls = internals.trace_function(chain, signature, internals.NO_AUTOMATIC_CONTROL)

    def probe() -> Floats:
        with tf.device(device), internals.without_specialisation():
            return np.array(calls(*[tf.zeros([])] * 4)[0].numpy())

    return probe


@dataclass(frozen=True)
class LayerRuns:
    """The layers in runs, each a stage of ``program``; run k has the layers ``bounds[k]`` to ``bounds[k + 1] - 1``."""

    facts: LayerFacts
    bounds: tuple[int, ...]
    program: Program

    @staticmethod
    def build(facts: LayerFacts, count: int, device: str, home: str) -> LayerRuns:
        """Cut the layers into about ``count`` runs of equal work, and build their program.

        There are fewer runs where a gradient needs a tensor that no stage boundary carries.
        """
        weights = facts.forward_seconds(CPU_CORE) + facts.backward_seconds(CPU_CORE)
        while True:
            starts = choose_even_starts(weights, facts.layers.positions(), count)
            try:
                staged = stage_model(facts.captured, facts.layers, starts, None)
                break
            except PartitionError:
                if not starts:
                    raise
                count = (len(starts) + 1) // 2
        bounds = (0, *starts, len(facts.names))
        size = facts.batch_size
        stages = tuple(StagePlan(first, end - 1, (0,)) for first, end in itertools.pairwise(bounds))
        schedule = f"looped-bfs:v={len(stages)}"  # all stages are on one device
        plan = Plan(facts.captured.graph.name, "profile", size, size, 1, schedule, False, stages)
        graph = pipeline_graph(staged, plan, [device], home, variant=StepVariant.TIMED)
        # TensorFlow drops calls whose results are not used: return every gradient.
        gradients = [value for node in graph.nodes if node.op == "backward" for value in node.values()]
        graph = graph.replace(outputs=(*graph.outputs[:-1], *gradients, graph.outputs[-1]))
        # Not inlined, as in a step of several micro-batches.
        program = build_program(graph, staged, Buffers(home), inline=False)
        return LayerRuns(facts, bounds, program)

    def probe(self, rows: Sequence[Any]) -> Callable[[], Floats]:
        """Return a function that runs the program on ``rows``, and returns the seconds of its forwards and backwards.

        They are a float64 vector [2 x number of runs]: first the forwards of all runs, then the backwards.
        """

        def run() -> Floats:
            stamps = self.program.run(rows)[-1].numpy()
            count = len(self.bounds) - 1
            seconds = np.zeros(2 * count)
            for event in read_timeline(self.program.graph, stamps).events:
                seconds[event.action.stage + count * (event.action.kind == "B")] += event.end - event.start
            return seconds

        return run

    def split(self, rounds: Floats, call_seconds: float) -> tuple[Floats, Floats]:
        """Return the seconds of every layer's forward and backward: medians of ``rounds``, without the cost of calls.

        ``call_seconds``: the time of a call that does nothing. At most half of a run's time counts as its call's.
        """
        medians = np.median(rounds, axis=0)
        own = np.maximum(medians - call_seconds, medians / 2)
        count = len(self.bounds) - 1
        forward = split_by_weight(own[:count], self.bounds, self.facts.forward_seconds(CPU_CORE))
        backward = split_by_weight(own[count:], self.bounds, self.facts.backward_seconds(CPU_CORE))
        return forward, backward
