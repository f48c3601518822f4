"""A run of ``dapple train``, step by step: plan, build, resume, train, report."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import platform
import signal
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import click
import keras
import numpy as np
import tensorflow as tf

import dapple_tf
from dapple_tf.autoplan.options import Options
from dapple_tf.checkpoint.checkpoints import Checkpoints
from dapple_tf.checkpoint.content import Position
from dapple_tf.checkpoint.names import checkpoint_name
from dapple_tf.commands.command import describe_own_command
from dapple_tf.commands.model_loading import load_model
from dapple_tf.commands.observation import LossWatch, Observer, Scalars
from dapple_tf.commands.plain import time_plain_model
from dapple_tf.commands.ranks import Ranks
from dapple_tf.commands.run_file import RunEnd, RunFile, RunRestart, RunStart, bytes_of_stages
from dapple_tf.commands.train_settings import TrainSettings, check_unfinished
from dapple_tf.commands.training_loop import RunResult, StepResult, repeat_batches, run_steps
from dapple_tf.commands.training_report import find_other_data, find_restart, make_report, read_restarts
from dapple_tf.distributed import membership
from dapple_tf.distributed.exit_reporting import end_for_more_ranks
from dapple_tf.distributed.process_exit import describe_resumption, print_line
from dapple_tf.distributed.shared_errors import share_error
from dapple_tf.distributed.watchdog import INTERRUPTED
from dapple_tf.launcher.restart import read_start
from dapple_tf.runtime.growth import Growth
from dapple_tf.runtime.step import PipelinedStep
from dapple_tf.timeline.picture import save_recording
from dapple_tf.timeline.recording import Recording, plan_title
from dapple_tf.wording import format_count

Batches = Iterator[tuple[Any, ...]]


def run_training(settings: TrainSettings, given: Options, options: Mapping[str, Any]) -> None:
    """Train as ``settings``, the ``given`` options of the plan and the ``options`` of the model state; print results.

    In a job every rank calls it, and rank 0 prints and writes. Raises ClickException at the end of a run whose loss
    became NaN or infinite.
    """
    ranks = Ranks(membership.current())
    minibatches = given.training.minibatches
    plain_speed = time_plain_model(settings.baseline, minibatches, **options) if settings.baseline else None
    step, first, batches = ranks.job.run_on_all(lambda: _make_step(given, options))
    step.check_numerics = settings.check_numerics
    step.build(*first, record=settings.records_steps)
    ranks.print_result(step.summary())
    checkpoints, position, batches = _resume(step, batches, settings, ranks)
    done = position.steps
    restart = ranks.run_on_first(lambda: find_restart(settings.record_path, step.plan, ranks.job.size, position))
    if restart is not None:
        ranks.print_result(str(restart))
    losses = LossWatch(step, ranks)
    growth = Growth(step, ranks.job, ranks.print_result) if given.elastic else None
    saver = _Saver(checkpoints, settings, losses, done, ranks, step.plan.training.words.unit, growth)
    with contextlib.ExitStack() as opened:
        record = _open_record(step, settings, ranks, done, options["model"], restart)
        if record is not None:
            opened.enter_context(record)
        opened.callback(saver.end)
        try:
            run = _train(step, batches, settings, ranks, done, saver, record, restart)
        except KeyboardInterrupt:
            ranks.print_warning(saver.describe_stop())
            raise
        ranks.job.check_call_history()
        if checkpoints is not None:
            if checkpoints.snapshot_costs is not None:
                ranks.print_result(str(checkpoints.snapshot_costs))
            checkpoints.close()
        if record is not None and settings.records_steps:
            record.end(_describe_end(step))
    recording = _named_recording(step, options["model"], settings) if settings.trace and ranks.is_first else None
    text, fields = make_report(
        run,
        step,
        settings,
        plain_speed=plain_speed,
        minibatch_losses=losses.minibatch_losses,
        recording=recording,
        restarts=ranks.run_on_first(lambda: read_restarts(settings.record_path, restart)) or (),
    )
    ranks.print_result(text)
    if options["as_json"]:
        ranks.print_result(json.dumps({"steps": settings.steps, **fields}))
    if settings.trace and recording is not None:
        save_recording(recording, settings.trace)  # after the report, which is not lost where this fails
    if losses.problem:
        raise share_error(click.ClickException(losses.problem), 0)


def _make_step(given: Options, options: Mapping[str, Any]) -> tuple[PipelinedStep, tuple[Any, ...], Batches]:
    """Return the step of the model that ``options`` name, its first batch, and all its batches without end."""
    workload = load_model(**options)
    step = PipelinedStep(workload.loss_fn, workload.optimizer, given)
    batches = repeat_batches(workload.dataset)
    first = next(batches)
    return step, first, itertools.chain([first], batches)


def _resume(
    step: PipelinedStep, batches: Batches, settings: TrainSettings, ranks: Ranks
) -> tuple[Checkpoints | None, Position, Batches]:
    """Restore the last checkpoint; return the checkpoints, the position of the run, and the batches that follow.

    Raises ClickException where all steps are done, or SystemExit (0) where a job before, of the same launch, did them.
    """
    folder = settings.checkpoint_dir
    if not folder:
        return None, Position(0, 0), batches
    checkpoints = Checkpoints(folder, step)
    position = checkpoints.restore()
    start = read_start()
    if start is not None and start.number and position.steps >= settings.steps:
        ranks.print_result(
            f"{folder} has {format_count(position.steps, 'step')}, which is all: the job before had saved the last one"
        )
        checkpoints.close()
        raise SystemExit(0)
    ranks.job.run_on_all(lambda: check_unfinished(folder, position.steps, settings.steps))
    if not position.steps:
        return checkpoints, position, batches
    ranks.print_result(f"resumed after {step.plan.training.words.unit} {position.steps} from {position.origin}")
    other = ranks.run_on_first(lambda: find_other_data(settings, position))
    if other:
        ranks.print_warning(other)
    return checkpoints, position, itertools.islice(batches, position.batches, None)


_NOTHING_SAVED = "nothing was saved: give --checkpoint-dir DIR, and a stopped run goes on from its last checkpoint"


class _Saver:
    """Saves the checkpoints of a run: of each step where one is due, and of the last one before a signal stops the run.

    Ctrl-C stops at once before the first step is done, and without checkpoints. Else the run stops between two steps,
    where its variables belong together, and the second Ctrl-C stops at once. In a job SIGTERM and SIGUSR1, of any rank,
    do the same: launchers send the first to end a job, and pass the second on. ``saved``: the last step that is saved;
    0 for none. ``unit``: "step" or "window".
    """

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        settings: TrainSettings,
        losses: LossWatch,
        resumed: int,
        ranks: Ranks,
        unit: str,
        growth: Growth | None,
    ) -> None:
        self._checkpoints, self._settings, self._losses, self._growth = checkpoints, settings, losses, growth
        self._ranks, self._unit = ranks, unit
        self._watchdog = ranks.job.watchdog
        if checkpoints is None:
            ranks.job.progress.saved = _NOTHING_SAVED
        self._may_stop = False
        self._interrupted = False
        self.saved = resumed

    def note(self, done: StepResult) -> None:
        """Note the loss of a step that is done, and save a checkpoint if one is due."""
        self._losses.note(done)
        if self._growth is not None:
            self._growth.note_step(done.seconds)
        if done.number % self._settings.checkpoint_interval == 0 or done.number == self._settings.steps:
            self._save(done.number)
        if self._checkpoints is not None and not self._may_stop:
            self._may_stop = True
            if self._watchdog is not None:
                self._watchdog.allow_stops(self._tell_job)
            # In the background a shell lets a process ignore Ctrl-C.
            elif signal.getsignal(signal.SIGINT) == signal.default_int_handler:
                signal.signal(signal.SIGINT, self._note_interrupt)

    def stop_if_asked(self, done: StepResult) -> None:
        """Stop before the last step where a signal asks for it, after saving, or where the launcher has more ranks.

        Raises KeyboardInterrupt; in a job, after a step that is saved, SystemExit with ``INTERRUPTED`` or ``CONTINUE``.
        """
        if done.number == self._settings.steps:
            return
        left = self._settings.steps - done.number
        if self._growth is not None and self.saved == done.number and self._growth.wants_more_ranks(left):
            self._ranks.print_result(f"step {done.number} is saved: the job ends, to go on with more ranks")
            end_for_more_ranks(self._ranks.job)
        if self._watchdog is not None and self._may_stop:
            self._interrupted = self._watchdog.agree_to_stop(done.number)
        if self._interrupted:
            if self.saved < done.number:
                self._save(done.number)
            if self._watchdog is None:
                raise KeyboardInterrupt
            self._ranks.print_warning(self.describe_stop())
            raise SystemExit(INTERRUPTED)

    def end(self) -> None:
        """Let Ctrl-C stop at once again."""
        if self._watchdog is not None:
            self._watchdog.forbid_stops()
        elif signal.getsignal(signal.SIGINT) == self._note_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def describe_stop(self) -> str:
        """Return what a run that is stopped leaves, and how to go on."""
        folder = self._settings.checkpoint_dir
        if not folder:
            return _NOTHING_SAVED
        if not self._ranks.job.is_alone:
            return describe_resumption(self._ranks.job.progress.saved)
        command = describe_own_command()
        if not self.saved:
            return f"{folder} has no checkpoint yet; to start again: {command}"
        name = os.path.join(folder, checkpoint_name(self.saved))
        return f"{self._unit} {self.saved} is saved as {name}; to go on: {command}"

    def _save(self, number: int) -> None:
        if self._checkpoints is not None and self._losses.may_save():
            self._checkpoints.save(number)
            self.saved = number

    def _note_interrupt(self, *_: object) -> None:
        self.end()
        self._interrupted = True
        print_line("stops after this step and saves it; Ctrl-C again stops at once")

    def _tell_job(self, what: str) -> None:
        """Say on rank 0 what has happened, and what is saved if the launcher kills the ranks before the job stops."""
        print_line(
            f"{what}: the job stops after the next {self._unit} and saves it, unless the launcher kills the ranks "
            f"before; now {describe_resumption(self._ranks.job.progress.saved)}"
        )


def _train(
    step: PipelinedStep,
    batches: Batches,
    settings: TrainSettings,
    ranks: Ranks,
    done: int,
    saver: _Saver,
    record: RunFile | None,
    restart: RunRestart | None,
) -> RunResult:
    """Train until the last step, recording steps for the trace and the curves."""
    tensorboard = settings.tensorboard
    scalars = ranks.run_on_first(lambda: Scalars(tensorboard)) if tensorboard else None
    if scalars is not None and restart is not None:
        scalars.write_text(done, "restart", str(restart))
    words = step.plan.training.words
    observer = Observer(step, done + 1, settings, ranks, scalars, record)

    def after(done: StepResult) -> None:
        saver.note(done)
        observer.observe(done)
        saver.stop_if_asked(done)

    try:
        return run_steps(
            observer.run,
            batches,
            settings.steps - done,
            words.training,
            done=done,
            after=after,
            shown=ranks.is_first,
            loss_name=words.loss,
        )
    finally:
        if scalars is not None:
            scalars.close()


def _open_record(
    step: PipelinedStep, settings: TrainSettings, ranks: Ranks, done: int, model: str, restart: RunRestart | None
) -> RunFile | None:
    """Return the record of the run, on rank 0; None on others, and where none is wanted."""
    path = settings.record_path
    if path is None:
        return None
    versions = {
        "dapple_tf": dapple_tf.__version__,
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        **({} if ranks.job.is_alone else {"Horovod": metadata.version("horovod")}),
    }

    def open_file() -> RunFile:
        start = RunStart(
            model=model,
            steps=settings.steps,
            done=done,
            time=time.time(),
            processes=ranks.job.size,
            versions=versions,
            options=settings.options,
            plan=step.plan.to_json(),
            layer_names=step.layer_names,
            memory=bytes_of_stages(step.report.to_json()["stages"]),
            restart=restart,
        )
        return RunFile(path, start, ranks.print_warning)

    return ranks.run_on_first(open_file)


def _describe_end(step: PipelinedStep) -> RunEnd:
    """Return what is known at the end of a run with recorded steps."""
    recording, memory = step.recording, step.report
    simulated = None if recording.predicted is None else recording.predicted.timeline.bubble
    together = None
    if memory.measured is not None and memory.predicted is not None:
        together = float(memory.predicted), float(max(0, memory.measured.above_start))
    measured = [None if stage.measured is None else float(stage.measured.above_start) for stage in memory.stages]
    return RunEnd(simulated, tuple(measured), together)


def _named_recording(step: PipelinedStep, model: str, settings: TrainSettings) -> Recording:
    """Return the recorded step and those before that are wanted, with the model and the schedule as its title."""
    measured = step.timeline.with_earlier(settings.trace_steps - 1)
    title = plan_title(dataclasses.replace(step.plan, model=model.rpartition(":")[2]))
    return dataclasses.replace(step.recording, title=title, measured=measured)
