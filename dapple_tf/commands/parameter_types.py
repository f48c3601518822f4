"""Types of options that several commands have: a schedule, a cluster, and names of planners."""

from __future__ import annotations

import os
from pathlib import Path

import click
import cloup

from dapple_tf.commands.command import Completed
from dapple_tf.errors import ClusterError, PlanError, ScheduleError
from dapple_tf.graph_passes.schedules.spec import NAMES, ScheduleSpec
from dapple_tf.profiler.cluster import Cluster

# --- ``--schedule``: a schedule by name or by its actions, or a file that holds the actions


def read_schedule(value: str) -> str:
    """Return ``value``, or the text of the file of that name; a schedule's name comes before a file's.

    Raises BadParameter for a file that cannot be read, and ScheduleError, naming the file, where it holds no schedule.
    """
    if os.path.isfile(value) and not _is_schedule(value):
        try:
            text = Path(value).read_text("utf-8").strip()
        except (OSError, UnicodeError) as error:
            raise click.BadParameter(f"{value} cannot be read as text: {error}") from error
        try:
            ScheduleSpec.parse(text)
        except ScheduleError as error:
            raise ScheduleError(f"{value}: {error}") from error
        return text
    if "/" in value or value.endswith(".txt"):
        raise click.BadParameter(f"there is no file {value}")
    return value


def _is_schedule(value: str) -> bool:
    try:
        ScheduleSpec.parse(value)
    except ScheduleError:
        return value == "auto"
    return True


SCHEDULE = Completed("schedule", ["auto", "1f1b", *NAMES], read_schedule)
"""The type of a schedule, which the shell completes with the names and with files."""

SCHEDULE_OPTION = cloup.option(
    "--schedule",
    default="auto",
    show_default=True,
    help="The order of forwards and backwards: gpipe, dapple-a (1f1b), dapple-b, zb-h1, zb-h2 (:D=n), "
    "interleaved-1f1b, interleaved-zb, looped-bfs, zb-auto (:v=n), zb-v, dualpipe-v, hanayo (:w=n), K=3,2,1, "
    "auto; the actions, '0F0 0B0; 1F0 1B0', or a file of them.",
    type=SCHEDULE,
)


# --- ``--cluster``: a cluster file, or the name of a preset


CLUSTER = Completed("cluster", [f"config-{letter}" for letter in "abc"])
"""The type of the option, which the shell completes with the presets and with files."""


def load_cluster(name: str) -> Cluster:
    """Return the cluster in the file ``name``, or the preset (``config-a:8``) if there is no such file.

    Raises ClusterError where there is neither.
    """
    if Path(name).exists() or name.startswith("config-"):
        return Cluster.load(name)
    raise ClusterError(f"--cluster {name}: there is no such file; presets are such as config-a:8")


# --- ``--planner`` and ``--planners``: names of planners


# A copy of the names in ``planner.registry.PLANNERS``, which takes long to import, for the help.
PLANNER_NAMES = (
    "best",
    "dapple",
    "dp",
    "gpipe",
    "pipedream",
    "alpa-inter",
    "autopipe",
    "bapipe",
    "even",
    "hetpipe",
    "piper",
    "spp",
    "torchgpipe",
)


def _read_name(text: str) -> str:
    """Return the planner's name in lower case. Raises BadParameter for another name, with the one that is near."""
    name = text.strip().lower()
    if name not in PLANNER_NAMES:
        from dapple_tf.planner.registry import check_planner

        try:
            check_planner(name)
        except PlanError as error:
            raise click.BadParameter(str(error)) from error
    return name


PLANNER = Completed("planner", PLANNER_NAMES, _read_name, files=False)
"""The type of ``--planner``."""

PLANNERS = Completed("planners", PLANNER_NAMES, lambda text: [_read_name(name) for name in text.split(",")], False)
"""The type of ``--planners``: names between commas."""
