"""The helper that runs several ranks ends launches that hang, and says which rank hangs where."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dapple_tf.distributed.startup_watch import ProcessState, state_of
from tests.processes import HOROVODRUN, MPIRUN, Launcher, RanksError, needs_horovod, run_ranks

RANK = "import os, sys; rank = int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['HOROVOD_RANK'])\n"

pytestmark = needs_horovod

both_launchers = pytest.mark.parametrize(
    "launcher",
    [pytest.param(MPIRUN, id="mpirun"), pytest.param(HOROVODRUN, id="horovodrun")],
)


@both_launchers
def test_each_rank_has_its_own_output(launcher: Launcher) -> None:
    program = RANK + "print('out', rank); print('err', rank, file=sys.stderr)"
    ranks = run_ranks(["-c", program], 3, launcher=launcher)
    assert [(rank.stdout, rank.stderr) for rank in ranks] == [(f"out {n}\n", f"err {n}\n") for n in range(3)]


def test_the_output_of_a_failing_rank_is_in_the_error() -> None:
    with pytest.raises(RanksError, match=r"(?s)code 3.*--- rank 1:\nno luck") as caught:
        run_ranks(["-c", RANK + "rank == 1 and (print('no luck'), sys.exit(3))"], 2)
    assert caught.value.exit_code == 3
    assert caught.value.ranks[1].stdout == "no luck\n"


@both_launchers
def test_a_hang_outside_of_horovod_ends_all_processes_of_the_launch(launcher: Launcher, tmp_path: Path) -> None:
    """Rank 1 has a child process in another session; horovodrun starts each rank in a session of its own."""
    program = (
        RANK + "import subprocess, time; from pathlib import Path\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True) if rank else None\n"
        "print('waiting')\n"
        "child and Path(sys.argv[1]).write_text(f'{os.getpid()} {child.pid}')\n"
        "time.sleep(600 if rank else 0)\n"
    )
    pids = tmp_path / "pids"

    def wait_for_children(_: Path) -> None:
        end = time.monotonic() + 60
        while not pids.exists():
            assert time.monotonic() < end, "the ranks do not start"
            time.sleep(0.1)

    with pytest.raises(RanksError, match=r"(?s)rank\(s\) 1 still ran: Horovod reports no tensor.*rank 1:\nwaiting"):
        run_ranks(["-c", program, str(pids)], 2, timeout_seconds=5, launcher=launcher, during=wait_for_children)
    end = time.monotonic() + 10  # the signal is sent; the kernel may take its time
    while state_of([int(pid) for pid in pids.read_text().split()]) != ProcessState.ENDED:
        assert time.monotonic() < end
        time.sleep(0.05)  # this process is not their parent, so it cannot wait for them


def test_a_tensor_that_waits_and_the_rank_that_has_not_submitted_it_are_named() -> None:
    program = (
        "import time; import horovod.tensorflow as hvd; import tensorflow as tf; hvd.init()\n"
        "reduce = tf.function(lambda: hvd.allreduce(tf.zeros([1]), name='lonely', ignore_name_scope=True))\n"
        "time.sleep(600) if hvd.rank() == 1 else reduce()\n"
    )
    with pytest.raises(RanksError, match=r"ran: rank 1 has not submitted .*lonely") as caught:
        run_ranks(["-c", program], 2, timeout_seconds=30, stall_seconds=2)
    assert caught.value.exit_code is None


def test_variables_of_an_outer_launcher_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "77")
    program = "import os; print(os.environ['OMPI_COMM_WORLD_SIZE'], os.environ['ANSWER'])"
    assert [rank.stdout for rank in run_ranks(["-c", program], 2, environment={"ANSWER": "42"})] == ["2 42\n"] * 2
    assert os.environ["OMPI_COMM_WORLD_SIZE"] == "77"
