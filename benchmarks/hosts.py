"""Two hosts of one device on a slow network: a pipeline against data parallelism, measured and simulated.

The model has the paper's property: large weights (134 MB), small activations. Hosts are network namespaces with shaped
links (facts of the machine: both have one core, by pinning). Plain Horovod data parallelism with its tape, which sums
gradients while backward still runs, is the rival; the predictions come from a profile taken on one core and a cluster
file with the bandwidth that the links are shaped to.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # a rank keeps to a core of its own, before any library counts the cores
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_cores[int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")) % len(_cores)]})

import functools
import json
from collections.abc import Iterator
from typing import Any

from benchmarks.common import Row, cores, median, pinned, seconds_in_turn
from benchmarks.emulated_hosts import emulated_hosts

LAYERS, WIDTH, BATCH, MICRO_BATCHES = 8, 2048, 128, 4
RATES = {"1gbit": ("1Gbps", "1 Gbps"), "200mbit": ("200Mbps", "200 Mbps")}
KINDS = ("pipeline", "dp", "horovod")


def run() -> Iterator[Row]:
    """Step times of each way, and the ratios measured and predicted."""
    profile = pinned("benchmarks.hosts", cores()[:1], "profile")
    for rate, (bandwidth, name) in RATES.items():
        predicted = pinned("benchmarks.hosts", cores()[:1], "predict", bandwidth, json.dumps(profile))
        measured = {}
        with emulated_hosts(2, rate) as hosts:
            for kind in KINDS:
                found = hosts.mpirun(["-m", "benchmarks.hosts", kind], timeout=600)
                measured[kind] = json.loads(found.strip().splitlines()[-1])
        for kind in KINDS:
            yield Row(f"{name}: {kind}", "-", f"{measured[kind]:.3f} s, predicted {predicted[kind]:.3f} s", True)
        ratio, wanted = (found["horovod"] / found["pipeline"] for found in (measured, predicted))
        off = ratio / wanted - 1
        yield Row(
            f"{name}: Horovod DP with overlap over pipeline",
            "within 15% of the simulator's",
            f"{ratio:.2f}x, predicted {wanted:.2f}x ({off:+.0%})",
            abs(off) <= 0.15,
        )
        if rate == "200mbit":
            yield Row(f"{name}: the pipeline's advantage", "more than 2x", f"{ratio:.2f}x", ratio > 2)


def make() -> Any:
    """The loss, the optimizer and a batch."""
    from benchmarks.workloads import dense

    return dense(LAYERS, WIDTH, BATCH)


def measure(kind: str) -> float:
    """Median seconds of a step of this job."""
    import tensorflow as tf

    import dapple_tf as dapple

    timed = make()
    loss_fn, optimizer = timed.workload.loss_fn, timed.workload.optimizer
    if kind == "horovod":
        step = _horovod_step(loss_fn, optimizer, timed.batch)
    else:
        stages: dict[str, Any] = {"stages": 2} if kind == "pipeline" else {"stages": 1, "replicas": [2]}
        pipelined = dapple.pipeline(loss_fn, optimizer=optimizer, micro_batches=MICRO_BATCHES, **stages)
        step = functools.partial(pipelined, *timed.batch)
    steps = {"step": lambda: float(tf.convert_to_tensor(step()))}
    seconds_in_turn(steps, 2)
    return median(seconds_in_turn(steps, 5)["step"])


def _horovod_step(loss_fn: Any, optimizer: Any, batch: Any) -> Any:
    """A step of plain Horovod on this rank's half of the batch."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    share = [tensor[hvd.rank() :: hvd.size()] for tensor in batch]

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(*share)
        tape = hvd.DistributedGradientTape(tape)
        variables = list(tape.watched_variables())
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    return step


def profile() -> dict[str, Any]:
    """A profile of the model on this core, as its file holds it."""
    import tempfile
    from pathlib import Path

    import dapple_tf as dapple

    timed = make()
    size = BATCH // MICRO_BATCHES
    found = dapple.profile(
        timed.workload.loss_fn, tuple(t[:size] for t in timed.batch), batch_sizes=[size // 2, BATCH // 2]
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        found.save(path)
        return dict(json.loads(path.read_text()))


def predict(bandwidth: str, saved: str) -> dict[str, float]:
    """Seconds of a step of each kind by the simulator."""
    import dataclasses
    import tempfile
    from pathlib import Path

    import dapple_tf as dapple
    from dapple_tf.planner.plan import Plan, StagePlan
    from profiler.cluster import Cluster, Link, Server
    from profiler.units import BYTES_A_SECOND, parse_quantity

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_text(saved)
        found = dapple.Profile.load(path)
    link = Link(parse_quantity(bandwidth, BYTES_A_SECOND), 0.6e-3)
    cluster = Cluster((Server("one", 1), Server("two", 1)), 8e9, link, link)
    last = len(found.layers) - 1
    middle = (
        dapple.plan(found, cluster, global_batch_size=BATCH, micro_batch_size=BATCH // MICRO_BATCHES, planner="gpipe")
        .stages[1]
        .first_layer
    )
    size = BATCH // MICRO_BATCHES
    straight = Plan(
        "m",
        "hosts",
        BATCH,
        size,
        MICRO_BATCHES,
        "dapple-a",
        False,
        (StagePlan(0, middle - 1, (0,)), StagePlan(middle, last, (1,))),
    )
    dp = dataclasses.replace(straight, stages=(StagePlan(0, last, (0, 1)),))
    whole = dataclasses.replace(dp, micro_batch_size=BATCH, micro_batches=1, overlap=True)
    plans = {"pipeline": straight, "dp": dp, "horovod": whole}
    return {kind: dapple.simulate(plan, found, cluster).step_seconds for kind, plan in plans.items()}


if __name__ == "__main__":
    import dapple_tf as dapple

    if sys.argv[1] == "profile":
        dapple.init(2)
        print(json.dumps(profile()))
    elif sys.argv[1] == "predict":
        print(json.dumps(predict(sys.argv[2], sys.argv[3])))
    else:
        dapple.init()
        seconds = measure(sys.argv[1])
        if os.environ.get("OMPI_COMM_WORLD_RANK") == "0":
            print(json.dumps(seconds))
