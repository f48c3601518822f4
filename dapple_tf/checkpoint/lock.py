"""A folder of checkpoints belongs to one run at a time.

The kernel holds the lock on a file in the folder for as long as a process that took it lives, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import socket
import warnings
import weakref
from pathlib import Path

from dapple_tf.errors import CheckpointError, DappleWarning

NAME = "lock"

# By device and inode of the file: all who use a folder in this process share one lock, which goes with the last.
_HELD: weakref.WeakValueDictionary[tuple[int, int], FolderLock] = weakref.WeakValueDictionary()


class FolderLock:
    """The lock of a folder, held by this process until the object goes, or the process ends."""

    def __init__(self, descriptor: int) -> None:
        self.let_go = weakref.finalize(self, os.close, descriptor)


def lock_folder(folder: Path) -> FolderLock | None:
    """Take the lock of ``folder`` for this process; None, with a DappleWarning, where its file system has no locks.

    Raises CheckpointError naming the host and the process that hold it, OSError where the folder cannot be written.
    """
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    found = os.fstat(descriptor)
    key = found.st_dev, found.st_ino
    held = _HELD.get(key)
    if held is not None:
        os.close(descriptor)
        return held
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 300, 0).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise CheckpointError(
            f"{folder} is in use by another run, {holder}: two would overwrite each other's checkpoints. Wait for it, "
            "end it, or give another folder"
        ) from None
    except OSError as error:
        os.close(descriptor)
        warnings.warn(
            f"the file system of {folder} has no locks ({error.strerror}): see to it that no other run saves there",
            DappleWarning,
            stacklevel=4,
        )
        return None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    lock = FolderLock(descriptor)
    _HELD[key] = lock
    return lock


def _let_go_of_all() -> None:
    """In a forked child, which may outlive its parent: the lock is the parent's alone."""
    for lock in list(_HELD.values()):
        lock.let_go()
    _HELD.clear()


os.register_at_fork(after_in_child=_let_go_of_all)
