"""Options that several commands share, and their parsing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, get_args

import click
import cloup

from dapple_tf.autoplan.option_help import about_option
from dapple_tf.autoplan.options import MicroBatches, Options
from dapple_tf.autoplan.recompute_option import Recompute, StageNumbers
from dapple_tf.autoplan.slice_option import Slice
from dapple_tf.commands.command import FILE, Decorator
from dapple_tf.commands.parameter_types import CLUSTER, SCHEDULE_OPTION, load_cluster
from dapple_tf.exactness import BatchNorm
from dapple_tf.graph_passes.schedules.weight_versions import POLICIES
from dapple_tf.plans import RECOMPUTE_WORDS, Plan
from dapple_tf.window_plan import USUAL_MINIBATCHES
from dapple_tf.wording import format_count

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


def window_options(*, hidden: bool = False) -> Decorator:
    """Return the options of asynchronous windows; ``hidden``: the command only says why it does not have them."""
    return cloup.option_group(
        "Asynchronous windows",
        cloup.option(
            "--async",
            "asynchronous",
            is_flag=True,
            help="Train asynchronously (PipeDream): every minibatch updates the weights, and the pipeline is not "
            "emptied in between. Each batch is then a window of minibatches: --batch-size gives its samples, --steps "
            "counts windows.",
        ),
        plan_option("minibatches", type=click.IntRange(1)),
        plan_option("weights", type=click.Choice(POLICIES)),
        plan_option("depth", type=click.IntRange(1)),
        hidden=hidden,
    )


def read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``dapple.pipeline`` that PLAN_OPTIONS and ``window_options`` state, and read their files.

    Raises UsageError where a number is not one, PlanError or ClusterError where a file holds no plan or no cluster.
    """
    declared = {option.name for option in fields(Options)} - {"devices"}  # --devices is a number of devices
    found = {
        name: _READERS[name](value) if name in _READERS else value
        for name, value in given.items()
        if name in declared and value is not None
    }
    return {**found, "mode": "async"} if given["asynchronous"] else found


def parse_stages(text: str) -> int | str | list[str]:
    """Return what ``--stages`` states, as ``dapple.pipeline`` takes it."""
    if text.isdecimal():
        return int(text)
    return text if text == "auto" else text.split(",")


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
        "replicas": lambda text: parse_numbers(
            text, f"--replicas {text}: give one whole number for each stage, such as 2,1"
        ),
        "micro_batches": parse_micro_batches,
        "recompute": parse_recompute,
        "slice": parse_slice,
        "plan": lambda path: Plan.load(path) if path else None,
        "cluster": lambda name: load_cluster(name) if name else None,
    }
)
"""For each option whose text is read further, the function that does it."""


# --- Contradictions of ``--async`` and other options


def check_window_usage(
    *,
    asynchronous: bool,
    minibatches: int | None,
    weights: str | None,
    depth: int | None,
    micro_batches: str | None,
    schedule: str,
    slice: str | None,
    batch_norm: str | None,
    batch_size: int | None,
    plan: str | None,
    check_numerics: bool = False,
    **_: Any,
) -> None:
    """Raise UsageError, before TensorFlow starts, for options of windows without --async, or that contradict it."""
    if not asynchronous:
        for name, value in (("--minibatches", minibatches), ("--weights", weights), ("--depth", depth)):
            if value is not None:
                raise click.UsageError(f"{name} {value} is for asynchronous windows: give --async too, or leave it out")
        return
    for name, given, default in (("--schedule", schedule, "auto"), ("--slice", slice, None)):
        if given != default:
            raise click.UsageError(f"{name} {given} with --async: windows have an order of their own; leave it out")
    if batch_norm not in (None, "micro-batch"):
        raise click.UsageError(
            f"--batch-norm {batch_norm} with --async: batch norm takes the statistics of each minibatch; leave it out"
        )
    if check_numerics:
        raise click.UsageError(
            "--check-numerics with --async: a window changes variables after every minibatch, so it cannot leave them "
            "as they were. The losses of minibatches are in the result of --json; to find out why one is not finite, "
            "train on from the last checkpoint without --async"
        )
    if plan is None and micro_batches is not None and weights != "2bw":
        raise click.UsageError(
            f"--micro-batches {micro_batches} with --async: each minibatch runs whole, so give --minibatches only, or "
            "--weights 2bw, which cuts minibatches"
        )
    if plan is None and batch_size is not None:
        _check_batch_size(batch_size, minibatches or USUAL_MINIBATCHES, micro_batches)


def _check_batch_size(samples: int, minibatches: int, micro_batches: str | None) -> None:
    """Raise UsageError unless every minibatch, or every micro-batch of it, has a sample."""
    cut = int(micro_batches) if micro_batches is not None and micro_batches.isdecimal() else 1
    if samples < minibatches * cut:
        parts = format_count(minibatches, "minibatch") + (f" of {format_count(cut, 'micro-batch')}" if cut > 1 else "")
        raise click.UsageError(
            f"--batch-size {samples} is a window of {parts}, which need at least "
            f"{format_count(minibatches * cut, 'sample')}: give a larger --batch-size, or fewer --minibatches"
        )
