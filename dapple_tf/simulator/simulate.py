"""Predict one training step of a plan: execute its schedule under the cost model."""

from __future__ import annotations

from dapple_tf.errors import PlanError
from dapple_tf.plan import Plan
from dapple_tf.plan_check import check_plan
from dapple_tf.simulator.costs import stage_costs
from dapple_tf.simulator.execution import execute
from dapple_tf.simulator.named_orders import named_order
from dapple_tf.simulator.simulated_step import SimulatedStep
from dapple_tf.timeline.recording import plan_title
from dapple_tf.timeline.timeline import Timeline
from profiler.cluster import Cluster
from profiler.profile import Profile


def simulate(plan: Plan, profile: Profile, cluster: Cluster, *, optimizer_slots: int = 2) -> Timeline:
    """Return the timeline of one step of ``plan`` under the design's cost model.

    ``optimizer_slots``: values that the optimizer keeps of each weight (2 for Adam, 0 for plain SGD). A plan that needs
    more memory than the devices have is simulated too: ``Timeline.fits`` says so. Raises PlanError for a plan that does
    not match the profile or the cluster, and ScheduleError for a schedule that does not exist.
    """
    if optimizer_slots < 0:
        raise PlanError(f"optimizer_slots is {optimizer_slots}; it must be at least 0")
    check_plan(plan, profile, cluster)
    order = named_order(plan.schedule, len(plan.stages), plan.micro_batches).order
    execution = execute(order, stage_costs(plan, profile, cluster, optimizer_slots=optimizer_slots))
    b = plan.micro_batch_size
    micro_batch_seconds = float(profile.forward_seconds(b).sum() + profile.backward_seconds(b).sum())
    one_device_seconds = plan.micro_batches * micro_batch_seconds
    step = SimulatedStep(plan, execution, one_device_seconds, cluster.device_memory)
    return Timeline(title=plan_title(plan), simulation=step)
