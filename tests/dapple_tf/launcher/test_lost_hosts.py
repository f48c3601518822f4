"""Whole hosts are lost under ``dapple launch``: the job goes on from the memory of the hosts that are left."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.named_hosts import NamedHosts, find_missing_for_names, named_hosts
from dapple_tf.checkpoint.checkpoints import Checkpoints
from tests.dapple_tf.builders import step_of
from tests.dapple_tf.distributed.programs.checkpoint_model import chain
from tests.dapple_tf.distributed.train_command import saving_in, train_arguments
from tests.paths import ROOT
from tests.processes import environment_without_launchers, needs_horovod

_MISSING = find_missing_for_names()
pytestmark = [needs_horovod, pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))]

STEPS, EVERY = 240, 10
COMPARED = 12  # steps: later ones differ by more, since each repeats the rounding of those before


@pytest.fixture
def hosts() -> Iterator[NamedHosts]:
    with named_hosts(["nodea", "nodeb", "nodec"]) as emulated:
        yield emulated


def run_while(
    hosts: NamedHosts, slots: dict[str, int], command: list[str], happens: Callable[[], None], *options: str
) -> tuple[int, str, str]:
    """Launch a command on the hosts, let something happen to them; return the exit code, stdout and stderr."""
    launch = ["--hosts", str(hosts.write_list(slots)), "-np", str(sum(slots.values())), "--check-every", "1"]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "dapple_tf", "launch", *launch, "--mpirun", " ".join(hosts.mpirun_options)),
            *(*options, "--", sys.executable, *command),
        ],
        cwd=ROOT,
        env=environment_without_launchers()
        | hosts.environment
        | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "DAPPLE_TIMEOUT_SECONDS": "6"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        happens()
        stdout, stderr = process.communicate(timeout=600)
    finally:
        process.kill()
        process.communicate()
    return process.returncode, stdout, stderr


def wait_for_snapshots(hosts: NamedHosts, steps: int) -> None:
    """Wait until each host has a part of a snapshot after that many steps or more."""
    end = time.monotonic() + 300
    while not all(max([0, *hosts.snapshots(name)]) >= steps for name in hosts.names[:2]):
        assert time.monotonic() < end, {name: hosts.snapshots(name) for name in hosts.names}
        time.sleep(0.01)  # other processes write the snapshots


def result(stdout: str) -> dict[str, Any]:
    found = json.loads(stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def resume_by_hand(folder: Path, steps: int) -> list[float]:
    """Return the losses of the steps after the last checkpoint or snapshot of ``folder``, by one device."""
    workload = chain()
    step = step_of(workload.loss_fn, optimizer=workload.optimizer, stages=1, snapshot_every=1_000_000)
    batches = list(itertools.islice(workload.dataset, STEPS))  # once: every epoch is shuffled anew
    step.build(*batches[0])
    done = Checkpoints(folder, step).restore().batches
    return [float(step(*batch)) for batch in batches[done : done + steps]]


def test_the_loss_of_a_host_costs_few_steps(hosts: NamedHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host that is lost is the one of rank 0; its folder of checkpoints is lost too."""
    saved, by_hand, memory = tmp_path / "saved", tmp_path / "by hand", tmp_path / "memory"

    def lose() -> None:
        wait_for_snapshots(hosts, 5 * EVERY)
        hosts.lose("nodea")
        by_hand.mkdir()
        shutil.move(saved / "run-id", by_hand)
        for path in saved.iterdir():
            path.unlink()
        (left,) = hosts.memory.glob("dapple-*/nodeb/*")
        place = hashlib.sha256(str(by_hand).encode()).hexdigest()[:16]
        shutil.copytree(left, memory / left.parent.parent.name / socket.gethostname() / place)

    options = ["--elastic", "--snapshot-every", str(EVERY), *saving_in(saved, every=10_000)]
    code, stdout, stderr = run_while(hosts, {"nodea": 1, "nodeb": 2}, train_arguments("1,1,1", STEPS, *options), lose)
    assert code == 0, stderr
    resumed = re.search(r"resumed after step (\d+) from the memory of nodeb", stdout)
    assert resumed is not None, stdout
    done = int(resumed[1])
    assert done % EVERY == 0
    assert done >= 4 * EVERY
    losses = result(stdout)["losses"]
    assert len(losses) == STEPS - done
    monkeypatch.setenv("DAPPLE_SNAPSHOT_DIR", str(memory))
    np.testing.assert_allclose(losses[:COMPARED], resume_by_hand(by_hand, COMPARED), rtol=1e-12)
    assert "starts the job again (number 1) with 2 ranks on nodeb:2" in stderr
    assert re.search(rf"a snapshot every {EVERY} steps: \d+ taken", stdout)
    assert not list(hosts.memory.rglob("*.st"))


def test_the_loss_of_two_hosts_falls_back_to_the_files(
    hosts: NamedHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, copy = tmp_path / "saved", tmp_path / "copy"

    def lose() -> None:
        wait_for_snapshots(hosts, 7 * EVERY)
        hosts.lose("nodeb", "nodec")  # each has the other's copy, or its own
        shutil.copytree(saved, copy)

    options = ["--elastic", "--snapshot-every", str(EVERY), *saving_in(saved, every=50)]
    slots = {"nodea": 1, "nodeb": 1, "nodec": 1}
    code, stdout, stderr = run_while(hosts, slots, train_arguments("1,1,1", STEPS, *options), lose)
    assert code == 0, stderr
    assert re.search(rf"resumed after step (\d+) from {saved}", stdout), stdout
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("DAPPLE_SNAPSHOT_DIR", str(tmp_path / "empty"))
    np.testing.assert_allclose(result(stdout)["losses"][:COMPARED], resume_by_hand(copy, COMPARED), rtol=1e-12)
