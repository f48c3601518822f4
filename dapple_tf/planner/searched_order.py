"""The order of a plan whose schedule is ``zb-auto``: searched for with the plan's costs, and written out."""

from __future__ import annotations

import dataclasses

from dapple_tf.plan import Plan
from dapple_tf.simulator.costs import stage_costs
from dapple_tf.simulator.memory import usable_bytes
from dapple_tf.simulator.order_search import FoundOrder, search_order
from graph_passes.schedules.policies import worker_map_of
from profiler.cluster import Cluster
from profiler.profile import Profile


def search_plan_order(plan: Plan, profile: Profile, cluster: Cluster, *, optimizer_slots: int = 2) -> FoundOrder:
    """Return the best order found for the stages of ``plan``, within the memory of the cluster's devices.

    ``optimizer_slots``: values that the optimizer keeps of each weight. Raises ScheduleError where no order fits.
    """
    costs = stage_costs(plan, profile, cluster, optimizer_slots=optimizer_slots)
    workers = worker_map_of(plan.schedule, len(plan.stages))
    return search_order(workers, plan.micro_batches, costs, usable_bytes(cluster.device_memory))


def with_order(plan: Plan, found: FoundOrder) -> Plan:
    """Return the plan with all actions of the order that was found as its schedule."""
    return dataclasses.replace(plan, schedule=str(found.schedule))
