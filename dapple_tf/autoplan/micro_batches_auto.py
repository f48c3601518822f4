"""``micro_batches="auto"``, or a cluster, for given stages: profile the model, and simulate each M and policy."""

from __future__ import annotations

import dataclasses

from dapple_tf.autoplan.decision import PlanDecision, decide_on
from dapple_tf.autoplan.measured_problem import PlanningInputs, check_cluster, detect_job_cluster, measure_problem
from dapple_tf.autoplan.schedule_auto import choose_profiled_schedule
from dapple_tf.plan import Plan
from dapple_tf.planner.planning_problem import Candidate
from profiler.cluster import Cluster


def choose_micro_batches(inputs: PlanningInputs, plan: Plan) -> PlanDecision:
    """Return ``plan`` with M, policy and D chosen, as far as they are "auto".

    M is a divisor of the batch that gives every replica a sample. Of micro-batches of given sizes, each counts as the
    largest while the schedule is chosen. Without a cluster, the plan's own devices are taken
    to run at the same time, even if there are more than cores: the user asked for them. Raises PlanError where no
    schedule fits the cluster's memory, or the cluster does not fit the devices.
    """
    cluster = inputs.cluster or (detect_job_cluster() if inputs.ranks else Cluster.detect(plan.device_count))
    check_cluster(inputs, cluster)
    problem = measure_problem(inputs, cluster, [r for r in plan.replicas if r > 1])
    problem = dataclasses.replace(problem, recompute=plan.recompute)
    sizes = [size for size in problem.micro_batch_sizes if size >= plan.least_samples]
    choice = choose_profiled_schedule(problem, plan.stages, sizes)
    size = problem.global_batch_size // choice.micro_batches
    chosen = Candidate(plan.stages, size, choice.schedule, 0.0, "requested")
    return decide_on(problem, chosen, "requested", inputs.samples, choice, plan.micro_batch_sizes)
