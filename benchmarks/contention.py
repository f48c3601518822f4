"""Flows of several stages over one network interface: steps measured on four hosts against the simulator.

Hosts are network namespaces with shaped links, two ranks each. Of four stages the even ones have a replica on each of
hosts 0 and 1, the odd ones on hosts 2 and 3. So activations of stages 0 and 2 and gradients of stage 2 leave host 0 by
one interface, and the rings of stages 0 and 2 use it in both directions. Stages sleep instead of computing, so that two
cores suffice for all of them; the graph, the transfers and AllReduces and the runtime are the real ones. The simulator
gets the bandwidth between two hosts that ``dapple_tf.profiler.links`` measures there before the steps: headers of TCP
and IP, and Horovod's messages, take a part of what the links are shaped to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common import Row, median, print_on_rank_0, time_interleaved
from benchmarks.emulated_hosts import Hosts, emulated_hosts
from benchmarks.hosts import LATENCY
from dapple_tf.planner.api import make_problem
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.cluster import Cluster, Link, Server
from dapple_tf.profiler.profile import LayerCost, Profile
from dapple_tf.simulator.simulate import simulate

RATE, SHAPED = "100mbit", 100e6 / 8  # bytes a second
INSIDE = Link(2.5e9, 0.5e-3)  # between two processes of a host
HOSTS, SLOTS = 4, 2
DEVICES = ((0, 2), (4, 6), (1, 3), (5, 7))  # of each stage: host 0 has ranks 0 and 1, host 1 ranks 2 and 3 ...
REPLICAS, STAGES = 2, len(DEVICES)
FORWARD, BACKWARD = 0.05, 0.1  # seconds that a replica sleeps for a micro-batch
ROWS, MICRO_BATCHES = 8, 6
STEPS = 5
CLOSE = 0.10  # of the predicted seconds
SIZES, REPEATS = (64 << 10, 512 << 10, 2 << 20, 4 << 20), 4  # of the probe: a few seconds at this rate
# Ranks without work ask each other for work to do at most every 5 ms: with the 0.2 ms of ``dapple.init``, that alone
# uses 3% of these links, and it occupies the two cores that all ranks share.
VARIABLES = {"DAPPLE_EXCHANGE": "native", "HOROVOD_CYCLE_TIME": "5"}


@dataclass(frozen=True)
class Case:
    """Float32 columns of the tensor between stages, and weights of each stage."""

    name: str
    width: int
    weights: int


CASES = (
    Case("boundaries", 60_000, 1),  # a replica sends 0.96 MB a micro-batch: 77 ms alone
    Case("rings", 1, 2_000_000),  # 8 MB: 0.64 s alone
    Case("boundaries and rings", 60_000, 2_000_000),
)
SCHEDULES = ("dapple-a", "dapple-b")


def run() -> Iterator[Row]:
    """Yield each case under each schedule against the simulator."""
    with emulated_hosts(HOSTS, RATE, burst=0.001, slots=SLOTS) as hosts:
        wire = Link(_run_job(hosts, "link"), LATENCY)
        yield Row(
            "bandwidth between two of the hosts, measured by dapple_tf.profiler.links, over that of the shaped links",
            "-",
            f"{wire.bandwidth / SHAPED:.1%} ({wire.bandwidth * 8 / 1e6:.1f} Mbps)",
            True,
        )
        for case in CASES:
            measured = _run_job(hosts, case.name)
            for schedule in SCHEDULES:
                yield _compare(case, schedule, wire, measured[schedule])


def _run_job(hosts: Hosts, name: str) -> Any:
    printed = hosts.mpirun(["-m", "benchmarks.contention", name], timeout=900, variables=VARIABLES)
    return json.loads(printed.strip().splitlines()[-1])


def _compare(case: Case, schedule: str, wire: Link, measured: float) -> Row:
    predicted, alone = (predict(case, schedule, wire, contention=contention) for contention in (True, False))
    return Row(
        f"4 hosts, {case.name} over one interface, {schedule}: over the simulator",
        f"within {CLOSE:.0%}",
        f"{measured / predicted - 1:+.1%} ({measured * 1e3:.0f} ms, predicted {predicted * 1e3:.0f} ms; without "
        f"contention {alone * 1e3:.0f} ms, {measured / alone - 1:+.1%})",
        abs(measured / predicted - 1) <= CLOSE,
    )


def predict(case: Case, schedule: str, wire: Link, *, contention: bool) -> float:
    """Return the simulated seconds of a step, from the sleeps, the bytes and the link between hosts."""
    sent = 4.0 * ROWS * case.width
    layer = LayerCost("wait", REPLICAS * FORWARD, REPLICAS * BACKWARD, sent, sent, 4.0 * (case.width + case.weights))
    layers = tuple(replace(layer, name=f"wait_{i}") for i in range(STAGES))
    profile = Profile("waits", ROWS, "waiting", layers)
    cluster = Cluster(tuple(Server(f"host{i}", SLOTS) for i in range(HOSTS)), 8e9, INSIDE, wire)
    problem = make_problem(profile, cluster, global_batch_size=ROWS * MICRO_BATCHES, micro_batch_size=ROWS)
    stages = [StagePlan(i, i, devices) for i, devices in enumerate(DEVICES)]
    plan = problem.make_plan(stages, ROWS, schedule, "contention")
    return float(simulate(plan, profile, cluster, contention=contention).step_seconds)


def measure_bandwidth() -> float:
    """Return the bytes a second between two hosts, the median over the pairs."""
    from dapple_tf.profiler.links import probe

    return probe(sizes=SIZES, repeats=REPEATS, device_memory=8e9).inter_server.bandwidth


def measure(case: Case) -> dict[str, float]:
    """Return the median seconds of a step under each schedule, timed in turn."""
    calls = {schedule: _make_step(case, schedule) for schedule in SCHEDULES}
    time_interleaved(calls, 2)
    taken = time_interleaved(calls, STEPS)
    return {schedule: median(taken[schedule]) for schedule in SCHEDULES}


def _make_step(case: Case, schedule: str) -> Any:
    """Return a function that runs one step."""
    import tensorflow as tf

    import dapple_tf as dapple
    from benchmarks.waits import stage_names, waits

    # Backward consists of the gradient of the inputs only, so the tensor to send back is ready when it ends.
    timed = waits(
        STAGES,
        forward=FORWARD,
        inputs=BACKWARD,
        weights=0.0,
        width=case.width,
        batch_size=ROWS * MICRO_BATCHES,
        extra_weights=case.weights,
    )
    options: dict[str, Any] = {
        "optimizer": timed.workload.optimizer,
        "micro_batches": MICRO_BATCHES,
        "schedule": schedule,
        "inexact": "allow",  # that Python code treats samples one by one is not known
    }
    loss_fn, names = timed.workload.loss_fn, stage_names(STAGES)
    even = dapple.pipeline(loss_fn, stages=names, replicas=[REPLICAS] * STAGES, example_batch=timed.batch, **options)
    stages = [replace(stage, devices=devices) for stage, devices in zip(even.plan.stages, DEVICES, strict=True)]
    step = dapple.pipeline(
        loss_fn,
        optimizer=options["optimizer"],
        plan=replace(even.plan, stages=tuple(stages)),
        inexact="allow",
    )
    return lambda: float(tf.convert_to_tensor(step(*timed.batch)))


if __name__ == "__main__":
    import sys

    import tensorflow as tf

    import dapple_tf as dapple

    tf.config.threading.set_inter_op_parallelism_threads(8)
    dapple.init()
    cases = {case.name: case for case in CASES}
    print_on_rank_0(measure_bandwidth() if sys.argv[1] == "link" else measure(cases[sys.argv[1]]))
