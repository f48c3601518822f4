"""If a host is cut off from the network, the ranks on both sides end, say why, and leave a good checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.emulated_hosts import Hosts, emulated_hosts, find_missing_requirement
from dapple_tf.checkpoint.file import open_checkpoint
from tests.dapple_tf.distributed.failing_jobs import ADVICE_OF_TRAIN, assert_stopped
from tests.dapple_tf.distributed.test_job_checkpoints import train_in_one_process
from tests.dapple_tf.distributed.train_command import saved_steps, saving_in, train_arguments
from tests.processes import Launcher, RanksError, needs_horovod, run_ranks

# Network namespaces need root and iproute2; where these are missing, pytest prints the reason of the skip.
_MISSING = find_missing_requirement()
pytestmark = [needs_horovod, pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))]

SECONDS = 10
# Noticed by its silence, or by the system, which closes the connection first if it is set to do so early.
CUT_OFF = (
    r"(has sent nothing for \d+\.\d s|cannot be reached \(.*\)): its host is cut off from the network"
    r"(, or the process hangs)?"
)
ADVICE = (
    r"\S+ (has no checkpoint yet|.* is saved as \S+); start the job again with ranks that run \S+ -m dapple_tf train .*"
)


def launcher_on(hosts: Hosts) -> Launcher:
    """Return a launcher of one rank on each host by mpirun, whose output arrives in files of this machine."""

    def command(folder: Path, ranks: int) -> Sequence[str]:
        assert ranks == len(hosts.addresses)
        return [*hosts.command(), "--mca", "orte_tmpdir_base", str(folder), "--output-filename", f"{folder}/out"]

    return Launcher("mpirun on hosts", command)


def wait_until(done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"still waiting after {seconds:g} s"
        time.sleep(0.05)


def test_a_host_that_is_cut_off_ends_the_ranks_on_both_sides(tmp_path: Path) -> None:
    taken: list[float] = []

    def cut_off_after_a_checkpoint(output: Path) -> None:
        wait_until(lambda: bool(saved_steps(tmp_path)), 100)
        hosts.cut_off(1)
        begin = time.monotonic()
        wait_until(lambda: all("All processes end" in file.read_text() for file in output.rglob("stderr")), 60)
        taken.append(time.monotonic() - begin)

    with emulated_hosts(2, "1gbit", retransmissions=4) as hosts, pytest.raises(RanksError) as caught:
        run_ranks(
            train_arguments("1,1", 100_000, *saving_in(tmp_path)),
            2,
            environment={"DAPPLE_TIMEOUT_SECONDS": str(SECONDS)},
            launcher=launcher_on(hosts),
            during=cut_off_after_a_checkpoint,
            linger_seconds=30,
        )
    for me in (0, 1):
        assert_stopped(caught.value.ranks[me], me, 1 - me, CUT_OFF, advice=ADVICE_OF_TRAIN)
    assert not caught.value.left
    assert taken[0] < SECONDS + 5
    last = saved_steps(tmp_path)[-1]
    assert dict(open_checkpoint(tmp_path / f"checkpoint-{last}.safetensors").read())
    assert len(train_in_one_process("1,1", last + 2, *saving_in(tmp_path))) == 2
