"""Snapshots in the memory of a host: what is restored from them, when they are not used, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.checkpoint import host_memory
from dapple_tf.checkpoint.checkpoints import Checkpoints
from dapple_tf.checkpoint.content import Position
from dapple_tf.distributed.buddies import choose_buddies
from dapple_tf.errors import CheckpointError, PlanError
from dapple_tf.launcher.restart import Start
from tests.dapple_tf.builders import X, step_of


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in place of /dev/shm."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("DAPPLE_SNAPSHOT_DIR", str(folder))
    return folder


def make_step(every: int | None = 2, *, rows: int = 3, **options: Any) -> Any:
    """Return a step that was built; without ``every`` it takes no snapshots."""
    first = tf.Variable(tf.ones((4, rows)), name="first")
    second = tf.Variable(tf.ones((rows, 1)), name="second")

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(tf.tanh(x @ first) @ second))

    step = step_of(loss, optimizer=keras.optimizers.Adam(0.1), snapshot_every=every, **options)
    step.build(X)
    return step


def parts_in(memory: Path) -> list[int]:
    """Return the steps of the snapshots in the memory."""
    return sorted(int(path.name.split("-")[1]) for path in memory.rglob("snapshot-*.st"))


def wait_for(saving: Checkpoints, memory: Path, steps: int) -> None:
    """Wait for the snapshot after this number of steps, which a thread writes, and until none is being written."""
    end, costs = time.monotonic() + 30, saving.snapshot_costs
    while steps not in parts_in(memory) or len(costs.beside) < costs.taken:
        assert time.monotonic() < end, (parts_in(memory), costs)
        time.sleep(0.01)  # the thread notes that it is done; no event says so


def train(step: Any, saving: Checkpoints, memory: Path, count: int, done: int = 0, every: int = 2) -> list[float]:
    """Train ``count`` steps, and return their losses; wait after each step for the snapshot taken before it."""
    losses = []
    for number in range(done, done + count):
        losses.append(float(step(X)))
        if number and number % every == 0:
            wait_for(saving, memory, number)
    return losses


def start_and_train(folder: Path, memory: Path, count: int = 3) -> tuple[Any, Checkpoints]:
    """Begin a run that saves in ``folder``, and train ``count`` steps."""
    run = make_step()
    saving = Checkpoints(folder, run)
    saving.restore()
    train(run, saving, memory, count)
    return run, saving


def expected_losses(count: int) -> list[float]:
    step = make_step(None)
    return [float(step(X)) for _ in range(count)]


@pytest.mark.always  # the quick one of the runs that are resumed from a snapshot
def test_a_run_goes_on_bit_by_bit_from_its_last_snapshot(tmp_path: Path, memory: Path) -> None:
    run = make_step()
    saving = Checkpoints(tmp_path / "run", run)
    assert saving.restore() == Position(0, 0)
    losses = train(run, saving, memory, 2)
    saving.save(2)
    losses += train(run, saving, memory, 3, done=2)
    assert parts_in(memory) == [2, 4]  # not removed before the next one begins

    again = make_step(stages=2)
    saving = Checkpoints(tmp_path / "run", again)
    resumed = saving.restore()
    assert resumed == Position(4, 4)
    assert resumed.origin.startswith("the memory of ")
    assert set(parts_in(memory)) == {4}  # the one that was restored, and its copy by this job
    assert losses[:4] + train(again, saving, memory, 3, done=4) == expected_losses(7)


def test_a_file_that_is_newer_is_restored(tmp_path: Path, memory: Path) -> None:
    _, saving = start_and_train(tmp_path / "run", memory)
    saving.save(3, batches=7)
    resumed = Checkpoints(tmp_path / "run", make_step()).restore()
    assert resumed == Position(3, 7)
    assert resumed.origin == str(tmp_path / "run")


def test_steps_are_counted_from_what_was_saved(tmp_path: Path, memory: Path) -> None:
    run = make_step()
    saving = Checkpoints(tmp_path / "run", run)
    saving.restore()
    run(X)
    saving.save(11, batches=5)
    run(X)
    run(X)
    wait_for(saving, memory, 12)
    assert Checkpoints(tmp_path / "run", make_step()).restore() == Position(12, 6)


def test_a_damaged_snapshot_is_left_out(tmp_path: Path, memory: Path, capsys: Any) -> None:
    start_and_train(tmp_path / "run", memory, 5)
    (last,) = memory.rglob("snapshot-4-*")
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    assert Checkpoints(tmp_path / "run", make_step()).restore() == Position(2, 2)
    assert "snapshot after step 4: part 0 is damaged on a host" in capsys.readouterr().err


def test_a_snapshot_whose_parts_are_not_all_there_is_left_out(tmp_path: Path, memory: Path) -> None:
    start_and_train(tmp_path / "run", memory)
    (part,) = memory.rglob("snapshot-2-*")
    part.rename(part.with_name(part.name.replace("-0-of-1", "-1-of-2")))
    assert Checkpoints(tmp_path / "run", make_step()).restore() == Position(0, 0)


def test_the_end_of_a_run_removes_its_snapshots(tmp_path: Path, memory: Path) -> None:
    run = make_step()
    with Checkpoints(tmp_path / "run", run) as saving:
        saving.restore()
        train(run, saving, memory, 3)
        assert str(saving.snapshot_costs).startswith("a snapshot every 2 steps: 1 taken; each held up training for ")
    assert not list(memory.rglob("*.st"))
    run(X)  # takes none any more
    with pytest.raises(ValueError, match="of the run"):
        fail_in_run(tmp_path / "run", memory)
    assert parts_in(memory) == [2]


def fail_in_run(folder: Path, memory: Path) -> None:
    run = make_step()
    with Checkpoints(folder, run) as saving:
        saving.restore()
        train(run, saving, memory, 3)
        raise ValueError("of the run")


def test_variables_that_are_not_finite_are_in_no_snapshot(tmp_path: Path, memory: Path) -> None:
    run, _ = start_and_train(tmp_path / "run", memory)
    bad = tf.fill(X.shape, np.nan)
    run(tf.cast(bad, X.dtype))
    run(X)
    run(X)
    run(X)
    time.sleep(0.2)  # for a thread that would write
    assert parts_in(memory) == [2]
    assert Checkpoints(tmp_path / "run", make_step()).restore() == Position(2, 2)


def test_a_snapshot_of_another_model_is_refused(tmp_path: Path, memory: Path) -> None:
    start_and_train(tmp_path / "run", memory)
    other = Checkpoints(tmp_path / "run", make_step(rows=5))
    with pytest.raises(CheckpointError, match=r"the snapshot after step 2 has 'first' as float32 \[4, 3\], but here"):
        other.restore()


def test_snapshots_of_a_folder_that_is_new_are_not_used_unasked(tmp_path: Path, memory: Path) -> None:
    folder = tmp_path / "run"
    start_and_train(folder, memory)
    identity = (folder / "run-id").read_text()
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"has snapshots of a run that saved in .*/run, where no file run-id nam"):
        Checkpoints(folder, make_step())
    (folder / "run-id").write_text(identity)
    assert Checkpoints(folder, make_step()).restore() == Position(2, 2)
    (folder / "run-id").write_text("0123456789abcdef\n")  # of another run that saves there now
    assert Checkpoints(folder, make_step()).restore() == Position(0, 0)
    assert not parts_in(memory)


def test_snapshots_under_a_launcher_are_found_without_the_folder(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAPPLE_LAUNCH", Start(0, launch="abcdef").to_text())
    start_and_train(tmp_path / "run", memory)
    shutil.rmtree(tmp_path / "run")  # it was on the host of rank 0, which is lost
    monkeypatch.setenv("DAPPLE_LAUNCH", Start(1, launch="abcdef").to_text())
    assert Checkpoints(tmp_path / "run", make_step()).restore() == Position(2, 2)


def test_snapshots_outlive_launches_that_fail_before_they_take_one(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAPPLE_LAUNCH", Start(0, launch="aa").to_text())
    start_and_train(tmp_path / "run", memory)
    for start in (Start(0, launch="bb"), Start(1, launch="bb"), Start(0, launch="cc")):
        monkeypatch.setenv("DAPPLE_LAUNCH", start.to_text())
        with pytest.raises(CheckpointError, match="the snapshot after step 2 has 'first' as float32"):
            Checkpoints(tmp_path / "run", make_step(rows=5)).restore()
    monkeypatch.setenv("DAPPLE_LAUNCH", Start(0, launch="dd").to_text())
    assert Checkpoints(tmp_path / "run", make_step()).restore() == Position(2, 2)


@pytest.mark.usefixtures("memory")
def test_a_folder_in_place_of_the_name_of_the_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "run-id").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"run/run-id cannot be read or written: Is a directory"):
        Checkpoints(tmp_path / "run", make_step())


def test_a_memory_that_is_too_small_is_refused(tmp_path: Path, memory: Path) -> None:
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(memory)], check=False, capture_output=True
    ).returncode:
        pytest.skip("mounting needs root")
    try:
        with pytest.raises(CheckpointError, match=r"snapshots need 0 MB .* leave snapshot_every out") as raised:
            Checkpoints(tmp_path / "run", make_step(rows=2000)).restore()
        assert not raised.value.lasts, "another run may have left the memory by the next start"
    finally:
        subprocess.run(["umount", str(memory)], check=True)


@pytest.mark.parametrize("how", ["a file", "a link"])
def test_a_folder_in_memory_that_is_not_the_users_own_is_refused(tmp_path: Path, memory: Path, how: str) -> None:
    place = host_memory._memory_folder()
    place.rmdir()
    if how == "a file":
        place.write_text("")
    else:
        place.symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot hold snapshots: File exists|belongs to another user"):
        Checkpoints(tmp_path / "run", make_step())


def test_a_missing_folder_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAPPLE_SNAPSHOT_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"nowhere cannot hold snapshots: No such file"):
        Checkpoints(tmp_path / "run", make_step())


@pytest.mark.parametrize("given", [0, -3, True, 2.5, "10"])
def test_the_interval_is_a_number_of_steps(given: Any) -> None:
    with pytest.raises(PlanError, match=r"snapshot_every=.*: give a number of steps, at least 1, or None"):
        make_step(given)


def test_each_rank_has_its_buddy_on_the_next_host() -> None:
    assert choose_buddies(["a", "a"]) == (None, None)
    assert choose_buddies(["a", "b"]) == (1, 0)
    assert choose_buddies(["a", "a", "b", "b", "c"]) == (2, 3, 4, 4, 0)
    for hosts in (["a", "b", "b", "b"], ["a", "a", "a", "b"], ["a", "b", "a", "c"]):
        assert all(
            hosts[one] != host for host, one in zip(hosts, choose_buddies(hosts), strict=True) if one is not None
        )


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAPPLE_LAUNCH", raising=False)
