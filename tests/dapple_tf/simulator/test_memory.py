"""Memory over time: by hand, and its peak on any schedule."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.graph_passes.schedules.schedule import Schedule
from dapple_tf.graph_passes.schedules.spec import warm_up
from dapple_tf.simulator.execution import execute
from dapple_tf.simulator.memory import memory_over_time, peak_bytes
from dapple_tf.simulator.order import encode
from dapple_tf.timeline.stage_costs import StageCosts
from tests.dapple_tf.simulator.builders import cost, order_of, runs
from tests.dapple_tf.simulator.reference import longest_paths

BYTES = {"fixed_bytes": 10, "working_bytes": 5, "stash_bytes": 3}


def test_forwards_add_stashes_and_backwards_free_them_by_hand() -> None:
    # The times are those of test_policy_a_waits_for_the_network_by_hand.
    done = execute(order_of("dapple-a", 2, 4), [cost(1, 1, 1, **BYTES), cost(1, 1, **BYTES)])
    times, held = memory_over_time(done, 0)
    assert times.tolist() == [0, 0, 1, 6, 6, 8, 8, 12, 14]
    assert held.tolist() == [15, 18, 21, 18, 21, 18, 21, 18, 15]
    times, held = memory_over_time(done, 1)
    assert times.tolist() == [0, 2, 4, 4, 6, 8, 10, 10, 12]
    assert held.tolist() == [15, 18, 15, 18, 15, 18, 15, 18, 15]
    assert peak_bytes(done) == (21, 18)


@given(
    st.sampled_from(["gpipe", "dapple-a", "dapple-b", "dapple-a:D=2"]),
    st.integers(1, 5),
    st.integers(1, 9),
)
def test_the_peak_of_a_policy_is_k_stashes(name: str, stages: int, micro_batches: int) -> None:
    policy, _, limit = name.partition(":D=")
    k = warm_up(policy, stages, micro_batches, int(limit) if limit else None)
    done = execute(order_of(name, stages, micro_batches), [cost(1, 2, 1, **BYTES)] * stages)
    assert peak_bytes(done) == tuple(10 + 5 + 3 * k_i for k_i in k)


@given(st.integers(1, 8), st.integers(1, 12))
def test_zb_h1_has_the_peak_of_1f1b(stages: int, micro_batches: int) -> None:
    costs = [cost(1, 2, weights_seconds=1, **BYTES)] * stages
    found, wanted = (execute(order_of(name, stages, micro_batches), costs) for name in ("zb-h1", "dapple-a"))
    assert max(peak_bytes(found)) == max(peak_bytes(wanted)) == 15 + 3 * min(stages, micro_batches)


def test_weight_gradients_free_the_stash_where_they_are_actions_of_their_own_by_hand() -> None:
    # The times are those of test_zb_h1_by_hand.
    done = execute(order_of("zb-h1", 2, 3), [cost(1, 2, weights_seconds=1, **BYTES)] * 2)
    times, held = memory_over_time(done, 1)
    assert times.tolist() == [0, 1, 3, 6, 6, 9, 10]
    assert held.tolist() == [15, 18, 21, 18, 21, 18, 15]


def test_only_a_whole_backward_frees_the_stash_at_once_by_hand() -> None:
    # The times are those of test_a_mixed_schedule_by_hand.
    schedule = "0F0 0F1 0I0 0B1 0W0; 1F0 1B0 1F1 1I1 1W1"
    done = execute(order_of(schedule, 2, 2), [cost(1, 4, 1, weights_seconds=3, **BYTES)] * 2)
    times, held = memory_over_time(done, 0)
    assert times.tolist() == [0, 0, 1, 14, 17]  # F0, F1, B1 and W0
    assert held.tolist() == [15, 18, 21, 18, 15]
    times, held = memory_over_time(done, 1)
    assert times.tolist() == [0, 2, 7, 7, 12]
    assert held.tolist() == [15, 18, 15, 18, 15]
    assert peak_bytes(done) == (21, 18)


@given(runs())
def test_the_peak_counts_micro_batches_between_forward_start_and_backward_end(
    drawn: tuple[Schedule, tuple[StageCosts, ...]],
) -> None:
    schedule, _ = drawn
    # Nothing takes no time, so times tell the order.
    costs = [cost(1, 2, 1, weights_seconds=1, **BYTES)] * len(schedule.stages)
    times = longest_paths(schedule, costs)
    peaks = {}
    for stages, stashes in zip(schedule.worker_map.stages_of, schedule.stashes, strict=True):
        calls = [(stage, m) for stage in stages for m in range(schedule.micro_batches)]
        frees = {call: "W" if call in schedule.split else "B" for call in calls}
        lives = [(times["F", stage, m][0], times[frees[stage, m], stage, m][1]) for stage, m in calls]
        most = max(sum(start <= moment < end for start, end in lives) for moment, _ in lives)
        assert most == stashes
        peaks |= dict.fromkeys(stages, 10.0 * len(stages) + 5 + 3 * most)
    assert peak_bytes(execute(encode(schedule), costs)) == tuple(peaks[stage] for stage in range(len(costs)))


@given(runs())
def test_memory_starts_and_ends_without_stashes(drawn: tuple[Schedule, tuple[StageCosts, ...]]) -> None:
    schedule, costs = drawn
    done = execute(encode(schedule), costs)
    for stage in range(len(costs)):
        times, held = memory_over_time(done, stage)
        assert (times[0], held[0], held[-1]) == (0, 0, 0)
        assert np.all(np.diff(times) >= 0)
