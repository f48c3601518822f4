"""``dapple.profile``: what each layer costs, measured on the device at hand.

Runs of consecutive layers are made stages of the machinery that trains, all on one device and with one micro-batch,
and time stamps around every forward and backward are read: all layers are measured in place, in one graph. What a
call costs that does nothing is measured beside it and taken off, since a layer is no call of its own in a plan of
fewer stages. Within a run the time is shared by the roofline of the ops.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dapple_tf.backend.saved_variables import unchanged_variables
from dapple_tf.devices import home_device, list_devices
from dapple_tf.errors import DappleWarning
from dapple_tf.frontend.batch import as_arguments, batch_size
from dapple_tf.frontend.capture import capture
from dapple_tf.profiling.analytic import make_profile
from dapple_tf.profiling.layer_facts import examine_layers
from dapple_tf.profiling.probes import LayerRuns, PlainModel, empty_calls
from profiler.cores import limit_to_cores
from profiler.errors import ProfileError
from profiler.measure import Floats, measure_interleaved, relative_spread
from profiler.profile import Profile, Timing, WholeModel

AGREEMENT = 0.10
"""How far the layers' sum may be from the whole model before the profile warns."""

_MOST_RUNS = 32
_CALLS_IN_A_RUN = 20  # a run's forward shall take about as long as so many calls that do nothing, or longer
_CLOCK_SECONDS = 1e-6  # the step of the clock that stamps
_BUDGET_SECONDS = 8.0  # of rounds, for each batch size: reached where the machine is busy or the model large


def profile(
    loss_fn: Callable[..., Any],
    batch: Any,
    *,
    batch_sizes: Sequence[int] | None = None,
    repeats: int = 9,
    model: str | None = None,
) -> Profile:
    """Measure what each layer of a loss costs, on one of the devices that a pipeline would use.

    ``batch`` is the tuple of the loss's arguments; the profile is for its size. ``batch_sizes``: further sizes to
    take times at (rows of the batch are taken, again from the first where it is too short). ``repeats``: rounds, of
    which the median counts; fewer where they would take more than 8 seconds. ``model`` names the profile.
    All variables have their values back afterwards, and live where they did.

    On CPUs the process is held to the cores that one device has to itself, and what other processes took of them is
    taken off. Warns (DappleWarning) where the sum over
    layers is more than 10% from the whole model's time (see ``disagreement``). Raises ProfileError for sizes or
    repeats below 1, BatchError for a batch of no size, StepError for a model that fails on
    the batch, and what ``dapple.pipeline`` raises for the loss.
    """
    sizes = _check(batch_sizes, repeats)
    arguments = as_arguments(batch)
    size = batch_size(arguments)
    rows = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(arguments)]
    more = [n for n in sizes if n != size]
    with _progress(3 + repeats * (1 + len(more))) as tell:
        tell("tracing")
        facts = examine_layers(capture(loss_fn, arguments), size)
        if facts.lists:
            _warn(f"While loops keep lists of unknown length, which stash_bytes leaves out: {', '.join(facts.lists)}")
        device, home = list_devices()[0], home_device()
        with unchanged_variables(facts.captured.variables.values()):
            plain = PlainModel(loss_fn, arguments, device)
            empty = empty_calls(device)
            tell("tracing", 1)
            with _one_device() as full:
                first, calls = measure_interleaved([plain.forward, empty], min(3, repeats), 1.0, full_share=full)
            most = _median(first) / (_CALLS_IN_A_RUN * max(_median(calls), _CLOCK_SECONDS))
            runs = LayerRuns.build(facts, max(1, min(_MOST_RUNS, int(most))), device, home)
            tell("building", 1)
            measured = runs.probe(rows)
            measured()
            tell("measuring", 1)
            with _one_device() as full:
                measure = functools.partial(
                    measure_interleaved,
                    repeats=repeats,
                    budget_seconds=_BUDGET_SECONDS,
                    after_round=lambda: tell("measuring", 1),
                    full_share=full,
                )
                probes = [measured, plain.forward, plain.both, empty]
                stages, forward, both, calls = measure(probes)
                call = _median(calls)
                timings = []
                for n in more:
                    probe = runs.probe([_take(tensor, n) for tensor in rows])
                    (found,) = measure([probe])
                    timings.append(Timing(n, *(tuple(map(float, part)) for part in runs.share(found, call))))
    whole = WholeModel(_median(forward), max(0.0, _median(both) - _median(forward)))
    result = make_profile(
        facts,
        model or facts.captured.graph.name,
        _describe(device),
        *runs.share(stages, call),
        timings=tuple(timings),
        whole=whole,
        error=relative_spread(stages),
    )
    if problem := _disagreement_problem(result):
        _warn(problem)
    return result


def disagreement(found: Profile) -> float | None:
    """How far the sum over layers is from the whole model: sum over whole, less 1; None where that was not measured."""
    if found.whole is None:
        return None
    layers = sum(layer.forward_seconds + layer.backward_seconds for layer in found.layers)
    return layers / (found.whole.forward_seconds + found.whole.backward_seconds) - 1


def _disagreement_problem(found: Profile) -> str:
    """What is wrong where the layers' sum is too far from the whole model, else nothing."""
    off = disagreement(found)
    if off is None or found.whole is None or abs(off) <= AGREEMENT:
        return ""
    whole = found.whole.forward_seconds + found.whole.backward_seconds
    return (
        f"the layers of {found.model} sum to {whole * (1 + off) * 1e3:.3g} ms, which is {off:+.0%} from the "
        f"{whole * 1e3:.3g} ms of the whole model, measured beside them (half of the rounds are further than "
        f"{found.error:.1%} from the median): where the machine is busy, profile again"
    )


def _check(sizes: Sequence[int] | None, repeats: int) -> list[int]:
    if repeats < 1:
        raise ProfileError(f"repeats={repeats}: at least one is needed")
    for size in sizes or ():
        if size < 1:
            raise ProfileError(f"batch_sizes={list(sizes or ())}: {size} is less than one sample")
    return sorted(set(sizes or ()))


def _warn(text: str) -> None:
    warnings.warn(text, DappleWarning, stacklevel=3)


def _take(tensor: Any, size: int) -> Any:
    """``size`` rows of a batch, again from the first where it has fewer."""
    return tf.gather(tensor, tf.range(size) % tf.shape(tensor)[0])


def _median(rounds: Floats) -> float:
    return float(np.median(rounds))


def _describe(device: str) -> str:
    for physical in tf.config.list_physical_devices("GPU"):
        return str(tf.config.experimental.get_device_details(physical).get("device_name", "GPU"))
    count = _cores(len(list_devices()))
    return f"CPU, {count} core{'s' * (count > 1)}"


def _cores(devices: int) -> int:
    """Cores that one of so many logical CPU devices has to itself."""
    have = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, have // devices)


@contextlib.contextmanager
def _one_device() -> Iterator[float | None]:
    """While open, the process has what one device of a pipeline has; the ``full_share`` of ``measure_interleaved``."""
    if tf.config.list_logical_devices("GPU"):
        yield 0.0  # the processor only waits for it
        return
    count = _cores(len(list_devices()))
    with limit_to_cores(count):
        yield 1.0 if count == 1 else None


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr, where that is a terminal: a function (what is done now, steps done)."""
    console = Console(file=sys.stderr)
    columns = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("profiling", total=total)

        def tell(what: str, done: int = 0) -> None:
            bar.update(task, advance=done, description=f"profiling: {what}")

        yield tell
