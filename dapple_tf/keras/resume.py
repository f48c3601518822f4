"""``dapple.keras.SaveAndResume``: save during ``fit``, and go on with the batch after the last saved one."""

from __future__ import annotations

import os
import time
from typing import Any

import keras
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.checkpoint.checkpoints import Checkpoints
from dapple_tf.distributed import membership
from dapple_tf.distributed.exit_reporting import end_for_more_ranks
from dapple_tf.errors import UsageError
from dapple_tf.keras.install import installed_in
from dapple_tf.messages import LOGGER
from dapple_tf.runtime.growth import Growth


class SaveAndResume(keras.callbacks.Callback):  # type: ignore[misc]  # keras is not typed
    """Saves checkpoints in ``folder`` during ``fit``, at the end of each epoch and after each ``every`` batches.

    ``fit`` then begins with the epoch and the batch that follow the last checkpoint, or the last snapshot if the
    pipeline has the option ``snapshot_every``. Batches of that epoch that were trained on before are read but not
    trained on, so that none is trained on twice or left out; give the same data and seeds. Callbacks are called for
    these batches too; metrics of the epoch are computed without them. The end of ``fit`` removes the snapshots. If
    ``dapple launch`` offers more ranks, an elastic job decides at the end of an epoch whether it is started again with
    them.

    The model must have a pipeline with an ``example_batch``, and its data a known number of batches. In a job every
    rank needs the callback. Raises UsageError if one of these is missing, and the errors of ``dapple.Checkpoints``.
    """

    reads_no_values = True  # Checkpoints fetches the values that it saves

    def __init__(self, folder: str | os.PathLike[str], every: int | None = None) -> None:
        super().__init__()
        if every is not None and every < 1:
            raise UsageError(f"every={every}: give a number of batches, at least 1, or None for the end of each epoch")
        self._folder = folder
        self._every = every
        self._checkpoints: Checkpoints | None = None
        self._growth: Growth | None = None
        self._epoch = self._saved = 0
        self._begun = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the last saved state, and make ``fit`` go on from there."""
        installed = installed_in(self.model)
        if self.params.get("steps") is None:
            raise UsageError(
                "SaveAndResume needs the number of batches of an epoch, which the data do not say: give "
                "data.apply(tf.data.experimental.assert_cardinality(batches)), or steps_per_epoch"
            )
        if not installed.step.built:
            raise UsageError(
                "SaveAndResume restores the state before the first batch: give dapple.keras.pipeline an example_batch, "
                "such as (x[:n], y[:n]) for batches of n samples"
            )
        job = membership.current()
        self._checkpoints = Checkpoints(self._folder, installed.step)
        position = self._checkpoints.restore()
        self._saved = position.batches
        epoch, batch = divmod(position.batches, self._batches)
        if position.batches:
            internals.set_initial_epoch(self.model, epoch)
            self._pass_over(epoch, batch)
            if job.rank == 0:
                LOGGER.info("fit goes on with epoch %d, batch %d, from %s", epoch + 1, batch + 1, position.origin)
        if installed.step.is_elastic:
            tell = LOGGER.info if job.rank == 0 else (lambda text: None)
            self._growth = Growth(installed.step, job, tell)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note when the batch began."""
        self._begun = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save where a checkpoint is due."""
        if self._growth is not None:
            self._growth.note_step(time.perf_counter() - self._begun)
        done = self._epoch * self._batches + batch + 1
        if self._every is not None and done - self._saved >= self._every:
            self._save(done)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save; end an elastic job that goes on with more ranks."""
        done = (epoch + 1) * self._batches
        if done > self._saved:
            self._save(done)
        left = self.params["epochs"] * self._batches - done
        if left > 0 and self._growth is not None and self._growth.wants_more_ranks(left):
            end_for_more_ranks(membership.current())

    def on_train_end(self, logs: Any = None) -> None:
        """Remove the snapshots."""
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None
        internals.set_initial_epoch(self.model, None)

    @property
    def _batches(self) -> int:
        """The batches of an epoch."""
        return int(self.params["steps"])

    def _save(self, done: int) -> None:
        assert self._checkpoints is not None, "made when training began"
        self._checkpoints.save(done)
        self._saved = done

    def _pass_over(self, epoch: int, batch: int) -> None:
        """Make ``fit`` read the data of earlier epochs, and the first ``batch`` batches of this one, without training.

        Each iterator may shuffle a data set in another order, so as many iterators are made as the earlier epochs made.
        With ``steps_per_epoch`` all epochs use one iterator, and the batches of the earlier ones are taken from it.
        """
        loops, (data, steps_per_epoch) = installed_in(self.model).loops, installed_in(self.model).fit_data
        assert loops is not None, "made with the pipeline"
        whole = isinstance(data, tf.data.Dataset)
        if isinstance(data, keras.utils.PyDataset):
            raise UsageError("SaveAndResume cannot know in which order a PyDataset gives its batches: give a data set")
        if steps_per_epoch is None:
            for _ in range(internals.ITERATORS_OF_AN_EPOCH * epoch if whole else 0):
                iter(data)
        elif whole and data.cardinality() != tf.data.INFINITE_CARDINALITY:
            raise UsageError(
                "SaveAndResume with steps_per_epoch and data that end, which begin again somewhere in an epoch: repeat "
                "the data, or leave steps_per_epoch out"
            )
        else:
            loops.passed_over = epoch * self._batches
        loops.skipped = batch
