"""The command line ``dapple``: each subcommand is in the file of its name in ``dapple_tf.commands``.

Progress and logs go to stderr, results to stdout; with ``--json`` the last line of stdout is one JSON object. Exit
codes: 0 done, 2 a wrong option, MODEL, or file that an option names, 130 stopped by Ctrl-C, 1 any other failure.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import NoReturn, TextIO

import click

from dapple_tf.commands.output import print_error, print_warning
from dapple_tf.distributed import membership
from dapple_tf.distributed.exit_reporting import prints_error_in_full, report_failure
from dapple_tf.distributed.watchdog import INTERRUPTED
from dapple_tf.errors import (
    ClusterError,
    DappleError,
    DappleWarning,
    DeviceError,
    ModelError,
    NoFitError,
    OutputError,
    PartitionError,
    PlanError,
    ProfileError,
    RunError,
    ScheduleError,
    TraceError,
)
from dapple_tf.launcher.restart import failure_code
from dapple_tf.profiler.detect import job_rank

_WRONG_OPTION = (
    ClusterError,
    DeviceError,
    ModelError,
    OutputError,
    PartitionError,  # stages or replicas that the model cannot have
    PlanError,
    ProfileError,
    RunError,
    ScheduleError,
    TraceError,
)


_COMMANDS = (
    "compare",
    "launch",
    "plain",
    "plan",
    "profile",
    "report",
    "schedules",
    "simulate",
    "timeline",
    "train",
    "verify",
)


class _Group(click.Group):
    """The commands, each imported when it is named: the first line of a command comes at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(_COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names; UsageError with the nearest names where there is none."""
        near = difflib.get_close_matches(args[0], _COMMANDS)
        if args[0] not in _COMMANDS and near:
            ctx.fail(f"There is no command {args[0]!r}; did you mean {' or '.join(near)}?")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name, None if there is none."""
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"dapple_tf.commands.{cmd_name}"), cmd_name)
        return command


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dapple_tf")
def cli() -> None:
    """Pipelined training of unmodified TensorFlow 2 models."""


def main() -> None:
    """Run the command line, and exit with its code; without any words show the help, and exit with 2.

    An error of dapple_tf, a ValueError or an OSError is one line on stderr, not a traceback. In a job the other ranks
    are notified; an error that every rank has is printed by one of them, and only rank 0 explains the usage.
    """
    try:
        with _warnings_as_lines():
            cli(sys.argv[1:] or ["--help"], standalone_mode=False)
        if not sys.argv[1:]:
            sys.exit(2)
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        if context is not None and not job_rank(os.environ):
            click.echo(f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n", err=True)
        _fail(error, error.format_message(), 2 if isinstance(error, click.UsageError) else failure_code(lasts=True))
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("stopped", err=True)
        report_failure(KeyboardInterrupt())
        _end_interrupted()
    except (ValueError, RuntimeError, OSError) as error:
        if not isinstance(error, DappleError | OSError | ValueError):
            raise
        wrong = isinstance(error, _WRONG_OPTION) and not isinstance(error, NoFitError)
        _fail(error, str(error), 2 if wrong else failure_code(getattr(error, "lasts", False)))


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print a DappleWarning as a line of the command line, with its place if a line of the user's led to it."""
    usual = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not issubclass(category, DappleWarning):
            usual(message, category, filename, lineno, file, line)
            return
        place = "" if filename == getattr(sys.modules["__main__"], "__file__", "") else f"{filename}:{lineno}: "
        print_warning(f"warning: {place}{message}")

    with warnings.catch_warnings():  # which restores the function that shows them
        warnings.showwarning = show
        yield


def _fail(error: Exception, text: str, exit_code: int) -> NoReturn:
    """Print the ``text`` of an error, and end the process, and the other ranks of its job, with this code."""
    if prints_error_in_full(error):
        print_error(text)
    report_failure(error, exit_code)
    sys.exit(exit_code)


def _end_interrupted() -> NoReturn:
    """End the process as Ctrl-C does, outside of a job without waiting for threads: one may compile for seconds."""
    if membership.current().is_alone and any(not thread.daemon for thread in threading.enumerate()[1:]):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    sys.exit(INTERRUPTED)
