"""Jobs under Horovod's elastic driver: a rank that outlives another one starts again in place, and the job goes on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dapple_tf.launcher.restart import begin_again
from tests.dapple_tf.distributed.train_command import (
    losses_of_one_process,
    model_options,
    saved_steps,
    saving_in,
    train_arguments,
)
from tests.dapple_tf.launcher.test_elastic_fit import MODEL, PROGRAM, assert_trained_as_plain_keras
from tests.paths import ROOT
from tests.processes import environment_without_launchers, needs_horovod, run_python

pytestmark = needs_horovod

# --- One rank, beside a server of Horovod that knows its next place

RANK = """
import json, os, sys, threading
from dapple_tf.launcher.restart import begin_again, read_start

names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
slot = [os.environ.get(f"HOROVOD_{name}") for name in names]
print(json.dumps([sys.flags.optimize, sys.argv[1:], slot, os.environ.get("KEPT")]), flush=True)
if read_start() is None:
    os.environ["KEPT"] = "yes"
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)  # as libraries leave theirs
    print(writer, file=open("writer", "w"))
    threading.Thread(target=begin_again, args=("rank 1 was killed", (1,))).start()
    threading.Event().wait()
start = read_start()
print(json.dumps([start.number, start.cause, start.lost, start.began == start.ended]))
try:
    os.fstat(int(open("writer").read()))
except OSError:
    print("closed")
"""


@pytest.fixture
def driver() -> Iterator[Callable[..., dict[str, str]]]:
    """Return the variables of a rank to which its driver, a server of Horovod, gives this place, or none."""
    from horovod.runner.common.util.hosts import INVALID_SLOT_INFO, SlotInfo
    from horovod.runner.http.http_server import KVStoreServer

    server = KVStoreServer(verbose=False)
    port = server.start_server()

    def give(**place: int) -> dict[str, str]:
        answer = SlotInfo("nodeb", **place).to_response_string() if place else INVALID_SLOT_INFO.to_response_string()
        server.httpd.cache["rank_and_size"] = {"nodeb:0": answer.encode()}
        return {
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_HOSTNAME": "nodeb",
            "HOROVOD_LOCAL_RANK": "0",
            "HOROVOD_RANK": "2",
            "HOROVOD_SIZE": "3",
        }

    yield give
    server.shutdown_server()


def run_rank(folder: Path, variables: dict[str, str]) -> list[str]:
    """Run the program with a flag of Python and an argument; return its lines."""
    (folder / "rank.py").write_text(RANK)
    return run_python("-O", "rank.py", "a word", folder=folder, variables=variables).stdout.splitlines()


def test_a_rank_starts_again_in_place(tmp_path: Path, driver: Callable[..., dict[str, str]]) -> None:
    place = {"rank": 1, "size": 2, "local_rank": 0, "local_size": 1, "cross_rank": 1, "cross_size": 2}
    first, second, start, pipe = run_rank(tmp_path, driver(**place))
    assert json.loads(first) == [1, ["a word"], ["2", "3", "0", None, None, None], None]
    assert json.loads(second) == [1, ["a word"], ["1", "2", "0", "1", "1", "2"], "yes"]
    assert json.loads(start) == [1, "rank 1 was killed", [1], True]
    assert pipe == "closed"


def test_a_rank_for_which_there_is_no_place_ends(tmp_path: Path, driver: Callable[..., dict[str, str]]) -> None:
    assert len(run_rank(tmp_path, driver())) == 1


def test_without_the_driver_nothing_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_ELASTIC", raising=False)
    begin_again("rank 1 was killed")


# --- Jobs. Names of this machine are hosts: Horovod leaves a whole host out when one process on it fails


def run_job(
    folder: Path, hosts: str, ranks: tuple[int, int, int], *words: object, cwd: Path = ROOT
) -> tuple[int, str, str]:
    """Run a job on the hosts that a script prints; return the exit code, and what the ranks have written.

    ``ranks``: at first, and the least and the largest number.
    """
    script = folder / "hosts"
    script.write_text(f"#!/bin/sh\n{hosts}\n")
    script.chmod(0o755)
    program = Path(sys.executable).with_name("horovodrun")
    numbers = [word for pair in zip(("-np", "--min-np", "--max-np"), ranks, strict=True) for word in pair]
    options = ["--network-interfaces", "lo", "--elastic-timeout", "5", "--host-discovery-script", script]
    done = subprocess.run(
        [sys.executable, *map(str, (program, "--gloo", *numbers, *options, sys.executable, *words))],
        cwd=cwd,
        env=environment_without_launchers() | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    stdout, stderr = (re.sub(r"^\[\d+\]<\w+>:", "", text, flags=re.MULTILINE) for text in (done.stdout, done.stderr))
    return done.returncode, stdout, stderr


def test_a_job_that_has_lost_a_host_goes_on_under_a_new_plan(tmp_path: Path) -> None:
    """Of two ranks on a host one is killed: the other one is left out, too."""
    saved = tmp_path / "saved"
    options = ["--elastic", *saving_in(saved), *model_options(kill_rank=3, at_batch=9)]
    command = train_arguments("1,1,1,1", 12, *options)
    code, stdout, stderr = run_job(tmp_path, "echo localhost:2; echo 127.0.0.1:2", (4, 1, 4), *command)
    assert code == 0, stdout + stderr
    found = json.loads(stdout.splitlines()[-1])
    np.testing.assert_allclose(found["losses"], losses_of_one_process(12)[6:], rtol=1e-12)
    assert saved_steps(saved) == [9, 12]
    assert "elastic: there are 2 ranks, and 4 were asked for: planning anew" in stderr
    assert re.search(
        r"since the one before ended \(rank 3 was killed or has crashed \(its connection closed\)\): "
        r"2 ranks \(4 before\), back after \d+ s, goes on from step 6 from .*, repeats [12] steps?\n"
        r"  lost: rank 3, stage 3 ",
        stdout,
    )


def test_a_job_with_fewer_ranks_than_the_least_fails(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    options = ["--elastic", *saving_in(saved), *model_options(kill_rank=1, at_batch=9)]
    command = train_arguments("1,1", 12, *options)
    code, stdout, stderr = run_job(tmp_path, "echo localhost:1; echo 127.0.0.1:1", (2, 2, 2), *command)
    assert code == 1, stdout + stderr
    assert "you have enough resources to run at least 2 Horovod processes" in stderr
    assert saved_steps(saved) == [3, 6]


def test_a_job_goes_on_with_more_ranks_after_a_checkpoint(tmp_path: Path) -> None:
    saved, steps = tmp_path / "saved", 2000
    hosts = f"echo localhost:1; if ls {saved}/checkpoint-* >/dev/null 2>&1; then echo 127.0.0.1:1; fi"
    command = train_arguments("1,1", steps, "--elastic", *saving_in(saved, every=100))
    code, stdout, stderr = run_job(tmp_path, hosts, (1, 1, 2), *command)
    assert code == 0, stdout + stderr
    done = steps - len(json.loads(stdout.splitlines()[-1])["losses"])
    assert done % 100 == 0
    assert done > 0
    assert f"step {done} is saved: the job ends, to go on with more ranks" in stdout
    assert "since the one before ended (the hosts have changed): 2 ranks (1 before), back after" in stdout
    assert f"goes on from step {done} from {saved}, repeats 0 steps" in stdout


def test_a_fit_that_has_lost_a_host_ends_as_plain_keras(tmp_path: Path) -> None:
    """Rank 1 is on the host with two slots, whichever host comes first: one rank is left."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "program.py").write_text(PROGRAM)
    hosts = "echo localhost:2; echo 127.0.0.1:1"
    code, stdout, stderr = run_job(tmp_path, hosts, (3, 1, 3), "program.py", "{}", cwd=tmp_path)
    assert code == 0, stdout + stderr
    assert_trained_as_plain_keras(tmp_path)
