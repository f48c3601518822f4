"""Horovod's own launcher, without MPI: the same scripts give the same results as with mpirun.

The quick cases on three ranks run with horovodrun in `make test`; `make test-all` runs them with mpirun too.
"""

from __future__ import annotations

import pytest

from tests.dapple_tf.distributed.launches import LAUNCHES, QUICK_CASES, Launches
from tests.dapple_tf.distributed.test_ranks_equal_one_device import assert_case
from tests.processes import HOROVODRUN, MPIRUN, needs_horovod

pytestmark = needs_horovod

BY_MPIRUN = "three ranks by mpirun"


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK_CASES[3])
def test_cases_that_pass_with_horovodrun_pass_with_mpirun(launches: Launches, name: str) -> None:
    assert LAUNCHES["three ranks"].launcher is HOROVODRUN
    assert LAUNCHES[BY_MPIRUN].launcher is MPIRUN
    assert_case(name, launches.case_results(name, BY_MPIRUN))
