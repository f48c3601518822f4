"""Print results and progress, check the paths of results, and describe plans in words."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import click

from dapple_tf.errors import OutputError
from dapple_tf.messages import LOGGER
from dapple_tf.profiler.detect import job_rank
from dapple_tf.profiler.files import find_folder_problem, find_write_problem


def print_result(text: str) -> None:
    """Print a result on stdout (progress and logs go to stderr)."""
    click.echo(printable(text))


def hand_over(kind: str, result: Any, output: str | None, as_json: bool) -> None:
    """Save a result of this ``kind`` in the file ``output``, and print it as JSON, as far as wanted."""
    if output:
        result.save(output)
        print_result(f"{kind}: {output}")
    if as_json:
        print_result(json.dumps(result.to_json()))


def print_progress(text: str) -> None:
    """Print a line of progress on stderr, unless --quiet was given."""
    LOGGER.info(printable(text))


def print_warning(text: str) -> None:
    """Print what the user should know or act on, on stderr."""
    LOGGER.warning(printable(text))


def print_error(text: str) -> None:
    """Print why a command failed, on stderr."""
    click.echo(f"error: {printable(text)}", err=True)


def shows_progress() -> bool:
    """Return whether progress is shown: not with --quiet."""
    return LOGGER.isEnabledFor(logging.INFO)


@contextlib.contextmanager
def showing(phase: str) -> Iterator[None]:
    """Show on stderr that a phase runs: a spinner on a terminal, else a line when it begins; on rank 0 of a job."""
    if job_rank(os.environ) or not shows_progress():
        yield
    elif sys.stderr.isatty():
        from rich.console import Console

        with Console(file=sys.stderr).status(f"{printable(phase)} ..."):
            yield
    else:
        print_progress(f"{phase} ...")
        yield


def printable(text: str) -> str:
    """Return the text with its control characters as Python writes them: a name in a file may hold a terminal's."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def check_output_path(option: str, path: str | None) -> None:
    """Raise OutputError if the file at ``path``, given as ``option``, cannot be written; call it before any work."""
    if path is not None and (problem := find_write_problem(path)):
        raise OutputError(f"{option}: {problem}")


def check_chart_path(option: str, path: str | None, content: str = "a timeline") -> None:
    """Raise OutputError if ``content`` cannot be saved at ``path``, given as ``option``; call it before any work."""
    if path is None:
        return
    from dapple_tf.drawing.save import check_path

    try:
        check_path(path, content)
    except OutputError as error:
        raise OutputError(f"{option}: {error}") from error


def check_folder_path(option: str, path: str | None, content: str) -> None:
    """Make the folder at ``path``, given as ``option``; raise OutputError if it cannot hold ``content``."""
    if path is not None and (problem := find_folder_problem(path)):
        raise OutputError(f"{option}: {path} cannot hold {content}: {problem}")
