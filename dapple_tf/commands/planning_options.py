"""Options of the commands that plan or simulate: cluster, batch, cost model, and how to read the profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from dapple_tf.commands.schedule_option import SCHEDULE_OPTION

COST_OPTIONS = [
    click.option(
        "--cluster", required=True, help="A cluster file, or a preset: config-a, config-b:8, config-c:32 (devices)."
    ),
    click.option(
        "--optimizer-slots",
        default=2,
        show_default=True,
        type=click.IntRange(0),
        help="Values that the optimizer keeps of each weight.",
    ),
    click.option(
        "--contention/--no-contention",
        default=True,
        help="Whether transfers and AllReduces share the servers' network interfaces (default), or each has them "
        "alone, as in the papers.",
    ),
    click.option(
        "--whole-rows/--fractions",
        default=True,
        help="Whether replicas take whole rows of a micro-batch, as the run does (default), or equal fractions of its "
        "rows, as in the papers.",
    ),
    click.option(
        "--profile-batch-size", type=click.IntRange(1), help="Samples of a graph.txt whose name has no -pbs-N."
    ),
    click.option("--size-scale", default=1.0, show_default=True, help="Factor for the bytes in a graph.txt."),
]
"""Options of the cluster, the cost model and the profile, for commands that simulate a plan."""

PLANNING_OPTIONS = [
    click.option("--global-batch-size", required=True, type=click.IntRange(1), help="Samples of a training step."),
    click.option(
        "--micro-batch-size", type=click.IntRange(1), help="Samples of a micro-batch (default: each planner's best)."
    ),
    SCHEDULE_OPTION,
    click.option("--recompute", is_flag=True, help="Keep only the inputs of a stage; backward runs its forward again."),
    click.option("--overlap", is_flag=True, help="Run AllReduce during the last backward."),
    *COST_OPTIONS,
]
"""Options of the batch, the schedule and all of ``COST_OPTIONS``, for commands that make plans."""


def add_options(*lists: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Return a decorator that gives a command the options and arguments of ``lists``, in that order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed([option for options in lists for option in options]):
            function = option(function)
        return function

    return decorate
