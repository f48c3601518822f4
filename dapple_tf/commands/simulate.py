"""``dapple simulate``: predict a step of a plan."""

from __future__ import annotations

import click
import cloup

from dapple_tf.commands.command import FILE, command, result_options
from dapple_tf.commands.output import check_chart_path, hand_over, print_result
from dapple_tf.commands.parameter_types import load_cluster
from dapple_tf.commands.planning_options import cost_options
from dapple_tf.profiler.importers import read_profile


@command(short_help="Simulate a step of a plan.")
@click.argument("plan", type=FILE)
@cost_options(
    cloup.option("--profile", required=True, type=FILE, help="A dapple-profile JSON, or a PipeDream graph.txt.")
)
@result_options(cloup.option("-o", "--output", type=FILE, help="Save the timeline: .json (Perfetto), .png or .html."))
def simulate(
    plan: str,
    profile: str,
    cluster: str,
    optimizer_slots: int,
    contention: bool,
    whole_rows: bool,
    profile_batch_size: int | None,
    size_scale: float,
    output: str | None,
    as_json: bool,
) -> None:
    """Predict a training step of PLAN (a file that dapple plan -o has written): its time, idle time and memory."""
    from dapple_tf.planner.explain import FRACTIONS, describe_plan
    from dapple_tf.plans import Plan
    from dapple_tf.simulator.simulate import simulate as run

    check_chart_path("--output", output)
    planned, costs = Plan.load(plan), read_profile(profile, profile_batch_size, size_scale)
    devices = load_cluster(cluster)
    timeline = run(
        planned, costs, devices, optimizer_slots=optimizer_slots, contention=contention, whole_rows=whole_rows
    )
    print_result(describe_plan(planned, costs, devices, timeline))
    if not whole_rows:
        print_result(FRACTIONS)
    hand_over("timeline", timeline, output, as_json)
