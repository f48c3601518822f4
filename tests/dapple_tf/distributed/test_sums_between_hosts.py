"""Sums over ranks of different hosts use both directions of the link at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest

from benchmarks.emulated_hosts import emulated_hosts, find_missing_requirement
from tests.processes import Launcher, needs_horovod, run_ranks

# Network namespaces need root and iproute2; where these are missing, pytest prints the reason of the skip.
_MISSING = find_missing_requirement()
pytestmark = [needs_horovod, pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))]

BYTES, BYTES_A_SECOND = 8_000_000, 100e6 / 8
PROGRAM = f"""
import json, time
import tensorflow as tf
import dapple_tf as dapple
dapple.init()
import horovod.tensorflow as hvd
value, taken = tf.zeros([{BYTES // 4}]), []
for number in range(9):
    hvd.allreduce(tf.zeros([1]), name="meet")
    begin = time.perf_counter()
    hvd.allreduce(value, op=hvd.Sum, name="sum").numpy()
    taken.append(time.perf_counter() - begin)
print(json.dumps(taken[1:]))
hvd.allreduce(tf.zeros([1]), name="meet")
"""


def test_a_sum_over_two_hosts_sends_and_receives_at_the_same_time() -> None:
    """Each rank sends, and receives, as many bytes as the tensor has; one after the other would take twice as long."""
    with emulated_hosts(2, "100mbit", burst=0.001) as hosts:

        def command(folder: Path, ranks: int) -> Sequence[str]:
            return [*hosts.command(), "--mca", "orte_tmpdir_base", str(folder), "--output-filename", f"{folder}/out"]

        ranks = run_ranks(
            ["-c", PROGRAM],
            2,
            timeout_seconds=100,
            launcher=Launcher("mpirun on hosts", command),
        )
    seconds = median(json.loads(ranks[0].stdout))
    assert BYTES / BYTES_A_SECOND < seconds < 1.25 * BYTES / BYTES_A_SECOND
