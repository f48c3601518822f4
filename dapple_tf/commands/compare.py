"""``dapple compare``: the plans of all planners, side by side."""

from __future__ import annotations

from typing import Any

import cloup

from dapple_tf.commands.command import FILE, command, result_options
from dapple_tf.commands.output import check_chart_path, hand_over, print_progress, print_result
from dapple_tf.commands.parameter_types import PLANNERS, load_cluster
from dapple_tf.commands.planning_options import PROFILE_ARGUMENT, batch_options, cost_options
from dapple_tf.errors import NoFitError
from dapple_tf.profiler.importers import read_profile


@command(short_help="Compare the plans of all planners.")
@PROFILE_ARGUMENT
@batch_options(
    cloup.option("--planners", type=PLANNERS, help="Planners to compare, such as best,dapple,piper (default: all).")
)
@cost_options()
@result_options(cloup.option("-o", "--output", type=FILE, help="Save the comparison: .html, .png or .json."))
def compare(
    profile: str,
    cluster: str,
    planners: list[str] | None,
    profile_batch_size: int | None,
    size_scale: float,
    output: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare the plans of all planners for PROFILE (a dapple-profile JSON, or a PipeDream graph.txt) on a cluster.

    A planner that has no plan is listed with the reason. Fails where none has one.
    """
    from dapple_tf.planner.compare import compare as run

    check_chart_path("--output", output, "a comparison")
    costs = read_profile(profile, profile_batch_size, size_scale)
    comparison = run(
        costs,
        load_cluster(cluster),
        planners=planners,
        progress=lambda name: print_progress(f"plans with planner {name} ..."),
        **options,
    )
    print_result(str(comparison))
    hand_over("comparison", comparison, output, as_json)
    if comparison.fastest is None:
        raise NoFitError(f"no planner has a plan for {costs.model!r}: see the reason of each above")
