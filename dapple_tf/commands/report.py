"""``dapple report``: one page about a training run."""

from __future__ import annotations

import json
from pathlib import Path

import click
import cloup

from dapple_tf.commands.command import FILE, command, result_options
from dapple_tf.commands.output import check_output_path, print_result
from dapple_tf.errors import OutputError


@command(short_help="Make a page about a run.")
@click.argument("run", type=FILE)
@result_options(cloup.option("-o", "--output", type=FILE, help="Save the report as a web page (.html)."))
def report(run: str, output: str | None, as_json: bool) -> None:
    """Report on a training RUN: the folder of its checkpoints, or the file that train --record wrote.

    Prints the figures in a few lines. The page also has the curves of loss and speed, the memory of the stages, the
    plan, the versions and the options. A run that goes on or was killed can be reported too.
    """
    from dapple_tf.commands.run_file import read_run
    from dapple_tf.commands.run_page import describe_run, make_run_page, run_figures
    from dapple_tf.profiler.files import write_atomically

    check_output_path("--output", output)
    if output is not None and Path(output).suffix.lower() != ".html":
        raise OutputError(f"--output: {output}: a report is saved as .html")
    found = read_run(run)
    print_result("\n".join(f"{name}: {value}" for name, value in describe_run(found)))
    if output is not None:
        write_atomically(Path(output), make_run_page(found))
        print_result(f"report: {output}")
    if as_json:
        print_result(json.dumps(run_figures(found)))
