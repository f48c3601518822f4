"""The schedule that ``--schedule`` names, or the file that holds its text."""

from __future__ import annotations

import os
from pathlib import Path

import click

from dapple_tf.errors import ScheduleError
from graph_passes.schedules.policies import check_schedule_name

OPTION = click.option(
    "--schedule",
    default="auto",
    show_default=True,
    help="gpipe, dapple-a, dapple-b, zb-h1 (:D=n), K=3,2,1, auto; the actions, '0F0 0B0; 1F0 1B0', or a file of them.",
    callback=lambda context, parameter, value: read_schedule(value),
)


def read_schedule(value: str) -> str:
    """The schedule itself, or what is in the file of that name, where no schedule is called so.

    Raises BadParameter for a file that cannot be read, and ScheduleError for what is no schedule, naming the file.
    """
    if os.path.isfile(value) and not _is_name(value):
        try:
            text = Path(value).read_text("utf-8").strip()
        except (OSError, UnicodeError) as error:
            raise click.BadParameter(f"{value} cannot be read as text: {error}") from error
        try:
            check_schedule_name(text)
        except ScheduleError as error:
            raise ScheduleError(f"{value}: {error}") from error
        return text
    if "/" in value or value.endswith(".txt"):
        raise click.BadParameter(f"there is no file {value}")
    return value


def _is_name(value: str) -> bool:
    try:
        check_schedule_name(value)
    except ScheduleError:
        return value == "auto"
    return True
