"""Options that contradict each other are refused when they are given: the loss is never called."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dapple_tf as dapple
from dapple_tf.errors import PlanError, ScheduleError
from tests.equality.small_models import sgd


def never_called(*batch: Any) -> Any:
    raise AssertionError("the loss was traced")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"stages": 3, "schedule": "dualpipe-v"}, ScheduleError, "gives each worker 2 stages, but there are 3 in all"),
        ({"stages": 4, "schedule": "zb-auto:v=3"}, ScheduleError, "gives each worker 3 stages, but there are 4 in all"),
        (
            {"stages": 4, "schedule": "dualpipe-v", "replicas": [1, 1, 1, 1]},
            PlanError,
            "names 4 workers for 4 stages, but there are 2",
        ),
        (
            {"stages": 4, "micro_batches": 1, "schedule": "0F0 2F0 2B0 0B0; 1F0 1B0"},
            ScheduleError,
            "the schedule's text is for 3 stages x 1 micro-batch, but there are 4 x 1",
        ),
        ({"stages": 4, "micro_batches": [6, 6], "schedule": "K=9,9,9,9"}, ScheduleError, "K_0 = 9 is not between 1"),
        ({"stages": 2, "micro_batches": np.array([6, 6])}, PlanError, "give a whole number, 'auto', or a list of"),
        ({"stages": 2, "replicas": [1], "schedule": "gpipe"}, PlanError, "names 1 stage, but there are 2"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_tracing(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as raised:
        dapple.pipeline(never_called, optimizer=sgd(), **options)
    assert said in str(raised.value)
