"""Add a planner: a function from a planning problem to its result.

Run it with ``python examples/extending/add_a_planner.py``. It prints the plan that the new planner chooses for 8 V100s,
and that of the planner ``best`` beside it.

The planner tries every two-stage split in which both stages have the same number of devices.
"""

from __future__ import annotations

from dapple_tf.planner.api import make_problem, predict_plan, run_planner
from dapple_tf.planner.planning_problem import PlannerResult, PlanningProblem
from dapple_tf.plans import Plan, StagePlan
from dapple_tf.profiler.cluster import config
from dapple_tf.profiler.profile import LayerCost, Profile


# --8<-- [start:planner]
def plan_halves(problem: PlanningProblem) -> PlannerResult | None:
    """Two stages, each on half of the devices, cut where the simulated step is shortest.

    None where there are fewer than two devices, no cut, or where no split fits the memory of the devices.
    """
    half, last_layer = problem.cluster.devices // 2, len(problem.profile.layers) - 1
    first_half, second_half = tuple(range(half)), tuple(range(half, 2 * half))
    candidates = []
    for cut in problem.chain.positions[1:-1]:  # the layers before which a stage may start
        stages = (StagePlan(0, cut - 1, first_half), StagePlan(cut, last_layer, second_half))
        if half:
            candidates += problem.evaluate_all_sizes(stages, "halves")
    if not candidates:
        return None
    return PlannerResult(min(candidates, key=lambda candidate: candidate.seconds))


# --8<-- [end:planner]


def main() -> None:
    """Plan twelve layers, whose weights grow and whose activations shrink, on one server of 8 V100s."""
    layers = tuple(
        LayerCost(
            f"layer_{i}",
            forward_seconds=0.002,
            backward_seconds=0.004,
            activation_bytes=4e6 / (i + 1),
            stash_bytes=8e6,
            parameter_bytes=4e6 * (i + 1),
        )
        for i in range(12)
    )
    profile = Profile("twelve layers", batch_size=8, device="V100 (an example)", layers=layers)
    # --8<-- [start:run]
    problem = make_problem(profile, config("B", 8), global_batch_size=256)
    result = plan_halves(problem)
    assert result is not None
    plan, timeline = predict_plan(problem, result.chosen, "halves")
    print(f"halves: {describe(plan)}, {timeline.summary}")
    # --8<-- [end:run]
    plan, timeline = predict_plan(problem, run_planner(problem, "best").chosen, "best")
    print(f"best: {describe(plan)}, {timeline.summary}")


def describe(plan: Plan) -> str:
    """Return the layers and the devices of each stage."""
    stages = [f"layers {s.first_layer}-{s.last_layer} on {s.replicas} devices" for s in plan.stages]
    return f"{', '.join(stages)}, {plan.micro_batches} micro-batches, {plan.schedule}"


if __name__ == "__main__":
    main()
