"""The options of ``dapple train`` that are not about the model or its plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import click

from dapple_tf.commands.run_file import NAME
from dapple_tf.wording import format_count


@dataclass(frozen=True)
class TrainSettings:
    """The settings of a training run, and the files that it writes.

    ``steps``: the number of the last step. ``trace``: file for the timeline of the last step, and of the others of the
    last ``trace_steps``. ``trace_ops``: whether these record ops. ``tensorboard``: folder for curves.
    ``checkpoint_every``: steps between checkpoints. ``baseline``: steps of the un-pipelined model to time. ``record``:
    file for the record of the run. ``options``: those of the command line that were given, as text.
    """

    steps: int
    trace: str | None = None
    tensorboard: str | None = None
    checkpoint_dir: str | None = None
    checkpoint_every: int | None = None
    check_numerics: bool = False
    baseline: int = 0
    trace_steps: int = 1
    trace_ops: bool = False
    record: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def checkpoint_interval(self) -> int:
        """Steps between checkpoints: by default a tenth of all."""
        return self.checkpoint_every or max(1, self.steps // 10)

    @property
    def record_path(self) -> str | None:
        """The file for the record of the run: by default one beside its checkpoints, None without any."""
        if self.record is None and self.checkpoint_dir is not None:
            return os.path.join(self.checkpoint_dir, NAME)
        return self.record

    @property
    def records_curves(self) -> bool:
        """Whether steps are recorded for TensorBoard: a step that checks its numbers cannot record its times."""
        return self.tensorboard is not None and not self.check_numerics

    @property
    def records_steps(self) -> bool:
        """Whether any step is recorded: for the trace or for curves."""
        return self.trace is not None or self.records_curves


def check_unfinished(folder: str, done: int, steps: int) -> None:
    """Raise ClickException where the checkpoints in ``folder`` have as many steps ``done`` as are wanted."""
    if done >= steps:
        raise click.ClickException(f"{folder} has {format_count(done, 'step')} already: ask for more with --steps")
