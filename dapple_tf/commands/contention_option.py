"""``--no-contention``: the cost model of the papers, in which nothing shares the servers' network interfaces."""

import click

CONTENTION_OPTION = click.option(
    "--contention/--no-contention",
    default=True,
    help="Whether transfers and AllReduces share the servers' network interfaces (default), or each has them alone.",
)
