"""Lock a folder of checkpoints, so that one run at a time uses it.

The lock is the kernel's, on a file in the folder: it ends with the process that took it, however that ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import warnings
import weakref
from pathlib import Path

from dapple_tf.errors import CheckpointError, DappleWarning

NAME = "lock"

# By device and inode of the file: all users of a folder in this process share one lock, released with the last of them.
# Like the kernel's locks these belong to the process.
_LOCKS: weakref.WeakValueDictionary[tuple[int, int], FolderLock] = weakref.WeakValueDictionary()


class FolderLock:
    """The lock of a folder, held by this process until the object is deleted or the process ends."""

    def __init__(self, descriptor: int) -> None:
        self.release = weakref.finalize(self, os.close, descriptor)


def lock_folder(folder: Path) -> FolderLock | None:
    """Lock ``folder`` for this process; return None, with a DappleWarning, if its file system has no locks.

    Raises CheckpointError naming the process that holds the lock and its host, or where the lock is no regular file (a
    link's target would be overwritten), OSError if the folder cannot be written.
    """
    descriptor = _open_lock(folder / NAME)
    found = os.fstat(descriptor)
    key = found.st_dev, found.st_ino
    held = _LOCKS.get(key)
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
            f"the file system of {folder} has no locks ({error.strerror}): make sure that no other run saves there",
            DappleWarning,
            stacklevel=4,
        )
        return None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    lock = FolderLock(descriptor)
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
