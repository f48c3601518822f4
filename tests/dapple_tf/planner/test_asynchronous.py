"""Plans of asynchronous windows: the least seconds of a minibatch among several planners' stages."""

from __future__ import annotations

import pytest

from dapple_tf.errors import PlanError
from dapple_tf.planner.api import make_problem, plan, plan_windows
from dapple_tf.planner.asynchronous import describe_runners_up
from dapple_tf.plans import Plan
from dapple_tf.profiler.cluster import Cluster, Link, Server
from dapple_tf.profiler.profile import LayerCost, Profile
from dapple_tf.simulator.simulate import simulate
from dapple_tf.window_plan import WindowPlan


def profile(*layers: tuple[float, float, float, float]) -> Profile:
    """Layers of (forward, backward) seconds for 4 samples, bytes that they send, and of parameters."""
    costs = tuple(LayerCost(f"layer{i}", f, b, sent, 4, held) for i, (f, b, sent, held) in enumerate(layers))
    return Profile("net", 4, "test", costs)


def cluster(devices: int = 2, memory: float = 1e6) -> Cluster:
    """One server whose devices exchange 100 bytes a second."""
    return Cluster((Server("a", devices),), memory, Link(100, 0), Link(1, 1))


HEAVY = profile((1, 2, 1, 1000), (1, 2, 1, 1000))
LIGHT = profile((1, 2, 1000, 1), (1, 2, 1000, 1))


def make(costs: Profile, devices: Cluster, **options: object) -> Plan:
    return plan(costs, devices, global_batch_size=32, mode="async", minibatches=8, **options)  # type: ignore[arg-type]


def test_a_pipeline_is_chosen_where_allreduce_is_slow_and_dp_where_transfers_are() -> None:
    straight = make(HEAVY, cluster())
    assert [stage.devices for stage in straight.stages] == [(0,), (1,)]
    # Each stage takes 3 s of a minibatch. K_0 = 2 hides the transfers of 0.01 s but for the wait of the first stage.
    predicted = straight.predicted
    assert predicted["minibatch_seconds"] == pytest.approx(3, abs=0.05)
    replicated = make(LIGHT, cluster())
    assert [stage.devices for stage in replicated.stages] == [(0, 1)]
    # Two minibatches of 6 s at once, then 2 (2 - 1) / 2 x 2 bytes at 100 bytes a second.
    assert replicated.predicted["minibatch_seconds"] == pytest.approx((6 + 0.02) / 2)


def test_the_plan_has_the_window_and_its_prediction() -> None:
    found = make(HEAVY, cluster())
    assert found.window == WindowPlan(8)
    assert (found.planner, found.global_batch_size, found.micro_batch_size, found.micro_batches) == ("best", 32, 4, 8)
    timeline = simulate(found, HEAVY, cluster())
    assert found.predicted == {
        "step_seconds": timeline.step_seconds,
        "speedup": timeline.speedup,
        "bubble": timeline.bubble,
        "peak_memory_bytes": list(timeline.peak_memory_bytes),
        "startup_seconds": timeline.phases.startup_seconds,
        "minibatch_seconds": timeline.phases.minibatch_seconds,
        "drain_seconds": timeline.phases.drain_seconds,
    }
    assert make(HEAVY, cluster(), planner="dp").replicas == (2,)
    assert make(HEAVY, cluster(), planner="pipedream").replicas == (1, 1)


def test_the_choices_are_ranked_and_the_first_of_each_origin_is_named() -> None:
    problem = make_problem(HEAVY, cluster(), global_batch_size=32, micro_batch_size=4)
    choices = plan_windows(problem, "best", WindowPlan(8))
    seconds = [choice.minibatch_seconds for choice in choices]
    assert seconds == sorted(seconds)
    assert {choice.plan.replicas for choice in choices} >= {(1,), (2,), (1, 1)}
    lines = describe_runners_up(choices, [str(choice.plan.replicas) for choice in choices])
    # DP: 6 s of two minibatches at once, then 2000 bytes at 100 a second, 13 s a minibatch; one device 6 s.
    assert "runner-up (1,) (one device): 6.000 s a minibatch, " in lines[0] + lines[-1]
    assert any(line.startswith("runner-up (2,) (DP): 13.000 s a minibatch, ") for line in lines)


def test_versions_and_stashes_must_fit_the_memory() -> None:
    # A stage of 1000 bytes of parameters: 4000 with gradients and two slots, and on stage 0 two versions.
    assert make(HEAVY, cluster(memory=6100)).replicas == (1, 1)
    with pytest.raises(PlanError, match="the versions of the weights and the stashes of a window do not fit"):
        make(HEAVY, cluster(memory=5000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "later"}, "mode='later': give 'sync' or 'async'"),
        ({"mode": "sync", "minibatches": 8}, "minibatches=8 is for asynchronous windows: give mode='async' too"),
        ({"mode": "async", "minibatches": 5}, "global_batch_size=32 is no multiple of minibatches=5"),
        ({"mode": "async", "minibatches": 0}, "minibatches=0: give a whole number from 1 on"),
        ({"mode": "async", "schedule": "gpipe"}, "schedule='gpipe' with mode='async'"),
        ({"mode": "async", "micro_batch_size": 2}, "micro_batch_size=2 with mode='async'"),
        ({"mode": "async", "overlap": True}, "overlap=True with mode='async'"),
    ],
)
def test_options_that_windows_do_not_have_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(HEAVY, cluster(), global_batch_size=32, **options)  # type: ignore[arg-type]


def test_replicas_that_do_not_divide_the_window_are_left_out() -> None:
    found = make(LIGHT, cluster(3))
    assert 8 % max(found.replicas) == 0
    with pytest.raises(PlanError, match="minibatches=8 is no multiple of the 3 replicas of stage 0"):
        make(LIGHT, cluster(3), planner="dp")
