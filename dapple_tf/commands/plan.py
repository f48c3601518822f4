"""``dapple plan``: make a plan from a profile and a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import cloup

from dapple_tf.commands.command import FILE, command, result_options
from dapple_tf.commands.output import check_output_path, hand_over, print_result, showing
from dapple_tf.commands.parameter_types import PLANNER, PLANNER_NAMES, load_cluster
from dapple_tf.commands.planning_options import PROFILE_ARGUMENT, batch_options, cost_options
from dapple_tf.errors import OutputError
from dapple_tf.profiler.importers import read_profile


def _explain_unknown(name: str) -> str:
    if name not in ("--stages", "--replicas"):
        return ""
    return f"The planner chooses stages and replicas: leave {name} out, or give it to dapple train or dapple verify."


@command(short_help="Make a plan for a cluster.", explain_unknown=_explain_unknown)
@PROFILE_ARGUMENT
@batch_options(
    cloup.option(
        "--planner", default="best", show_default=True, type=PLANNER, help=f"One of {', '.join(PLANNER_NAMES)}."
    ),
    cloup.option(
        "--async", "asynchronous", is_flag=True, help="Plan asynchronous windows; the global batch is a window."
    ),
    cloup.option("--minibatches", type=click.IntRange(1), help="Minibatches of an asynchronous window (default: 64)."),
)
@cost_options()
@result_options(cloup.option("-o", "--output", type=FILE, help="Write the plan to this file (dapple-plan/1)."))
def plan(
    profile: str,
    cluster: str,
    planner: str,
    output: str | None,
    as_json: bool,
    asynchronous: bool,
    minibatches: int | None,
    **options: Any,
) -> None:
    """Plan PROFILE (a dapple-profile JSON, or a PipeDream graph.txt) on a cluster."""
    from dapple_tf.planner.api import cut_window, make_problem, plan_windows, predict_plan, run_planner
    from dapple_tf.planner.asynchronous import describe_runners_up
    from dapple_tf.planner.explain import describe_moves, describe_plan, describe_result

    check_output_path("--output", output)
    if output is not None and Path(output).suffix.lower() in (".png", ".html"):
        raise OutputError(f"--output: {output}: a plan is written as JSON; its picture is drawn by dapple simulate")
    costs = read_profile(profile, options.pop("profile_batch_size"), options.pop("size_scale"))
    devices = load_cluster(cluster)
    if asynchronous or minibatches is not None:
        window, options = cut_window("async" if asynchronous else "sync", minibatches, options)
        with showing(f"plans with planner {planner}"):
            choices = plan_windows(make_problem(costs, devices, **options), planner, window)
        print_result(describe_plan(choices[0].plan, costs, devices, choices[0].timeline))
        for line in describe_runners_up(choices, [choice.plan.notation for choice in choices]):
            print_result(line)
        hand_over("plan", choices[0].plan, output, as_json)
        return
    problem = make_problem(costs, devices, **options)
    with showing(f"plans with planner {planner}"):
        result = run_planner(problem, planner)
    chosen = predict_plan(problem, result.chosen, planner, pipedream=result.pipedream)
    others = [predict_plan(problem, candidate, planner) for candidate in result.runners_up]
    print_result(describe_plan(chosen[0], costs, devices, chosen[1]))
    print_result(describe_result(problem, result, chosen, others))
    for line in describe_moves(problem, *chosen):
        print_result(line)
    hand_over("plan", chosen[0], output, as_json)
