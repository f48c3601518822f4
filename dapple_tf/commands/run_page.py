"""A training run as one web page: loss, speed, bubble, memory, plan, versions and options."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from dapple_tf.commands.run_file import Run, RunStep
from dapple_tf.drawing.chart import Curve
from dapple_tf.drawing.page import Axis, Plot, build_page, make_legend
from dapple_tf.drawing.plan import draw_plan
from dapple_tf.profiler.units import format_bytes, format_samples, format_seconds
from dapple_tf.timeline.plan_drawing import describe_plan_drawing
from dapple_tf.timeline.recording import describe_error, plan_title, planned_seconds
from dapple_tf.wording import format_count

_MOST_POINTS = 2000  # of a curve; a longer one is drawn by the least and the largest value of each part
_FIXED, _IN_STEP, _MEASURED = "#7a6fae", "#45a29e", "#d98b2b"


def run_figures(run: Run) -> dict[str, Any]:
    """Return the run's figures as JSON values; what is not known is null. Seconds and bytes."""
    losses = [step.loss for step in run.steps if step.loss is not None]
    timed = _timed(run)
    seconds = statistics.median(step.seconds for step in timed) if timed else None
    bubbles = [step.bubble for step in run.steps if step.bubble is not None]
    simulated = run.end.simulated_bubble
    if simulated is None:
        planned = (run.plan.predicted or {}).get("bubble")
        simulated = float(planned) if isinstance(planned, int | float) else None
    return {
        "model": run.start.model,
        "steps": run.start.steps,
        "done": run.steps[-1].number if run.steps else run.start.done,
        "resumed": list(run.resumed),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "least_loss": min(losses, default=None),
        "step_seconds": seconds,
        "samples": timed[-1].samples if timed else None,
        "samples_per_second": timed[-1].samples / seconds if seconds else None,
        "planned_step_seconds": planned_seconds(run.plan),
        "simulated_bubble": simulated,
        "bubble": statistics.mean(bubbles) if bubbles else None,
        "recorded_steps": len(bubbles),
        "memory": [dataclasses.asdict(stage) for stage in run.start.memory],
        "measured_memory": list(run.end.measured),
        "versions": dict(run.start.versions),
        "options": dict(run.start.options),
    }


def describe_run(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the run's figures."""
    start, plan, found = run.start, run.plan, run_figures(run)
    unit = plan.training.words.unit
    yield "model", start.model
    yield "plan", plan.headline.removeprefix("plan ")
    resumed = "".join(f", resumed after {unit} {number}" for number in run.resumed)
    yield f"{unit}s", f"{found['done']} of {start.steps}{resumed}"
    lost = sum(step.loss is None for step in run.steps)
    if lost < len(run.steps):
        text = f"{found['first_loss']:.4g} → {found['last_loss']:.4g}, least {found['least_loss']:.4g}"
        yield "loss", text + f", {lost} not finite" * bool(lost)
    elif lost:
        yield "loss", "not finite"
    seconds, samples, planned = found["step_seconds"], found["samples"], found["planned_step_seconds"]
    if seconds:
        yield f"a {unit} takes", f"{format_seconds(seconds)} (median of {len(_timed(run))})"
        yield "speed", f"{found['samples_per_second']:.4g} samples/s, {format_samples(samples)} a {unit}"
        if planned is not None and samples == plan.global_batch_size:
            yield "the planner predicted", f"{format_seconds(planned)}, {describe_error(planned / seconds - 1)}"
    yield "bubble", _describe_bubble(found)
    if run.end.together is not None:
        predicted, measured = map(format_bytes, run.end.together)
        yield "memory in a step, all stages together", f"{predicted} predicted, {measured} measured"
    where = f"{start.processes} processes" if start.processes > 1 else "one process"
    yield "started", f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(start.time))} UTC, in {where}"


def _describe_bubble(found: Mapping[str, Any]) -> str:
    """Return the simulated bubble (of the plan, or with the measured times of the actions) and the measured one."""
    parts = [] if found["simulated_bubble"] is None else [f"{found['simulated_bubble']:.1%} simulated"]
    if found["bubble"] is not None:
        count = found["recorded_steps"]
        parts.append(f"{found['bubble']:.1%} measured ({format_count(count, 'recorded step')})")
    return ", ".join(parts) or "not known: record a step with --trace or --tensorboard"


def _timed(run: Run) -> list[RunStep]:
    """Return the steps but for the first of each part, which also builds."""
    return [step for step in run.steps if step.number not in run.first_steps]


def make_run_page(run: Run) -> str:
    """Return the page."""
    body = [_table(dict(describe_run(run)))]
    name = run.plan.training.words.curve
    points = [(step.number, step.loss) for step in run.steps if step.loss is not None and math.isfinite(step.loss)]
    if points:
        low, high = min(loss for _, loss in points), max(loss for _, loss in points)
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        axis = Axis(low - room, high + room, lambda loss: f"{loss:.4g}")
        body += [f"<h2>{name.capitalize()}</h2>", _plot("loss", name, points, axis)]
    body += _draw_speed(run)
    body += _draw_memory(run)
    drawing = describe_plan_drawing(run.plan, layer_names=run.start.layer_names)
    body += ["<h2>Plan</h2>", f'<div class="wide">\n{draw_plan(drawing)}\n</div>']
    body += ["<h2>Versions</h2>", _table(run.start.versions)]
    body += ["<h2>Options</h2>", _table({"MODEL": run.start.model, **run.start.options})]
    model = run.start.model.rpartition(":")[2]
    return build_page(f"{model} · {plan_title(run.plan)}", "\n".join(body), _STYLE)


_STYLE = """\
table.pairs td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
table.pairs td:first-child { opacity: 0.75; white-space: nowrap; padding-right: 20px; }"""


def _table(pairs: Mapping[str, str]) -> str:
    rows = (f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in pairs.items())
    return f'<table class="pairs"><tbody>{"".join(rows)}</tbody></table>'


def _plot(name: str, label: str, points: Sequence[tuple[float, float]], y: Axis) -> str:
    points = _thin(points)
    times, values = zip(*points, strict=True)
    x = Axis(float(times[0]), float(max(times[-1], times[0] + 1)), lambda number: f"{number:.10g}")
    return f'<div class="wide">\n{Plot(name, x, y, [Curve(label, times, values)]).draw()}\n</div>'


def _thin(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Reduce a curve to the number of points that are drawn: the minimum and the maximum of each section."""
    size = -(-len(points) // (_MOST_POINTS // 2))
    if size <= 2:
        return points
    parts = (points[first : first + size] for first in range(0, len(points), size))
    ends = ((min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])) for part in parts)
    return [point for pair in ends for point in sorted(pair)]


def _draw_speed(run: Run) -> list[str]:
    """Return the curve of the seconds of steps; what lasts more than four times the median is drawn at the edge."""
    timed = _timed(run)
    if not timed:
        return []
    median = statistics.median(step.seconds for step in timed)
    top = min(max(step.seconds for step in timed), 4 * median)
    longer = sum(step.seconds > top for step in timed)
    unit = run.plan.training.words.unit
    title = f"Seconds of a {unit}"
    if longer:
        title += f" ({longer} took longer than is shown)"
    points = [(step.number, min(step.seconds, top)) for step in timed]
    axis = Axis(0.0, 1.08 * top or 1.0, format_seconds)
    return [f"<h2>{title}</h2>", _plot("speed", f"seconds of a {unit}", points, axis)]


def _draw_memory(run: Run) -> list[str]:
    """Return a table of the stages with a bar of each one's predicted bytes, and what was measured in a step."""
    memory = run.start.memory
    if not memory:
        return []
    measured = [*run.end.measured, *[None] * len(memory)][: len(memory)]
    known = any(found is not None for found in measured)
    most = max(stage.fixed + max(stage.in_step, found or 0) for stage, found in zip(memory, measured, strict=True)) or 1
    rows = []
    for index, (stage, found) in enumerate(zip(memory, measured, strict=True)):
        bars = _bar([(stage.fixed, _FIXED), (stage.in_step, _IN_STEP)], most)
        cells = [format_bytes(stage.fixed), format_bytes(stage.in_step)]
        if found is not None:
            bars += _bar([(stage.fixed, _FIXED), (found, _MEASURED)], most)
            cells.append(format_bytes(found))
        columns = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f'<tr><td>stage {index}</td><td class="bar">{bars}</td>{columns}</tr>')
    names = {_FIXED: "between steps, predicted", _IN_STEP: "more in a step, predicted"}
    if known:
        names[_MEASURED] = "more in a step, measured"
    head = "<th></th><th></th>" + "".join(f"<th>{name}</th>" for name in names.values())
    return [
        "<h2>Memory of one device of each stage</h2>",
        make_legend([(f"background: {colour}", name) for colour, name in names.items()]),
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>',
    ]


def _bar(parts: Sequence[tuple[float, str]], most: float) -> str:
    inside = "".join(f'<i style="width: {100 * size / most:.3f}%; background: {colour}"></i>' for size, colour in parts)
    return f"<div>{inside}</div>"
