"""The compiled run of a schedule, against tables by hand, closed forms, the plain run and a slow reference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.chunked import interleaved_1f1b
from dapple_tf.graph_passes.schedules.schedule import Action, Kind, Schedule, run_schedule
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec, early_backward, parse_schedule
from dapple_tf.simulator.engine import make_rings, run, step_seconds, uniform_seconds
from dapple_tf.simulator.execution import execute
from dapple_tf.simulator.memory import peak_bytes
from dapple_tf.simulator.order import (
    HeldStash,
    decode_order,
    early_backward_order,
    encode,
    interleaved_order,
)
from dapple_tf.timeline.stage_costs import StageCosts
from tests.dapple_tf.simulator.builders import arrays, cost, order_of, runs, schedules, seconds, step_of
from tests.dapple_tf.simulator.reference import longest_paths
from tests.dapple_tf.simulator.test_contention import times_of
from tests.graph_passes.builders import refused


def test_a_schedule_is_encoded_as_an_order() -> None:
    order = encode(parse_schedule("0F1 0F0 0B0 0B1\n1F1 1F0 1B0 1B1"))
    stage, backward = 1 << 34, 1 << 32
    first = [1, 0, backward, backward + 1]
    assert order.actions.tolist() == [first, [stage + code for code in first]]
    assert (order.worker_of.tolist(), order.micro_batches, order.size) == ([0, 1], 2, 8)


def test_a_worker_with_fewer_actions_than_others_has_a_shorter_row() -> None:
    order = encode(parse_schedule("0F0 2F0 2B0 0B0\n1F0 1B0"))
    assert order.actions[1].tolist() == [1 << 34, (1 << 34) + (1 << 32), -1, -1]
    assert (order.worker_of.tolist(), order.micro_batches, order.size) == ([0, 1, 0], 1, 6)


def test_each_kind_of_action_has_a_code() -> None:
    order = encode(parse_schedule("0F0 0F1 0I0 0B1 0W0"))
    assert order.actions.tolist() == [[0, 1, 3 << 32, (1 << 32) + 1, 2 << 32]]
    assert (order.micro_batches, order.size) == (2, 5)


@given(schedules())
def test_decoding_an_order_gives_the_schedule(schedule: Schedule) -> None:
    order = encode(schedule)
    assert decode_order(order) == schedule.workers


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(7, 9))
def test_compiled_and_plain_early_backward_orders_are_equal(k: list[int], micro_batches: int) -> None:
    k = sorted(k, reverse=True)
    wanted = encode(early_backward(k, micro_batches))
    found = early_backward_order(np.array(k), micro_batches)
    assert np.array_equal(found.actions, wanted.actions)
    assert np.array_equal(found.worker_of, wanted.worker_of)
    assert found.micro_batches == wanted.micro_batches


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 13))
def test_compiled_and_plain_interleaved_orders_are_equal(workers: int, chunks: int, micro_batches: int) -> None:
    wanted = encode(interleaved_1f1b(workers, chunks, micro_batches))
    found = interleaved_order(workers, chunks, micro_batches)
    assert np.array_equal(found.actions, wanted.actions)
    assert np.array_equal(found.worker_of, wanted.worker_of)
    assert found.micro_batches == wanted.micro_batches


@given(schedules())
def test_the_most_that_stages_hold_is_counted_from_orders(schedule: Schedule) -> None:
    order, stages = encode(schedule), len(schedule.stages)
    assert tuple(HeldStash.of(order).in_flight()) == schedule.in_flight
    nothing = np.zeros(stages)
    assert tuple(HeldStash.of(order).peaks(nothing, np.ones(stages), nothing)) == schedule.stashes


@given(runs(), st.lists(st.tuples(seconds, seconds, seconds), min_size=9, max_size=9))
def test_the_peaks_of_workers_are_those_of_memory_over_time(
    drawn: tuple[Schedule, tuple[StageCosts, ...]], sizes: list[tuple[float, float, float]]
) -> None:
    schedule, costs = drawn
    names = ("fixed_bytes", "stash_bytes", "working_bytes")
    sized = [replace(c, **dict(zip(names, size, strict=True))) for c, size in zip(costs, sizes, strict=False)]
    peaks = HeldStash.of(encode(schedule)).peaks(*(np.array([getattr(c, name) for c in sized]) for name in names))
    wanted = peak_bytes(execute(encode(schedule), sized))
    for worker, stages in enumerate(schedule.worker_map.stages_of):
        assert [wanted[stage] for stage in stages] == pytest.approx([peaks[worker]] * len(stages), rel=1e-12)


@given(runs())
def test_every_event_ends_at_its_longest_path(drawn: tuple[Schedule, tuple[StageCosts, ...]]) -> None:
    schedule, costs = drawn
    assert times_of(execute(encode(schedule), costs)) == longest_paths(schedule, costs)


def end_of_allreduces(last: dict[int, float], schedule: Schedule, costs: Sequence[StageCosts]) -> float:
    """The end of the last AllReduce; those of a worker start as gradients are complete, one at a time."""
    ends = []
    for stages in schedule.worker_map.stages_of:
        now = 0.0
        for stage in sorted(stages, key=lambda stage: last[stage]):
            now = max(now, last[stage]) + costs[stage].exposed_seconds
        ends.append(now)
    return max(ends)


@given(runs())
def test_the_step_ends_with_the_last_allreduce(drawn: tuple[Schedule, tuple[StageCosts, ...]]) -> None:
    schedule, costs = drawn
    times = longest_paths(schedule, costs)
    ends = [(stage, end) for (kind, stage, _), (_, end) in times.items() if kind in ("B", "W")]
    last = end_of_allreduces({stage: max(e for s, e in ends if s == stage) for stage, _ in ends}, schedule, costs)
    assert step_seconds(encode(schedule), *arrays(costs, bool(schedule.split))) == last
    assert execute(encode(schedule), costs).step_seconds == last


@given(runs())
def test_compiled_and_plain_runs_of_a_schedule_are_equal(drawn: tuple[Schedule, tuple[StageCosts, ...]]) -> None:
    schedule, costs = drawn

    def seconds_of(action: Action) -> float:
        cost = costs[action.stage]
        return {
            "F": cost.forward_seconds,
            "B": cost.backward_seconds,
            "I": cost.backward_seconds - cost.weights_seconds,
            "W": cost.weights_seconds,
        }[action.kind]

    def send_seconds(action: Action) -> float:
        if action.kind == "F":
            return costs[action.stage].send_forward_seconds
        return costs[action.stage - 1].send_backward_seconds if action.stage else 0.0

    plain = run_schedule(schedule, seconds_of, send_seconds)
    done = execute(encode(schedule), costs)
    ends = {
        "F": done.times.end_forward,
        "B": done.times.end_backward,
        "I": done.times.end_backward,
        "W": done.times.end_weights,
    }
    last_of = {}
    for actions, worker_ends in zip(schedule.workers, plain, strict=True):
        assert worker_ends == tuple(ends[a.kind][a.stage, a.micro_batch] for a in actions)
        last_of |= {a.stage: end for a, end in zip(actions, worker_ends, strict=True)}
    last = end_of_allreduces(last_of, schedule, costs)
    assert step_seconds(encode(schedule), *arrays(costs, bool(schedule.split))) == last


# Closed forms.

small = st.integers(1, 6)
counts = st.integers(1, 9)


@given(st.sampled_from(["gpipe", "dapple-a", "dapple-b"]), small, counts, small, small)
def test_balanced_stages_take_m_plus_s_minus_1_rounds(name: str, s: int, m: int, f: int, b: int) -> None:
    assert step_of(name, m, [cost(f, b)] * s) == (m + s - 1) * (f + b)


@given(small, counts, small, small, st.integers(0, 8))
def test_gpipe_with_transfers(s: int, m: int, f: int, b: int, c: int) -> None:
    # A line of S stages and S - 1 channels: the first micro-batch passes all of them, each later one comes out one
    # beat of the slowest after the one before. Backwards start when the last forward is out, on channels of their own.
    slowest_forward, slowest_backward = (max(f, c), max(b, c)) if s > 1 else (f, b)
    wanted = s * (f + b) + 2 * (s - 1) * c + (m - 1) * (slowest_forward + slowest_backward)
    assert step_of("gpipe", m, [cost(f, b, c)] * s) == wanted


@given(st.lists(st.tuples(seconds, seconds, seconds, seconds), min_size=1, max_size=4), counts)
def test_gpipes_transfers_are_stages_of_their_own(drawn: list[tuple[float, ...]], m: int) -> None:
    costs = [cost(*figures) for figures in drawn]
    line = []
    for each in costs:
        line += [
            cost(each.forward_seconds, each.backward_seconds),
            cost(each.send_forward_seconds, each.send_backward_seconds),
        ]
    assert step_of("gpipe", m, costs) == step_of("gpipe", m, line[:-1])


@given(st.integers(1, 8), st.integers(0, 5), st.data())
def test_zb_h1s_bubble_is_the_papers(s: int, more: int, data: st.DataObject) -> None:
    # Qi et al., Table 1: (p - 1) (T_F + T_B - T_W), against (p - 1) (T_F + T_B + T_W) of 1F1B.
    f, b = data.draw(small), data.draw(small)
    w = data.draw(st.integers(0, min(f, b)))
    costs = [cost(f, b + w, weights_seconds=w)] * s
    work = (s + more) * (f + b + w)
    assert step_of("zb-h1", s + more, costs) - work == (s - 1) * (f + b - w)
    assert step_of("dapple-a", s + more, costs) - work == (s - 1) * (f + b + w)


def test_zb_h1_by_hand() -> None:
    # F = B = W = 1, S = 2, M = 3: two seconds less than 1F1B's 12, and one second idle on each stage.
    #   stage 0: F0 0  F1 1        B0 3  W0 4  F2 5  B1 6  W1 7  B2 8  W2 9
    #   stage 1:       F0 1  B0 2  F1 3  B1 4  W0 5  F2 6  B2 7  W1 8  W2 9
    done = execute(order_of("zb-h1", 2, 3), [cost(1, 2, weights_seconds=1)] * 2)
    assert done.times.start_forward.tolist() == [[0, 1, 5], [1, 3, 6]]
    assert done.times.start_backward.tolist() == [[3, 6, 8], [2, 4, 7]]
    assert done.times.start_weights.tolist() == [[4, 7, 9], [5, 8, 9]]
    assert done.step_seconds == 10


def test_a_mixed_schedule_by_hand() -> None:
    # F = 1, B = 4 of which W = 3, c = 1, S = 2, M = 2. Stage 0 splits micro-batch 0, and stage 1 micro-batch 1.
    #   stage 0: F0 0  F1 1                  I0 8          B1 10-14  W0 14-17
    #   stage 1:             F0 2  B0 3-7  F1 7  I1 8  W1 9-12
    schedule = "0F0 0F1 0I0 0B1 0W0; 1F0 1B0 1F1 1I1 1W1"
    done = execute(order_of(schedule, 2, 2), [cost(1, 4, 1, weights_seconds=3)] * 2)
    assert done.times.start_forward.tolist() == [[0, 1], [2, 7]]
    assert done.times.start_backward.tolist() == [[8, 10], [3, 8]]
    assert done.times.end_backward.tolist() == [[9, 14], [7, 9]]
    assert done.times.start_send_backward[0].tolist() == [7, 9]
    assert (done.times.start_weights[0, 0], done.times.start_weights[1, 1]) == (14, 9)
    assert np.isnan(done.times.start_weights[[0, 1], [1, 0]]).all()
    assert done.last_gradients.tolist() == [17, 12]
    assert done.step_seconds == 17


def test_the_allreduce_starts_after_the_last_of_both_kinds_of_gradients_by_hand() -> None:
    # F, I and W take 1 s, B 2. Stage 0 ends with a whole backward, and stage 1 with W.
    #   stage 0: F0 0  F1 1        I0 4  W0 5  B1 6-8
    #   stage 1:       F0 1  B0 2-4  F1 4  I1 5  W1 6
    costs = [cost(1, 2, weights_seconds=1, exposed_seconds=5), cost(1, 2, weights_seconds=1, exposed_seconds=1)]
    done = execute(order_of("0F0 0F1 0I0 0W0 0B1; 1F0 1B0 1F1 1I1 1W1", 2, 2), costs)
    assert done.last_gradients.tolist() == [8, 7]
    assert done.step_seconds == 13


def test_policy_a_waits_for_the_network_by_hand() -> None:
    # F = B = c = 1, S = 2, M = 4. Stage 0: F0 at 0, F1 at 1, then it waits for B0, which is back at 5.
    #   stage 0: F0 0  F1 1            B0 5  F2 6  B1 7  F3 8              B2 11       B3 13
    #   stage 1:             F0 2  B0 3  F1 4  B1 5       F2 8  B2 9  F3 10  B3 11
    done = execute(order_of("dapple-a", 2, 4), [cost(1, 1, 1), cost(1, 1)])
    assert done.times.start_forward.tolist() == [[0, 1, 6, 8], [2, 4, 8, 10]]
    assert done.times.start_backward.tolist() == [[5, 7, 11, 13], [3, 5, 9, 11]]
    assert done.times.start_send_forward[0].tolist() == [1, 2, 7, 9]
    assert done.times.start_send_backward[0].tolist() == [4, 6, 10, 12]
    assert done.step_seconds == 14


def test_policy_b_runs_forwards_during_that_wait_by_hand() -> None:
    #   stage 0: F0 0  F1 1  F2 2      B0 5  F3 6  B1 7        B2 9        B3 11
    #   stage 1:             F0 2  B0 3  F1 4  B1 5  F2 6  B2 7  F3 8  B3 9
    done = execute(order_of("dapple-b", 2, 4), [cost(1, 1, 1), cost(1, 1)])
    assert done.times.start_forward.tolist() == [[0, 1, 2, 6], [2, 4, 6, 8]]
    assert done.times.start_backward.tolist() == [[5, 7, 9, 11], [3, 5, 7, 9]]
    assert done.step_seconds == 12


def test_a_slow_channel_is_first_in_first_out_by_hand() -> None:
    # Forwards of 1 s leave every second, but each needs 3 s on the wire: they arrive at 4, 7, 10.
    done = execute(order_of("gpipe", 2, 3), [cost(1, 1, 3, 0), cost(1, 1)])
    assert done.times.start_send_forward[0].tolist() == [1, 4, 7]
    assert done.times.start_forward[1].tolist() == [4, 7, 10]
    assert done.times.start_backward[1].tolist() == [11, 12, 13]
    assert done.times.end_backward[0].tolist() == [13, 14, 15]


def test_a_channel_sends_in_the_order_in_which_its_producer_runs() -> None:
    order = encode(parse_schedule("0F1 0F0 0B0 0B1\n1F1 1F0 1B1 1B0"))
    done = execute(order, [cost(1, 1, 3), cost(1, 1)])
    assert done.times.start_send_forward[0].tolist() == [4, 1]  # micro-batch 1 ran first
    assert done.times.start_send_backward[0].tolist() == [12, 9]


@given(st.integers(1, 6), counts, small, small, st.integers(0, 8))
def test_policy_b_is_never_slower_than_a_on_balanced_stages(s: int, m: int, f: int, b: int, c: int) -> None:
    costs = [cost(f, b, c)] * s
    assert step_of("dapple-b", m, costs) <= step_of("dapple-a", m, costs)


def test_policy_b_may_be_slower_where_stages_differ_by_hand() -> None:
    # Forwards (1, 3, 1), backwards (5, 4, 2), no transfers, M = 3. B's third forward of stage 1 delays its first
    # backward, on which stage 0's all wait.
    #   A: stage 0: F0-2 0-3                      B0 11-16  B1 18-23  B2 23-28
    #      stage 1: F0 1-4  F1 4-7  B0 7-11  F2 11-14  B1 14-18  B2 18-22
    #      stage 2: F0 4-5 B0 5-7  F1 7-8 B1 8-10  F2 14-15 B2 15-17
    #   B: stage 0: F0-2 0-3                              B0 14-19  B1 19-24  B2 24-29
    #      stage 1: F0 1-4  F1 4-7  F2 7-10  B0 10-14  B1 14-18  B2 18-22
    costs = [cost(1, 5), cost(3, 4), cost(1, 2)]
    assert (step_of("dapple-a", 3, costs), step_of("dapple-b", 3, costs)) == (28, 29)


@given(runs())
def test_a_step_is_no_shorter_than_one_stages_work_or_one_micro_batchs_path(
    drawn: tuple[Schedule, tuple[StageCosts, ...]],
) -> None:
    schedule, costs = drawn
    m, stages = schedule.micro_batches, list(enumerate(costs))
    found = step_seconds(encode(schedule), *arrays(costs, bool(schedule.split)))
    ways = [
        sum(c.forward_seconds + c.backward_seconds - ((s, i) in schedule.split) * c.weights_seconds for s, c in stages)
        for i in range(m)
    ]
    worker_of = schedule.worker_map.worker_of
    moves = [a != b for a, b in itertools.pairwise(worker_of)]
    way = max(ways) + sum(
        c.send_forward_seconds + c.send_backward_seconds for c, moved in zip(costs, moves, strict=False) if moved
    )
    own = [[costs[stage] for stage in stages] for stages in schedule.worker_map.stages_of]
    work = max(m * sum(c.forward_seconds + c.backward_seconds for c in costs) for costs in own)
    assert max(way, work) <= found * (1 + 1e-12)  # sums in another order round otherwise


# What cannot run ends all the same.

DEADLOCKS = [
    ("0B0 0F0", 0),
    ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", 2),
    ("0F0 0F1 0B0 0B1\n1F0 1F1 1B1 1B0\n2F1 2B1 2B0 2F0", 7),
    ("0F0 0W0 0I0", 1),
    ("0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1F1 1I1 1W0 1I0 1W1", 5),
    ("0F0 0F1 0I0 0W0 0B1\n1F0 1F1 1B1 1W0 1I0", 5),
]


def unchecked(text: str) -> Schedule:
    rows = [line.split() for line in text.splitlines()]
    kinds: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
    return Schedule(tuple(tuple(Action(int(w[0]), kinds[w[1]], int(w[2])) for w in r) for r in rows))


@pytest.mark.parametrize(("text", "ran"), DEADLOCKS)
def test_a_deadlock_ends_and_is_reported(text: str, ran: int) -> None:
    order = encode(unchecked(text))
    costs = [cost(1, 1, 1)] * len(order.worker_of)
    *columns, _ = arrays(costs, weights=True)
    done = run(order, uniform_seconds(*columns), make_rings(costs)).done
    assert done == ran == sum(map(len, run_schedule(unchecked(text), lambda action: 1.0)))
    assert step_seconds(order, *arrays(costs, bool(unchecked(text).split))) == np.inf
    with refused(ScheduleError, f"the schedule deadlocks after {ran} of {order.size} actions"):
        execute(order, costs)


def test_costs_of_another_number_of_stages_are_refused() -> None:
    with refused(ScheduleError, "the schedule has 2 stages x 2 micro-batches, but there are costs of 3"):
        execute(order_of("gpipe", 2, 2), [cost()] * 3)


def test_a_policys_name_gives_its_warm_up_forwards() -> None:
    assert ScheduleSpec.parse("dapple-b:D=4").warm_up(4, 16) == (4, 4, 3, 1)
