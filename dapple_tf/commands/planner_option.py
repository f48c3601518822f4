"""``--planner`` and ``--planners``: names of planners."""

from __future__ import annotations

import click

from dapple_tf.commands.command import Completed
from dapple_tf.errors import PlanError

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
