"""Checkpoints that know nothing of stages: variables in the model's own order, the optimizer, the step."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from dapple_tf.errors import UsageError
from dapple_tf.runtime.step import PipelinedStep


class Checkpoints:
    """Saves and restores a training run in a folder; the last three are kept.

    TensorFlow writes the data before it names it the latest, so a run killed at any moment leaves the last
    good one.
    """

    def __init__(self, folder: str | os.PathLike[str], step: PipelinedStep, batch: Any, optimizer: Any) -> None:
        self._count = tf.Variable(0, dtype=tf.int64, trainable=False)
        names = step.model(batch).model_variables
        variables = {f"v{i}": variable for i, variable in enumerate(names.values())}
        tracked = tf.train.Checkpoint(step=self._count, optimizer=optimizer, **variables)
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{os.fspath(folder)} cannot hold checkpoints: {error.strerror}") from error
        self._manager = tf.train.CheckpointManager(tracked, os.fspath(folder), max_to_keep=3)

    def restore(self) -> int:
        """Load the latest checkpoint, if there is one; the number of steps it had done."""
        if self._manager.latest_checkpoint is None:
            return 0
        try:
            status = self._manager.checkpoint.restore(self._manager.latest_checkpoint)
            status.assert_existing_objects_matched()
        except (AssertionError, ValueError, tf.errors.OpError) as error:
            raise UsageError(
                f"{self._manager.latest_checkpoint} cannot be loaded, being damaged or of another model or optimizer: "
                f"{error}"
            ) from error
        return int(self._count.numpy())

    def save(self, steps: int) -> str:
        """Save after ``steps`` steps; the path of the checkpoint."""
        self._count.assign(steps)
        return str(self._manager.save(checkpoint_number=steps))
