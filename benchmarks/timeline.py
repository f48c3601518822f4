"""The cost of recording a step, how true the first recorded timeline is, and the time to read one."""

from __future__ import annotations

import sys

from benchmarks.own_core import run_on_own_core

if __name__ == "__main__" and sys.argv[1] == "ranks":  # before any library counts the cores
    run_on_own_core("OMPI_COMM_WORLD_LOCAL_RANK")

import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.common import Row, available_cores, median, print_on_rank_0, run_on_cores, run_ranks, time_interleaved
from benchmarks.needs import find_missing_for_ranks

MODULE = "benchmarks.timeline"
STAGES, MICRO_BATCHES, ROUNDS = 2, 8, 25
FIRSTS, STEPS_PER_FIRST = 3, 8  # steps that are recorded at first sight, and the plain steps that each is compared with
MAX_COST, MAX_ERROR = 0.01, 0.05


def run() -> Iterator[Row]:
    """Yield rows for the dense stack and the gpt in one process, and for the dense stack as two ranks."""
    if len(available_cores()) < STAGES:
        yield Row("recording two stages on two cores", "at most +1%", "this machine has one core", False)
        return
    cores = available_cores()[:STAGES]
    setting = f"S = {STAGES}, M = {MICRO_BATCHES}"
    for model in ("dense", "gpt"):
        yield _first_row(f"{model}: {setting}, two cores", run_on_cores(MODULE, cores, "process", "first", model))
    found = {model: run_on_cores(MODULE, cores, "process", "cost", model) for model in ("dense", "gpt")}
    for model, seconds in found.items():
        yield _cost_row(f"{model}: step.record over step, {setting}, two cores", seconds)
    if find_missing_for_ranks() is None:
        yield _first_row(
            f"dense: {setting}, two ranks, a core each", run_ranks(MODULE, STAGES, "ranks", "first", "dense")
        )
        seconds = run_ranks(MODULE, STAGES, "ranks", "cost", "dense")
        yield _cost_row(f"dense: step.record over step, {setting}, two ranks, a core each", seconds)
    gpt = found["gpt"]
    share = (gpt["read"] + gpt["write"]) / median(gpt["step"])
    yield Row(
        "gpt: timeline and critical path of a recorded step; its curves written for TensorBoard",
        "at most 1% of a step",
        f"{share:.1%} ({gpt['read'] * 1e3:.1f} ms, {gpt['write'] * 1e3:.1f} ms)",
        share <= MAX_COST,
    )


def _first_row(setting: str, firsts: list[dict[str, float]]) -> Row:
    """Return the row of the first recorded timelines: the median of their seconds over those of plain steps."""
    ratios = [first["timeline"] / first["step"] for first in firsts]
    error = median(ratios) - 1
    times = ", ".join(f"{first['timeline'] * 1e3:.0f} of {first['step'] * 1e3:.0f} ms" for first in firsts)
    return Row(
        f"{setting}: the first recorded timeline over the median plain step",
        "within 5%",
        f"{error:+.1%} ({times})",
        abs(error) <= MAX_ERROR,
    )


def _cost_row(figure: str, seconds: dict[str, Any]) -> Row:
    """Return the row of the cost of recording: the median of the rounds' ratios."""
    more = median([b / a for a, b in zip(seconds["step"], seconds["record"], strict=True)]) - 1
    times = ", ".join(f"{median(seconds[way]) * 1e3:.1f} ms" for way in ("step", "record"))
    return Row(figure, "at most +1%", f"{more:+.1%} ({times})", more <= MAX_COST)


def measure_first(model: str) -> list[dict[str, float]]:
    """Return, for several new pipelines, the seconds of the first recorded timeline and of the median plain step.

    The plain steps run right after the recorded one, so that both see the same noise.
    """
    firsts = []
    for _ in range(FIRSTS):
        step, batch = _make_step(model)
        step.record(*batch)
        plain = {"step": lambda step=step, batch=batch: float(step(*batch))}
        seconds = time_interleaved(plain, STEPS_PER_FIRST)["step"]
        firsts.append({"timeline": step.timeline.step_seconds, "step": median(seconds[1:])})  # the first one builds
    return firsts


def measure_cost(model: str) -> dict[str, Any]:
    """Return the seconds of plain and recorded steps in turn, and the median ones to read and to write a timeline."""
    from dapple_tf.commands.observation import Scalars, recorded_scalars

    step, batch = _make_step(model)
    steps = {"step": lambda: float(step(*batch)), "record": lambda: float(step.record(*batch))}
    time_interleaved(steps, 2)
    seconds: dict[str, Any] = dict(time_interleaved(steps, ROUNDS))
    reads, writes = [], []
    with tempfile.TemporaryDirectory() as folder:
        scalars = Scalars(folder)
        for number in range(5):
            step.record(*batch)
            begin = time.perf_counter()
            values = recorded_scalars(step.timeline)
            read = time.perf_counter()
            scalars.write(number, values)
            reads.append(read - begin)
            writes.append(time.perf_counter() - read)
        scalars.close()
    return {**seconds, "read": median(reads), "write": median(writes)}


def _make_step(model: str) -> tuple[Any, tuple[Any, ...]]:
    """Return a new pipeline of the model, and a batch."""
    import dapple_tf as dapple
    from benchmarks.workloads import MODELS

    timed = MODELS[model]()
    workload = timed.workload
    step = dapple.pipeline(workload.loss_fn, optimizer=workload.optimizer, stages=STAGES, micro_batches=MICRO_BATCHES)
    return step, timed.batch


if __name__ == "__main__":
    import dapple_tf as dapple

    dapple.init(STAGES if sys.argv[1] == "process" else None)
    print_on_rank_0({"first": measure_first, "cost": measure_cost}[sys.argv[2]](sys.argv[3]))
