"""Two hosts of one device on a slow network: the planner's plan against data parallelism, measured and simulated.

The model has the paper's property: large weights (134 MB), small activations. Hosts are network namespaces with shaped
links, each with one core, by pinning. Plain Horovod data parallelism with its tape, which sums gradients while
backward still runs, is the rival; the predictions come from a profile taken on one core and a cluster description with
the bandwidth that the links are shaped to.
"""

from __future__ import annotations

import os
import sys

from benchmarks.own_core import keep_to_own_core

if __name__ == "__main__":  # before any library counts the cores
    keep_to_own_core("OMPI_COMM_WORLD_RANK")

import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import Row, cores, median, pinned, seconds_in_turn
from benchmarks.emulated_hosts import emulated_hosts

LAYERS, WIDTH, BATCH, MICRO_BATCHES = 8, 2048, 256, 8
RATES = {"1gbit": ("1Gbps", "1 Gbps"), "500mbit": ("500Mbps", "500 Mbps"), "200mbit": ("200Mbps", "200 Mbps")}
PLANS = ("planned", "straight", "dp", "dp-overlap")
RIVAL = "horovod"
LATENCY = 0.6e-3  # seconds of an exchange between these hosts, whatever their bandwidth


def run() -> Iterator[Row]:
    """Step times of each way, and the ratios measured and predicted."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pinned("benchmarks.hosts", cores()[:1], "profile", str(folder))
        for rate, (bandwidth, name) in RATES.items():
            predicted = pinned("benchmarks.hosts", cores()[:1], "plan", str(folder), bandwidth)
            with emulated_hosts(2, rate) as hosts:
                measured = {}
                for kind in (*PLANS, RIVAL):
                    found = hosts.mpirun(["-m", "benchmarks.hosts", kind, str(folder)], timeout=600)
                    measured[kind] = float(json.loads(found.strip().splitlines()[-1]))
            yield from compare(name, measured, predicted, rate == "200mbit")


def compare(name: str, measured: dict[str, float], predicted: dict[str, Any], slowest: bool) -> Iterator[Row]:
    """The rows of one bandwidth."""
    for kind in (*PLANS, RIVAL):
        told = f" ({predicted['told']})" if kind == "planned" else ""
        seconds = predicted["seconds"][kind]
        yield Row(f"{name}: {kind}{told}", "-", f"{measured[kind]:.3f} s, predicted {seconds:.3f} s", True)
    ratio, wanted = measured[RIVAL] / measured["planned"], predicted["seconds"][RIVAL] / predicted["seconds"]["planned"]
    off = ratio / wanted - 1
    yield Row(
        f"{name}: Horovod DP with overlap over the planned",
        "within 15% of the simulator's",
        f"{ratio:.2f}x, predicted {wanted:.2f}x ({off:+.0%})",
        abs(off) <= 0.15,
    )
    if slowest:
        yield Row(f"{name}: the planned one's advantage", "more than 2x", f"{ratio:.2f}x", ratio > 2)


def make() -> Any:
    """The loss, the optimizer and a batch."""
    from benchmarks.workloads import dense

    return dense(LAYERS, WIDTH, BATCH)


def measure(kind: str, folder: Path) -> float:
    """Median seconds of a step of this job."""
    import tensorflow as tf

    import dapple_tf as dapple

    timed = make()
    loss_fn, optimizer = timed.workload.loss_fn, timed.workload.optimizer
    if kind == RIVAL:
        step = horovod_step(loss_fn, optimizer, timed.batch)
    else:
        plan = dapple.Plan.load(folder / f"{kind}.json")
        step = functools.partial(dapple.pipeline(loss_fn, optimizer=optimizer, plan=plan), *timed.batch)
    steps = {"step": lambda: float(tf.convert_to_tensor(step()))}
    seconds_in_turn(steps, 2)
    return median(seconds_in_turn(steps, 5)["step"])


def horovod_step(loss_fn: Any, optimizer: Any, batch: Any) -> Any:
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


def save_profile(folder: Path) -> None:
    """A profile of the model on this core."""
    import dapple_tf as dapple

    timed = make()
    size = BATCH // MICRO_BATCHES
    share = tuple(tensor[:size] for tensor in timed.batch)
    found = dapple.profile(timed.workload.loss_fn, share, batch_sizes=[size // 2, BATCH // 4, BATCH // 2])
    found.save(folder / "profile.json")


def save_plans(folder: Path, bandwidth: str) -> dict[str, Any]:
    """Plan for two hosts that such a link joins; the seconds of each plan's step by the simulator."""
    import dataclasses

    import dapple_tf as dapple
    from profiler.cluster import Cluster, Link, Server
    from profiler.units import BYTES_A_SECOND, parse_quantity

    profile = dapple.Profile.load(folder / "profile.json")
    link = Link(parse_quantity(bandwidth, BYTES_A_SECOND), LATENCY)
    cluster = Cluster((Server("one", 1), Server("two", 1)), 8e9, link, link)
    planned = dapple.plan(profile, cluster, global_batch_size=BATCH)
    share = {"global_batch_size": BATCH, "micro_batch_size": BATCH // MICRO_BATCHES}
    straight = dapple.plan(profile, cluster, planner="gpipe", **share)
    dp = dapple.plan(profile, cluster, planner="dp", **share)
    whole = {"micro_batch_size": BATCH, "micro_batches": 1, "overlap": True}
    plans = {
        "planned": planned,
        "straight": dataclasses.replace(straight, schedule="dapple-b"),
        "dp": dp,
        "dp-overlap": dataclasses.replace(dp, **whole),
    }
    for kind, plan in plans.items():
        plan.save(folder / f"{kind}.json")
    seconds = {kind: dapple.simulate(plan, profile, cluster).step_seconds for kind, plan in plans.items()}
    stages = ", ".join(f"layers {s.first_layer}-{s.last_layer} on {len(s.devices)}" for s in planned.stages)
    told = f"{planned.schedule}, M = {planned.micro_batches}, {stages}"
    return {"seconds": {**seconds, RIVAL: seconds["dp-overlap"]}, "told": told}


if __name__ == "__main__":
    import dapple_tf as dapple

    kind, folder = sys.argv[1], Path(sys.argv[2])
    if kind == "profile":
        dapple.init(2)
        save_profile(folder)
        print(json.dumps(True))
    elif kind == "plan":
        print(json.dumps(save_plans(folder, sys.argv[3])))
    else:
        dapple.init()
        seconds = measure(kind, folder)
        if os.environ.get("OMPI_COMM_WORLD_RANK") == "0":
            print(json.dumps(seconds))
