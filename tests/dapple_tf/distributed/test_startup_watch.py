"""A rank that does not come to ``dapple.init`` is named by the others within the timeout."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from dapple_tf.distributed import startup_watch
from dapple_tf.distributed.startup_watch import (
    ProcessState,
    StartupWatch,
    find_rank_processes,
    state_of,
    watching_start,
)
from tests.dapple_tf.distributed.failing_jobs import assert_ended
from tests.processes import (
    HOROVODRUN,
    MPIRUN,
    Launcher,
    RanksError,
    environment_without_launchers,
    needs_horovod,
    run_ranks,
)

# --- processes

JOB = {"OMPI_MCA_orte_jobfam_session_dir": "the folder of a test", "OMPI_MCA_ess_base_jobid": "77"}


def start(**variables: str) -> subprocess.Popen[bytes]:
    """A process with these variables that sleeps, after it has started Python."""
    made = subprocess.Popen(
        [sys.executable, "-c", "import time; print('', flush=True); time.sleep(60)"],
        env={**environment_without_launchers(), **variables},
        stdout=subprocess.PIPE,
    )
    assert made.stdout is not None
    made.stdout.readline()
    return made


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with start(**JOB, OMPI_COMM_WORLD_RANK="5") as made:
        yield made
        made.kill()


def wait_for(state: ProcessState, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 30
    while state_of([process.pid]) != state:
        assert time.monotonic() < end


def test_the_processes_of_a_job_are_found_by_their_rank(process: subprocess.Popen[bytes]) -> None:
    assert find_rank_processes(JOB) == {5: [process.pid]}
    assert find_rank_processes({**JOB, "OMPI_MCA_ess_base_jobid": "78"}) == {}
    assert find_rank_processes({}) == {}


def test_processes_of_horovodrun_are_found_by_the_place_where_they_meet() -> None:
    job = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "192.0.2.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4"}
    with start(**job, HOROVOD_RANK="2") as made:
        assert find_rank_processes(job) == {2: [made.pid]}
        made.kill()


def test_what_a_process_does_is_told(process: subprocess.Popen[bytes]) -> None:
    assert state_of([process.pid]) == ProcessState.RUNS
    process.send_signal(signal.SIGSTOP)
    wait_for(ProcessState.STOPPED, process)
    assert state_of([os.getpid(), process.pid]) == ProcessState.STOPPED
    process.send_signal(signal.SIGCONT)
    wait_for(ProcessState.RUNS, process)
    process.kill()
    wait_for(ProcessState.ENDED, process)
    process.wait()
    assert state_of([process.pid]) == ProcessState.ENDED


# --- the watch


def watch_of(process: subprocess.Popen[bytes], size: int = 2) -> Callable[[float], str]:
    """What a watch, which has begun just now, finds after so many seconds."""
    watch = StartupWatch(0, size, 10.0, lambda: {0: [os.getpid()], 1: [process.pid]})
    return lambda seconds: watch.examine(watch._began + seconds)


def test_a_rank_that_runs_is_waited_for_and_named_once(
    process: subprocess.Popen[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    watch = watch_of(process, size=3)
    assert [watch(seconds) for seconds in range(0, 99, 3)] == [""] * 33
    assert capfd.readouterr().err == (
        "dapple: rank 0 has waited in dapple.init for 12 s: not all ranks have called it. Ranks [1] run on this host; "
        "ranks [2] are on other hosts.\n"
    )
    assert watch(100.0) == ("after 100 s not all of the ranks [2] have joined, which are not on this host")


def test_a_rank_that_stays_stopped_has_failed_and_one_that_goes_on_has_not(process: subprocess.Popen[bytes]) -> None:
    watch = watch_of(process)
    process.send_signal(signal.SIGSTOP)
    wait_for(ProcessState.STOPPED, process)
    assert watch(0.0) == ""
    process.send_signal(signal.SIGCONT)
    wait_for(ProcessState.RUNS, process)
    assert watch(7.0) == ""
    process.send_signal(signal.SIGSTOP)
    wait_for(ProcessState.STOPPED, process)
    assert watch(9.0) == ""
    assert watch(16.0) == ""
    said = watch(17.5)
    assert said == f"rank 1 (process {process.pid}) has been stopped for 8.5 s (SIGSTOP, Ctrl-Z or a debugger)"


def test_a_rank_that_has_ended_has_failed(process: subprocess.Popen[bytes]) -> None:
    watch = watch_of(process)
    assert watch(0.0) == ""
    process.kill()
    process.wait()
    assert watch(1.0) == ""
    assert "was killed or has ended before all ranks had joined" in watch(3.5)


Examine = Callable[[float, ProcessState], str]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> tuple[StartupWatch, Examine]:
    """A watch of rank 0 of 3, and what it finds at a time where process 77, of rank 1, has a state; rank 2 is away."""
    made = StartupWatch(0, 3, 12.5, lambda: {0: [1], 1: [77]})
    begin = made._began  # ``note_pause`` changes it later

    def examine(seconds: float, state: ProcessState) -> str:
        monkeypatch.setattr(startup_watch, "state_of", lambda processes: state)
        return made.examine(begin + seconds)

    return made, examine


@pytest.mark.parametrize(
    ("state", "seconds", "what"),
    [
        (ProcessState.ENDED, 2.0, "was killed or has ended before all ranks had joined"),
        (ProcessState.STOPPED, 10.5, "has been stopped for 10.5 s (SIGSTOP, Ctrl-Z or a debugger)"),
    ],
)
def test_a_rank_has_failed_when_its_state_has_lasted(
    watch: tuple[StartupWatch, Examine], state: ProcessState, seconds: float, what: str
) -> None:
    _, examine = watch
    assert [examine(0.0, ProcessState.RUNS), examine(1.0, state), examine(2.0, state)] == [""] * 3
    assert examine(0.9 + seconds, state) == ""
    assert examine(1.01 + seconds, state) == f"rank 1 (process 77) {what}"


def test_a_rank_that_runs_again_has_not_failed(watch: tuple[StartupWatch, Examine]) -> None:
    _, examine = watch
    stopped, runs = ProcessState.STOPPED, ProcessState.RUNS
    assert [examine(1.0, stopped), examine(5.0, runs), examine(6.0, stopped), examine(16.4, stopped)] == [""] * 4


def test_a_process_was_not_stopped_while_this_one_was_suspended(
    watch: tuple[StartupWatch, Examine], capfd: pytest.CaptureFixture[str]
) -> None:
    made, examine = watch
    assert examine(1.0, ProcessState.STOPPED) == ""
    made.note_pause(60.0)
    assert examine(71.4, ProcessState.STOPPED) == ""
    assert capfd.readouterr().err == ""  # it has waited for 11.4 s only
    assert "has been stopped for 10.6 s" in examine(71.6, ProcessState.STOPPED)


def test_without_a_job_nothing_is_watched() -> None:
    with watching_start({}):
        pass
    with watching_start({"OMPI_COMM_WORLD_SIZE": "2"}):  # contradicts itself: dapple.init says so
        pass
    with watching_start(
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "DAPPLE_TIMEOUT_SECONDS": "x"}
    ):
        pass


# --- jobs


@needs_horovod
@pytest.mark.parametrize(
    ("moment", "ranks", "launcher"),
    [
        ("stopped before init", 2, MPIRUN),
        ("stopped in init", 3, MPIRUN),
        ("stopped before init", 2, HOROVODRUN),
    ],
)
def test_a_rank_that_is_stopped_before_all_have_joined_is_named(moment: str, ranks: int, launcher: Launcher) -> None:
    """The job once hung, silently."""
    with pytest.raises(RanksError) as caught:
        run_ranks(
            ["-m", "tests.dapple_tf.distributed.programs.slow_start", moment, "1"],
            ranks,
            environment={"DAPPLE_TIMEOUT_SECONDS": "4"},
            launcher=launcher,
        )
    assert_ended(caught.value)
    said = "".join(caught.value.ranks[rank].stderr for rank in range(ranks) if rank != 1)
    assert re.search(r"rank \d (stops|\(stage).*rank 1 .*(has been stopped for 3\.\d s|has sent nothing for)", said)


@needs_horovod
def test_a_slow_rank_is_waited_for() -> None:
    for rank in run_ranks(
        ["-m", "tests.dapple_tf.distributed.programs.slow_start", "sleeps", "1"],
        2,
        environment={"DAPPLE_TIMEOUT_SECONDS": "2"},
    ):
        assert "joined" in rank.stdout
