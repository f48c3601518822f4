"""Jobs under ``dapple launch``, with real mpirun: what is started again, with how many ranks, and what is not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.processes import MPIRUN, environment_without_launchers, needs_horovod, run_python

pytestmark = needs_horovod

# The ranks write a line each time they start; what they do then is the test's own code.
_BEGIN = """
import json, os, select, signal, sys, time
rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
start = json.loads(os.environ["DAPPLE_LAUNCH"])["number"]
with open("started", "a") as file:
    file.write(f"{start} {rank} {size}\\n")
"""


@dataclass
class Launch:
    """A folder with a list of hosts, and programs that are launched on them."""

    folder: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def hosts(self, text: str) -> None:
        (self.folder / "hosts").write_text(text)

    def begin(self, program: str, *options: str, ranks: int = 2, timeout_seconds: float = 2) -> subprocess.Popen[str]:
        """Start ``dapple launch`` of a program."""
        (self.folder / "program.py").write_text(_BEGIN + program)
        mpirun = " ".join(MPIRUN.command(self.folder, ranks)[1:-2])
        command = [sys.executable, "-m", "dapple_tf", "launch", "--hosts", "hosts", "-np", str(ranks)]
        process = subprocess.Popen(
            [*command, "--check-every", "0.5", *options, "--mpirun", mpirun, "--", sys.executable, "program.py"],
            cwd=self.folder,
            env=environment_without_launchers()
            | {"PYTHONPATH": str(ROOT), "DAPPLE_TIMEOUT_SECONDS": str(timeout_seconds)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def run(self, program: str, *options: str, ranks: int = 2) -> tuple[int, str]:
        """Return the exit code of ``dapple launch``, and what it writes to stderr."""
        process = self.begin(program, *options, ranks=ranks)
        _, stderr = process.communicate(timeout=120)
        return process.returncode, stderr

    @property
    def starts(self) -> list[tuple[int, ...]]:
        """The number of the start, the rank and the number of ranks, of all ranks that were started."""
        path = self.folder / "started"
        lines = path.read_text().splitlines() if path.exists() else []
        return sorted(tuple(map(int, line.split())) for line in lines)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launched = Launch(tmp_path)
    launched.hosts("localhost slots=2\n")
    yield launched
    for process in launched.processes:
        process.kill()
        process.wait()


def test_a_job_whose_rank_is_killed_is_started_again(launch: Launch) -> None:
    program = """
while start == 0 and rank == 1 and "0 0 2\\n" not in open("started").read():
    time.sleep(0.01)  # rank 0 must have started before it is ended
if start == 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0 if start else 50)  # mpirun ends the others when rank 1 has failed
"""
    code, told = launch.run(program)
    assert code == 0, told
    assert launch.starts == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    assert "starts the job with 2 ranks on localhost:2" in told
    assert "the job failed with exit code 137 (SIGKILL) after" in told
    assert "starts the job again (number 1) with 2 ranks on localhost:2" in told


def test_it_is_started_again_on_the_slots_that_are_left_then(launch: Launch) -> None:
    launch.hosts("localhost slots=3\n")
    program = """
if start == 0 and rank == 0:
    open("hosts", "w").write("localhost slots=1")
    sys.exit(9)
time.sleep(0 if start else 50)  # mpirun ends the others when rank 0 has failed
"""
    code, told = launch.run(program, ranks=3)
    assert code == 0, told
    assert (1, 0, 1) in launch.starts
    assert "starts the job again (number 1) with 1 rank on localhost:1" in told


def test_a_job_that_fails_each_time_ends_after_the_restarts(launch: Launch) -> None:
    code, told = launch.run("sys.exit(9)", "--restarts", "2")
    assert code == 1
    assert {start for start, _, _ in launch.starts} == {0, 1, 2}
    assert "it has been started again 2 times (--restarts): it ends here" in told


def test_fewer_ranks_than_the_least_end_the_job(launch: Launch) -> None:
    program = """
if rank == 0:
    open("hosts", "w").write("localhost slots=1")
    sys.exit(9)
time.sleep(50)  # mpirun ends the others when rank 0 has failed
"""
    code, told = launch.run(program, "--min-np", "2")
    assert code == 1
    assert {start for start, _, _ in launch.starts} == {0}
    assert "the hosts that answer have 1 slot, fewer than --min-np 2: it ends here; what was saved stays" in told


@pytest.mark.parametrize(("ended", "wanted"), [(2, 2), (78, 1)])
def test_a_job_that_would_fail_in_the_same_way_is_not_started_again(launch: Launch, ended: int, wanted: int) -> None:
    code, told = launch.run(f"sys.exit({ended})")
    assert code == wanted
    assert {start for start, _, _ in launch.starts} == {0}
    assert f"the job ended with exit code {ended}: another start would end in the same way" in told


# Fourteen devices are asked for, which neither one rank nor two have.
_REFUSED = """
import tensorflow as tf
import dapple_tf as dapple
dapple.init()
weight = tf.Variable([1.0])
dapple.pipeline(lambda x: tf.reduce_mean(x * weight), optimizer="sgd", stages=2, replicas=[7, 7])(tf.ones([28, 1]))
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_uncaught_error_that_would_come_again_ends_the_job_for_good(launch: Launch, ranks: int) -> None:
    code, told = launch.run(_REFUSED, ranks=ranks)
    assert code == 1, told
    assert {start for start, _, _ in launch.starts} == {0}
    assert "Traceback" in told
    assert "the job ended with exit code 78: another start would end in the same way" in told


def test_a_job_is_asked_to_go_on_with_more_ranks(launch: Launch) -> None:
    launch.hosts("localhost slots=1\n")
    program = """
if size == 1:
    for slots in (2, 1, 2):  # those that are gone again are withdrawn, and offered anew when they are back
        open('hosts', 'w').write(f'localhost slots={slots}')
        select.select([sys.stdin], [], [], 50)
        if sys.stdin.readline() != f"dapple: more ranks are possible: localhost:{slots}\\n":
            sys.exit(1)
    sys.exit(75)
"""
    code, told = launch.run(program, "--restarts", "0")
    assert code == 0, told
    assert launch.starts == [(0, 0, 1), (1, 0, 2), (1, 1, 2)]
    assert "there are slots for 1 rank now, and the job has 1\n" in told
    assert "there are slots for 2 ranks now, and the job has 1: if it is elastic, it decides once it has saved" in told


@pytest.mark.parametrize(("sent", "wanted"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_job_for_good(launch: Launch, sent: int, wanted: int) -> None:
    process = launch.begin("time.sleep(50)")
    wait_until(lambda: len(launch.starts) == 2)
    process.send_signal(sent)
    _, told = process.communicate(timeout=30)
    assert process.returncode == wanted, told
    assert "starts the job again" not in told


@pytest.mark.parametrize(("sent", "wanted"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_lets_the_job_save(launch: Launch, sent: int, wanted: int) -> None:
    """It takes longer than mpirun waits between SIGTERM and SIGKILL."""
    process = launch.begin(
        "def stop(*_): time.sleep(1.5); open(f'saved{rank}', 'w').close(); sys.exit(130)\n"
        "signal.signal(signal.SIGUSR1, stop); open(f'ready{rank}', 'w').close(); time.sleep(50)",
        timeout_seconds=20,  # after SIGTERM and SIGHUP the job has this time
    )
    wait_until(lambda: all((launch.folder / f"ready{rank}").exists() for rank in (0, 1)))
    process.send_signal(sent)
    _, told = process.communicate(timeout=30)
    assert process.returncode == wanted, told
    assert all((launch.folder / f"saved{rank}").exists() for rank in (0, 1))
    asked = (
        "asks the job to end: dapple train --checkpoint-dir saves the step that runs first, any other job ends as it"
    )
    assert asked in told
    assert (
        "dapple: launch: to start the job again: python -m dapple_tf launch --hosts hosts -np 2 --check-every" in told
    )


@pytest.mark.parametrize("left", [2, 1])  # fewer than the least would end the job by themselves
def test_a_signal_while_the_hosts_are_asked_starts_nothing_any_more(launch: Launch, left: int) -> None:
    wait = "until [ -e sent ]; do sleep 0.1; done"
    launch.hosts(f"#!/bin/sh\n[ -e started ] || exec echo localhost:2\ntouch asked; {wait}; echo localhost:{left}\n")
    (launch.folder / "hosts").chmod(0o755)
    process = launch.begin("sys.exit(9)", "--check-every", "60", "--min-np", "2")
    wait_until((launch.folder / "asked").exists)
    process.send_signal(signal.SIGTERM)
    (launch.folder / "sent").touch()
    _, told = process.communicate(timeout=30)
    assert process.returncode == 143, told
    assert "fewer than" not in told
    assert {start for start, _, _ in launch.starts} == {0}


def test_a_launcher_goes_on_when_nobody_reads_its_messages_any_more(launch: Launch) -> None:
    process = launch.begin("while not os.path.exists('closed'): time.sleep(0.05)\nif start == 0: sys.exit(9)")
    wait_until(lambda: len(launch.starts) == 2)
    process.stderr.close()
    (launch.folder / "closed").touch()
    assert process.wait(60) == 0
    assert (1, 1, 2) in launch.starts


def test_a_stopped_job_is_not_done_whatever_its_exit_code(launch: Launch) -> None:
    """The mpirun of Open MPI ends with 0 where it gets the signal while it starts the ranks on other hosts."""
    process = launch.begin(
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0)); open(f'ready{rank}', 'w').close(); time.sleep(50)"
    )
    wait_until(lambda: all((launch.folder / f"ready{rank}").exists() for rank in (0, 1)))
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 143, told


def test_the_second_signal_ends_the_job_at_once(launch: Launch) -> None:
    process = launch.begin(
        "signal.signal(signal.SIGUSR1, lambda *_: open(f'asked{rank}', 'w').close())\n"
        "open(f'ready{rank}', 'w').close()\nwhile True: time.sleep(0.1)"
    )
    for name in ("ready", "asked"):
        wait_until(lambda name=name: all((launch.folder / f"{name}{rank}").exists() for rank in (0, 1)))
        process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130, told


def test_signals_that_come_before_the_answer_to_the_first_let_the_job_save(launch: Launch) -> None:
    """The launcher waits for a slow script of hosts, and has not yet said that the job saves.

    The rank takes a second to save: a launcher that ended it at the second signal would lose that.
    """
    wait = "until [ -e sent ]; do sleep 0.1; done"
    launch.hosts(f"#!/bin/sh\n[ -e ready0 ] && touch asked && {wait}\necho localhost:1\n")
    (launch.folder / "hosts").chmod(0o755)
    process = launch.begin(
        "def stop(*_): time.sleep(1); open('saved', 'w').close(); sys.exit(130)\n"
        "signal.signal(signal.SIGUSR1, stop); open('ready0', 'w').close(); time.sleep(50)"
    )
    wait_until((launch.folder / "asked").exists)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)  # signals that are not yet handled become one
    (launch.folder / "sent").touch()
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130, told
    assert (launch.folder / "saved").exists()


def test_a_host_that_does_not_answer_is_left_out(launch: Launch) -> None:
    launch.hosts("localhost slots=1\nnobody.invalid slots=1\n")
    code, told = launch.run("")
    assert code == 0, told
    assert launch.starts == [(0, 0, 1)]
    assert "host nobody.invalid does not answer: it is left out, with its 1 slot" in told


def test_too_few_slots_are_refused_before_anything_starts(launch: Launch) -> None:
    code, told = launch.run("", "--min-np", "2", "--restarts", "9", ranks=4)
    assert code == 0, told  # two of four
    launch.hosts("localhost slots=1\n")
    code, told = launch.run("", "--min-np", "2")
    assert code == 2
    assert "hosts: 1 slot on hosts that answer, but --min-np asks for 2 ranks: add hosts, or lower --min-np" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--", "nowhere"), "nowhere is no program on the PATH, nor a file that can be run: correct COMMAND"),
        (("--min-np", "3"), "--min-np 3 is more than -np 2: start more ranks, or ask for fewer"),
        (("--mpirun", "'"), '--mpirun "\'": No closing quotation'),
        (("--check-every", "nan"), "--check-every nan: give a number of seconds"),
        (("--restarts", "-1"), "Invalid value for '--restarts'"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    words = ("-m", "dapple_tf", "launch", "--hosts", "hosts", "-np", "2", *options, "--", "true")
    ran = run_python(*words, folder=tmp_path, exit_code=2)
    assert message in ran.stderr


def wait_until(happened: object, seconds: float = 30) -> None:
    """Wait until a function returns True; fail after some seconds."""
    assert callable(happened)
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)
