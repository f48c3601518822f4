"""The cost and the saving of re-computation: seconds of a step on one core, bytes that forward keeps for backward.

One forward and one backward (of twice the work) become two forwards and one backward: 4/3 of the compute. Backward of
the dense stack has one product less (the first layer's input needs no gradient): 63/47 for 16 layers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import dapple_tf as dapple
from benchmarks.common import Row, available_cores, median, print_rows, run_on_cores, time_interleaved
from dapple_tf.graph_passes.ir.graph import Port

STAGES, MICRO_BATCHES, ROUNDS = 2, 4, 10


def run() -> Iterator[Row]:
    """Yield the dense stack and the gpt in two stages, all on one core."""
    for model in ("dense", "gpt"):
        yield from (Row(**row) for row in run_on_cores("benchmarks.recompute", available_cores()[:1], model))


def measure(model: str) -> list[Row]:
    """Time steps of the same model with and without re-computation, in turn; bytes are those of its functions."""
    from benchmarks.workloads import dense, small_gpt

    make = {"dense": partial(dense, layers=16, batch_size=1024), "gpt": small_gpt}[model]
    steps, runs = {}, {}
    for recompute in (False, True):
        timed = make()
        options: dict[str, Any] = {"stages": STAGES, "micro_batches": MICRO_BATCHES, "recompute": recompute}
        step = timed.pipeline(**options)
        steps[recompute] = step
        runs[f"recompute={recompute}"] = lambda step=step, batch=timed.batch: float(step(*batch))
    time_interleaved(runs, 3)
    plain, again = time_interleaved(runs, ROUNDS).values()
    ratio = median([b / a for a, b in zip(plain, again, strict=True)])
    times = f"{median(plain) * 1e3:.0f} ms, {median(again) * 1e3:.0f} ms"
    figure = f"{model}: step with re-computation over without, S = {STAGES}, M = {MICRO_BATCHES}, one core"
    rows = [Row(figure, "at most 1.35x", f"{ratio:.2f}x ({times})", ratio <= 1.35)]
    samples = steps[True].plan.micro_batch_size
    for stage in range(STAGES):
        kept, left = (sum(sizes(step, stage, "stash", samples)) for step in steps.values())
        entering = sum(sizes(steps[True], stage, "boundary", samples))
        measured = f"{kept / 1e6:.1f} MB without, {left} B with; {entering / 1e6:.1f} MB enter the stage"
        figure = f"{model}: stash of a micro-batch of {samples}, stage {stage}"
        rows.append(Row(figure, "sizes: at most 0.1% of it", measured, left <= kept / 1000))
    return rows


def sizes(step: Any, stage: int, role: str, samples: int) -> list[int]:
    """Return the bytes of each tensor that the stage's forward keeps ("stash") or receives ("boundary").

    For a micro-batch of ``samples``; an unknown dimension counts as the batch's.
    """
    function = step.graph.function(f"stage{stage}/forward")
    ports: list[Port] = [port for _, port in function.output_ports(role)]
    if role == "boundary":
        ports = [port for _, port in function.input_ports(role)]
    return [port.type.bytes(samples) for port in ports]


if __name__ == "__main__":
    dapple.init(STAGES)
    print_rows(measure(sys.argv[1]))
