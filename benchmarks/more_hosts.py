"""Three and four hosts on a slow network: steps against the simulator, natively and by Horovod's alltoall.

Hosts are network namespaces with shaped links, one rank each. Stages sleep instead of computing, so that more of them
than this machine has cores can work at the same time. A second job measures whether the AllReduce of a replicated
stage delays the last gradients that it sends to the stage before it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.common import Row, median, time_interleaved
from benchmarks.emulated_hosts import Hosts, emulated_hosts
from benchmarks.hosts import LATENCY
from benchmarks.policies import POLICIES, ROWS, Case
from dapple_tf.profiler.cluster import Link

RATE, WIRE = "200mbit", Link(200e6 / 8, LATENCY)
WAYS = ("native", "horovod")
COUNTS = (3, 4)
CASES = {count: tuple(Case((1,) * count, 0.02, 0.04, 8, WIRE, ratio) for ratio in (0.1, 0.6)) for count in COUNTS}
STEPS = 7
CLOSE = 0.10  # of the predicted seconds

# Two replicated stages, the second one with weights that take at least a third of a second to reduce at 200 Mbps.
REPLICAS, MICRO_BATCHES, WIDTH = (2, 2), 8, 4096
SLEEP = 0.02  # seconds that forward, the gradients of inputs and those of weights sleep each
HEAVY, LIGHT = 2_000_000, 1  # weights of the last stage, float32
MAX_DELAY = 0.05  # of the time until the first stage ends its last backward


def run() -> Iterator[Row]:
    """Yield for 3 and 4 hosts each policy against the simulator; then what the AllReduce of a stage delays."""
    for count in COUNTS:
        with emulated_hosts(count, RATE, burst=0.001) as hosts:
            found = {way: _run_job(hosts, way, "steps", str(count)) for way in WAYS}
            for number, case in enumerate(CASES[count]):
                for way in WAYS:
                    yield from _compare(case, way, found[way][number])
            if count == sum(REPLICAS):
                for way in WAYS:
                    yield from _delay_rows(way, _run_job(hosts, way, "delay"))


def _run_job(hosts: Hosts, way: str, *arguments: str) -> Any:
    printed = hosts.mpirun(["-m", "benchmarks.more_hosts", *arguments], timeout=300, variables={"DAPPLE_EXCHANGE": way})
    return json.loads(printed.strip().splitlines()[-1])


def _compare(case: Case, way: str, measured: Mapping[str, float]) -> Iterator[Row]:
    """Yield each policy's seconds over the predicted ones."""
    for policy in POLICIES:
        predicted = case.predict(policy)
        off = measured[policy] / predicted.step_seconds - 1
        yield Row(
            f"{len(case.layer_counts)} hosts, ACR {predicted.acr:.2f}, {policy}, {way} exchanges: over the simulator",
            f"within {CLOSE:.0%}",
            f"{off:+.1%} ({measured[policy] * 1e3:.0f} ms, predicted {predicted.step_seconds * 1e3:.0f} ms)",
            abs(off) <= CLOSE,
        )


def _delay_rows(way: str, found: Mapping[str, float]) -> Iterator[Row]:
    """Yield how much later the first stage ends its last backward because the last stage reduces its weights."""
    delay = found["heavy"] - found["light"]
    share = delay / found["light"]
    yield Row(
        f"4 hosts, replicas 2 and 2, {way} exchanges: delay of stage 0's last backward by stage 1's AllReduce of "
        f"{4 * HEAVY / 1e6:.0f} MB ({found['allreduce'] * 1e3:.0f} ms)",
        f"at most {MAX_DELAY:.0%}",
        f"{share:+.1%} ({found['light'] * 1e3:.0f} ms, {found['heavy'] * 1e3:.0f} ms)",
        share <= MAX_DELAY,
    )


def measure_steps(count: int) -> list[dict[str, float]]:
    """Return the median seconds of a step of each case under each policy, all timed in turn."""
    cases = CASES[count]
    steps = {(i, policy): step for i, case in enumerate(cases) for policy, step in case.make_steps().items()}
    calls = {str(key): partial(step, False) for key, step in steps.items()}
    time_interleaved(calls, 2)
    taken = time_interleaved(calls, STEPS)
    return [{policy: median(taken[str((i, policy))]) for policy in POLICIES} for i in range(len(cases))]


def measure_delay() -> dict[str, float]:
    """Return when stage 0 ends its last backward with heavy and light weights in the last stage; median seconds.

    ``allreduce``: the seconds of the AllReduce of the heavy ones.
    """
    steps = {"heavy": _make_step(HEAVY), "light": _make_step(LIGHT)}
    ends: dict[str, list[float]] = {name: [] for name in steps}
    reductions = []
    for number in range(2 + STEPS):
        for name, record in steps.items():
            timeline = record()
            if number < 2:  # these build and warm up
                continue
            ends[name].append(max(event.end for event in timeline.events if event.action.stage == 0))
            if name == "heavy":
                reductions.append(timeline.costs[-1].allreduce_seconds)
    return {**{name: median(values) for name, values in ends.items()}, "allreduce": median(reductions)}


def _make_step(weights: int) -> Any:
    """Return a function that records a step of the replicated pipeline, with this many weights in its last stage."""
    import tensorflow as tf

    import dapple_tf as dapple
    from benchmarks.waits import stage_names, waits

    stages = len(REPLICAS)
    timed = waits(stages, forward=SLEEP, inputs=SLEEP, weights=SLEEP, width=WIDTH, batch_size=ROWS * MICRO_BATCHES)
    heavy = tf.Variable(tf.zeros([weights]), name="heavy")

    def loss_fn(x: Any, y: Any) -> Any:
        return timed.workload.loss_fn(x, y) + tf.reduce_sum(heavy)

    step = dapple.pipeline(
        loss_fn,
        optimizer=timed.workload.optimizer,
        stages=stage_names(stages),
        replicas=REPLICAS,
        micro_batches=MICRO_BATCHES,
        schedule="dapple-a",
        inexact="allow",  # that Python code treats samples one by one is not known
    )

    def record() -> Any:
        step.record(*timed.batch)
        return step.timeline

    return record


if __name__ == "__main__":
    import tensorflow as tf

    import dapple_tf as dapple

    tf.config.threading.set_inter_op_parallelism_threads(8)
    dapple.init()
    found = measure_delay() if sys.argv[1] == "delay" else measure_steps(int(sys.argv[2]))
    if os.environ.get("OMPI_COMM_WORLD_RANK") == "0":
        print(json.dumps(found))
