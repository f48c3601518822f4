"""Print results and progress, check the paths of results, and describe plans in words."""

from __future__ import annotations

from collections.abc import Sequence

import click

from dapple_tf.errors import OutputError
from dapple_tf.plan import Plan
from dapple_tf.window_plan import WindowPlan
from graph_passes.schedules.policies import abbreviate_schedule
from graph_passes.schedules.window import Window
from profiler.files import find_write_problem
from profiler.units import format_samples


def print_result(text: str) -> None:
    """Print a result on stdout (progress and logs go to stderr)."""
    click.echo(text)


def print_progress(text: str) -> None:
    """Print a line of progress, or a warning, on stderr."""
    click.echo(text, err=True)


def check_output_path(path: str | None) -> None:
    """Raise OutputError if ``--output PATH`` cannot be written; called before any work is done."""
    if path is not None and (problem := find_write_problem(path)):
        raise OutputError(problem)


def check_chart_path(path: str | None, content: str = "a timeline") -> None:
    """Raise OutputError if ``content`` cannot be saved in ``path``; called before any work is done."""
    from dapple_tf.drawing.save import check_path

    if path is not None:
        check_path(path, content)


def describe_plan(plan: Plan, layer_names: Sequence[str]) -> str:
    """Return the plan as text: a line for the whole, and one for each stage with its devices and layers."""
    how = f"{plan.describe_micro_batches()}, schedule {abbreviate_schedule(plan.schedule)}"
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
