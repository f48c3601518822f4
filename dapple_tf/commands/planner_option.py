"""``--planner`` and ``--planners``: names of planners."""

from __future__ import annotations

import click

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


def check_planner_names(option: str, names: list[str]) -> None:
    """Raise click.UsageError for the first of ``names`` that no planner has; ``option``: where they were given."""
    from dapple_tf.planner.registry import check_planner

    for name in names:
        try:
            check_planner(name)
        except PlanError as error:
            raise click.UsageError(f"{option}: {error}") from error
