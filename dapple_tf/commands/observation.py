"""Observe a training run: record some of its steps, write curves for TensorBoard, and check that losses are finite."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from dapple_tf.commands.ranks import Ranks
from dapple_tf.commands.run_file import RunFile, RunStep, finite_or_none
from dapple_tf.commands.train_settings import TrainSettings
from dapple_tf.commands.training_loop import StepResult
from dapple_tf.runtime.step import PipelinedStep
from dapple_tf.timeline.critical_path import sum_by_kind
from dapple_tf.timeline.timeline import Timeline

_MAX_COST = 0.01  # the largest part of the training time that recording steps for curves may take
_MEASURED_STEPS = 4  # the cost of recording is measured in the first steps; in the very first it is higher


def choose_interval(cost_seconds: float, step_seconds: float) -> int:
    """Return n such that recording every n-th step takes at most 1% of the training time."""
    return max(1, math.ceil(cost_seconds / (_MAX_COST * step_seconds)))


class Observer:
    """Runs the steps of a training run, records some of them, and writes curves and the run's file.

    For a trace it records the last steps, as the ``settings`` say. For curves it records every n-th step. The first
    four steps measure what recording costs; then rank 0 chooses n for all ``ranks``. ``first``: the number of the first
    step. ``scalars``: where rank 0 writes the curves. ``record``: the file in which it notes each step.
    """

    def __init__(
        self,
        step: PipelinedStep,
        first: int,
        settings: TrainSettings,
        ranks: Ranks,
        scalars: Scalars | None,
        record: RunFile | None,
    ) -> None:
        self._step, self._first, self._ranks = step, first, ranks
        self._scalars, self._record = scalars, record
        # The number of the last step before the trace.
        self._untraced = settings.steps - (settings.trace_steps if settings.trace else 0)
        self._trace_ops, self._curves = settings.trace_ops, settings.records_curves
        self._number = first - 1
        self._recorded = False
        self._interval = 1
        self._costs: list[float] = []
        self._seconds: list[float] = []

    def run(self, *batch: Any) -> Any:
        """Run the next step on a batch, record it if it is time to, and return its result."""
        self._number += 1
        on_curve = self._curves and (self._number - self._first) % self._interval == 0
        traced = self._number > self._untraced
        self._recorded = on_curve or traced
        if self._recorded:
            return self._step.record(*batch, ops=self._trace_ops and traced)
        return self._step(*batch)

    def observe(self, done: StepResult) -> None:
        """Write what is known of a step that is done; after the first four steps choose which steps to record."""
        begin = time.perf_counter()
        if self._scalars is not None:
            values = {"loss": done.loss, "samples_per_second": done.samples / done.seconds}
            if self._recorded:
                values |= recorded_scalars(self._step.timeline)
            self._scalars.write(done.number, values)
        if self._record is not None:
            bubble = self._step.timeline.bubble if self._recorded else None
            self._record.add_step(RunStep(done.number, done.seconds, done.samples, finite_or_none(done.loss), bubble))
        if self._curves and done.number < self._first + _MEASURED_STEPS:
            self._costs.append(self._step.recording_seconds + time.perf_counter() - begin)
            self._seconds.append(done.seconds)
            if len(self._costs) == _MEASURED_STEPS:
                self._choose_interval()

    def _choose_interval(self) -> None:
        cost, seconds = min(self._costs[1:]), statistics.median(self._seconds[1:])
        self._interval = self._ranks.job.broadcast(choose_interval(cost, seconds))
        if self._interval > 1:
            takes = f"recording a step takes {cost * 1e3:.2g} ms"
            self._ranks.print_result(f"one step in {self._interval} is recorded: {takes}")


# --- Write scalars of a run for TensorBoard, which must be installed only to look at them

# Tells TensorBoard that a tensor is a point of a curve.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"), data_class="DATA_CLASS_SCALAR"
)


class Scalars:
    """Writes scalars by step into a file in ``folder``.

    They are buffered until ``close``, or until the first ``write`` after two minutes.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._writer = tf.summary.create_file_writer(os.fspath(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point at ``step`` to the curve of each name, all in one event of the file."""
        summary = tf.compat.v1.Summary(
            value=[
                tf.compat.v1.Summary.Value(tag=name, tensor=tf.make_tensor_proto(value, tf.float32), metadata=_SCALAR)
                for name, value in values.items()
            ]
        )
        with self._writer.as_default():
            tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step=step)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Add a text at ``step``, and write the buffer to the file."""
        with self._writer.as_default():
            tf.summary.text(name, text, step=step)
        self._writer.flush()

    def close(self) -> None:
        """Write the points that are not in the file yet, and close it."""
        self._writer.close()


def recorded_scalars(timeline: Timeline) -> dict[str, float]:
    """Return the points of a recorded step: its bubble, utilisations (fractions), and seconds of its critical path."""
    busy = {f"utilisation/stage_{stage}": share for stage, share in enumerate(timeline.stage_utilisation)}
    path = {f"critical_path_seconds/{kind}": seconds for kind, seconds in sum_by_kind(timeline.critical_path).items()}
    return {"bubble": timeline.bubble, "step_seconds": timeline.seconds, **busy, **path}


# --- Detect a loss that becomes NaN or infinite: warn at once, keep the good checkpoints, fail at the end


_ADVICE = "run with --check-numerics, with which the first such step fails, changes nothing and names the cause"
_WINDOW_ADVICE = "train on from a good checkpoint without --async and with --check-numerics, which names the cause"


class LossWatch:
    """Checks the losses of a training run of ``step``, and decides whether checkpoints may be saved.

    ``minibatch_losses``: for each asynchronous window that has run, the losses of its minibatches.
    """

    def __init__(self, step: PipelinedStep, ranks: Ranks) -> None:
        self._step = step
        self._ranks, self._warn = ranks, ranks.print_warning
        self._first: StepResult | None = None
        self._bad_minibatch = 0
        self._last: StepResult | None = None
        self._unsaved = 0
        self.minibatch_losses: list[list[float]] = []

    def note(self, done: StepResult) -> None:
        """Note the loss of a step that is done; print a warning for the first loss that is not finite."""
        self._last = done
        if self._in_windows:
            self.minibatch_losses.append(self._step.losses.numpy().tolist())
        if not math.isfinite(done.loss) and self._first is None:
            self._first = done
            losses = self.minibatch_losses[-1] if self._in_windows else []
            self._bad_minibatch = next((m for m, loss in enumerate(losses) if not math.isfinite(loss)), 0)
            self._warn(f"warning: the loss of {self._place(done)} is {done.loss}: to find out why, {self._advice}")

    def may_save(self) -> bool:
        """Return whether a checkpoint may be saved now: the last loss and all trained variables are finite.

        Variables are checked too, since an update may not be finite although the loss of its step is. In a job every
        rank must call this: a checkpoint is saved only if each of them finds only finite values.
        """
        last = self._last
        good = last is None or (math.isfinite(last.loss) and not self._has_bad_variable())
        if all(self._ranks.job.gather(good)):
            return True
        self._unsaved += 1
        if self._unsaved == 1:
            number = 0 if last is None else last.number
            what = self._step.plan.training.words.unit
            self._warn(f"warning: no checkpoint after {what} {number}: the loss or a variable is not finite")
        return False

    @property
    def problem(self) -> str:
        """The error message for the end of the run: what was not finite; "" if all was finite."""
        if self._first is None and not self._unsaved:
            return ""
        if self._first is None:
            return f"variables became NaN or infinite, and {self._unsaved} checkpoints were not saved: {self._advice}"
        kept = "" if not self._unsaved else f"; the checkpoints before are kept, and {self._unsaved} were not saved"
        place = self._place(self._first)
        return f"the loss became {self._first.loss} in {place}{kept}. To find out why, {self._advice}"

    @property
    def _in_windows(self) -> bool:
        return self._step.plan.window is not None

    @property
    def _advice(self) -> str:
        return _WINDOW_ADVICE if self._in_windows else _ADVICE

    def _place(self, done: StepResult) -> str:
        """Return the words for the step, or the minibatch and its window, with the first loss that was not finite."""
        if not self._in_windows:
            return f"step {done.number}"
        return f"minibatch {self._bad_minibatch} of window {done.number}"

    def _has_bad_variable(self) -> bool:
        """Return whether any trained variable that this rank holds is not finite."""
        job = self._ranks.job
        for variable in self._step.variables.values():
            holders = job.variable_locations.ranks_of(variable)
            held = holders is None or job.rank in holders
            checked = held and variable.trainable and variable.dtype.is_floating
            if checked and not bool(tf.reduce_all(tf.math.is_finite(variable))):
                return True
        return False
