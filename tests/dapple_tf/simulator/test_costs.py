"""Costs of the stages of a plan: by hand, and against the slow reference of the planner's tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dapple_tf.plans import Plan
from dapple_tf.profiler.cluster import Cluster, Link, Server
from dapple_tf.profiler.profile import LayerCost, Profile, Timing
from dapple_tf.simulator.costs import exposed_seconds, stage_costs
from dapple_tf.timeline.stage_costs import StageCosts
from tests.dapple_tf.planner.builders import Case, cases
from tests.dapple_tf.planner.exhaustive import StageCostModel, divisors, list_plans
from tests.dapple_tf.simulator.builders import make_plan

# Seconds of forward and backward, bytes sent, kept and trained, for 4 samples.
PROFILE = Profile(
    model="net",
    batch_size=4,
    device="test",
    layers=(LayerCost("l0", 4, 8, 8, 6, 10), LayerCost("l1", 2, 4, 4, 2, 20), LayerCost("l2", 1, 3, 2, 1, 0)),
)
CLUSTER = Cluster((Server("a", 3),), 1000, Link(4, 0.5), Link(1, 1))
# Two samples a micro-batch: half the profile's, and one for each replica of stage 0.
PLAN = make_plan((0, 1, (0, 1)), (2, 2, (2,)))


def costs_of(plan: Plan = PLAN, profile: Profile = PROFILE, slots: int = 2) -> tuple[StageCosts, ...]:
    return stage_costs(plan, profile, CLUSTER, optimizer_slots=slots)


def test_costs_by_hand() -> None:
    assert costs_of() == (
        StageCosts(
            forward_seconds=1.5,  # (4 + 2) / 4
            backward_seconds=3.0,  # (8 + 4) / 4
            send_forward_seconds=1.0,  # latency 0.5, and 4 x 2/4 bytes into one device at 4 bytes a second
            send_backward_seconds=1.0,
            allreduce_seconds=8.5,  # 2 turns of latency 0.5, and 2 x 1/2 x 30 bytes / 4
            exposed_seconds=8.5,
            fixed_bytes=120,  # weight, gradient, two slots of 30 bytes
            stash_bytes=2,  # (6 + 2) / 4
            working_bytes=3,  # of layer 1: its input 8 and output 4, over 4
        ),
        StageCosts(
            forward_seconds=0.5,
            backward_seconds=1.5,
            send_forward_seconds=0,
            send_backward_seconds=0,
            allreduce_seconds=0,
            exposed_seconds=0,
            fixed_bytes=0,
            stash_bytes=0.5,
            working_bytes=3,  # (4 + 2) x 2/4
        ),
    )


def test_recompute_adds_a_forward_to_backward_and_stashes_only_inputs() -> None:
    plain, again = costs_of(), costs_of(replace(PLAN, recompute=True))
    assert [c.backward_seconds for c in again] == [3 + 1.5, 1.5 + 0.5]
    assert [c.stash_bytes for c in again] == [0, 2]  # nothing enters the first; 4 x 2/4 bytes the second
    assert [c.working_bytes for c in again] == [3 + 2, 3 + 0.5]  # and what forward makes again
    same = ("forward_seconds", "send_forward_seconds", "allreduce_seconds", "fixed_bytes")
    assert all(getattr(a, name) == getattr(b, name) for a, b in zip(plain, again, strict=True) for name in same)


def test_seconds_of_weight_gradients_are_given_where_the_schedule_has_them_as_actions() -> None:
    first, second = costs_of(replace(PLAN, schedule="zb-h1"))
    assert (first.backward_seconds, first.weights_seconds) == (3, 1.5)  # half of it, of layers with parameters
    assert (second.backward_seconds, second.weights_seconds) == (1.5, 0)
    assert all(costs.weights_seconds == 0 for costs in costs_of(replace(PLAN, schedule="dapple-b")))
    measured = replace(PROFILE, layers=(*PROFILE.layers[:2], replace(PROFILE.layers[2], weights_seconds=2)))
    assert costs_of(replace(PLAN, schedule="zb-h1:D=1"), measured)[1].weights_seconds == 1


def test_allreduce_overlaps_only_the_weight_gradients_of_a_split_backward() -> None:
    first, _ = costs_of(replace(PLAN, overlap=True, schedule="zb-h1"))
    # Each layer's ring has 1 s of latency. Layer 1's gradients are there after 0.5 s and reduced until 6.5; layer 0's
    # after 1.5, and reduced from 6.5 to 10.
    assert first.exposed_seconds == 8.5


def test_recompute_of_some_layers_stashes_the_others_and_the_inputs_of_each_run() -> None:
    whole = make_plan((0, 2, (0,)), micro_batch_size=4)
    costs = {
        layers: costs_of(replace(whole, recompute=layers))[0] for layers in ((), (0,), (1,), (0, 2), (1, 2), (0, 1, 2))
    }
    forward, backward = 4 + 2 + 1, 8 + 4 + 3
    assert {c.forward_seconds for c in costs.values()} == {forward}
    again = {layers: c.backward_seconds - backward for layers, c in costs.items()}
    assert again == {(): 0, (0,): 4, (1,): 2, (0, 2): 4 + 1, (1, 2): 2 + 1, (0, 1, 2): forward}
    # Layers keep 6, 2 and 1; 8 bytes enter layer 1, and 4 layer 2.
    kept = {layers: c.stash_bytes for layers, c in costs.items()}
    assert kept == {(): 9, (0,): 3, (1,): 6 + 8 + 1, (0, 2): 2 + 4, (1, 2): 6 + 8, (0, 1, 2): 0}
    # Layers work on 8, 8 + 4 and 4 + 2, and on what their run has made again.
    work = {layers: c.working_bytes for layers, c in costs.items()}
    assert work == {(): 12, (0,): 8 + 6, (1,): 12 + 2, (0, 2): 8 + 6, (1, 2): 12 + 3, (0, 1, 2): 12 + 9}
    assert costs_of(replace(whole, recompute=True)) == (costs[0, 1, 2],)
    assert costs_of(replace(whole, recompute=False)) == (costs[()],)


def test_allreduce_during_the_last_backward_is_not_exposed() -> None:
    first, second = costs_of(replace(PLAN, overlap=True))
    # Each layer's ring has 1 s of latency. Layer 1 is done after 1 s and reduces until 7; layer 0 is done at 3 and
    # reduces from 7 to 10.5.
    assert (first.allreduce_seconds, first.exposed_seconds) == (9.5, 7.5)
    assert second.exposed_seconds == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_layers_without_parameters_start_no_ring(overlap: bool) -> None:
    bare = tuple(replace(layer, parameter_bytes=0) for layer in PROFILE.layers)
    (first, _) = costs_of(replace(PLAN, overlap=overlap), replace(PROFILE, layers=bare))
    assert (first.allreduce_seconds, first.exposed_seconds) == (0, 0)
    one = replace(PROFILE, layers=(bare[0], PROFILE.layers[1], bare[2]))
    assert costs_of(replace(PLAN, overlap=overlap), one)[0].allreduce_seconds == 1 + 5  # one ring's latency


@pytest.mark.parametrize(
    ("backward", "ring", "exposed"),
    [
        ([3, 3], [1, 2], 1),  # the later layer's ends before the earlier's backward does
        ([3, 3], [1, 4], 2),  # and here a second after: 3 + 4, then 1 more
        ([3, 3], [0, 0], 0),
        ([3, 3], [0, 2], 0),
        ([0, 0], [2, 5], 7),
    ],
)
def test_exposed_seconds(backward: list[float], ring: list[float], exposed: float) -> None:
    assert exposed_seconds(backward, np.array(ring, float)) == exposed


@pytest.mark.parametrize(("slots", "fixed"), [(0, 60), (1, 90), (2, 120)])
def test_optimizer_slots_add_to_the_fixed_bytes(slots: int, fixed: float) -> None:
    assert costs_of(slots=slots)[0].fixed_bytes == fixed


def test_seconds_are_those_of_the_profile_at_the_slice_of_each_replica() -> None:
    profile = replace(PROFILE, timings=(Timing(1, (2, 2, 2), (3, 3, 3)), Timing(2, (2.5, 2, 2), (4, 3, 3))))
    first, second = costs_of(profile=profile)
    assert (first.forward_seconds, first.backward_seconds) == (4, 6)  # one sample
    assert (second.forward_seconds, second.backward_seconds) == (2, 3)  # two


def test_an_output_that_skips_a_stage_crosses_both_boundaries() -> None:
    profile = replace(PROFILE, edges=((0, 1), (0, 2), (1, 2)))
    costs = costs_of(make_plan((0, 0, (0,)), (1, 1, (1,)), (2, 2, (2,))), profile)
    # 8 x 2/4 bytes over the first; over the second 4 x 2/4 more.
    assert [c.send_forward_seconds for c in costs] == [0.5 + 4 / 4, 0.5 + 6 / 4, 0]
    assert costs[2].working_bytes == (2 + 8 + 4) / 2


@given(cases(), st.data())
def test_costs_agree_with_the_reference(case: Case, data: st.DataObject) -> None:
    profile, cluster, batch, options = case
    size = data.draw(st.sampled_from(divisors(batch)))
    plans = [p for p in list_plans(profile, cluster) if max(len(devices) for _, _, devices in p) <= size]
    assume(plans)
    stages = data.draw(st.sampled_from(plans))
    plan = make_plan(
        *((first, end - 1, devices) for first, end, devices in stages),
        global_batch_size=batch,
        micro_batch_size=size,
        micro_batches=batch // size,
        **options,
    )
    expected = StageCostModel(profile, cluster, size, slots=1, **options).costs(stages)
    found = stage_costs(plan, profile, cluster, optimizer_slots=1)
    close = {"rel": 1e-12, "abs": 1e-12}
    assert [c.forward_seconds for c in found] == pytest.approx(expected.forward, **close)
    assert [c.backward_seconds for c in found] == pytest.approx(expected.backward, **close)
    assert [c.exposed_seconds for c in found] == pytest.approx(expected.exposed, **close)
    assert [c.send_forward_seconds for c in found] == pytest.approx([*expected.send, 0], **close)
    assert [c.send_backward_seconds for c in found] == pytest.approx([*expected.send, 0], **close)
    assert [c.fixed_bytes + c.working_bytes for c in found] == pytest.approx(expected.fixed, **close)
    assert [c.stash_bytes for c in found] == pytest.approx(expected.stash, **close)
