"""Predict one training step of a plan: execute its schedule under the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from dapple_tf.errors import PlanError
from dapple_tf.plan import Plan
from dapple_tf.plan_check import check_plan
from dapple_tf.simulator.costs import stage_costs
from dapple_tf.simulator.execution import Execution, execute
from dapple_tf.simulator.given_sizes import execute_sizes
from dapple_tf.simulator.named_orders import named_order
from dapple_tf.simulator.simulated_step import SimulatedStep
from dapple_tf.simulator.simulated_window import SimulatedWindow
from dapple_tf.simulator.window_costs import window_costs
from dapple_tf.simulator.window_execution import execute_window
from dapple_tf.timeline.recording import plan_title
from dapple_tf.timeline.stage_costs import StageCosts
from dapple_tf.timeline.timeline import Timeline
from graph_passes.schedules.policies import actions_together, build_schedule
from profiler.cluster import Cluster
from profiler.profile import Profile


def simulate(plan: Plan, profile: Profile, cluster: Cluster, *, optimizer_slots: int = 2) -> Timeline:
    """Return the timeline of one step of ``plan``, or of its asynchronous window, under the design's cost model.

    ``optimizer_slots``: values that the optimizer keeps of each weight (2 for Adam, 0 for plain SGD). A plan that needs
    more memory than the devices have is simulated too: ``Timeline.fits`` says so. Raises PlanError for a plan that does
    not match the profile or the cluster, and ScheduleError for a schedule that does not exist.
    """
    if optimizer_slots < 0:
        raise PlanError(f"optimizer_slots is {optimizer_slots}; it must be at least 0")
    check_plan(plan, profile, cluster)
    if plan.window is not None:
        execution_of_window = execute_window(
            plan.versions, window_costs(plan, profile, cluster, optimizer_slots=optimizer_slots)
        )
        seconds = plan.micro_batches * _one_device_seconds(profile, plan.micro_batch_size)
        window = SimulatedWindow(plan, execution_of_window, seconds, cluster.device_memory)
        return Timeline(title=plan_title(plan), simulation=window)
    costs_of = partial(stage_costs, plan, profile, cluster, optimizer_slots=optimizer_slots)
    if plan.sizes or actions_together(plan.schedule):
        sizes = plan.sizes or (plan.micro_batch_size,) * plan.micro_batches
        execution = _execute_sizes(plan, sizes, {size: costs_of(samples=size) for size in set(sizes)})
        one_device_seconds = sum(_one_device_seconds(profile, size) for size in sizes)
    else:
        order = named_order(plan.schedule, len(plan.stages), plan.micro_batches).order
        execution = execute(order, costs_of())
        one_device_seconds = plan.micro_batches * _one_device_seconds(profile, plan.micro_batch_size)
    step = SimulatedStep(plan, execution, one_device_seconds, cluster.device_memory)
    return Timeline(title=plan_title(plan), simulation=step)


def _execute_sizes(plan: Plan, sizes: Sequence[int], costs: Mapping[int, Sequence[StageCosts]]) -> Execution:
    """Return a step of micro-batches of these sizes; ``costs``: of each stage, by the samples."""
    # AllReduce hides behind the backward of the last micro-batch; everything else is told for the largest.
    pairs = zip(costs[plan.micro_batch_size], costs[sizes[-1]], strict=True)
    shown = [replace(largest, exposed_seconds=last.exposed_seconds) for largest, last in pairs]
    schedule = build_schedule(plan.schedule, len(plan.stages), plan.micro_batches)
    return execute_sizes(schedule, shown, [costs[size] for size in sizes])


def _one_device_seconds(profile: Profile, samples: int) -> float:
    """Return the seconds that one device takes for a micro-batch of ``samples``."""
    return float(profile.forward_seconds(samples).sum() + profile.backward_seconds(samples).sum())
