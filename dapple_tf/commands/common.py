"""What the commands share: options, the model and the plan they name, and the start of TensorFlow."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from dapple_tf.commands import schedule_option as schedules
from dapple_tf.errors import ModelError, UsageError
from graph_passes.schedules.policies import abbreviate_schedule
from profiler.files import make_writable

MODEL = [
    click.argument("model"),
    click.option("--batch-size", type=click.IntRange(1), help="Samples of a batch (the model's batch_size option)."),
    click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="An option of the model's callable."),
    click.option("--seed", default=None, type=int, help="Seed of the model and of the data (its seed option)."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line of stdout."),
]
PLAN = [
    click.option("--stages", default="auto", help="Number of stages, layer names (a,b,c), or auto."),
    click.option("--replicas", default=None, help="Devices of each stage, such as 2,1."),
    click.option("--micro-batches", default="8", show_default=True, help="M, micro-batches of a step, or auto."),
    schedules.OPTION,
    click.option(
        "--cluster", default=None, help="Plan what is auto for this cluster file, or preset such as config-a:4."
    ),
    click.option(
        "--recompute",
        default="none",
        show_default=True,
        help="What backward makes again: all, none, stages:0,1 or layer names (a,b,c).",
    ),
    click.option("--plan", "plan_path", default=None, help="A plan file, in place of the options above."),
    click.option("--devices", default=None, type=int, help="Logical devices to make on a machine without GPUs."),
]


def add_options(*lists: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """A decorator that gives a command the options (and arguments) of ``lists``, in that order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed([option for options in lists for option in options]):
            function = option(function)
        return function

    return decorate


def say(text: str) -> None:
    """Print a result on stdout."""
    click.echo(text)


def check_output(path: str | None) -> None:
    """UsageError, before any work, for a file that cannot be written."""
    if path is not None and (problem := make_writable(Path(path))):
        raise UsageError(problem)


def describe(plan: Any, layers: Sequence[str]) -> str:
    """A plan in a few lines, with the names of its layers."""
    lines = [
        f"{len(plan.stages)} stages, {plan.micro_batches} micro-batches of {plan.micro_batch_size} samples, "
        f"schedule {abbreviate_schedule(plan.schedule)}{describe_recompute(plan, len(layers))}"
    ]
    for i, stage in enumerate(plan.stages):
        devices = ", ".join(map(str, stage.devices))
        first, last = layers[stage.first_layer], layers[stage.last_layer]
        lines.append(f"  stage {i}, device {devices}: {first} .. {last}")
    return "\n".join(lines)


def describe_recompute(plan: Any, layers: int) -> str:
    """What backward makes again of so many layers, as the end of a line; nothing where that is none."""
    count = len(plan.recomputed)
    return f", recompute of {'all' if count == layers else f'{count} of {layers}'} layers" if count else ""


def make_request(
    stages: str,
    replicas: str | None,
    micro_batches: str,
    schedule: str,
    recompute: str,
    plan_path: str | None = None,
    **_: Any,
) -> Any:
    """The Request that the options of PLAN make; UsageError where what is counted is no number."""
    from dapple_tf.autoplan.request import Request

    wanted: Any = stages
    if stages.isdecimal():
        wanted = int(stages)
    elif stages != "auto":
        wanted = stages.split(",")
    counts = None
    if replicas is not None:
        counts = read_numbers(replicas, f"--replicas {replicas}: give one whole number a stage, such as 2,1")
    if micro_batches != "auto" and not micro_batches.removeprefix("-").isdecimal():
        raise click.UsageError(f"--micro-batches {micro_batches}: give a whole number, or auto")
    number = "auto" if micro_batches == "auto" else int(micro_batches)
    return Request(wanted, counts, number, schedule, read_recompute(recompute))


def load_named_cluster(cluster: str | None, **_: Any) -> Any:
    """The cluster that the options of PLAN name, or None; ClusterError for a file that holds none."""
    from dapple_tf.commands.cluster_option import load_cluster

    return load_cluster(cluster) if cluster else None


def read_recompute(text: str) -> Any:
    """What ``--recompute`` asks for, as ``dapple.pipeline`` takes it; UsageError for stages that are no numbers."""
    from dapple_tf.autoplan.recompute_option import StageNumbers

    if text in ("all", "none"):
        return text == "all"
    kind, colon, numbers = text.partition(":")
    if colon and kind == "stages":
        return StageNumbers(read_numbers(numbers, f"--recompute {text}: give numbers of stages, such as stages:0,1"))
    return tuple(text.split(","))


def read_numbers(text: str, problem: str) -> tuple[int, ...]:
    """Whole numbers between commas; UsageError that tells the ``problem`` otherwise."""
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise click.UsageError(problem)
    return tuple(int(part) for part in text.split(","))


def load_plan(path: str | None) -> Any:
    """The plan of a file, or None without one; PlanError for a file that holds none."""
    from dapple_tf.plan import Plan

    return Plan.load(path) if path else None


def load_model(model: str, settings: tuple[str, ...], batch_size: int | None, seed: int | None, **_: Any) -> Any:
    """The Workload that the options of MODEL name; ModelError where there is none, or it lacks an option."""
    from dapple_tf.commands.model_loading import accepts, load_workload, parse_options

    chosen = parse_options(settings)
    for key, value in (("batch_size", batch_size), ("seed", seed)):
        if value is not None:
            if not accepts(model, key):
                raise ModelError(f"{model} takes no {key}, so --{key.replace('_', '-')} cannot be given")
            chosen[key] = value
    return load_workload(model, chosen)


def start(devices: int | None) -> None:
    """Import TensorFlow and make the devices."""
    with quiet_start():
        from dapple_tf.devices import home_device, init

        init(devices)
        home_device()


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Hold back what TensorFlow's libraries print about the processor while they start; shown if they fail."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(kept, 2)
            held.seek(0)
            os.write(2, held.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
