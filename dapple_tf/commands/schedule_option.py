"""``--schedule``: a schedule by name or by its actions, or a file that holds the actions."""

from __future__ import annotations

import os
from pathlib import Path

import click
import cloup

from dapple_tf.commands.command import Completed
from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.spec import NAMES, ScheduleSpec


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
