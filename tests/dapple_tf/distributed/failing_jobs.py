"""Jobs in which a rank fails: how they end, and what the other ranks print."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

import pytest

from tests.processes import MPIRUN, Launcher, Rank, RanksError, run_ranks

EXCHANGE = r"(exchange/\S+|stage\d+/allreduce|update/barrier|none( of step \d+)?)"
ADVICE = r"dapple has saved no checkpoint of this job; start the job again with ranks that run .*"
ADVICE_OF_TRAIN = (
    r"(\S+ has no checkpoint yet|(step|window) \d+ is saved as \S+); start the job again with ranks that run .*"
)


def run_until_failure(
    failure: str,
    failing_rank: int,
    *,
    ranks: int = 2,
    environment: Mapping[str, str] | None = None,
    launcher: Launcher = MPIRUN,
) -> tuple[RanksError, float]:
    """Run ``failing_rank``; return how the job ended, and the seconds from the failure to the end of the launcher."""
    program = "tests.dapple_tf.distributed.programs.failing_rank"
    with pytest.raises(RanksError) as caught:
        run_ranks(
            ["-m", program, failure, str(failing_rank), str(ranks)], ranks, environment=environment, launcher=launcher
        )
    end = time.time()
    assert_ended(caught.value)
    printed = re.search(r"^[\d.]+$", caught.value.ranks[failing_rank].stdout, re.MULTILINE)
    return caught.value, end - float(printed[0]) if printed else 0.0


def assert_ended(error: RanksError) -> None:
    """Assert that all processes of a failed job ended by themselves."""
    assert error.exit_code, "it hung"
    assert not error.left


def assert_stopped(
    rank: Rank, number: int, other: int, what: str, *, replicas: bool = False, advice: str = ADVICE
) -> None:
    """Assert that a rank has printed, in one line and without a traceback, that it stops because ``other`` failed.

    Each rank is a stage of its own, or all are ``replicas`` of one. Open MPI writes its own lines in pieces: ours may
    come between two of them.
    """
    me, failed = (f"rank {i} (stage {0 if replicas else i})" for i in (number, other))
    assert re.search(
        rf"(^|\] )dapple: {re.escape(me)} stops: {re.escape(failed)}, (in|after) step \d+, "
        rf"{what}; the last exchange it completed, by its last report: {EXCHANGE}\. {re.escape(me)} "
        rf"was (in|after) step \d+; the last exchange it completed: {EXCHANGE}\. All processes end; {advice}\.\n",
        rank.stderr,
        re.MULTILINE,
    ), rank.stderr
    assert rank.stderr.count("stops: ") == 1
    assert "Traceback" not in rank.stderr
