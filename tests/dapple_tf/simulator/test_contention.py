"""Steps whose transfers and rings share network interfaces: by hand, and against a second simulator."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import Action, Kind, Schedule, of_kind
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec, parse_schedule
from dapple_tf.profiler.cluster import Cluster, Link, Server
from dapple_tf.simulator.contention import Flows, find_flows
from dapple_tf.simulator.costs import exposed_seconds, overlapped_rings
from dapple_tf.simulator.engine import make_rings, run, run_in_python, uniform_seconds
from dapple_tf.simulator.execution import Execution, execute
from dapple_tf.simulator.order import encode
from dapple_tf.simulator.simulate import simulate
from dapple_tf.simulator.transfer import allreduce_cost, link_tables, ring_seconds, transfer_cost
from dapple_tf.timeline.critical_path import sum_by_kind
from dapple_tf.timeline.stage_costs import StageCosts
from tests.dapple_tf.simulator.builders import arrays, cost, make_plan, make_profile, path_of, schedules
from tests.dapple_tf.simulator.contention_reference import Event, Setting, run_reference
from tests.graph_passes.builders import refused


@dataclass(frozen=True)
class Case:
    """Stages of a schedule on a cluster: bytes over each boundary and trained by each layer, seconds of each action.

    ``layers``: of each stage, (seconds of backward, parameter bytes); the rest of its backward comes before. Where the
    schedule has W, the layers' seconds are those of their weights' gradients.
    ``sizes``: of each micro-batch, factors of all seconds and bytes of a micro-batch.
    """

    schedule: Schedule
    cluster: Cluster
    devices: tuple[tuple[int, ...], ...]
    forward: tuple[int, ...]
    rest: tuple[int, ...]
    crossing: tuple[int, ...]
    layers: tuple[tuple[tuple[int, int], ...], ...]
    overlap: bool
    sizes: tuple[int, ...] = ()

    @property
    def weights(self) -> tuple[int, ...]:
        splits = bool(self.schedule.split)
        return tuple(splits * sum(seconds for seconds, _ in layers) for layers in self.layers)

    def homes(self) -> list[list[int]]:
        return [[self.cluster.homes[device] for device in devices] for devices in self.devices]

    def flows(self) -> Flows:
        moves = [a != b for a, b in itertools.pairwise(self.devices)]
        return find_flows(self.homes(), moves, link_tables(self.cluster))

    def costs(self, size: int = 1) -> tuple[StageCosts, ...]:
        """Our costs; gradients of layers are not scaled: AllReduce is for micro-batches of size 1."""
        tables, homes, found = link_tables(self.cluster), self.homes(), []
        for s, layers in enumerate(self.layers):
            send = 0.0
            if s + 1 < len(homes) and self.devices[s] != self.devices[s + 1]:
                latency, per_byte = transfer_cost(homes[s], homes[s + 1], tables)
                send = latency + per_byte * self.crossing[s] * size
            ring_cost = allreduce_cost(homes[s], tables)
            backward = np.array([seconds for seconds, _ in layers], float)
            rings = [ring_seconds(*ring_cost, amount) for _, amount in layers]
            whole = ring_seconds(*ring_cost, sum(amount for _, amount in layers))
            found.append(
                cost(
                    self.forward[s] * size,
                    (self.rest[s] + backward.sum()) * size,
                    send,
                    weights_seconds=self.weights[s] * size,
                    exposed_seconds=exposed_seconds(backward, np.array(rings)) if self.overlap else whole,
                )
            )
            if self.overlap:
                found[-1] = replace(found[-1], rings=overlapped_rings(backward, rings))
        return tuple(found)

    def run(self) -> Execution:
        if self.sizes:
            of_sizes = [self.costs(size) for size in self.sizes]
            return execute(
                encode(self.schedule),
                self.costs(),
                self.flows(),
                of_micro_batches=of_sizes,
                together=self.schedule.together,
            )
        return execute(encode(self.schedule), self.costs(), self.flows(), together=self.schedule.together)

    def setting(self) -> Setting:
        sizes = self.sizes or (1,) * self.schedule.micro_batches
        rings = []
        for layers in self.layers:
            whole = sum(amount for _, amount in layers)
            pairs = [(Fraction(sum(b for b, _ in layers[:i])), Fraction(p)) for i, (_, p) in enumerate(layers)]
            rings.append(pairs[::-1] if self.overlap else [(Fraction(0), Fraction(whole))])
        backward = [sum(b for b, _ in layers) + rest for layers, rest in zip(self.layers, self.rest, strict=True)]
        return Setting(
            self.schedule,
            self.cluster,
            self.devices,
            {
                a: Fraction(
                    sizes[a.micro_batch]
                    * int(
                        of_kind(
                            a.kind,
                            self.forward[a.stage],
                            backward[a.stage],
                            self.weights[a.stage],
                        )
                    )
                )
                for actions in self.schedule.workers
                for a in actions
            },
            [[Fraction(amount * size) for size in sizes] for amount in self.crossing],
            rings,
        )


def times_of(done: Execution) -> dict[Event, tuple[float, float]]:
    """Starts and ends by event, without those that are not there."""
    found = {}
    for kind, starts, ends in (
        ("F", done.times.start_forward, done.times.end_forward),
        ("B", done.times.start_backward, done.times.end_backward),
        ("W", done.times.start_weights, done.times.end_weights),
        ("SF", done.times.start_send_forward[:-1], done.times.end_send_forward[:-1]),
        ("SB", done.times.start_send_backward[:-1], done.times.end_send_backward[:-1]),
    ):
        for stage, m in np.ndindex(starts.shape):
            if not np.isnan(starts[stage, m]):
                found[kind, stage, m] = float(starts[stage, m]), float(ends[stage, m])
    return found


small = st.integers(0, 4)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    count = draw(st.integers(2, 4))
    links = {}
    if draw(st.booleans()):
        links["a", "b"] = Link(draw(st.integers(1, 4)), draw(small))
    inside, between = (Link(draw(st.integers(1, 8)), draw(st.integers(0, 2))) for _ in range(2))
    return Cluster(tuple(Server(name, 4) for name in "abcd"[:count]), 1, inside, between, links)


@st.composite
def cases(draw: st.DrawFn, *, overlap: bool = False, sized: bool = False) -> Case:
    schedule, cluster = draw(schedules()), draw(clusters())
    worker_of = schedule.worker_map.worker_of
    stages, workers = len(worker_of), len(schedule.workers)
    device_order = draw(st.permutations(range(cluster.devices)))
    counts, used = draw(st.lists(st.integers(1, 3), min_size=workers, max_size=workers)), 0
    devices = []
    for count in counts:
        left = cluster.devices - used - (workers - len(devices) - 1)
        count = min(count, left)
        devices.append(tuple(sorted(device_order[used : used + count])))
        used += count
    per_stage = st.lists(small, min_size=stages, max_size=stages).map(tuple)
    layers = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=3).map(tuple)
    return Case(
        schedule,
        cluster,
        tuple(devices[worker] for worker in worker_of),
        draw(per_stage),
        draw(per_stage),
        draw(st.lists(st.integers(0, 9), min_size=stages, max_size=stages).map(tuple)),
        draw(st.lists(layers, min_size=stages, max_size=stages).map(tuple)),
        overlap,
        tuple(draw(st.lists(st.integers(1, 3), min_size=schedule.micro_batches, max_size=schedule.micro_batches)))
        if sized
        else (),
    )


def check_against_reference(case: Case) -> None:
    reference, done = run_reference(case.setting()), case.run()
    found = times_of(done)
    assert found.keys() == reference.times.keys()
    for event, times in reference.times.items():
        assert found[event] == pytest.approx([float(time) for time in times], rel=1e-9, abs=1e-9), event
    for stages in case.schedule.worker_map.stages_of:
        rows, ends = list(stages), [float(reference.rings[stage]) for stage in stages]
        if len(set(done.last_gradients[rows])) == len(rows):  # else the order of their rings is not said
            assert done.allreduce_end[rows].tolist() == pytest.approx(ends, rel=1e-9, abs=1e-9)
        assert max(done.allreduce_end[rows]) == pytest.approx(max(ends), rel=1e-9)
    assert done.step_seconds == pytest.approx(float(max(reference.rings.values())), rel=1e-9)


@given(cases())
def test_every_event_is_when_the_reference_says(case: Case) -> None:
    check_against_reference(case)


@given(cases(sized=True))
def test_so_it_is_for_micro_batches_of_given_sizes(case: Case) -> None:
    check_against_reference(case)


@given(cases(overlap=True))
def test_so_it_is_for_rings_that_overlap_backward(case: Case) -> None:
    check_against_reference(case)


TOGETHER = (
    "0F0+ 0F1 0F2 0B0 0B1 0B2; 1F0 1F1 1F2 1B0 1B1+ 1B2; 2F0 2F1 2F2 2B0+ 2B1+ 2B2",
    "0F0+ 0F1+ 0F2 0B0 0B1 0B2; 1F0+ 1F1 1F2 1B0+ 1B1 1B2; 2F0 2B0 2F1 2F2 2B1 2B2",
)


@given(st.sampled_from(TOGETHER), st.lists(st.integers(0, 9), min_size=12, max_size=12), st.booleans(), clusters())
def test_so_it_is_for_results_that_travel_together(text: str, n: list[int], equal: bool, cluster: Cluster) -> None:
    layers = tuple(((1, amount),) for amount in n[:3])
    sizes = (1, 1, 1) if equal else (1, 2, 3)
    devices = ((0, 4), (1,), (2, 5))
    seconds = tuple(n[3:6]), tuple(n[6:9])
    check_against_reference(
        Case(parse_schedule(text), cluster, devices, *seconds, tuple(n[9:12]), layers, overlap=False, sizes=sizes)
    )


@given(st.one_of(cases(), cases(overlap=True)))
def test_no_event_is_sooner_than_without_contention(case: Case) -> None:
    costs = case.costs()
    alone, shared = execute(encode(case.schedule), costs), case.run()
    for event, times in times_of(alone).items():
        assert all(a <= b * (1 + 1e-12) + 1e-12 for a, b in zip(times, times_of(shared)[event], strict=True))
    assert alone.step_seconds <= shared.step_seconds * (1 + 1e-12) + 1e-12


@given(st.one_of(cases(), cases(overlap=True)), st.booleans())
def test_the_engine_in_python_computes_the_same(case: Case, contention: bool) -> None:
    costs, order = case.costs(), encode(case.schedule)
    *columns, _ = arrays(costs, weights=True)
    given = order, uniform_seconds(*columns), make_rings(costs), case.flows() if contention else None
    wanted, found = run_in_python(*given), run(*given)
    assert (found.seconds, found.done) == (pytest.approx(wanted.seconds, rel=1e-9), wanted.done)
    np.testing.assert_allclose(found.rings_end, wanted.rings_end, rtol=1e-9)
    for name in wanted.times._fields:
        np.testing.assert_allclose(getattr(found.times, name), getattr(wanted.times, name), rtol=1e-9, err_msg=name)


@given(cases(), st.floats(0.5, 1.5))
def test_a_simulation_ends_early_only_where_the_step_is_not_below_the_ceiling(case: Case, share: float) -> None:
    costs, order, step = case.costs(), encode(case.schedule), case.run().step_seconds
    *columns, _ = arrays(costs, weights=True)
    for engine in (run, run_in_python):
        found = engine(order, uniform_seconds(*columns), make_rings(costs), case.flows(), share * step)
        assert found.seconds == pytest.approx(step, rel=1e-9) or (found.seconds == np.inf and share * step <= step)
        assert 0 < found.done <= order.size


def test_of_a_step_far_above_the_ceiling_few_actions_are_simulated() -> None:
    flows, costs = on_servers("a", "b", "a"), [cost(1, 2, 3, exposed_seconds=4)] * 3
    order, (*columns, _) = encode(ScheduleSpec.parse("dapple-a").build(3, 100)), arrays(costs, weights=True)
    assert flows.directions
    for engine in (run, run_in_python):
        whole = engine(order, uniform_seconds(*columns), make_rings(costs), flows)
        found = engine(order, uniform_seconds(*columns), make_rings(costs), flows, whole.seconds / 2)
        assert (found.seconds, whole.done) == (np.inf, 600)
        assert found.done < 150


def on_servers(*homes: str, **links: Link) -> Flows:
    """The flows of stages whose replicas are on these servers, which send one byte a second after 0.5 s."""
    own = {(pair[0], pair[1]): link for pair, link in links.items()}
    cluster = Cluster(tuple(Server(name, 9) for name in "abcd"), 1, Link(4, 0), Link(1, 0.5), own)
    numbers = [["abcd".index(name) for name in names] for names in homes]
    return find_flows(numbers, [True] * (len(homes) - 1), link_tables(cluster))


def uses(flows: Flows, flow: int) -> list[float]:
    return sorted(flows.demand[flows.first[flow] : flows.first[flow + 1]].tolist())


@pytest.mark.parametrize(
    ("homes", "links"),
    [
        (("aa", "aa", "a"), {}),
        (("a", "b"), {}),  # the two directions of one boundary
        (("a", "bb", "cc"), {"ab": Link(1, 1), "bc": Link(1, 1)}),
        (("aa", "b", "b"), {}),
    ],
)
def test_where_nothing_is_shared_no_direction_is_kept(homes: tuple[str, ...], links: dict[str, Link]) -> None:
    flows = on_servers(*homes, **links)
    assert (flows.directions, len(flows.direction)) == (0, 0)
    costs = [cost(1, 2, 3, exposed_seconds=4)] * len(homes)
    order = encode(ScheduleSpec.parse("dapple-a").build(len(homes), 4))
    assert times_of(execute(order, costs, flows)) == times_of(execute(order, costs))


def test_both_boundaries_of_a_server_share_its_interface() -> None:
    # What leaves b: activations to c and gradients to a; what enters it: activations of a and gradients of c.
    flows = on_servers("a", "b", "c")
    assert flows.directions == 2
    assert [uses(flows, flow) for flow in (0, 1, 3, 4)] == [[1], [1], [1], [1]]
    assert [uses(flows, flow) for flow in (2, 5, 6, 7, 8)] == [[]] * 5  # no boundary, and no rings of one replica
    assert flows.latency.tolist() == [0.5, 0.5, 0, 0.5, 0.5, 0, 0, 0, 0]


def test_a_ring_uses_both_directions_of_each_server_that_it_spans() -> None:
    flows = on_servers("ab", "ab")
    assert flows.directions == 4
    assert (uses(flows, 4), uses(flows, 5)) == ([1, 1, 1, 1], [1, 1, 1, 1])
    assert uses(flows, 0) == uses(flows, 2) == []  # transfers stay in their servers
    assert flows.latency.tolist() == [0, 0, 0, 0, 1, 1]  # of rings two turns


def test_demands_are_relative_to_the_slowest_link() -> None:
    # Half of boundary 0 goes from a to c in 1/2 s a byte, the other half from b to d over their own link in 1 s.
    flows = on_servers("ab", "cd", "a", bd=Link(0.5, 0))
    assert uses(flows, 0) == [0.5, 0.5]  # leaves a, enters c
    # The links of a ring of a and b are their own; of those of a, b and c one is, and takes twice as long.
    assert on_servers("ab", "ab", ab=Link(8, 0)).directions == 0
    assert uses(on_servers("abc", "abc", "abc", ab=Link(0.5, 0)), 6) == [0.5] * 4  # leaves b, enters c; leaves c ...


def test_transfers_that_leave_one_server_by_hand() -> None:
    # Stages on a, b, c; F = 1, B = 1, transfers take 0.5 s of latency, and 2 s for their bytes. GPipe, M = 2:
    #   forwards: a to b 1-3.5 and 3.5-6; b to c 4.5-7 and 7-9.5; stage 2: F0 7-8, F1 9.5-10.5, B0 10.5, B1 11.5-12.5.
    #   c to b: 11.5-14 and 14-16.5; stage 1: B0 14-15, B1 16.5-17.5; b to a: 15-17.5, 17.5-20. Nothing meets.
    costs = [cost(1, 1, 2.5), cost(1, 1, 2.5), cost(1, 1)]
    order, flows = encode(ScheduleSpec.parse("gpipe").build(3, 2)), on_servers("a", "b", "c")
    assert times_of(execute(order, costs, flows)) == times_of(execute(order, costs))
    # 1F1B: 1B0 has run at 9 + ... when activations of micro-batch 1 still leave b.
    order = encode(parse_schedule("0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1; 2F0 2B0 2F1 2B1"))
    #   0F0 0-1, 0F1 1-2; a to b 1-3.5, 3.5-6; 1F0 3.5-4.5; b to c 4.5-7; 2F0 7-8, 2B0 8-9; c to b 9-11.5;
    #   1B0 11.5-12.5, 1F1 12.5-13.5; b to a from 12.5: latency until 13, alone until 14, then b to c moves too
    #   (13.5 + 0.5). At 14 it has moved half: both move at half speed, 1 s each takes 2 until 16. Then b to c, which
    #   has moved 1 of its 2 s, is alone until 17.
    done = execute(order, costs, flows)
    assert (done.times.start_send_backward[0, 0], done.times.end_send_backward[0, 0]) == (12.5, 16)
    assert (done.times.start_send_forward[1, 1], done.times.end_send_forward[1, 1]) == (13.5, 17)
    assert done.times.start_forward[2, 1] == 17


def test_two_rings_on_the_same_servers_by_hand() -> None:
    # Two stages on a and b: 1 s of latency, then 4 and 6 s of bytes. Stage 1's gradients are there at 3, stage 0's at
    # 5. Ring 1 waits until 4 and moves alone until 6, where 4 of its 6 s are left. Both move at half speed until ring
    # 0 ends at 6 + 2 x 4 = 14, as does ring 1.
    costs = [cost(1, 2, exposed_seconds=5), cost(1, 1, exposed_seconds=7)]
    done = execute(encode(ScheduleSpec.parse("gpipe").build(2, 1)), costs, on_servers("ab", "ab"))
    assert done.last_gradients.tolist() == [5, 3]
    assert done.allreduce_end.tolist() == [14, 14]
    assert execute(encode(ScheduleSpec.parse("gpipe").build(2, 1)), costs).allreduce_end.tolist() == [10, 10]


def test_flows_that_use_half_of_a_direction_do_not_slow_one_another_down() -> None:
    # Half of the activations for d and half of the gradients for a leave b, and the others c.
    assert on_servers("a", "bc", "d", bc=Link(8, 0)).directions == 0
    assert on_servers("a", "bbc", "d", bc=Link(8, 0)).directions == 2  # leaving and entering b, which does two thirds


def test_a_deadlock_is_reported_with_contention_too() -> None:
    rows = ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F1 2B1 2B0 2F0"]
    kinds: dict[str, Kind] = {"F": "F", "B": "B"}
    schedule = Schedule(tuple(tuple(Action(int(w[0]), kinds[w[1]], int(w[2])) for w in row.split()) for row in rows))
    costs, flows = [cost(1, 1, 1)] * 3, on_servers("a", "b", "c")
    with refused(ScheduleError, "the schedule deadlocks after 6 of 12 actions"):
        execute(encode(schedule), costs, flows)
    *columns, _ = arrays(costs, weights=True)
    for engine in (run, run_in_python):
        found = engine(encode(schedule), uniform_seconds(*columns), make_rings(costs), flows)
        assert (found.seconds, found.done) == (np.inf, 6)


def test_the_rings_of_a_worker_run_one_after_the_other_by_hand() -> None:
    # Three layers, two stages of which each is on both devices, one micro-batch. Backward of stage 1 ends at 6, its
    # ring of 4 s at 10. That of stage 0 ends at 9; its rings of 2.5 s and 2 s were ready before, but run from 10 on.
    costs = [
        replace(cost(1, 3, exposed_seconds=2), rings=((1.0, 2.5), (0.0, 2.0))),
        replace(cost(1, 4, exposed_seconds=4), rings=((0.0, 4.0),)),
    ]
    order = encode(ScheduleSpec.parse("looped-bfs:v=2").build(2, 1))
    assert execute(order, costs).allreduce_end.tolist() == [14.5, 10]


@given(st.one_of(cases(), cases(overlap=True)))
def test_the_critical_path_has_no_gaps_where_flows_slow_one_another_down(case: Case) -> None:
    done = case.run()
    path = path_of(done)
    assert sum_by_kind(path)["waiting"] == pytest.approx(0, abs=1e-9)
    assert sum(part.seconds for part in path) == pytest.approx(done.step_seconds)


def test_a_transfer_that_another_slows_down_is_longer_on_the_critical_path() -> None:
    # As in test_transfers_that_leave_one_server_by_hand: activations of micro-batch 1 take 3.5 s from b to c, not 2.5.
    order = encode(parse_schedule("0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1; 2F0 2B0 2F1 2B1"))
    path = path_of(execute(order, [cost(1, 1, 2.5), cost(1, 1, 2.5), cost(1, 1)], on_servers("a", "b", "c")))
    assert [part.seconds for part in path if str(part) == "1>2 F1"] == [3.5]


def test_simulate_shares_interfaces_unless_told_not_to() -> None:
    profile, cluster = (
        make_profile((2, 2), (2, 2), (2, 2)),
        Cluster(tuple(Server(name, 1) for name in "abc"), 1e6, Link(4, 0), Link(2, 0.5)),
    )
    stages = (0, 0, (0,)), (1, 1, (1,)), (2, 2, (2,))
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "micro_batches": 2}
    schedule = "0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1; 2F0 2B0 2F1 2B1"
    plan = make_plan(*stages, **sizes, schedule=schedule)
    # Of two samples F = B = 1, and transfers take 0.5 s of latency and 4 bytes at 2 a second: the steps above.
    timeline = simulate(plan, profile, cluster)
    assert [(t.start, t.end) for t in timeline.transfers if (t.source, t.target) == (1, 2)] == [(4.5, 7), (13.5, 17)]
    alone = simulate(plan, profile, cluster, contention=False)
    assert [(t.start, t.end) for t in alone.transfers if (t.source, t.target) == (1, 2)] == [(4.5, 7), (13.5, 16)]
    assert timeline.acr == alone.acr
    assert timeline.step_seconds > alone.step_seconds
    given_sizes = simulate(replace(plan, micro_batch_sizes=(2, 2)), profile, cluster)
    assert given_sizes.transfers == timeline.transfers
    together = simulate(replace(plan, schedule="0F0+ 0F1 0B0 0B1; 1F0 1B0 1F1 1B1; 2F0 2B0 2F1 2B1"), profile, cluster)
    assert [(t.start, t.end) for t in together.transfers if t.source == 0] == [(2, 7)]
