"""``dapple plan``: make a plan from a profile and a cluster."""

from __future__ import annotations

import json
from typing import Any

import click

from dapple_tf.commands.cluster_option import load_cluster
from dapple_tf.commands.output import check_output, print_result
from dapple_tf.commands.schedule_option import SCHEDULE_OPTION
from profiler.importers import read_profile


@click.command()
@click.argument("profile")
@click.option(
    "--cluster", required=True, help="A cluster file, or a preset: config-a, config-b:8, config-c:32 (devices)."
)
@click.option("--global-batch-size", required=True, type=click.IntRange(1), help="Samples of a training step.")
@click.option(
    "--micro-batch-size", type=click.IntRange(1), help="Samples of a micro-batch (default: the best divisor)."
)
@click.option("--planner", default="best", show_default=True, help="best, dapple, dp, gpipe or pipedream.")
@SCHEDULE_OPTION
@click.option("--recompute", is_flag=True, help="Stash only the inputs of a stage; backward runs its forward again.")
@click.option("--overlap", is_flag=True, help="Run AllReduce during the last backward.")
@click.option(
    "--optimizer-slots", default=2, show_default=True, type=click.IntRange(0), help="Optimizer slots per weight."
)
@click.option("--profile-batch-size", type=click.IntRange(1), help="Samples of a graph.txt whose name has no -pbs-N.")
@click.option("--size-scale", default=1.0, show_default=True, help="Factor for the bytes in a graph.txt.")
@click.option("-o", "--output", help="Write the plan to this file (dapple-plan/1).")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object, the last line of stdout.")
def plan(profile: str, cluster: str, planner: str, output: str | None, as_json: bool, **options: Any) -> None:
    """Plan PROFILE (a dapple-profile JSON, or a PipeDream graph.txt) on a cluster."""
    from dapple_tf.planner.api import make_problem, predict_plan, run_planner
    from dapple_tf.planner.explain import describe_plan, describe_result

    check_output(output)
    costs = read_profile(profile, options.pop("profile_batch_size"), options.pop("size_scale"))
    problem = make_problem(costs, load_cluster(cluster), **options)
    result = run_planner(problem, planner)
    chosen = predict_plan(problem, result.chosen, planner, pipedream=result.pipedream)
    others = [predict_plan(problem, candidate, planner) for candidate in result.runners_up]
    print_result(describe_plan(chosen[0], costs, chosen[1]))
    print_result(describe_result(problem, result, chosen, others))
    if output:
        chosen[0].save(output)
        print_result(f"plan: {output}")
    if as_json:
        print_result(json.dumps(chosen[0].to_json()))
