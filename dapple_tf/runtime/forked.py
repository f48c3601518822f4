"""Refuse to run in a forked child of a process in which TensorFlow had started.

The child has none of TensorFlow's threads, and a step would wait for them forever.
"""

from __future__ import annotations

import os

from dapple_tf import internals
from dapple_tf.errors import UsageError

# The process from which this one was forked after TensorFlow had started there; empty if there is none.
_parents: list[int] = []


def _note_fork() -> None:
    if internals.tensorflow_has_started():
        _parents.append(os.getppid())


os.register_at_fork(after_in_child=_note_fork)


def check_not_forked() -> None:
    """Raise UsageError in a process that was forked after TensorFlow had started."""
    if _parents:
        raise UsageError(
            f"process {os.getpid()} was forked from process {_parents[-1]}, in which TensorFlow had started: its "
            "threads do not exist here, and a step would never end. Start processes anew (multiprocessing's 'spawn' or "
            "'forkserver'), or fork before anything of TensorFlow runs"
        )
