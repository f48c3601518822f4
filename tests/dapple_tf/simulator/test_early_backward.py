"""The recurrence of early backward against the discrete-event engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.simulator.early_backward import early_backward_seconds
from dapple_tf.simulator.engine import step_seconds
from dapple_tf.simulator.order import early_backward_order
from graph_passes.schedules.spec import warm_up

SECONDS = st.floats(0, 10, allow_subnormal=False)


@given(
    st.integers(1, 6),
    st.integers(1, 40),
    st.sampled_from(["dapple-a", "dapple-b", "gpipe"]),
    st.integers(1, 6),
    st.data(),
)
def test_the_recurrence_ends_when_the_engine_does(
    stages: int, micro_batches: int, policy: str, limit: int, data: st.DataObject
) -> None:
    forward, backward, send, exposed = (
        np.array(data.draw(st.lists(SECONDS, min_size=stages, max_size=stages))) for _ in range(4)
    )
    held = np.array(warm_up(policy, stages, micro_batches, None if policy == "gpipe" else limit), np.int64)
    order = early_backward_order(held, micro_batches)
    expected = step_seconds(order, forward, backward, backward[:0], send, send, exposed)
    room = np.zeros((stages, micro_batches))
    arguments = (held, micro_batches, forward, backward, send, exposed)
    found = early_backward_seconds(*arguments, np.inf, room, False)
    assert found == pytest.approx(expected, rel=1e-12, abs=0)
    above = expected * (1 + 1e-9) + 1e-9
    assert early_backward_seconds(*arguments, above, room, False) == found
    assert early_backward_seconds(*arguments, expected * (1 - 1e-9), room, False) == np.inf


def test_a_step_judged_early_ends_early_only_where_the_step_would_be_longer() -> None:
    stages, micro_batches = 3, 200
    one = np.ones(stages)
    arguments = (np.array([3, 2, 1]), micro_batches, one, 2 * one, 2 * one, one)
    room = np.zeros((stages, micro_batches))
    seconds = early_backward_seconds(*arguments, np.inf, room, False)
    assert early_backward_seconds(*arguments, seconds * 1.001, room, True) == seconds
    assert early_backward_seconds(*arguments, seconds * 0.9, room, True) == np.inf
