"""A host of a job is cut off from the network: the ranks on both sides end, say why, and leave a good checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.emulated_hosts import Hosts, emulated_hosts, find_hindrance
from dapple_tf.checkpoint.file import open_checkpoint
from tests.dapple_tf.distributed.test_checkpoint import arguments, steps_in, train_alone
from tests.dapple_tf.distributed.test_faults import stops
from tests.processes import Launcher, RanksError, needs_horovod, run_ranks

_HINDRANCE = find_hindrance()
pytestmark = [needs_horovod, pytest.mark.skipif(_HINDRANCE is not None, reason=str(_HINDRANCE)), pytest.mark.slow]

SECONDS = 10
# By its silence, or by the system, which gives the connection up first where it has been told to do so early.
CUT_OFF = (
    r"(has not been heard of for \d+\.\d s|cannot be reached \(.*\)): its host is cut off(, or the process hangs)?"
)


def launcher_on(hosts: Hosts) -> Launcher:
    """A rank on each host by mpirun, whose output comes to files of this machine."""

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
        wait_until(lambda: bool(steps_in(tmp_path)), 100)
        hosts.cut_off(1)
        begin = time.monotonic()
        wait_until(lambda: all("All processes end" in file.read_text() for file in output.rglob("stderr")), 60)
        taken.append(time.monotonic() - begin)

    with emulated_hosts(2, "1gbit", retransmissions=4) as hosts, pytest.raises(RanksError) as caught:
        run_ranks(
            arguments(tmp_path, 100_000, "1,1"),
            2,
            environment={"DAPPLE_TIMEOUT_SECONDS": str(SECONDS)},
            launcher=launcher_on(hosts),
            during=cut_off_after_a_checkpoint,
            linger_seconds=30,
        )
    for me in (0, 1):
        stops(caught.value.ranks[me], me, 1 - me, CUT_OFF)
    assert not caught.value.left
    assert taken[0] < SECONDS + 5
    last = steps_in(tmp_path)[-1]
    assert dict(open_checkpoint(tmp_path / f"checkpoint-{last}.safetensors").read())
    assert len(train_alone(tmp_path, last + 2, "1,1")) == 2
