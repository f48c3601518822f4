"""``dapple schedules``: print a schedule as a grid, with its bubble and its stashes, and draw it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
import cloup

from dapple_tf.commands.command import FILE, Completed, command, result_options
from dapple_tf.commands.output import check_chart_path, print_result
from dapple_tf.commands.parameter_types import read_schedule
from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import Action, Schedule, of_kind, run_schedule
from dapple_tf.graph_passes.schedules.spec import NAMES, ScheduleSpec
from dapple_tf.wording import format_count

if TYPE_CHECKING:
    from dapple_tf.simulator.order_search import FoundOrder
    from dapple_tf.timeline.stage_costs import StageCosts


@command(short_help="Print a schedule as a grid.", former_names={"--weights": "--weight-gradients"})
@click.argument("schedule", required=False, type=Completed("schedule", ["1f1b", *NAMES]))
@cloup.option_group(
    "The pipeline",
    cloup.option("--stages", type=click.IntRange(1, 4096), help="Stages in all (default: 4, or those of the text)."),
    cloup.option("--micro-batches", type=click.IntRange(1, 65536), help="M (default: 8, or that of the text)."),
    cloup.option("--forward", type=click.IntRange(1), default=1, show_default=True, help="Units of time of a forward."),
    cloup.option("--backward", type=click.IntRange(1), default=2, show_default=True, help="Of a backward."),
    cloup.option(
        "--weight-gradients", type=click.IntRange(1), default=1, show_default=True, help="Of its weight gradients (W)."
    ),
    cloup.option("--stashes", type=click.IntRange(1), help="The most stashes of a worker that zb-auto may use."),
)
@result_options(
    cloup.option("-o", "--output", type=FILE, help="Draw it: .png, .html, or .json (Perfetto); a unit is a second.")
)
def schedules(
    schedule: str | None,
    stages: int | None,
    micro_batches: int | None,
    forward: int,
    backward: int,
    weight_gradients: int,
    stashes: int | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Print SCHEDULE (a name, or the text or file of its actions) as a grid, a line per worker; transfers take no time.

    Without SCHEDULE, list the names.
    """
    if schedule is None:
        if output is not None:
            raise click.UsageError("--output draws a SCHEDULE: name one")
        for name, meaning in NAMES.items():
            print_result(f"{name:20}  {meaning}")
        return
    check_chart_path("--output", output)
    spec = ScheduleSpec.parse(read_schedule(schedule))
    stages = stages or spec.stages or 4
    micro_batches = micro_batches or spec.micro_batches or 8
    units = Units(forward, backward, weight_gradients)
    searched = None
    if spec.is_searched:
        searched = _search(spec, stages, micro_batches, units, stashes)
    elif stashes is not None:
        raise ScheduleError(f"--stashes is for zb-auto, which searches within them; {spec} holds what it holds")
    found = searched.schedule if searched is not None else spec.build(stages, micro_batches)
    if found.split:
        units.check_parts()
    workers = time_workers(found, units)
    print_result(format_grid(found, units))
    for index, worker in enumerate(workers):
        total = worker.work + worker.idle
        stages_of = f"stage{'s' * (len(worker.stages) > 1)} {', '.join(map(str, worker.stages))}"
        print_result(
            f"worker {index}: {stages_of}; works {worker.work} of {total} units, bubble {worker.idle} "
            f"({worker.idle / total:.1%}); at most {format_count(worker.stashes, 'stash')}"
        )
    if searched is not None:
        print_result(_describe(searched))
    if output:
        _draw(found, units, output)
        print_result(f"picture: {output}")
    if as_json:
        rows = [
            {**dataclasses.asdict(worker), "actions": actions}
            for worker, actions in zip(workers, str(found).splitlines(), strict=True)
        ]
        click.echo(json.dumps({"schedule": str(found), "micro_batches": found.micro_batches, "workers": rows}))


def _search(spec: ScheduleSpec, stages: int, micro_batches: int, units: Units, stashes: int | None) -> FoundOrder:
    """Return the order that ``zb-auto`` finds for equal stages; by default within the stashes of zb-h2."""
    from dapple_tf.simulator.order_search import search_order

    units.check_parts()
    spec.check(stages, micro_batches)
    workers = spec.worker_map(stages)
    chunks = len(workers.stages_of[0])
    most = (2 * workers.workers - 1) * chunks if stashes is None else stashes
    if most < chunks:
        raise ScheduleError(
            f"--stashes {most}: a worker with {format_count(chunks, 'stage')} needs {chunks} for one micro-batch"
        )
    return search_order(workers, micro_batches, [_cost(units)] * stages, float(most))


def _describe(found: FoundOrder) -> str:
    named = "" if found.named is None else f"; {found.named[0]}, the best with a name, takes {found.named[1]:g}"
    return f"{found.seconds:g} units, {found.distance:.1%} above the lower bound of {found.bound:g}{named}"


def _cost(units: Units) -> StageCosts:
    """Return the costs of a stage where a unit of time is a second, and a stash is a byte."""
    from dapple_tf.timeline.stage_costs import StageCosts

    return StageCosts(
        forward_seconds=units.forward,
        backward_seconds=units.backward,
        send_forward_seconds=0.0,
        send_backward_seconds=0.0,
        allreduce_seconds=0.0,
        exposed_seconds=0.0,
        fixed_bytes=0.0,
        stash_bytes=1.0,
        working_bytes=0.0,
        weights_seconds=units.weights,
    )


def _draw(schedule: Schedule, units: Units, path: str) -> None:
    """Save a picture of ``schedule``, in which a unit of time is a second."""
    from dapple_tf.simulator.execution import execute
    from dapple_tf.simulator.order import encode
    from dapple_tf.simulator.simulated_step import execution_events
    from dapple_tf.timeline.timeline import Timeline

    costs = [_cost(units)] * len(schedule.stages)
    execution = execute(encode(schedule), costs, together=schedule.together)
    places = [(stage, 0, f"worker {worker}") for stage, worker in enumerate(schedule.worker_map.worker_of)]
    step = execution_events(execution, places)
    Timeline.of_step(step, "one unit of time is one second").save(path)


# --- A schedule as a grid of text: a row for each worker, a column for each unit of time


@dataclass(frozen=True)
class Units:
    """Whole units of time of a forward, of a backward, and of the part of that which is gradients of weights (W)."""

    forward: int = 1
    backward: int = 2
    weights: int = 1

    def check_parts(self) -> None:
        """Raise ScheduleError unless the gradients of weights take less than the backward that they are part of."""
        if self.weights >= self.backward:
            raise ScheduleError(
                f"--weight-gradients {self.weights} is part of --backward {self.backward}: it must be less"
            )

    def of(self, action: Action) -> int:
        """Return the units of ``action``."""
        return of_kind(action.kind, self.forward, self.backward, self.weights)


@dataclass(frozen=True)
class WorkerTime:
    """The work of one worker in a step without transfers, in units of time: ``idle`` between its first and last action.

    ``stashes``: the most that it holds at once, one for each stage and micro-batch in flight.
    """

    stages: tuple[int, ...]
    work: int
    idle: int
    stashes: int


def time_workers(schedule: Schedule, units: Units) -> tuple[WorkerTime, ...]:
    """Return the times of each worker."""
    ends = run_schedule(schedule, units.of)
    return tuple(
        WorkerTime(
            stages,
            work := sum(map(units.of, actions)),
            int(own[-1] - own[0]) + units.of(actions[0]) - work,
            stashes,
        )
        for stages, actions, own, stashes in zip(
            schedule.worker_map.stages_of, schedule.workers, ends, schedule.stashes, strict=True
        )
    )


def format_grid(schedule: Schedule, units: Units) -> str:
    """Return a line for each worker: its actions at their time, each as wide as it is long, and dots where it idles.

    Actions are printed as in the schedule's text: ``2F0+`` where its result travels with the next one's.
    """
    rows = zip(schedule.workers, run_schedule(schedule, units.of), strict=True)
    width = 1 + max(len(schedule.print_action(action)) for actions in schedule.workers for action in actions)
    names = [_name(stages) for stages in schedule.worker_map.stages_of]
    margin = max(map(len, names))
    lines = []
    for name, (actions, ends) in zip(names, rows, strict=True):
        cells, now = [], 0
        for action, end in zip(actions, ends, strict=True):
            start = int(end) - units.of(action)
            cells += [".".ljust(width)] * (start - now)
            cells.append(schedule.print_action(action).ljust(units.of(action) * width - 1, "-") + " ")
            now = int(end)
        lines.append(f"{name:{margin}}  {''.join(cells)}".rstrip())
    return "\n".join(lines)


def _name(stages: Sequence[int]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {','.join(map(str, stages))}"
