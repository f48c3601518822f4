"""``dapple timeline``: describe a saved trace, and draw it."""

from __future__ import annotations

import json

import click
import cloup

from dapple_tf.commands.command import FILE, command, result_options
from dapple_tf.commands.output import check_chart_path, print_result


@command(short_help="Describe a saved trace.")
@click.argument("trace", type=FILE)
@result_options(cloup.option("-o", "--output", type=FILE, help="Draw it: .png, .html, or .json (Perfetto)."))
def timeline(trace: str, output: str | None, as_json: bool) -> None:
    """Describe a TRACE (.json) saved by dapple: bubble, utilisation, critical path, and error of the prediction."""
    from dapple_tf.timeline.describe import explain_slow, find_slowest
    from dapple_tf.timeline.picture import save_recording
    from dapple_tf.timeline.trace_file import read_recording

    check_chart_path("--output", output)
    recording = read_recording(trace)
    print_result(recording.headline)
    print_result(str(recording))
    if recording.measured is not None and (slowest := find_slowest(recording.measured)):
        print_result(f"slowest compared with others of their kind: {', '.join(map(str, slowest))}")
        for slow in slowest:
            if ops := explain_slow(recording.measured, slow):
                print_result(f"{slow.event}: {', '.join(map(str, ops))}")
    if output:
        save_recording(recording, output)
        print_result(f"timeline: {output}")
    if as_json:
        click.echo(json.dumps(recording.to_json()))
