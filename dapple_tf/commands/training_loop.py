"""The training loop of ``dapple train``: batches in, losses and times out, progress on stderr."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dapple_tf import internals
from dapple_tf.commands.output import shows_progress
from dapple_tf.commands.workload import Workload
from dapple_tf.errors import ModelError
from dapple_tf.runtime.shard import beside_steps


@dataclass(frozen=True)
class StepResult:
    """A finished step: its number from 1, loss, seconds and samples."""

    number: int
    loss: float
    seconds: float
    samples: int


@dataclass(frozen=True)
class RunResult:
    """The measurements of a loop: the loss of each step, and the seconds of each but the first, which also builds.

    ``samples``: of a batch.
    """

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    samples: int

    @property
    def step_seconds(self) -> float | None:
        """Seconds of the median step, which a busy machine disturbs least; None where there was only one step."""
        ordered = sorted(self.seconds)
        return ordered[len(ordered) // 2] if ordered else None

    @property
    def samples_per_second(self) -> float:
        """Samples per second of the median step; 0 where there was only one step."""
        return self.samples / self.step_seconds if self.step_seconds else 0.0


def repeat_batches(dataset: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the data set's batches as tuples without end, starting again where the data set ends.

    Raises ModelError for an empty data set, and for what is no iterable.
    """
    if not (hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")):
        raise ModelError(f"the workload's dataset has the type {type(dataset).__name__}: give an iterable of batches")
    dataset = beside_steps(dataset)
    while True:
        empty = True
        for batch in dataset:
            empty = False
            yield batch if isinstance(batch, tuple) else (batch,)
        if empty:
            raise ModelError("the workload's dataset has no batches")


def run_steps(
    step: Callable[..., Any],
    batches: Iterable[tuple[Any, ...]],
    steps: int,
    label: str,
    *,
    done: int = 0,
    after: Callable[[StepResult], None] | None = None,
    shown: bool = True,
    loss_name: str = "loss",
) -> RunResult:
    """Train ``steps`` steps, one batch each; the first has the number ``done + 1``.

    After each step ``after`` is called with its result. Progress (``label``, loss under ``loss_name``, samples/s, time
    left) goes to stderr if ``shown``.
    """
    losses, seconds, samples = [], [], 0
    shown = shown and shows_progress()
    console = Console(file=sys.stderr, quiet=not shown)
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task(label, total=steps, status="tracing and building")
        for number, batch in enumerate(itertools.islice(batches, steps), 1):
            begin = time.perf_counter()
            result = step(*batch)
            loss = float(result[0] if isinstance(result, tuple) else result)
            took = time.perf_counter() - begin
            samples = int(tf.nest.flatten(batch)[0].shape[0])
            losses.append(loss)
            if number > 1:
                seconds.append(took)
            if after is not None:
                after(StepResult(done + number, loss, took, samples))
            status = f"{loss_name} {loss:.4f}  {samples / took:6.1f} samples/s"
            progress.update(task, advance=1, status=status)
            if not console.is_terminal and (number == 1 or number % max(1, steps // 10) == 0):
                console.print(f"{label} {done + number}: {status}", highlight=False)
    return RunResult(tuple(losses), tuple(seconds), samples)


def plain_step(workload: Workload) -> Callable[..., Any]:
    """Return the ordinary training step of a workload: one tf.function without a pipeline."""

    def step(*batch: Any) -> Any:
        with tf.GradientTape() as tape:
            result = workload.loss_fn(*batch)
            loss = result[0] if isinstance(result, tuple) else result
            scaled = workload.optimizer.scale_loss(loss)
        watched = list(tape.watched_variables())  # including those of frozen Keras layers
        variables = [v for v, known in zip(watched, internals.keras_variables(watched), strict=True) if known.trainable]
        workload.optimizer.apply(tape.gradient(scaled, variables), variables)
        return loss

    return tf.function(step)  # type: ignore[no-any-return]  # TensorFlow is untyped


def step_of_minibatches(step: Callable[..., Any], minibatches: int) -> Callable[..., Any]:
    """Return a step that takes a window, and runs ``step`` on each of its minibatches; it returns their mean loss."""

    def run(*window: Any) -> Any:
        size = int(tf.nest.flatten(window)[0].shape[0])
        ends = [size * m // minibatches for m in range(minibatches + 1)]
        rows = [
            tf.nest.map_structure(lambda tensor, a=a, b=b: tensor[a:b], window) for a, b in itertools.pairwise(ends)
        ]
        losses = [step(*minibatch) for minibatch in rows]
        return sum(losses) / minibatches

    return run
