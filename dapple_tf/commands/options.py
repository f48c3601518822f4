"""Options that several commands share, and their parsing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, get_args

import click
import cloup

from dapple_tf.autoplan.option_help import about_option
from dapple_tf.autoplan.options import MicroBatches
from dapple_tf.autoplan.recompute_option import Recompute, StageNumbers
from dapple_tf.autoplan.slice_option import Slice
from dapple_tf.commands.command import FILE, Decorator
from dapple_tf.commands.parameter_types import CLUSTER, SCHEDULE_OPTION, load_cluster
from dapple_tf.exactness import BatchNorm
from dapple_tf.plans import RECOMPUTE_WORDS, Plan

MODEL_ARGUMENT = click.argument("model", type=FILE)

MODEL_OPTIONS = cloup.option_group(
    "The model",
    cloup.option(
        "--batch-size", type=click.IntRange(1), help="Samples of each batch: the callable's argument batch_size."
    ),
    cloup.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="An argument of the callable, such as width=64; may be repeated.",
    ),
    cloup.option(
        "--seed", default=None, type=int, help="Seed of the weights and the data: the callable's argument seed."
    ),
)
"""The options of MODEL_ARGUMENT, for commands that run a model."""

DEVICES_OPTION = cloup.option(
    "--devices",
    default=None,
    type=click.IntRange(1),
    help="How many logical devices to make on a machine without GPUs (default: 8).",
)


def plan_option(name: str, form: str = "", **settings: Any) -> Decorator:
    """Return the command-line option of an option of ``dapple.pipeline``; ``form``: how it is written there."""
    about = about_option(name)
    return cloup.option(about["flag"], name, default=None, help=f"{about['meaning']}{form}", **settings)


PLAN_OPTIONS = cloup.option_group(
    "The pipeline",
    plan_option("stages", "  [such as 2, or a,b,c; default: auto]"),
    plan_option("replicas", "  [such as 2,1]"),
    plan_option("micro_batches", "  [such as 8, or 2,2,4, or 0.25,0.25,0.5]"),
    SCHEDULE_OPTION,
    plan_option("cluster", "  [a file, or a preset such as config-a:4]", type=CLUSTER),
    plan_option(
        "recompute",
        "  [all, none, stages:0,1, or names a,b,c; alone: all; default: none]",
        is_flag=False,
        flag_value="all",
        metavar="[LAYERS]",
    ),
    plan_option("batch_norm", "  [default: micro-batch]", type=click.Choice(get_args(BatchNorm))),
    plan_option("jit_compile"),
    plan_option("slice"),
    plan_option("shard_optimizer", is_flag=True, flag_value=True),
    plan_option("plan", "  [a file that dapple plan -o has written]", type=FILE),
    DEVICES_OPTION,
)
"""Options that say how to pipeline the model."""


def read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``dapple.pipeline`` that PLAN_OPTIONS and ``window_options`` state, and read their files.

    Raises UsageError where a number is not one, PlanError or ClusterError where a file holds no plan or no cluster.
    """
    texts = {name: value for name, value in given.items() if name in _READERS and value is not None}
    found = {name: _READERS[name](value) for name, value in texts.items()}
    return {**found, "mode": "async"} if given["asynchronous"] else found


def parse_stages(text: str) -> int | str | list[str]:
    """Return what ``--stages`` states, as ``dapple.pipeline`` takes it."""
    if text.isdecimal():
        return int(text)
    return text if text == "auto" else text.split(",")


def _parse_replicas(text: str) -> tuple[int, ...]:
    return parse_numbers(text, f"--replicas {text}: give one whole number for each stage, such as 2,1")


def parse_slice(text: str) -> Slice:
    """Return what ``--slice`` states, as ``dapple.pipeline`` takes it; UsageError where it is no number."""
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise click.UsageError(f"--slice {text}: give the number of micro-batches to slice, or auto")
    return int(text)


def parse_micro_batches(text: str) -> MicroBatches:
    """Return what ``--micro-batches`` states, as ``dapple.pipeline`` takes it; UsageError where it is no number."""
    if text == "auto":
        return "auto"
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
    if text in RECOMPUTE_WORDS:
        return RECOMPUTE_WORDS[text]
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


_READERS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "stages": parse_stages,
        "replicas": _parse_replicas,
        "micro_batches": parse_micro_batches,
        "recompute": parse_recompute,
        "slice": parse_slice,
        "plan": lambda path: Plan.load(path) if path else None,
        "cluster": lambda name: load_cluster(name) if name else None,
        **dict.fromkeys(
            (
                *("schedule", "batch_norm", "jit_compile", "elastic", "snapshot_every", "shard_optimizer"),
                *("minibatches", "weights", "depth"),
            ),
            lambda value: value,
        ),
    }
)
"""For each option, a function that reads its text on the command line."""
