"""Check that the devices run the actions in the schedule's order, by time stamps taken inside the step."""

from __future__ import annotations

import dapple_tf as dapple
from benchmarks.common import Row
from dapple_tf.graph_passes.ir.names import nodes_of
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec

STAGES, MICRO_BATCHES, SCHEDULES = (1, 2, 3, 4), (1, 2, 4, 8, 16), ("gpipe", "dapple-a", "dapple-b", "dapple-b:D=2")


def run() -> list[Row]:
    """Return, over every S, M and schedule, how many stages ran in order, and the largest number of graph nodes."""
    from benchmarks.workloads import dense

    right = total = 0
    most = 0.0
    for stages in STAGES:
        for micro_batches in MICRO_BATCHES:
            for name in SCHEDULES:
                timed = dense(layers=4, width=64, batch_size=64)
                step = dapple.pipeline(
                    timed.workload.loss_fn,
                    optimizer=timed.workload.optimizer,
                    stages=stages,
                    micro_batches=micro_batches,
                    schedule=name,
                )
                step.record(*timed.batch)
                schedule = ScheduleSpec.parse(name).build(stages, micro_batches)
                total += stages
                right += sum(step.timeline.order(s) == schedule.stages[s] for s in range(stages))
                calls = [n for n in step.graph.nodes if n not in nodes_of(step.graph, "timestamp")]
                most = max(most, len(calls) / (stages * micro_batches))
    return [
        Row(
            "order of F and B on every stage, S to 4, M to 16, four schedules",
            "all",
            f"{right} of {total}",
            right == total,
        ),
        Row("call-level nodes for each stage and micro-batch", "a constant", f"at most {most:.0f}", most < 30),
    ]


if __name__ == "__main__":
    dapple.init(8)
    print(run())
