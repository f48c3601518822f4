"""The critical path of a simulated step: by hand, and without gaps for any schedule and costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.graph_passes.schedules.schedule import Schedule
from dapple_tf.graph_passes.schedules.slicer import sliced_1f1b
from dapple_tf.graph_passes.schedules.spec import parse_schedule
from dapple_tf.simulator.execution import execute
from dapple_tf.simulator.order import encode
from dapple_tf.simulator.simulated_step import execution_events
from dapple_tf.timeline.critical_path import critical_stage, sum_by_kind
from dapple_tf.timeline.events import Transfer
from dapple_tf.timeline.stage_costs import StageCosts
from tests.dapple_tf.simulator.builders import cost, order_of, path_of, runs
from tests.graph_passes.schedules.marked import marked


def names_of(name: str, micro_batches: int, costs: Sequence[StageCosts]) -> list[str]:
    return [str(part) for part in path_of(execute(order_of(name, len(costs), micro_batches), costs))]


def test_the_path_through_a_pipeline_with_transfers_by_hand() -> None:
    # The times are those of test_policy_a_waits_for_the_network_by_hand. 1F3 starts at 10, when 1B2 on the same
    # device and its own transfer both end: the device is followed.
    costs = [cost(1, 1, 1), cost(1, 1)]
    assert names_of("dapple-a", 4, costs) == [
        *("0F0", "0>1 F0", "1F0", "1B0", "1>0 B0", "0B0", "0F2"),
        *("0>1 F2", "1F2", "1B2", "1F3", "1B3", "1>0 B3", "0B3"),
    ]
    path = path_of(execute(order_of("dapple-a", 2, 4), costs))
    assert [event.start for event in path] == list(range(14))
    assert critical_stage(path) == 1  # six of its actions, four of stage 0


def test_the_path_follows_a_channel_that_is_never_free_by_hand() -> None:
    # Transfers of 3 s back to back from 1 to 10, then 1F2 and 1B0; gradients take no time, and stage 0 follows.
    costs = [cost(1, 1, 3, 0), cost(1, 1)]
    wanted = ["0F0", "0>1 F0", "0>1 F1", "0>1 F2", "1F2", "1B0", "0B0", "0B1", "0B2"]
    assert names_of("gpipe", 3, costs) == wanted


def test_the_way_back_can_be_the_slow_channel_by_hand() -> None:
    # Backwards of the last stage at 3 and 5 (dapple-a), gradients on the wire 4 to 8 and 8 to 12.
    wanted = ["0F0", "0>1 F0", "1F0", "1B0", "1>0 B0", "1>0 B1", "0B1"]
    costs = [cost(1, 1, 1, 4), cost(1, 1)]
    assert names_of("dapple-a", 2, costs) == wanted


def test_an_allreduce_that_ends_last_ends_the_path() -> None:
    path = path_of(execute(order_of("gpipe", 2, 1), [cost(1, 1), cost(1, 1, exposed_seconds=9)]))
    assert [str(event) for event in path] == ["0F0", "1F0", "1B0", "AllReduce of stage 1"]
    assert (path[-1].start, path[-1].end) == (3, 12)


def test_the_path_of_zb_h1_by_hand() -> None:
    # The times are those of test_zb_h1_by_hand: once its first gradient is there, stage 0 never waits.
    path = path_of(execute(order_of("zb-h1", 2, 3), [cost(1, 2, weights_seconds=1)] * 2))
    wanted = ["0F0", "1F0", "1I0", "0I0", "0W0", "0F2", "0I1", "0W1", "0I2", "0W2"]
    assert [str(event) for event in path] == wanted
    assert critical_stage(path) == 0
    assert [event.start for event in path] == list(range(10))


def test_the_path_of_a_mixed_schedule_by_hand() -> None:
    # The times are those of test_a_mixed_schedule_by_hand: at 10 the gradient of 1I1 arrives at stage 0.
    schedule = "0F0 0F1 0I0 0B1 0W0; 1F0 1B0 1F1 1I1 1W1"
    path = path_of(execute(order_of(schedule, 2, 2), [cost(1, 4, 1, weights_seconds=3)] * 2))
    wanted = ["0F0", "0>1 F0", "1F0", "1B0", "1F1", "1I1", "1>0 B1", "0B1", "0W0"]
    assert [str(part) for part in path] == wanted
    assert [part.start for part in path] == [0, 1, 2, 3, 7, 8, 9, 10, 14]


def test_the_first_of_equally_busy_stages_is_critical() -> None:
    path = path_of(execute(order_of("gpipe", 3, 1), [cost(1, 1)] * 3))
    assert critical_stage(path) == 0


def test_results_that_travel_together_are_waited_for_by_hand() -> None:
    # Stage 1 takes 0F0 when 0F1 ends, and stage 0 takes 1B0 when 1B1 ends; transfers take no time.
    schedule = parse_schedule("0F0+ 0F1 0B0 0B1; 1F0 1F1 1B0+ 1B1")
    costs = [cost(1, 2)] * 2
    path = path_of(execute(encode(schedule), costs, together=schedule.together))
    wanted = [("0F0", 0), ("0F1", 1), ("1F0", 2), ("1F1", 3), ("1B0", 4), ("1B1", 6), ("0B0", 8), ("0B1", 10)]
    assert [(str(part), part.start) for part in path] == wanted


def test_the_path_through_sliced_micro_batches_has_no_waiting() -> None:
    schedule = sliced_1f1b(4, 4, 2)
    costs = [cost(1, 2, 1, 0)] * 4
    path = path_of(execute(encode(schedule), costs, together=schedule.together))
    assert sum_by_kind(path)["waiting"] == 0
    assert path[-1].end == 34


def test_actions_that_take_no_time_stay_in_the_order_in_which_their_worker_runs_them() -> None:
    schedule = parse_schedule("0F0 1F0 2F0 2B0 1B0 0I0 0W0; 3F0 3B0")
    path = path_of(execute(encode(schedule), [cost(0, 0)] * 3 + [cost(0, 1)]))
    assert [(str(part), part.start, part.end) for part in path] == [("3B0", 0, 1)]


@given(st.data())
def test_a_path_where_results_travel_together_has_no_gaps(data: st.DataObject) -> None:
    schedule, costs = data.draw(runs())
    schedule = data.draw(marked(schedule))
    done = execute(encode(schedule), costs, together=schedule.together)
    path = path_of(done)
    assert sum_by_kind(path)["waiting"] == 0
    assert sum(part.seconds for part in path) == pytest.approx(done.step_seconds, rel=1e-9)
    sent: dict[tuple[int, int], list[Transfer]] = {}
    for transfer in execution_events(done, [(s, 0, f"d:{s}") for s in range(len(costs))]).transfers:
        sent.setdefault((transfer.source, transfer.target), []).append(transfer)
    for transfers in sent.values():  # one after the other on each channel, each micro-batch in one of them
        assert all(before.end <= after.start for before, after in pairwise(transfers))
        carried = [m for transfer in transfers for m in transfer.micro_batches]
        assert sorted(carried) == list(range(schedule.micro_batches))


@given(runs())
def test_a_path_has_no_gaps_from_the_start_to_the_end(drawn: tuple[Schedule, tuple[StageCosts, ...]]) -> None:
    schedule, costs = drawn
    done = execute(encode(schedule), costs)
    path = path_of(done)
    assert sum_by_kind(path)["waiting"] == 0
    assert all(before.end == after.start for before, after in pairwise(path))
    if done.step_seconds:
        assert (path[0].start, path[-1].end) == (0, done.step_seconds)
    assert len(set(path)) == len(path)
    assert sum(event.end - event.start for event in path) == pytest.approx(done.step_seconds, rel=1e-9)
    assert 0 <= critical_stage(path) < len(costs)
