"""Options of the commands that plan or simulate: cluster, batch, cost model, and how to read the profile."""

from __future__ import annotations

import click
import cloup

from dapple_tf.commands.command import FILE, Completed, Decorator
from dapple_tf.commands.parameter_types import CLUSTER, SCHEDULE_OPTION
from dapple_tf.plans import RECOMPUTE_WORDS


def _read_level(text: str) -> bool:
    if text not in RECOMPUTE_WORDS:
        raise click.BadParameter(f"{text!r} is neither all nor none; before PROFILE write --recompute=all")
    return RECOMPUTE_WORDS[text]


PROFILE_ARGUMENT = click.argument("profile", type=FILE)


def cost_options(*more: Decorator) -> Decorator:
    """Return the options of the cluster, the cost model and the profile, of commands that simulate a plan."""
    return cloup.option_group(
        "Cluster, costs and profile",
        *more,
        cloup.option(
            "--cluster",
            required=True,
            type=CLUSTER,
            help="A cluster file, or a cluster of DAPPLE's paper with a number of devices: config-a:8, config-b:16, "
            "config-c:32 (without a number: 16).",
        ),
        cloup.option(
            "--optimizer-slots",
            default=2,
            show_default=True,
            type=click.IntRange(0),
            help="How many values the optimizer keeps for each weight (Adam: 2).",
        ),
        cloup.option(
            "--contention/--no-contention",
            default=True,
            help="Whether transfers and AllReduces share the servers' network interfaces (default), or each has them "
            "alone, as in the papers.",
        ),
        cloup.option(
            "--whole-rows/--fractions",
            default=True,
            help="Whether replicas take whole rows of a micro-batch, as the run does (default), or equal fractions of "
            "its rows, as in the papers.",
        ),
        cloup.option(
            "--profile-batch-size",
            type=click.IntRange(1),
            help="The batch size that a graph.txt was measured with, if its name has no -pbs-N.",
        ),
        cloup.option(
            "--size-scale", default=1.0, show_default=True, help="Multiply the bytes in a graph.txt by this factor."
        ),
    )


def batch_options(*more: Decorator) -> Decorator:
    """Return the options of the batch and the schedule, of commands that make plans."""
    return cloup.option_group(
        "What to plan",
        cloup.option(
            "--global-batch-size",
            required=True,
            type=click.IntRange(1),
            help="Samples of a training step, on all devices together.",
        ),
        cloup.option(
            "--micro-batch-size",
            type=click.IntRange(1),
            help="Samples of a micro-batch (default: each planner's best).",
        ),
        SCHEDULE_OPTION,
        cloup.option(
            "--recompute",
            default="none",
            type=Completed("level", list(RECOMPUTE_WORDS), _read_level, files=False),
            help="all: stages keep only their inputs, and backward runs their forward again. Without a value: all.",
            is_flag=False,
            flag_value="all",
            metavar="[all|none]",
        ),
        cloup.option(
            "--overlap", is_flag=True, help="Let the AllReduce of gradients run during the last backward, not after it."
        ),
        cloup.option(
            "--shard-optimizer",
            is_flag=True,
            help="Let the replicas of a stage share the optimizer's slots out among them.",
        ),
        *more,
    )
