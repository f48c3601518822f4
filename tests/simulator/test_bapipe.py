"""BaPipe's Table 2: what a mini-batch takes where transfers are hidden (1F1B-SO) and where they are not (1F1B-SNO)."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest

from dapple_tf.simulator.engine import early_backward_order, step_seconds
from graph_passes.schedule import named_warm_up

F, B, SR = 1.0, 2.0, 0.25  # of every stage; SR is the time to send or to receive


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("m", [4, 8, 9, 12])
def test_table_2(n: int, m: int) -> None:
    compute = (m + n - 1) * (F + B)
    assert seconds("1f1b-sno", n, m) == pytest.approx(compute + (n + m - 2 - ceil((m - 1) / n)) * 2 * SR)
    assert seconds("1f1b-so", n, m) == pytest.approx(compute + (n - 1) * 2 * SR)
    assert seconds("dapple-b", n, m) == seconds("1f1b-so", n, m)  # as fast, with one micro-batch less


def seconds(schedule: str, stages: int, micro_batches: int) -> float:
    order = early_backward_order(np.array(named_warm_up(schedule, stages, micro_batches), np.int64), micro_batches)
    each = [np.full(stages, value) for value in (F, B, SR, SR, 0.0)]
    return step_seconds(order, *each)
