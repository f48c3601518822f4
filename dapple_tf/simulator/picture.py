"""The picture of a simulated step: stages with the channels between them, AllReduce, and memory over time."""

from __future__ import annotations

from dapple_tf.drawing.chart import Chart, Curve, Row, Span
from dapple_tf.simulator.critical import Event, event_at
from dapple_tf.simulator.simulate import Timeline, list_ranges
from graph_passes.schedules.policies import abbreviate_schedule


def make_chart(timeline: Timeline) -> Chart:
    """A row a stage; between two stages a thin row for each direction, where transfers take any time."""
    execution, plan = timeline.execution, timeline.plan
    critical = set(timeline.critical_path)
    rows: list[Row] = []
    spans: list[Span] = []

    def add(event: Event) -> None:
        shown = Span(
            len(rows) - 1, str(event), event.kind, event.start, event.end, event.micro_batch, event in critical
        )
        spans.append(shown)

    for stage, cost in enumerate(timeline.costs):
        devices = list_ranges(plan.stages[stage].devices)
        rows.append(Row(f"stage {stage}", f"devices {devices}", until=timeline.step_seconds))
        for m in range(execution.micro_batches):
            add(event_at(execution, "forward", stage, m))
            add(event_at(execution, "backward", stage, m))
            if execution.splits:
                add(event_at(execution, "weights", stage, m))
        if cost.exposed_seconds:
            end = float(execution.last_gradients[stage])
            add(Event("allreduce", stage, None, end, float(execution.allreduce_end[stage])))
        if stage + 1 < execution.stages:
            if cost.send_forward_seconds:
                rows.append(Row(f"{stage} to {stage + 1}", "activations", network=True))
                for m in range(execution.micro_batches):
                    add(event_at(execution, "send-forward", stage, m))
            if cost.send_backward_seconds:
                rows.append(Row(f"{stage + 1} to {stage}", "gradients", network=True))
                for m in range(execution.micro_batches):
                    add(event_at(execution, "send-backward", stage, m))
    return Chart(
        title=f"{plan.model}: {abbreviate_schedule(plan.schedule)}, M = {plan.micro_batches} · {timeline.summary}",
        seconds=timeline.step_seconds,
        rows=tuple(rows),
        spans=tuple(spans),
        curves=tuple(Curve(f"stage {stage}", *timeline.memory(stage)) for stage in range(execution.stages)),
        limit=timeline.device_memory,
    )
