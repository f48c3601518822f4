"""The training loop of ``dapple train``: batches in, progress out, and a comparison with the plain model."""

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
from dapple_tf.commands.workload import Workload
from dapple_tf.errors import ModelError


@dataclass(frozen=True)
class Done:
    """A step that is done: its number from 1, loss, seconds and samples."""

    number: int
    loss: float
    seconds: float
    samples: int


@dataclass(frozen=True)
class Run:
    """What a loop measured; ``seconds`` of each step but the first, which also builds."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    samples: int

    @property
    def step_seconds(self) -> float | None:
        """Seconds of the median step (which a busy machine disturbs least); None where only the first was run."""
        ordered = sorted(self.seconds)
        return ordered[len(ordered) // 2] if ordered else None

    @property
    def samples_per_second(self) -> float:
        """Samples a second by the median step."""
        return self.samples / self.step_seconds if self.step_seconds else 0.0


def batches(dataset: Iterable[Any], count: int | None = None) -> Iterator[tuple[Any, ...]]:
    """``count`` batches as tuples (None: without end), from the beginning again where the data set ends.

    Raises ModelError for an empty data set.
    """
    endless = itertools.chain.from_iterable(_rounds(dataset))
    for batch in itertools.islice(endless, count):
        yield batch if isinstance(batch, tuple) else (batch,)


def _rounds(dataset: Iterable[Any]) -> Iterator[Iterable[Any]]:
    while True:
        empty = True
        for batch in dataset:
            empty = False
            yield [batch]
        if empty:
            raise ModelError("the workload's dataset has no batches")


def run_steps(
    step: Callable[..., Any],
    stream: Iterable[tuple[Any, ...]],
    steps: int,
    label: str,
    *,
    done: int = 0,
    after: Callable[[int], None] | None = None,
    observe: Callable[[Done], None] | None = None,
    shown: bool = True,
) -> Run:
    """Train for ``steps`` batches of ``stream``, the first of which is step ``done + 1``.

    Progress (loss, samples/s, time left) goes to stderr if ``shown``; ``after`` is called with the number of each step
    that is done, then ``observe`` with what is known of it.
    """
    losses, seconds, samples = [], [], 0
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
        for number, batch in enumerate(itertools.islice(stream, steps), 1):
            begin = time.perf_counter()
            result = step(*batch)
            loss = float(result[0] if isinstance(result, tuple) else result)
            took = time.perf_counter() - begin
            samples = int(tf.nest.flatten(batch)[0].shape[0])
            losses.append(loss)
            if number > 1:
                seconds.append(took)
            if after is not None:
                after(done + number)
            if observe is not None:
                observe(Done(done + number, loss, took, samples))
            status = f"loss {loss:.4f}  {samples / took:6.1f} samples/s"
            progress.update(task, advance=1, status=status)
            if not console.is_terminal and (number == 1 or number % max(1, steps // 10) == 0):
                console.print(f"{label} {done + number}: {status}", highlight=False)
    return Run(tuple(losses), tuple(seconds), samples)


def plain_step(workload: Workload) -> Callable[..., Any]:
    """The ordinary training step of a workload: one tf.function, no pipeline."""

    def step(*batch: Any) -> Any:
        with tf.GradientTape() as tape:
            result = workload.loss_fn(*batch)
            loss = result[0] if isinstance(result, tuple) else result
        watched = list(tape.watched_variables())  # frozen Keras layers' too
        variables = [v for v, known in zip(watched, internals.keras_variables(watched), strict=True) if known.trainable]
        workload.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    return tf.function(step)  # type: ignore[no-any-return]  # TensorFlow is untyped
