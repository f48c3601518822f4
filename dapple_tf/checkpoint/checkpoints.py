"""Checkpoints that do not depend on stages or ranks: saved under one plan, they can be restored under any other.

A checkpoint holds the variables of the model and the optimizer by name (see ``variable_names``), including the states
of random generators, the number of steps done, and the number of batches taken from the data set. The learning rate is
a variable of the optimizer, so it is restored as it was saved.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from dapple_tf.checkpoint.content import Position, check_variables, read_position, read_value
from dapple_tf.checkpoint.file import CheckpointFile, DamagedError, can_store, open_checkpoint, write_checkpoint
from dapple_tf.checkpoint.names import NAME, checkpoint_name, list_checkpoints, steps_of
from dapple_tf.checkpoint.snapshots import SnapshotCosts, Snapshots
from dapple_tf.distributed import membership
from dapple_tf.distributed.variable_transfer import load_values, stream_values
from dapple_tf.errors import CheckpointError, warn_user
from dapple_tf.launcher.restart import read_start
from dapple_tf.messages import LOGGER
from dapple_tf.profiler.files import find_folder_problem
from dapple_tf.runtime.step import PipelinedStep

_PART = re.compile(NAME.pattern + r"\.[0-9]+\.part")
_KEPT = 2


class Checkpoints:
    """Saves and restores a training run in a folder, as ``checkpoint-<steps>.safetensors``; keeps the last two.

    In a job rank 0 reads and writes the files, so only rank 0 needs the folder; every rank must make the same calls. A
    run that is killed at any moment leaves a good checkpoint: a file is written completely before it gets its name, and
    older files are removed after that. The folder is locked for this process as long as the object exists.

    If the step has the option ``snapshot_every``, a snapshot is taken after each ``snapshot_every`` calls, when the
    next one begins, into the memory of the hosts (see ``snapshots``), and ``restore`` loads the last complete one if it
    is newer than the last file. Calls are counted from the last ``restore`` or ``save``, as one batch each. ``close``
    at the end of the run removes the snapshots. As a context manager the object removes them at the end of its block,
    but not after an error.

    Raises CheckpointError, on every rank, for a folder that cannot be written, that another run uses (the error names
    host and process) or that holds checkpoints of another kind, and for a variable of a dtype or shape that cannot be
    stored; UsageError for a step that has not been built (give it an ``example_batch``).
    """

    def __init__(self, folder: str | os.PathLike[str], step: PipelinedStep) -> None:
        self._folder = Path(folder)
        self._step = step
        self._job = membership.current()
        self._lock: _FolderLock | None = None
        for name, variable in step.variables.items():
            if not can_store(variable):
                raise CheckpointError(
                    f"variable {name!r} ({variable.dtype.name}, shape {variable.shape}) cannot be saved: a checkpoint "
                    "holds numbers and booleans of fixed shapes; keep the variable out of the loss"
                )
        self._job.announce_call("open a checkpoint folder")
        self._job.run_on_rank_0(self._open_folder)
        self._position = Position(0, 0)
        every = step.snapshot_every
        self._snapshots = None if every is None else Snapshots(step, self._job, self._folder, every)
        if self._snapshots is not None:
            step.before_training = self._note_call

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def close(self) -> None:
        """End the run, on every rank: remove its snapshots. The files of checkpoints stay."""
        if self._snapshots is not None:
            self._job.announce_call("remove the snapshots")
            self._snapshots.close()
            self._step.before_training = None
            self._snapshots = None

    @property
    def snapshot_costs(self) -> SnapshotCosts | None:
        """The cost so far of this run's snapshots for this rank; None if it takes no snapshots."""
        return None if self._snapshots is None else self._snapshots.costs

    def restore(self) -> Position:
        """Load the last good checkpoint or snapshot, and return the position that it was saved at; (0, 0) without one.

        A damaged file is renamed to ``*.damaged`` with a DappleWarning, and the one before it loaded. Raises
        CheckpointError if all files are damaged, or the last good one is of another model; then nothing has changed.
        """
        self._job.announce_call("restore a checkpoint")
        found = self._job.run_on_rank_0(self._choose_last)
        self._position = Position(0, 0) if found is None else found[1]
        if self._snapshots is not None:
            newer = self._snapshots.restore(self._position.steps)
            if newer is None and found is not None:
                self._load(found[0])
            self._position = newer or self._position
            self._snapshots.begin(self._position)
        elif found is not None:
            self._load(found[0])
        self._job.progress.step = self._position.steps
        self._note_saved(self._position.steps, f"in {self._position.origin}")
        return self._position

    def _load(self, file: CheckpointFile) -> None:
        load_values(self._job, self._step.variables, partial(read_value, file))

    def _note_call(self) -> None:
        if self._snapshots is not None:
            self._snapshots.note_step(self._position)
        self._position = Position(self._position.steps + 1, self._position.batches + 1)

    def save(self, steps: int, batches: int | None = None) -> str:
        """Save after ``steps`` steps and ``batches`` batches (default: ``steps``); return the path of the checkpoint.

        In a job rank 0 receives the variables of other ranks a few at a time, and keeps none. Raises CheckpointError,
        on every rank, if the file cannot be written or the folder has a checkpoint of a later step; earlier checkpoints
        stay.
        """
        self._job.announce_call(f"save a checkpoint after step {steps}")
        self._job.check_call_history()  # variables trained on different batches must not be saved
        position = Position(steps, steps if batches is None else batches)
        values = stream_values(self._job, list(self._step.variables.values()))
        if self._job.rank != 0:
            _consume(values)
        path = str(self._job.run_on_rank_0(lambda: self._write(position, values)))
        self._position = position
        self._note_saved(steps, f"as {path}")
        return path

    def _note_saved(self, steps: int, where: str) -> None:
        """Note what is saved, for the line that a rank prints when the job ends early."""
        unit = self._step.plan.training.words.unit
        said = f"{unit} {steps} is saved {where}" if steps else f"{self._folder} has no checkpoint yet"
        self._job.progress.saved = said

    # --- on rank 0

    def _open_folder(self) -> None:
        if problem := find_folder_problem(self._folder):
            raise CheckpointError(f"{self._folder} cannot hold checkpoints: {problem}", lasts=False)
        try:
            names = os.listdir(self._folder)
            self._check_names(names)
            self._lock = lock_folder(self._folder)
            for name in filter(_PART.fullmatch, names):  # left by a run that was killed
                (self._folder / name).unlink()
        except OSError as error:
            raise CheckpointError(f"{self._folder} cannot hold checkpoints: {error.strerror}", lasts=False) from error

    def _check_names(self, names: list[str]) -> None:
        others = sorted(name for name in names if re.fullmatch(r"ckpt-\d+\.index", name))
        if others and not any(map(NAME.fullmatch, names)):
            raise CheckpointError(
                f"{self._folder} holds checkpoints of tf.train.Checkpoint ({others[-1]}), which have other names for "
                "variables: give another folder"
            )

    def _choose_last(self) -> tuple[CheckpointFile, Position] | None:
        try:
            return self._find_last()
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or self._folder} cannot be read: {error.strerror}", lasts=False
            ) from error

    def _find_last(self) -> tuple[CheckpointFile, Position] | None:
        """Return the last good checkpoint and its position; rename later ones, which are damaged."""
        paths = list_checkpoints(self._folder)
        damaged: list[DamagedError] = []
        for path in reversed(paths):
            try:
                found = open_checkpoint(path)
                position = read_position(found)
            except DamagedError as error:
                damaged.append(error)
                continue
            check_variables(found, self._step.variables)
            for damage in damaged:
                warn_user(f"{damage}. It is renamed to *.damaged; continuing from {path}")
            for later in paths[paths.index(path) + 1 :]:
                os.replace(later, later.with_name(f"{later.name}.damaged"))
            return found, position
        if damaged:
            raise CheckpointError(
                f"{'; '.join(map(str, damaged))}. No good checkpoint is left: give another folder to start from the "
                "beginning"
            )
        return None

    def _write(self, position: Position, values: Iterator[Any]) -> Path:
        path = self._folder / checkpoint_name(position.steps)
        metadata = position.to_metadata()
        try:
            known = sorted({*list_checkpoints(self._folder), path}, key=steps_of)
            if known[-1] != path:
                raise CheckpointError(
                    f"{self._folder} already has {known[-1].name}, of a later step than {position.steps}: restore it "
                    "first, or give another folder",
                    lasts=False,
                )
            check = None if self._lock is None else self._lock.check
            write_checkpoint(path, self._step.variables, values, metadata, check)
            for old in known[:-_KEPT]:
                old.unlink()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error.strerror}", lasts=False) from error
        finally:
            _consume(values)  # the other ranks send all of them
        return path


def _consume(values: Iterator[Any]) -> None:
    for _ in values:
        pass


# --- Lock a folder of checkpoints, so that one run at a time uses it
# The lock is the kernel's, on a file in the folder: it ends with the process that took it, however that ends.


_LOCK = "lock"
_STARTED = re.compile(r", start (?P<number>[0-9]{1,9}) of launch (?P<launch>[0-9a-f]+)$")

# By device and inode of the file: all users of a folder in this process share one lock, released with the last of them.
# Like the kernel's locks these belong to the process.
_LOCKS: weakref.WeakValueDictionary[tuple[int, int], _FolderLock] = weakref.WeakValueDictionary()


class _FolderLock:
    """The lock of the folder at ``path``, held by this process until the object is deleted or the process ends.

    ``holder``: what the file says while this process is the one that may write.
    """

    def __init__(self, path: Path, descriptor: int, holder: str) -> None:
        self._path, self._holder = path, holder
        self.release = weakref.finalize(self, os.close, descriptor)

    def check(self) -> None:
        """Raise CheckpointError where another process has taken the folder over, while this one was away."""
        with contextlib.suppress(OSError):
            if (found := self._path.read_text(encoding="utf-8", errors="replace").strip()) != self._holder:
                raise CheckpointError(
                    f"{self._path.parent} was taken over by {found or 'another process'}, a later start of the job: "
                    "this process was away for too long, and must not write there any more",
                    lasts=False,
                )


def lock_folder(folder: Path) -> _FolderLock | None:
    """Lock ``folder`` for this process; return None, with a DappleWarning, if its file system has no locks.

    A later start by the same ``dapple launch`` takes the lock over from a process that is away and still holds it, such
    as one that is stopped, or whose host is cut off; that one writes no more when it is back. Raises CheckpointError
    naming the process that holds the lock and its host, or where the lock is no regular file (a link's target would be
    overwritten), OSError if the folder cannot be written.
    """
    path = folder / _LOCK
    descriptor = _open_lock(path)
    found = os.fstat(descriptor)
    key = found.st_dev, found.st_ino
    held = _LOCKS.get(key)
    if held is not None:
        os.close(descriptor)
        return held
    start = read_start()
    launched = "" if start is None else f", start {start.number} of launch {start.launch}"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 300, 0).decode(errors="replace").strip() or "another process"
        before = _STARTED.search(holder)
        if start is None or before is None or before["launch"] != start.launch or int(before["number"]) >= start.number:
            os.close(descriptor)
            raise CheckpointError(
                f"{folder} is in use by another run, {holder}: two would overwrite each other's checkpoints. Wait for "
                "it, end it, or give another folder",
                lasts=False,
            ) from None
        LOGGER.warning("%s is taken over from %s, which is away", folder, holder)
    except OSError as error:
        os.close(descriptor)
        warn_user(
            f"the file system of {folder} has no locks ({error.strerror}): make sure that no other run saves there"
        )
        return None
    holder = f"process {os.getpid()} on {socket.gethostname()}{launched}"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{holder}\n".encode(), 0)
    lock = _FolderLock(path, descriptor, holder)
    _LOCKS[key] = lock
    return lock


def _open_lock(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR):
            raise
    raise CheckpointError(f"{path} is a link or another thing, not a lock of dapple: remove it, or give another folder")


def _release_all() -> None:
    """Release all locks in a forked child, which may outlive its parent: they belong to the parent."""
    for lock in list(_LOCKS.values()):
        lock.release()
    _LOCKS.clear()


os.register_at_fork(after_in_child=_release_all)
