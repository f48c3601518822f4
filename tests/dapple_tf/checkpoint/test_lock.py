"""The lock of a checkpoint folder: which process holds it, what others are told, and how it ends."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
import tensorflow as tf

from dapple_tf.checkpoint.checkpoints import Checkpoints, lock_folder
from dapple_tf.errors import CheckpointError, DappleWarning
from dapple_tf.launcher.restart import Start
from tests.dapple_tf.builders import X, step_of
from tests.paths import ROOT


def hold(folder: Path, to_parent: Connection) -> None:
    """Lock the folder, start a child, send its id, and stay."""
    lock = lock_folder(folder)
    assert lock is not None
    if os.fork() == 0:  # the child sends its id once its handlers of the fork have run
        to_parent.send(os.getpid())
    time.sleep(60)  # longer than any test: the fixture ends both processes


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[ForkProcess, int]]:
    """Return a process that holds the lock of the folder, and the id of its child."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path, there))
    process.start()
    child = here.recv()
    yield process, child
    os.kill(child, signal.SIGKILL)
    process.kill()
    process.join()


@pytest.mark.always  # the only test of a lock that another process holds
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_second_run_is_refused_until_the_first_is_killed_even_if_a_child_of_the_first_goes_on(
    tmp_path: Path, holder: tuple[ForkProcess, int]
) -> None:
    """A worker of a data loader may outlive its parent."""
    process, child = holder
    weight = tf.Variable(tf.ones((4, 1)))
    step = step_of(lambda x: tf.reduce_mean(tf.square(x @ weight)), stages=1)
    step.build(X)
    (tmp_path / "checkpoint-1.safetensors.123.part").touch()  # the first run is writing it
    who = re.escape(f"process {process.pid} on {socket.gethostname()}")
    with pytest.raises(CheckpointError, match=rf"{tmp_path} is in use by another run, {who}: two would"):
        Checkpoints(tmp_path, step)
    assert (tmp_path / "checkpoint-1.safetensors.123.part").exists()
    assert lock_folder(tmp_path.parent) is not None  # another folder is free

    process.kill()
    process.join()  # with a timeout it would wait for the child, which inherits its sentinel
    os.kill(child, 0)  # it is alive
    assert lock_folder(tmp_path) is not None


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


AWAY = """
import sys
import tensorflow as tf
import dapple_tf as dapple
dapple.init(1)
weight = tf.Variable(tf.ones((4, 1)))
step = dapple.pipeline(lambda x: tf.reduce_mean(tf.square(x @ weight)), optimizer="sgd", stages=1)
step.build(tf.ones((8, 4)))
checkpoints = dapple.Checkpoints(sys.argv[1], step)
print("opened", flush=True)
sys.stdin.readline()
try:
    checkpoints.save(7)
except dapple.errors.CheckpointError as error:
    print(error, flush=True)
"""


@pytest.mark.always  # the only test of two writers
def test_a_writer_that_was_away_is_fenced_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The later start takes the folder over, and what the earlier one then wants to write is refused."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DAPPLE_LAUNCH": Start(0, launch="ab12").to_text(),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    with subprocess.Popen(
        [sys.executable, "-c", AWAY, str(tmp_path)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as away:
        try:
            assert away.stdout.readline() == "opened\n"
            away.send_signal(signal.SIGSTOP)
            monkeypatch.setenv("DAPPLE_LAUNCH", Start(1, launch="cd34").to_text())  # of another launch
            with pytest.raises(CheckpointError, match=r"in use by another run, .*, start 0 of launch ab12"):
                lock_folder(tmp_path)
            monkeypatch.setenv("DAPPLE_LAUNCH", Start(1, launch="ab12").to_text())
            lock = lock_folder(tmp_path)
            away.send_signal(signal.SIGCONT)
            told, _ = away.communicate("save\n", timeout=60)
            assert f"{tmp_path} was taken over by process {os.getpid()} on" in told
            assert "must not write there any more" in told
            assert [path.name for path in tmp_path.iterdir()] == ["lock"]
            lock.check()
        finally:
            away.kill()
