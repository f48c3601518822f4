"""Horovod's own launcher, without MPI: the same scripts give the same results, and fail as cleanly."""

from __future__ import annotations

import pytest

from tests.dapple_tf.distributed.launches import check_equal, launch
from tests.dapple_tf.distributed.test_faults import run_until, stops
from tests.processes import HOROVODRUN, needs_horovod

pytestmark = needs_horovod

THREE_RANKS = ("1:1:1 float64", "2:1 float64")


@pytest.mark.parametrize("name", THREE_RANKS)
def test_ranks_of_horovodrun_equal_one_device(name: str) -> None:
    check_equal(name, launch(THREE_RANKS, HOROVODRUN)[name])


@pytest.mark.slow
def test_a_rank_of_horovodrun_that_is_killed_ends_the_others() -> None:
    error, seconds = run_until("SIGKILL", 1, launcher=HOROVODRUN)
    stops(error.ranks[0], 0, 1, r"was killed or has crashed \(its connection closed\)")
    assert error.exit_code == 1
    assert seconds < 15
