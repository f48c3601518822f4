"""Print results and progress, check the paths of results, and describe plans in words."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from dapple_tf.errors import OutputError
from dapple_tf.plans import Plan
from dapple_tf.window_plan import WindowPlan
from graph_passes.schedules.window import Window
from profiler.files import find_folder_problem, find_write_problem
from profiler.units import format_samples


def print_result(text: str) -> None:
    """Print a result on stdout (progress and logs go to stderr)."""
    click.echo(printable(text))


def print_progress(text: str) -> None:
    """Print a line of progress, or a warning, on stderr."""
    click.echo(printable(text), err=True)


def printable(text: str) -> str:
    """Return the text with its control characters as Python writes them: a name in a file may hold a terminal's."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def check_output_path(option: str, path: str | None) -> None:
    """Raise OutputError if the file at ``path``, given as ``option``, cannot be written; call it before any work.

    Its folder must exist: one that does not is probably mistyped. (A long training run makes the folders of its files.)
    """
    if path is None:
        return
    folder = os.path.dirname(path) or "."
    if path and not os.path.isdir(folder):
        raise OutputError(f"{option}: {path}: its folder is missing: make {folder}, or correct the path")
    if problem := find_write_problem(path):
        raise OutputError(f"{option}: {problem}")


def check_chart_path(option: str, path: str | None, content: str = "a timeline") -> None:
    """Raise OutputError if ``content`` cannot be saved at ``path``, given as ``option``; call it before any work."""
    from dapple_tf.drawing.save import check_path

    if path is None:
        return
    try:
        check_path(path, content)
    except OutputError as error:
        raise OutputError(f"{option}: {error}") from error


def check_folder_path(option: str, path: str | None, content: str) -> None:
    """Make the folder at ``path``, given as ``option``; raise OutputError if it cannot hold ``content``."""
    if path is not None and (problem := find_folder_problem(path)):
        raise OutputError(f"{option}: {path} cannot hold {content}: {problem}")


def describe_plan(plan: Plan, layer_names: Sequence[str]) -> str:
    """Return the plan as text: a line for the whole, and one for each stage with its devices and layers."""
    how = f"{plan.describe_micro_batches()}, schedule {plan.spec.short}"
    if plan.window is not None:
        how = describe_windows(plan.window, plan.global_batch_size, plan.versions.window)
    lines = [f"{len(plan.stages)} stages, {how}{_describe_recompute(plan, len(layer_names))}"]
    for i, stage in enumerate(plan.stages):
        devices = ", ".join(map(str, stage.devices))
        first, last = layer_names[stage.first_layer], layer_names[stage.last_layer]
        lines.append(f"  stage {i}, device {devices}: {first} .. {last}")
    return "\n".join(lines)


def describe_windows(window: WindowPlan, samples: int, order: Window) -> str:
    """Return minibatches, weights and warm-up of windows of ``samples`` samples, as text."""
    least, more = divmod(samples, window.minibatches)
    sizes = f"{least} or {least + 1} samples" if more else format_samples(least)
    parts = f" in {order.micro_batches} micro-batches" if order.micro_batches > 1 else ""
    warm_up = ",".join(map(str, order.warm_up))
    return f"windows of {window.minibatches} minibatches of {sizes}{parts}, weights {window.weights}, K={warm_up}"


def _describe_recompute(plan: Plan, layers: int) -> str:
    count = len(plan.recomputed)
    return f", recompute of {'all' if count == layers else f'{count} of {layers}'} layers" if count else ""
