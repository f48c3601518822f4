"""``dapple schedules``: print a schedule as a grid, with its bubble and its stashes, and draw it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from dapple_tf.commands.output import print_result
from dapple_tf.commands.schedule_option import read_schedule

if TYPE_CHECKING:
    from graph_passes.schedules.grid import Units
    from graph_passes.schedules.schedule import Schedule


@click.command()
@click.argument("schedule", required=False)
@click.option("--stages", type=click.IntRange(1, 4096), default=4, show_default=True, help="Stages in all.")
@click.option("--micro-batches", type=click.IntRange(1, 65536), default=8, show_default=True, help="M.")
@click.option("--forward", type=click.IntRange(1), default=1, show_default=True, help="Units of time of a forward.")
@click.option("--backward", type=click.IntRange(1), help="Of a backward; by default 2, or 1 where it is split.")
@click.option("--weights", type=click.IntRange(1), default=1, show_default=True, help="Of weight gradients (W).")
@click.option("-o", "--output", help="Draw it: .png, .html, or .json (Perfetto); a unit is a second.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line of stdout.")
def schedules(
    schedule: str | None,
    stages: int,
    micro_batches: int,
    forward: int,
    backward: int | None,
    weights: int,
    output: str | None,
    as_json: bool,
) -> None:
    """Print SCHEDULE (a name, or the text or file of its actions) as a grid, a line per worker; transfers take no time.

    Without SCHEDULE, list the names.
    """
    from dapple_tf.drawing.save import check_path
    from graph_passes.schedules.grid import Units, format_grid, time_workers
    from graph_passes.schedules.policies import NAMES, build_schedule
    from graph_passes.schedules.text import is_text, parse_schedule

    if output:
        check_path(output)
    if schedule is None:
        for name, meaning in NAMES.items():
            print_result(f"{name:20}  {meaning}")
        return
    name = read_schedule(schedule)
    found = parse_schedule(name) if is_text(name) else build_schedule(name, stages, micro_batches)
    usual = Units.usual(found)
    units = Units(forward, usual.backward if backward is None else backward, weights if found.splits else 0)
    workers = time_workers(found, units)
    print_result(format_grid(found, units))
    for index, worker in enumerate(workers):
        total = worker.work + worker.idle
        stages_of = f"stage{'s' * (len(worker.stages) > 1)} {', '.join(map(str, worker.stages))}"
        print_result(
            f"worker {index}: {stages_of}; works {worker.work} of {total} units, bubble "
            f"{worker.idle} ({worker.idle / total:.1%}); at most {worker.stashes} stash{'es' * (worker.stashes != 1)}"
        )
    if output:
        _draw(found, units, output)
        print_result(f"picture: {output}")
    if as_json:
        rows = [
            {**dataclasses.asdict(worker), "actions": " ".join(map(str, actions))}
            for worker, actions in zip(workers, found.workers, strict=True)
        ]
        click.echo(json.dumps({"schedule": str(found), "micro_batches": found.micro_batches, "workers": rows}))


def _draw(schedule: Schedule, units: Units, path: str) -> None:
    """Save a picture of ``schedule``, in which a unit of time is a second."""
    from dapple_tf.simulator.engine import encode
    from dapple_tf.simulator.execution import execute
    from dapple_tf.simulator.simulated_step import execution_events
    from dapple_tf.timeline.stage_costs import StageCosts
    from dapple_tf.timeline.timeline import Timeline

    links = ("send_forward_seconds", "send_backward_seconds", "allreduce_seconds", "exposed_seconds")
    nothing = dict.fromkeys((*links, "fixed_bytes", "stash_bytes", "working_bytes"), 0.0)
    cost = StageCosts(
        forward_seconds=units.forward,
        backward_seconds=units.backward + units.weights,
        weights_seconds=units.weights,
        **nothing,
    )
    execution = execute(encode(schedule), [cost] * len(schedule.stages))
    places = [(stage, 0, f"worker {worker}") for stage, worker in enumerate(schedule.worker_map.worker_of)]
    step = execution_events(execution, places)
    Timeline(step.events, step.transfers, step.stage_events, title="one unit of time is one second").save(path)
