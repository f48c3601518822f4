"""Adapt the callbacks of ``fit`` to a job: rank 0 prints and writes; values are gathered before they are read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from dapple_tf import internals
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.shared_errors import share_error
from dapple_tf.errors import JobError, UsageError

# Callbacks that only write: they run on rank 0.
_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
# Callbacks that read no weights, or read them by methods of the model that gather them first.
_NO_READERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TerminateOnNaN,
)
# What to do without the callbacks of Horovod, which are for ranks that each train a copy of the model.
_HOROVOD = {
    "BroadcastGlobalVariablesCallback": "all ranks begin with the variables of rank 0",
    "MetricAverageCallback": "metrics are those of the whole batch on every rank",
    "LearningRateScheduleCallback": "give keras.callbacks.LearningRateScheduler",
    "LearningRateWarmupCallback": "give keras.callbacks.LearningRateScheduler, with the learning rate of one device",
}


class GatherValues(keras.callbacks.Callback):  # type: ignore[misc]  # keras is not typed
    """Gathers the trained values before callbacks that may read or write them.

    It does so when training begins, and when an epoch, an evaluation or a prediction begins or ends.
    ``before_epoch`` is called before an epoch. This must be the first callback, on every rank.
    """

    def __init__(self, gather: Callable[[], None], before_epoch: Callable[[], None], reads: bool) -> None:
        super().__init__()
        self._gather = gather
        self._before_epoch = before_epoch
        self._reads = reads

    def on_train_begin(self, logs: Any = None) -> None:
        self._gather_if_read()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before_epoch()
        self._gather_if_read()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._gather_if_read()

    def on_test_begin(self, logs: Any = None) -> None:
        self._gather_if_read()

    def on_test_end(self, logs: Any = None) -> None:
        self._gather_if_read()

    def on_predict_begin(self, logs: Any = None) -> None:
        self._gather_if_read()

    def on_predict_end(self, logs: Any = None) -> None:
        self._gather_if_read()

    def _gather_if_read(self) -> None:
        if self._reads:
            self._gather()


def reads_values(callbacks: Sequence[Any], model: keras.Model) -> bool:
    """Return whether a callback, or the end of ``fit``, may read variables that other ranks hold."""
    return _finalizes(model.optimizer) or any(_reads(callback) for callback in callbacks)


def _finalizes(optimizer: Any) -> bool:
    """Return whether the optimizer, or one inside of it, writes variables at the end of ``fit``."""
    inner = [*getattr(optimizer, "optimizers", ()), *filter(None, [getattr(optimizer, "inner_optimizer", None)])]
    if any(map(_finalizes, inner)):
        return True
    own = not internals.is_of_keras(optimizer.finalize_variable_values)
    return own or bool(optimizer.use_ema)


def check_callbacks(callbacks: Sequence[Any], method: str, job: Job) -> None:
    """Raise JobError on every rank if the callbacks of ``method`` differ between ranks, and UsageError for Horovod's.

    Callbacks that only write may be missing on some ranks: they run on rank 0. Every rank must call this.
    """
    compared = [callback for callback in callbacks if not isinstance(callback, _WRITERS)]
    own = [(type(callback).__name__, _is_of_horovod(callback)) for callback in compared]
    found = job.gather(own)
    kinds = dict.fromkeys(kind for of_rank in found for kind in of_rank)
    for kind in kinds:
        name, of_horovod = kind
        if of_horovod:
            advice = _HOROVOD.get(name, "the ranks of a pipeline train one model, and need none")
            raise share_error(UsageError(f"leave Horovod's {name} out of the callbacks of {method}: {advice}"), 0)
        most = max(of_rank.count(kind) for of_rank in found)
        ranks = [rank for rank, of_rank in enumerate(found) if of_rank.count(kind) == most]
        if len(ranks) < job.size:
            where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
            raise share_error(
                JobError(
                    f"{name} is among the callbacks of {method} on {where} only: add it on every rank (rank 0 alone "
                    "prints and writes)"
                ),
                0,
            )
    job.agree(f"order of the callbacks of {method}", ", ".join(name for name, _ in own))


def _is_of_horovod(callback: Any) -> bool:
    return any(base.__module__.split(".")[0] == "horovod" for base in type(callback).__mro__)


def _reads(callback: Any) -> bool:
    if type(callback) is keras.callbacks.TensorBoard:
        return bool(callback.histogram_freq)
    return type(callback) not in _NO_READERS and not getattr(callback, "reads_no_values", False)


@contextlib.contextmanager
def adapted(callbacks: Sequence[Any], model: keras.Model, job: Job) -> Iterator[list[Any]]:
    """Return a context with the callbacks that this rank runs, changed inside of it as a rank of ``job`` needs."""
    kept = [callback for callback in callbacks if job.rank == 0 or not isinstance(callback, _WRITERS)]
    with contextlib.ExitStack() as stack:
        for callback in kept:
            if job.rank:
                _replace(stack, callback, verbose=0)
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                _share_backup(stack, callback, model, job)
            if job.rank and isinstance(callback, keras.callbacks.ModelCheckpoint):
                # Only rank 0 writes. Keras makes the folder of the path, so other ranks get a path without one.
                _replace(stack, callback, filepath=os.path.basename(callback.filepath))
        yield kept


def _share_backup(stack: contextlib.ExitStack, callback: Any, model: keras.Model, job: Job) -> None:
    """Have rank 0 alone read and write the backup; the others get its weights and its epoch."""
    path = internals.backup_path(callback)
    load_here, end_here = getattr(callback, internals.BACKUP_LOAD), callback.on_train_end

    def load() -> None:
        exists = job.broadcast(os.path.exists(path))
        if job.rank == 0:
            load_here()
        elif exists:
            model.load_weights(path)
        internals.set_initial_epoch(model, job.broadcast(internals.initial_epoch(model)))

    def end(logs: Any = None) -> None:
        job.run_on_rank_0(lambda: end_here(logs) and None)  # it deletes the backup

    _replace(stack, callback, **{internals.BACKUP_LOAD: load, "on_train_end": end})
    if job.rank:
        _replace(stack, callback, **{internals.BACKUP_SAVE: lambda: model.save_weights(path, overwrite=True)})


def _replace(stack: contextlib.ExitStack, callback: Any, **attributes: Any) -> None:
    """Set those of the ``attributes`` that the callback has, until the end of ``stack``."""
    for name, value in attributes.items():
        if not hasattr(callback, name):
            continue
        if name in vars(callback):
            stack.callback(setattr, callback, name, vars(callback)[name])
        else:
            stack.callback(delattr, callback, name)
        setattr(callback, name, value)
