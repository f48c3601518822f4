"""Predict one training step of a plan: execute its schedule under the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from dapple_tf.plan_check import check_inputs, check_optimizer_slots, check_plan
from dapple_tf.plans import Plan
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.profile import Profile
from dapple_tf.simulator.contention import Flows, plan_flows
from dapple_tf.simulator.costs import CostModel, one_device_seconds
from dapple_tf.simulator.execution import Execution, execute
from dapple_tf.simulator.interrupts import interruptible
from dapple_tf.simulator.memory import memory_limits
from dapple_tf.simulator.order import encode, named_order
from dapple_tf.simulator.simulated_step import SimulatedStep
from dapple_tf.simulator.simulated_window import SimulatedWindow
from dapple_tf.simulator.virtual_workers import simulate_workers
from dapple_tf.simulator.window_costs import window_costs
from dapple_tf.simulator.window_execution import execute_window
from dapple_tf.timeline.recording import plan_title
from dapple_tf.timeline.stage_costs import StageCosts
from dapple_tf.timeline.timeline import SimulatedTimeline


@interruptible
def simulate(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    optimizer_slots: int = 2,
    contention: bool = True,
    whole_rows: bool = True,
) -> SimulatedTimeline:
    """Return the timeline of one step of ``plan``, or of its asynchronous window, under the cost model.

    docs/guide/simulate.md describes the cost model. ``optimizer_slots``: values that the optimizer keeps of each
    weight (2 for Adam, 0 for plain SGD). ``contention``: transfers and AllReduces share the servers' network
    interfaces (see ``simulator.contention``); without it each has them for itself, as in the papers. A plan of
    virtual workers is always simulated without it. ``whole_rows``: the replicas of a stage take the whole rows of a
    micro-batch that the run gives them; without it replicas that have no unequal shares take equal fractions, as in
    the papers. In virtual workers and windows they always take whole rows. A plan that needs more memory than the
    devices have is simulated too: ``Timeline.fits`` says so. For a plan with virtual workers the timeline is that
    of the worker that is the last to end its backwards. Raises PlanError for a plan that does not match the profile
    or the cluster, and ScheduleError for a schedule that does not exist.
    """
    check_optimizer_slots(optimizer_slots)
    check_inputs(plan=plan, profile=profile, cluster=cluster)
    check_plan(plan, profile, cluster)
    if plan.virtual_workers:
        steps = simulate_workers(plan, profile, cluster, optimizer_slots=optimizer_slots)
        last = max(range(len(steps)), key=lambda worker: float(steps[worker].execution.last_gradients.max()))
        note = f"virtual worker {last} of {len(steps)}, the last to end its backwards; AllReduce joins all of them"
        return SimulatedTimeline(steps[last], title=plan_title(plan), note=note, profile=profile, cluster=cluster)
    alone = plan.micro_batches * one_device_seconds(profile, cluster, plan.micro_batch_size)
    if plan.window is not None:
        execution_of_window = execute_window(
            plan.versions,
            window_costs(plan, profile, cluster, optimizer_slots=optimizer_slots, contention=contention),
        )
        limits = memory_limits(plan, execution_of_window.costs.stages, cluster)
        window = SimulatedWindow(plan, execution_of_window, alone, cluster.least_memory, limits)
        return SimulatedTimeline(window, title=plan_title(plan), profile=profile, cluster=cluster)
    model = CostModel(profile, cluster, whole_rows=whole_rows)
    in_rows = [model.in_rows(stage, plan.micro_batch_size) for stage in plan.stages]
    flows = plan_flows(in_rows, cluster) if contention else None
    costs_of = partial(model.stage_costs, plan, optimizer_slots=optimizer_slots)
    if plan.sizes or plan.spec.together:
        sizes = plan.sizes or (plan.micro_batch_size,) * plan.micro_batches
        execution = _execute_sizes(plan, sizes, {size: costs_of(samples=size) for size in set(sizes)}, flows)
        seconds = {size: one_device_seconds(profile, cluster, size) for size in set(sizes)}
        alone = sum(seconds[size] for size in sizes)
    else:
        order = named_order(plan.schedule, len(plan.stages), plan.micro_batches).order
        execution = execute(order, costs_of(), flows)
    limits = memory_limits(plan, execution.costs, cluster)
    step = SimulatedStep(plan, execution, alone, cluster.least_memory, limits)
    return SimulatedTimeline(step, title=plan_title(plan), profile=profile, cluster=cluster)


def _execute_sizes(
    plan: Plan, sizes: Sequence[int], costs: Mapping[int, Sequence[StageCosts]], flows: Flows | None
) -> Execution:
    """Return a step of micro-batches of these sizes; ``costs``: of each stage, by the samples."""
    # AllReduce hides behind the backward of the last micro-batch; all other costs that are shown are of the largest.
    pairs = zip(costs[plan.micro_batch_size], costs[sizes[-1]], strict=True)
    shown = [replace(largest, exposed_seconds=last.exposed_seconds, rings=last.rings) for largest, last in pairs]
    schedule = plan.build_schedule()
    of_micro_batches = [costs[size] for size in sizes]
    return execute(encode(schedule), shown, flows, of_micro_batches=of_micro_batches, together=schedule.together)
