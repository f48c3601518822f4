"""Options that several commands share, and their parsing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, get_args

import click

from dapple_tf.autoplan.recompute_option import Recompute, StageNumbers
from dapple_tf.autoplan.request import MicroBatches, Request
from dapple_tf.autoplan.slice_option import Slice
from dapple_tf.autoplan.window_option import make_window
from dapple_tf.commands.schedule_option import SCHEDULE_OPTION
from dapple_tf.exactness import BatchNorm
from dapple_tf.plan import Plan

_USUAL_MICRO_BATCHES = 8

MODEL_OPTIONS = [
    click.argument("model"),
    click.option("--batch-size", type=click.IntRange(1), help="Samples of a batch (the model's option batch_size)."),
    click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="An option of the model's callable."),
    click.option("--seed", default=None, type=int, help="Seed of the weights and the data (the model's option seed)."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line of stdout."),
]
"""Which model to run, for commands that run one."""

PLAN_OPTIONS = [
    click.option(
        "--stages", default="auto", help="Number of stages, names of the layers that start one (a,b,c), or auto."
    ),
    click.option("--replicas", default=None, help="Devices of each stage, such as 2,1."),
    click.option(
        "--micro-batches",
        default=None,
        help="M, the micro-batches of a step, or auto; or the samples (2,2,4) or shares (0.25,0.25,0.5) of each.  "
        f"[default: {_USUAL_MICRO_BATCHES}]",
    ),
    SCHEDULE_OPTION,
    click.option(
        "--cluster", default=None, help="Plan what is auto for this cluster file, or preset such as config-a:4."
    ),
    click.option(
        "--recompute",
        default="none",
        show_default=True,
        help="Layers that backward computes again: all, none, stages:0,1 or layer names (a,b,c).",
    ),
    click.option(
        "--batch-norm",
        type=click.Choice(get_args(BatchNorm)),
        default="micro-batch",
        show_default=True,
        help="Statistics of batch norm: of each replica's samples of a micro-batch; the same, and moving statistics of "
        "the whole batch; or of a micro-batch's samples on all replicas.",
    ),
    click.option(
        "--jit-compile/--no-jit-compile",
        default=None,
        help="Compile stage functions by XLA, or not (default: where the loss is a tf.function with jit_compile=True).",
    ),
    click.option(
        "--slice", "slice_count", default=None, help="Micro-batches of 1F1B whose forwards run in halves: n, or auto."
    ),
    click.option("--plan", "plan_path", default=None, help="A plan file, in place of the options above."),
    click.option("--devices", default=None, type=int, help="Logical devices to make on a machine without GPUs."),
]
"""Options that say how to pipeline the model."""


def add_options(*lists: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Return a decorator that gives a command the options and arguments of ``lists``, in that order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed([option for options in lists for option in options]):
            function = option(function)
        return function

    return decorate


def parse_request(
    stages: str,
    replicas: str | None,
    micro_batches: str | None,
    schedule: str,
    recompute: str,
    batch_norm: BatchNorm,
    jit_compile: bool | None,
    slice_count: str | None,
    asynchronous: bool,
    minibatches: int | None,
    weights: str | None,
    depth: int | None,
    plan: Plan | None = None,
    **_: Any,
) -> Request:
    """Return the Request that PLAN_OPTIONS and ``window_options`` state; UsageError where a number is not one.

    ``plan``: that of ``--plan``; where it is for asynchronous windows, it says of them what no option does.
    """
    wanted_stages: int | list[str] | str = stages
    if stages.isdecimal():
        wanted_stages = int(stages)
    elif stages != "auto":
        wanted_stages = stages.split(",")
    wanted_replicas = None
    if replicas is not None:
        problem = f"--replicas {replicas}: give one whole number for each stage, such as 2,1"
        wanted_replicas = parse_numbers(replicas, problem)
    count = None if micro_batches is None else parse_micro_batches(micro_batches)
    mode = "async" if asynchronous else "sync"
    window = make_window(mode, minibatches, weights, depth, count, plan)
    recomputed = parse_recompute(recompute)
    return Request(
        wanted_stages,
        wanted_replicas,
        1 if window is not None else _USUAL_MICRO_BATCHES if count is None else count,
        schedule,
        recomputed,
        batch_norm=batch_norm,
        jit_compile=jit_compile,
        slice=parse_slice(slice_count),
        window=window,
    )


def parse_slice(text: str | None) -> Slice:
    """Return what ``--slice`` states, as ``dapple.pipeline`` takes it; UsageError where it is no number."""
    if text is None or text == "auto":
        return text
    if not text.isdecimal():
        raise click.UsageError(f"--slice {text}: give the number of micro-batches to slice, or auto")
    return int(text)


def parse_micro_batches(text: str) -> MicroBatches:
    """Return what ``--micro-batches`` states, as ``dapple.pipeline`` takes it; UsageError where it is no number."""
    if text == "auto":
        return text
    parts = text.split(",")
    if len(parts) > 1:
        with contextlib.suppress(ValueError):
            if all(part.strip().removeprefix("-").isdecimal() for part in parts):
                return tuple(map(int, parts))
            return tuple(map(float, parts))
    elif text.removeprefix("-").isdecimal():
        return int(text)
    raise click.UsageError(
        f"--micro-batches {text}: give a whole number, auto, or the samples (2,2,4) or shares (0.25,0.25,0.5) of each "
        "micro-batch"
    )


def parse_recompute(text: str) -> Recompute:
    """Return what ``--recompute`` states, as ``dapple.pipeline`` takes it.

    Raises UsageError for stages that are no numbers.
    """
    if text in ("all", "none"):
        return text == "all"
    kind, colon, numbers = text.partition(":")
    if colon and kind == "stages":
        problem = f"--recompute {text}: give numbers of stages, such as stages:0,1"
        return StageNumbers(parse_numbers(numbers, problem))
    return tuple(text.split(","))


def parse_numbers(text: str, problem: str) -> tuple[int, ...]:
    """Return the whole numbers between commas; raise UsageError with the message ``problem`` for other text."""
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise click.UsageError(problem)
    return tuple(int(part) for part in text.split(","))


def load_plan(plan_path: str | None, **_: Any) -> Plan | None:
    """Return the plan in the file of ``--plan``, None without the option; PlanError where the file holds no plan."""
    return Plan.load(plan_path) if plan_path else None
