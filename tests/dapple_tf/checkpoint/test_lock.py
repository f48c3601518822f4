"""The lock of a checkpoint folder: which process holds it, what others are told, and how it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

from dapple_tf.checkpoint.checkpoints import Checkpoints, lock_folder
from dapple_tf.errors import CheckpointError, DappleWarning
from tests.dapple_tf.builders import X, step_of
from tests.paths import ROOT

HOLD = """
import os, sys, time
from pathlib import Path
from dapple_tf.checkpoint.checkpoints import lock_folder
lock = lock_folder(Path(sys.argv[1]))
if not sys.argv[2:]:
    print(0, flush=True)
elif os.fork() == 0:  # the child tells its number once its handlers of the fork have run
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def hold(folder: Path, *more: str) -> tuple[subprocess.Popen[str], int]:
    """Start a process that locks the folder; return it and the id of its child."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *more],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process, _ = hold(tmp_path)
    with process:
        yield process
        process.kill()


def test_a_second_run_fails_at_once_and_names_the_first(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    weight = tf.Variable(tf.ones((4, 1)))
    step = step_of(lambda x: tf.reduce_mean(tf.square(x @ weight)), stages=1)
    step.build(X)
    (tmp_path / "checkpoint-1.safetensors.123.part").touch()  # the other run is writing it
    who = re.escape(f"process {holder.pid} on {socket.gethostname()}")
    with pytest.raises(CheckpointError, match=rf"{tmp_path} is in use by another run, {who}: two would"):
        Checkpoints(tmp_path, step)
    assert (tmp_path / "checkpoint-1.safetensors.123.part").exists()
    assert lock_folder(tmp_path.parent) is not None  # another folder is free


def test_the_lock_ends_with_its_process_even_if_that_is_killed(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(CheckpointError):
        lock_folder(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    assert lock_folder(tmp_path) is not None


def test_a_child_that_outlives_its_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A worker of a data loader may outlive its parent."""
    parent, child = hold(tmp_path, "and fork")
    with parent:
        try:
            parent.kill()
            parent.wait(10)
            os.kill(child, 0)  # it is alive
            assert lock_folder(tmp_path) is not None
        finally:
            os.kill(child, signal.SIGKILL)


def test_all_users_of_a_folder_in_one_process_share_its_lock(tmp_path: Path) -> None:
    """It is released with the last of them."""
    one, other = lock_folder(tmp_path), lock_folder(tmp_path)
    assert one is not None
    assert one is other
    del other
    assert not is_free(tmp_path)
    del one
    assert is_free(tmp_path)


def is_free(folder: Path) -> bool:
    """Return whether another process could lock it; locks belong to open files, so a second open file tells."""
    with (folder / "lock").open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_without_locks_a_run_continues_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have no locks."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(DappleWarning, match="has no locks .No locks available.: make sure that no other run saves"):
        assert lock_folder(tmp_path) is None


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "folder"])
def test_what_is_no_lock_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    precious, path = tmp_path / "precious", tmp_path / "folder" / "lock"
    precious.write_text("keep")
    path.parent.mkdir()
    match kind:
        case "link":
            path.symlink_to(precious)
        case "link to nothing":
            path.symlink_to(tmp_path / "made")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
    with pytest.raises(CheckpointError, match="lock is a link or another thing, not a lock of dapple: remove it"):
        lock_folder(path.parent)
    assert precious.read_text() == "keep"
    assert not (tmp_path / "made").exists()
