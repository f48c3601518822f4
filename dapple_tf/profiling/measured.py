"""``dapple.profile``: measure the cost of each layer on a device of this machine.

Runs of consecutive layers become stages of an ordinary pipelined program, all on one device and with one micro-batch.
Time stamps around every forward and backward then measure all layers in place, in one graph. The time of a call that
does nothing is measured beside it and subtracted, since in a plan of fewer stages a layer is not a call of its own.
Within a run the time is split among the layers in proportion to the roofline of their ops.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dapple_tf import variable_values
from dapple_tf.backend.saved_variables import unchanged_variables
from dapple_tf.devices import home_device, list_devices
from dapple_tf.errors import CaptureError, ProfileError, warn_user
from dapple_tf.exactness import BatchLoss
from dapple_tf.frontend.batch import as_arguments, batch_size
from dapple_tf.frontend.captured import Captured, Traced
from dapple_tf.frontend.composite import as_rows, taking_rows
from dapple_tf.frontend.trace import trace_loss, trace_uncut
from dapple_tf.messages import LOGGER
from dapple_tf.profiler.detect import count_cores, limit_to_cores
from dapple_tf.profiler.measure import Floats, measure_interleaved, relative_spread
from dapple_tf.profiler.peaks import CPU_CORE, PEAKS, Peak
from dapple_tf.profiler.profile import Profile, Timing, WholeModel
from dapple_tf.profiling.analytic import make_profile
from dapple_tf.profiling.layer_facts import LayerFacts, examine_layers
from dapple_tf.profiling.probes import LayerRuns, PlainModel, empty_calls
from dapple_tf.wording import format_count

AGREEMENT = 0.10
"""Largest difference between the layers' sum and the whole model's time, relative to the latter, without a warning."""

_ROUNDS = 9
_CALLS_PER_RUN = 20  # a run's forward should take at least as long as this many calls that do nothing
_CLOCK_SECONDS = 1e-6  # the resolution of the time stamps


@dataclass(frozen=True)
class _Effort:
    """The precision of a profile: into how many runs the layers are cut, and how often these are measured.

    For each batch size there are at most ``rounds``, and as many as fit into ``budget_seconds``, but at least a few.
    """

    rounds: int
    budget_seconds: float
    runs: int


_BUDGET_SECONDS = 8.0
_MOST_RUNS = 32
_TO_PLAN = _Effort(_ROUNDS, 3.0, 16)  # the first step waits for it


def profile(
    loss_fn: Callable[..., Any],
    batch: Any,
    *,
    batch_sizes: Sequence[int] | None = None,
    repeats: int = _ROUNDS,
    model: str | None = None,
    batch_loss: BatchLoss = False,
) -> Profile:
    """Measure the cost of each layer of a loss, on one of the devices that a pipeline would use.

    ``batch`` is the tuple of the loss's arguments; the profile is for its size. ``batch_sizes``: further sizes to
    measure at; rows of the batch are taken, and repeated where it has too few. ``repeats``: the number of rounds, whose
    median counts; fewer where they would take more than 8 seconds. ``model`` names the profile. ``batch_loss``: the
    option of ``dapple.pipeline``; the part of the loss that runs once is no layer then. All variables have their values
    and devices back afterwards.

    On CPUs the process is limited to the cores that one device has to itself, and time that other processes took is
    subtracted. Warns (DappleWarning) where the sum over the layers differs by more than 10% from the whole model's
    time (see ``disagreement``). Raises ProfileError for sizes or repeats below 1, BatchError for a batch without a
    size, StepError for a model that fails on the batch, and what ``dapple.pipeline`` raises for the loss.
    """
    sizes = _check_options(batch_sizes, repeats)
    effort = _Effort(repeats, _BUDGET_SECONDS, _MOST_RUNS)
    return _profile(loss_fn, as_rows(as_arguments(batch)), sizes, batch_loss, effort, loss_fn, model)


def profile_layers(loss_fn: Traced, batch: Sequence[Any], batch_sizes: Sequence[int], batch_loss: BatchLoss) -> Profile:
    """Measure the cost of each layer as ``profile`` does, but faster, and without the time of the whole model.

    ``batch``: the arguments of the loss. Raises what ``profile`` raises.
    """
    return _profile(loss_fn, batch, batch_sizes, batch_loss, _TO_PLAN)


def _profile(
    loss_fn: Traced,
    batch: Sequence[Any],
    batch_sizes: Sequence[int],
    batch_loss: BatchLoss,
    effort: _Effort,
    whole: Callable[..., Any] | None = None,
    model: str | None = None,
) -> Profile:
    """Return the profile, and warn of what is wrong with it. ``whole``: the loss, to measure the whole model too."""
    size = batch_size(batch)
    other_sizes = [n for n in batch_sizes if n != size]
    with _progress_bar(3 + effort.rounds * (1 + len(other_sizes))) as show:
        show("tracing", 0)
        with variable_values.without_values():
            facts = examine_layers(_trace(loss_fn, batch, batch_loss, other_sizes), size)
        if facts.lists:
            names = ", ".join(facts.lists)
            warn_user(f"stash_bytes leaves out lists of unknown length, of the While loops in {names}")
        plain = PlainModel(taking_rows(whole, batch), batch, list_devices()[0]) if whole else None
        show("tracing", 1)
        with unchanged_variables(facts.captured.variables.values()):
            result = _measure(facts, batch, plain, other_sizes, effort, model, show)
    message = "" if facts.layers.head_inputs else _disagreement_message(result)
    if message:
        warn_user(message)
    return result


def _trace(loss_fn: Traced, batch: Sequence[Any], batch_loss: BatchLoss, other_sizes: Sequence[int]) -> Captured:
    """Return the captured loss; with a known batch size if it needs one and no other size is to be measured.

    If ``loss_fn`` is a training step, only its loss is returned: what comes after its gradients is not run.
    """
    size = batch_size(batch)
    try:
        captured = trace_loss(loss_fn, batch, size, "allow", batch_loss)
    except CaptureError:
        if other_sizes:
            raise
        captured = trace_uncut(loss_fn, batch, size)
    return dataclasses.replace(captured, after=None)


def _measure(
    facts: LayerFacts,
    arguments: Sequence[Any],
    plain: PlainModel | None,
    other_sizes: Sequence[int],
    effort: _Effort,
    model: str | None,
    show: _ShowProgress,
) -> Profile:
    """Return the profile; variables may change. Without ``plain``, it has no ``whole``."""
    device = list_devices()[0]
    empty = empty_calls(device)
    runs = LayerRuns.build(facts, _count_runs(facts, plain, empty, effort), device, home_device())
    show("building", 1)
    rows = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(arguments)]
    probe = runs.probe(rows)
    probe()
    show("measuring", 1)
    compared = [plain.forward, plain.both] if plain else []
    with _limit_to_one_device() as full_share:
        measure = functools.partial(
            measure_interleaved,
            repeats=effort.rounds,
            budget_seconds=effort.budget_seconds,
            after_round=lambda: show("measuring", 1),
            full_share=full_share,
        )
        stages, calls, *others = measure([probe, empty, *compared])
        call_seconds = _median(calls)
        timings = []
        for n in other_sizes:
            (seconds,) = measure([runs.probe([_take_rows(tensor, n) for tensor in rows])])
            timings.append(Timing(n, *(tuple(map(float, part)) for part in runs.split(seconds, call_seconds))))
    whole = None
    if plain:
        forward, both = map(_median, others)
        whole = WholeModel(forward, max(0.0, both - forward))
    return make_profile(
        facts,
        model or facts.captured.graph.name,
        describe_device(),
        *runs.split(stages, call_seconds),
        timings=tuple(timings),
        whole=whole,
        error=relative_spread(stages),
    )


def _count_runs(facts: LayerFacts, plain: PlainModel | None, empty: Callable[[], Floats], effort: _Effort) -> int:
    """Return into how many runs to cut the layers, so that a run is long compared with the cost of a call.

    Without ``plain`` the forward's seconds are those of the roofline.
    """
    whole = [plain.forward] if plain else []
    with _limit_to_one_device() as full_share:
        calls, *measured = measure_interleaved([empty, *whole], min(3, effort.rounds), 1.0, full_share=full_share)
    forward = _median(measured[0]) if measured else float(np.sum(facts.forward_seconds(_roofline_of_device())))
    count = forward / (_CALLS_PER_RUN * max(_median(calls), _CLOCK_SECONDS))
    return max(1, min(effort.runs, int(count)))


def disagreement(profile: Profile) -> float | None:
    """Return the sum over the layers divided by the whole model's time, minus 1; None where the whole has no time."""
    if profile.whole is None:
        return None
    layers = sum(layer.forward_seconds + layer.backward_seconds for layer in profile.layers)
    return layers / (profile.whole.forward_seconds + profile.whole.backward_seconds) - 1


def _disagreement_message(profile: Profile) -> str:
    """Return a warning where the layers' sum is too far from the whole model's time, else ""."""
    relative = disagreement(profile)
    if relative is None or profile.whole is None or abs(relative) <= AGREEMENT:
        return ""
    whole = profile.whole.forward_seconds + profile.whole.backward_seconds
    return (
        f"the layers of {profile.model} sum to {whole * (1 + relative) * 1e3:.3g} ms, which is {relative:+.0%} from "
        f"the {whole * 1e3:.3g} ms of the whole model, measured beside them (half of the rounds are further than "
        f"{profile.error:.1%} from the median): if the machine is busy, profile again"
    )


def _check_options(sizes: Sequence[int] | None, repeats: int) -> list[int]:
    """Return the batch sizes in order, each once. Raises ProfileError for sizes or repeats below 1."""
    if repeats < 1:
        raise ProfileError(f"repeats={repeats}: at least one is needed")
    for size in sizes or ():
        if size < 1:
            raise ProfileError(f"batch_sizes={list(sizes or ())}: {size} is less than one sample")
    return sorted(set(sizes or ()))


def _take_rows(tensor: Any, size: int) -> Any:
    """Return ``size`` rows of a tensor of the batch, repeated from the first where there are fewer."""
    return tf.gather(tensor, tf.range(size) % tf.shape(tensor)[0])


def _median(rounds: Floats) -> float:
    return float(np.median(rounds))


# --- Give this process the processor share that one device of a pipeline has


def _cores_per_device() -> int:
    """Return how many of this process's cores each logical CPU device has to itself, at least 1."""
    return max(1, count_cores() // len(list_devices()))


@contextlib.contextmanager
def _limit_to_one_device() -> Iterator[float | None]:
    """Limit the process to one device's cores in the block, which gets ``full_share`` for ``measure_interleaved``."""
    if tf.config.list_logical_devices("GPU"):
        yield 0.0  # the processor only waits for the GPU
        return
    cores = _cores_per_device()
    with limit_to_cores(cores):
        yield 1.0 if cores == 1 else None


def _roofline_of_device() -> Peak:
    """Return figures that are no lower than those of the device: of the fastest known GPU, or of the device's cores."""
    if tf.config.list_logical_devices("GPU"):
        return max(PEAKS, key=lambda peak: peak.flops_per_second)
    cores = _cores_per_device()
    return dataclasses.replace(
        CPU_CORE, flops_per_second=cores * CPU_CORE.flops_per_second, bytes_per_second=cores * CPU_CORE.bytes_per_second
    )


def describe_device() -> str:
    """Return the name of the device that a profile is measured on, for people."""
    for physical in tf.config.list_physical_devices("GPU"):
        return str(tf.config.experimental.get_device_details(physical).get("device_name", "GPU"))
    cores = _cores_per_device()
    return f"CPU, {format_count(cores, 'core')}"


# --- A progress bar on stderr for profiling


_ShowProgress = Callable[[str, int], None]
"""Shows the current activity, and advances the bar by a number of steps."""


@contextlib.contextmanager
def _progress_bar(total: int) -> Iterator[_ShowProgress]:
    """Show a bar of ``total`` steps during the block, if stderr is a terminal."""
    console = Console(file=sys.stderr, quiet=not LOGGER.isEnabledFor(logging.INFO))
    columns = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, disable=console.quiet or not console.is_terminal, transient=True) as bar:
        task = bar.add_task("profiling", total=total)

        def show(activity: str, steps: int) -> None:
            bar.update(task, advance=steps, description=f"profiling: {activity}")

        yield show
