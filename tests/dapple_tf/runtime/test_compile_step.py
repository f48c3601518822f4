"""Compiling a step: what is traced and built once, and what a compiled step needs to stay alive."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
import pytest
import tensorflow as tf

from dapple_tf.autoplan.autoplan import Autoplan
from dapple_tf.autoplan.options import Options
from dapple_tf.backend.build_times import BuildTimes
from dapple_tf.backend.handler import ChooseCompiled
from dapple_tf.backend.program import Program
from dapple_tf.compiler import PlannedModel, StepVariant
from dapple_tf.distributed.membership import Job
from dapple_tf.errors import BatchError, UsageError
from dapple_tf.frontend.batch import Nesting
from dapple_tf.runtime.compile_step import (
    MOST_TRACES,
    CompiledStep,
    CompiledSteps,
    LocalTarget,
    compile_for_rows,
    compile_step,
    read_batch,
)
from tests.dapple_tf.backend.builders import DEVICES
from tests.dapple_tf.builders import X, chain, step_of


class RecordingTarget(LocalTarget):
    """A local target that records what is announced to other ranks and which programs are built."""

    def __init__(self) -> None:
        super().__init__(DEVICES, DEVICES[0])
        self.announced: list[str] = []
        self.built: list[tuple[int, tuple[int, ...], StepVariant]] = []

    def announce(self, what: str, batch_size: int, signature: Sequence[tf.TensorSpec]) -> None:
        self.announced.append(what)

    def build(
        self,
        planned: PlannedModel,
        variant: StepVariant,
        times: BuildTimes,
        choose: ChooseCompiled | None = None,
        earlier: Program | None = None,
    ) -> Program:
        self.built.append((planned.plan.micro_batches, planned.plan.replicas, variant))
        return super().build(planned, variant, times, choose, earlier)


class Compiler:
    """Compiles steps of one loss, cut into two stages, and counts the traces of the loss."""

    def __init__(self, micro_batches: int = 4, replicas: Sequence[int] | None = None) -> None:
        _, dense = chain(2)
        self.traces: list[Any] = []

        def loss(x: Any) -> tf.Tensor:
            self.traces.append(x)
            return dense(x)

        self.loss = loss
        self.optimizer = keras.optimizers.SGD(0.1)
        options = Options(stages=["net/d1"], replicas=replicas, micro_batches=micro_batches, schedule="dapple-a")
        self.autoplan = Autoplan(self.loss, self.optimizer, options, Job())
        self.target = RecordingTarget()
        self.known = CompiledSteps()

    def compile(self, *batch: Any, variant: StepVariant = StepVariant.PLAIN) -> CompiledStep:
        return compile_step(
            self.loss, read_batch(batch), self.optimizer, self.autoplan, self.target, variant, self.known
        )


def test_batches_of_the_same_size_use_one_program() -> None:
    compiler = Compiler()
    first, second = compiler.compile(X), compiler.compile(X + 1)
    assert first.program is second.program
    assert first.planned.model is second.planned.model
    assert len(compiler.traces) == 1
    assert compiler.target.announced == ["trace the model", "build another program"]


def test_a_smaller_batch_is_not_traced_again() -> None:
    """A batch of 8 runs 4 micro-batches of 2 samples; one of 6 may run them too, one of 3 only 3."""
    compiler = Compiler()
    programs = {size: compiler.compile(X[:size]) for size in (8, 6, 3)}
    assert len(compiler.traces) == 1
    assert {size: step.planned.plan.micro_batches for size, step in programs.items()} == {8: 4, 6: 4, 3: 3}
    assert programs[8].program is programs[6].program
    assert compiler.target.built == [(4, (1, 1), StepVariant.PLAIN), (3, (1, 1), StepVariant.PLAIN)]
    assert programs[3].planned.batch_size == 3


def test_replicas_that_a_small_batch_cannot_feed_are_left_out_of_its_program() -> None:
    compiler = Compiler(micro_batches=2, replicas=[2, 1])
    compiler.compile(X)
    small = compiler.compile(X[:1])
    assert len(compiler.traces) == 1
    assert small.planned.plan.replicas == (1, 1)
    assert [replicas for _, replicas, _ in compiler.target.built] == [(2, 1), (1, 1)]


def test_arguments_that_are_refused_are_not_traced() -> None:
    compiler = Compiler()
    with pytest.raises(BatchError, match="not batched alike"):
        compiler.compile(X, X[:1])
    assert compiler.traces == []
    assert compiler.target.announced == []


def test_each_nesting_of_the_arguments_is_traced_once() -> None:
    compiler = Compiler()
    dense = compiler.loss
    compiler.loss = lambda x: dense(x if isinstance(x, tf.Tensor) else x["x"])
    models = [compiler.compile(batch).planned.model for batch in (X, {"x": X}, X[:4], {"x": X[:4]})]
    assert models[0] is models[2]
    assert models[1] is models[3]
    assert len(compiler.traces) == len(compiler.known.models) == 2


def test_arguments_of_another_inner_shape_are_traced_again_under_the_same_plan() -> None:
    w = tf.Variable(1.0, name="w")
    v = tf.Variable(2.0, name="v")
    traces = []

    def loss(x: tf.Tensor) -> tf.Tensor:
        traces.append(x.shape)
        with tf.name_scope("first"):
            hidden = tf.tanh(x * w)
        with tf.name_scope("second"):
            return tf.reduce_mean(tf.square(hidden * v))

    step = step_of(loss, stages=["second"])
    for columns in (4, 2, 4, 2):
        step(X[:, :columns])
    assert [shape.as_list() for shape in traces] == [[None, 4], [None, 2]]
    assert len(step._compiled.models) == len(step._compiled.programs) == 2


def test_each_variant_has_a_program_of_its_own() -> None:
    compiler = Compiler()
    programs = {variant: compiler.compile(X, variant=variant).program for variant in StepVariant}
    assert len({id(program) for program in programs.values()}) == len(StepVariant)
    assert len(compiler.traces) == 1
    assert compiler.compile(X, variant=StepVariant.TIMED).program is programs[StepVariant.TIMED]
    assert compiler.target.announced[1:] == [
        "build another program",
        "build another program (times)",
        "build another program (gradients)",
        "build another program (check)",
    ]


def test_local_rows_have_programs_of_their_own() -> None:
    compiler = Compiler()
    whole = compiler.compile(X)

    def for_rows(samples: int, variant: StepVariant = StepVariant.PLAIN) -> CompiledStep:
        return compile_for_rows(whole, samples, compiler.autoplan, compiler.target, variant, compiler.known)

    local = for_rows(8)
    assert local.program is not whole.program
    assert for_rows(6).program is local.program
    assert (local.planned.local, whole.planned.local, local.planned.same(whole.planned)) == (True, False, False)
    assert for_rows(3).planned.plan.micro_batches == 3
    for_rows(8, StepVariant.TIMED)
    assert len(compiler.traces) == 1
    assert compiler.target.announced[2:] == [
        "build another program (local)",
        "build another program (local)",
        "build another program (local, times)",
    ]


def test_a_step_cannot_be_compiled_inside_of_a_tf_function() -> None:
    compiler = Compiler()

    @tf.function(autograph=False)
    def outer(x: tf.Tensor) -> None:
        compiler.compile(x)

    with pytest.raises(UsageError, match=r"call it outside of any tf.function"):
        outer(tf.constant(X))
    assert compiler.traces == []
    assert compiler.target.announced == []


def test_a_failed_trace_is_not_kept() -> None:
    compiler = Compiler()
    failing = [True]
    loss = compiler.loss

    def sometimes(x: tf.Tensor) -> tf.Tensor:
        if failing:
            raise ZeroDivisionError("not yet")
        return loss(x)

    compiler.loss = tf.function(sometimes, autograph=False)
    with pytest.raises(ZeroDivisionError):
        compiler.compile(X)
    assert not compiler.known.models
    failing.clear()
    compiler.compile(X)
    assert len(compiler.known.models) == 1


def test_branches_of_the_model_and_the_optimizer_are_still_defined_when_the_traces_are_garbage() -> None:
    """TensorFlow removes the functions nested in a trace once no one refers to the trace."""
    _, dense_loss = chain()

    def loss(x: tf.Tensor) -> tf.Tensor:
        value = dense_loss(x)
        return tf.cond(value > 100.0, lambda: value * 2.0, lambda: value)

    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2)  # a tf.cond in its update
    step = step_of(loss, stages=1, micro_batches=1, optimizer=optimizer, example_batch=(X,), inexact="allow")
    gc.collect()
    expected = float(loss(tf.constant(X)))
    assert float(step(X)) == expected


def test_programs_of_a_dropped_trace_are_dropped() -> None:
    compiler = Compiler()
    step = compiler.compile(X)
    model, program = step.planned.model, step.program
    compiler.known.started.add(id(program))
    for number in range(MOST_TRACES):
        signature = (tf.TensorSpec([None, *[1] * number], tf.float32),)
        another = replace(model, interface=replace(model.interface, signature=signature))
        compiler.known.add((Nesting.of(tf.constant(0.0)), signature), another)
    assert model not in compiler.known.models.values()
    assert not compiler.known.programs
    assert not compiler.known.started
