"""``dapple launch``: run a job by mpirun, and start it again on the hosts that are left when it fails."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys

import click
import cloup

from dapple_tf.commands.command import FILE, command, describe_own_command
from dapple_tf.commands.output import print_progress
from dapple_tf.distributed.failure_detector import read_timeout
from dapple_tf.errors import JobError
from dapple_tf.launcher.supervisor import ENDED_BY, LaunchSettings, Supervisor


@command(
    short_help="Run a job, and start it again on the hosts that are left when it fails.",
    explain_unknown=lambda name: f"If {name} belongs to COMMAND, write -- before COMMAND.",
)
@cloup.option(
    "--hosts",
    required=True,
    type=FILE,
    help="A list of hosts, with lines such as node1 slots=8 (on this machine alone: localhost slots=2), or a script "
    "that prints it; read again at each start.",
)
@cloup.option("-np", "most", required=True, type=click.IntRange(1), help="The largest number of ranks to start.")
@cloup.option(
    "--min-np",
    "least",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="The job ends if fewer ranks are possible.",
)
@cloup.option(
    "--restarts",
    default=3,
    show_default=True,
    type=click.IntRange(0),
    help="How many times a job that failed is started again.",
)
@cloup.option(
    "--mpirun", "options", default="", metavar="OPTIONS", help="More options for mpirun, quoted as one argument."
)
@cloup.option(
    "--check-every",
    default=15.0,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(0.5),
    help="Seconds between two checks of the hosts while the job runs.",
)
@click.argument("words", nargs=-1, required=True, metavar="-- COMMAND")
def launch(
    hosts: str, most: int, least: int, restarts: int, options: str, check_every: float, words: tuple[str, ...]
) -> None:
    """Run COMMAND as the ranks of a job, by mpirun, on the hosts that answer.

    A job that fails is started again on the hosts that are left. The command must go on from what it has saved, as
    dapple train does with --checkpoint-dir. With --elastic, dapple train makes a new plan when the number of ranks has
    changed. When hosts come back, an elastic dapple train decides after its next checkpoint whether to use them.
    """
    if least > most:
        raise click.UsageError(f"--min-np {least} is more than -np {most}: start more ranks, or ask for fewer")
    if not check_every < math.inf:  # not a number is neither less nor more than the smallest
        raise click.UsageError(f"--check-every {check_every}: give a number of seconds")
    if shutil.which("mpirun") is None:
        raise click.UsageError("mpirun is not on the PATH: install Open MPI (make horovod)")
    if shutil.which(words[0]) is None:  # mpirun would say nothing
        raise click.UsageError(f"{words[0]} is no program on the PATH, nor a file that can be run: correct COMMAND")
    try:
        timeout, more = read_timeout(os.environ), tuple(shlex.split(options))
    except JobError as error:
        raise click.UsageError(str(error)) from error
    except ValueError as error:
        raise click.UsageError(f"--mpirun {options!r}: {error}") from error
    settings = LaunchSettings(hosts, most, least, restarts, words, more, check_every, timeout)
    code = Supervisor(settings, lambda text: print_progress(f"launch: {text}")).run()
    if code > ENDED_BY:
        print_progress(f"launch: to start the job again: {describe_own_command()}")
    sys.exit(code)
