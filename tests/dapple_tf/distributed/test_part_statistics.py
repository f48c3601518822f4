"""Statistics of the whole batch in a job equal one device's, and are combined from parts where they can be."""

from __future__ import annotations

import pytest

from tests.dapple_tf.distributed.launches import Launches
from tests.dapple_tf.distributed.programs.part_statistics import COMBINABLE, NOT_COMBINABLE
from tests.equality.one_device import TOLERANCE
from tests.processes import needs_horovod

pytestmark = [needs_horovod, pytest.mark.slow]


@pytest.mark.parametrize("name", [*COMBINABLE, *NOT_COMBINABLE])
def test_statistics_of_ranks_with_their_own_rows_equal_one_device(launches: Launches, name: str) -> None:
    for found in launches.results("two ranks with statistics", "part_statistics"):
        assert max(found[name]["errors"].values()) <= TOLERANCE["float64"], found[name]["errors"]


@pytest.mark.parametrize("name", [*COMBINABLE, *NOT_COMBINABLE])
def test_the_first_rank_needs_all_rows_of_a_statistic_that_cannot_be_combined(launches: Launches, name: str) -> None:
    needed = [found[name]["needs all"] for found in launches.results("two ranks with statistics", "part_statistics")]
    assert needed == [name in NOT_COMBINABLE, False]
