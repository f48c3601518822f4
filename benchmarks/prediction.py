"""The step that the simulator predicts from a profile, against the measured step: the gpt of ``make train``.

One process on two cores profiles the model, simulates the plan and times its steps, so that noise affects both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import tensorflow as tf

import dapple_tf as dapple
from benchmarks.common import Row, available_cores, median, run_on_cores, time_interleaved
from benchmarks.workloads import MODELS

MICRO_BATCHES = 8
WANTED = 0.10


def run() -> Iterator[Row]:
    """Yield two stages, as in ``make train``, and the planner's choice: the median of three turns."""
    available = available_cores()[:2]
    for model, stages in (("gpt", "2"), ("gpt", "auto"), ("dense", "2")):
        turns = [run_on_cores("benchmarks.prediction", available, model, stages) for _ in range(3)]
        off = median([turn["predicted"] / turn["measured"] - 1 for turn in turns])
        turn = sorted(turns, key=lambda turn: turn["predicted"] / turn["measured"])[1]
        measured = (
            f"{off:+.1%}: {turn['predicted'] * 1e3:.0f} ms predicted, {turn['measured'] * 1e3:.0f} ms measured "
            f"(replicas {turn['replicas']})"
        )
        figure = f"{model}, stages {stages}, M = {MICRO_BATCHES}: predicted step over measured"
        yield Row(figure, f"within {WANTED:.0%}", measured, abs(off) <= WANTED)


def measure(model: str, stages: str) -> dict[str, object]:
    """Return the predicted and measured seconds of a step."""
    timed = MODELS[model]()
    step = timed.pipeline(
        stages=int(stages) if stages.isdigit() else stages, micro_batches=MICRO_BATCHES, example_batch=timed.batch
    )
    steps = {"step": lambda: float(step(*timed.batch))}
    time_interleaved(steps, 3)
    before = time_interleaved(steps, 8)["step"]
    size = int(timed.batch[0].shape[0]) // MICRO_BATCHES
    rows = tf.nest.map_structure(lambda leaf: leaf[:size], timed.batch)
    profile = dapple.profile(timed.workload.loss_fn, rows, batch_sizes=[size // 2])
    predicted = dapple.simulate(step.plan, profile, dapple.Cluster.detect(2)).step_seconds
    after = time_interleaved(steps, 8)["step"]
    return {"predicted": predicted, "measured": median(before + after), "replicas": list(step.plan.replicas)}


if __name__ == "__main__":
    import json

    dapple.init(2)
    print(json.dumps(measure(sys.argv[1], sys.argv[2])))
