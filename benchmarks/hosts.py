"""Two hosts of one device on a slow network: the planner's plan against data parallelism, measured and simulated.

The model has large weights (134 MB) and small activations, as the paper's have. Hosts are network namespaces with
shaped links; each is pinned to one core. The baseline is Horovod's data parallelism with its tape, which sums gradients
while backward still runs. Predictions come from a profile measured on one core, and a cluster with the bandwidth that
the links are shaped to. Pipelines exchange tensors natively; the planned one is measured with Horovod's alltoall too.
"""

from __future__ import annotations

import sys

from benchmarks.own_core import run_on_own_core

if __name__ == "__main__":  # before any library counts the cores
    run_on_own_core("OMPI_COMM_WORLD_RANK")

import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import Row, available_cores, median, print_on_rank_0, run_on_cores, time_interleaved
from benchmarks.emulated_hosts import Hosts, emulated_hosts

LAYERS, WIDTH, BATCH, MICRO_BATCHES = 8, 2048, 256, 8
RATES = {"1gbit": ("1Gbps", "1 Gbps"), "500mbit": ("500Mbps", "500 Mbps"), "200mbit": ("200Mbps", "200 Mbps")}
PLANS = ("planned", "straight", "dp", "dp-overlap")
BASELINE = "horovod"
MAX_SLOWDOWN = 0.02  # of native exchanges, relative to Horovod's
LATENCY = 0.6e-3  # seconds of a transfer between these hosts, at any bandwidth


def run() -> Iterator[Row]:
    """Yield the step times of each plan and the baseline, and their ratios, measured and predicted."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run_on_cores("benchmarks.hosts", available_cores()[:1], "profile", str(folder))
        for rate, (bandwidth, name) in RATES.items():
            predicted = run_on_cores("benchmarks.hosts", available_cores()[:1], "plan", str(folder), bandwidth)
            with emulated_hosts(2, rate) as hosts:
                measured = {kind: _run_job(hosts, kind, folder) for kind in (*PLANS, BASELINE)}
                alltoall = _run_job(hosts, "planned", folder, exchange="horovod")
            yield from compare(name, measured, predicted, rate == "200mbit")
            more = measured["planned"] / alltoall - 1
            yield Row(
                f"{name}: planned, native exchanges over Horovod's alltoall",
                f"at most +{MAX_SLOWDOWN:.0%}",
                f"{more:+.1%} ({measured['planned']:.3f} s, {alltoall:.3f} s)",
                more <= MAX_SLOWDOWN,
            )


def _run_job(hosts: Hosts, kind: str, folder: Path, exchange: str = "native") -> float:
    """Return the seconds of a step of this kind, as a job of all hosts that exchange tensors this way."""
    variables = {"DAPPLE_EXCHANGE": exchange}
    found = hosts.mpirun(["-m", "benchmarks.hosts", kind, str(folder)], timeout=600, variables=variables)
    return float(json.loads(found.strip().splitlines()[-1]))


def compare(name: str, measured: dict[str, float], predicted: dict[str, Any], slowest: bool) -> Iterator[Row]:
    """Yield the rows of one bandwidth."""
    for kind in (*PLANS, BASELINE):
        description = f" ({predicted['description']})" if kind == "planned" else ""
        seconds = predicted["seconds"][kind]
        yield Row(f"{name}: {kind}{description}", "-", f"{measured[kind]:.3f} s, predicted {seconds:.3f} s", True)
    ratio = measured[BASELINE] / measured["planned"]
    wanted = predicted["seconds"][BASELINE] / predicted["seconds"]["planned"]
    off = ratio / wanted - 1
    yield Row(
        f"{name}: Horovod DP with overlap over the planned",
        "within 15% of the simulator's",
        f"{ratio:.2f}x, predicted {wanted:.2f}x ({off:+.0%})",
        abs(off) <= 0.15,
    )
    if slowest:
        yield Row(f"{name}: the planned one's advantage", "more than 2x", f"{ratio:.2f}x", ratio > 2)


def make_workload() -> Any:
    """Return the loss, the optimizer and a batch."""
    from benchmarks.workloads import dense

    return dense(LAYERS, WIDTH, BATCH)


def measure(kind: str, folder: Path) -> float:
    """Return the median seconds of a step of this job."""
    import tensorflow as tf

    import dapple_tf as dapple

    timed = make_workload()
    loss_fn, optimizer = timed.workload.loss_fn, timed.workload.optimizer
    if kind == BASELINE:
        step = horovod_step(loss_fn, optimizer, timed.batch)
    else:
        plan = dapple.Plan.load(folder / f"{kind}.json")
        step = functools.partial(dapple.pipeline(loss_fn, optimizer=optimizer, plan=plan), *timed.batch)
    steps = {"step": lambda: float(tf.convert_to_tensor(step()))}
    time_interleaved(steps, 2)
    return median(time_interleaved(steps, 5)["step"])


def horovod_step(loss_fn: Any, optimizer: Any, batch: Any) -> Any:
    """Return a step of plain Horovod on this rank's half of the batch."""
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
    """Measure and save a profile of the model on this core."""
    import dapple_tf as dapple

    timed = make_workload()
    size = BATCH // MICRO_BATCHES
    share = tuple(tensor[:size] for tensor in timed.batch)
    found = dapple.profile(timed.workload.loss_fn, share, batch_sizes=[size // 2, BATCH // 4, BATCH // 2])
    found.save(folder / "profile.json")


def save_plans(folder: Path, bandwidth: str) -> dict[str, Any]:
    """Plan for two hosts with such a link; return the simulated seconds of each plan, and the best plan as text."""
    import dataclasses

    import dapple_tf as dapple
    from dapple_tf.profiler.cluster import Cluster, Link, Server
    from dapple_tf.profiler.units import BYTES_A_SECOND, parse_quantity

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
    description = f"{planned.schedule}, M = {planned.micro_batches}, {stages}"
    return {"seconds": {**seconds, BASELINE: seconds["dp-overlap"]}, "description": description}


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
        print_on_rank_0(measure(kind, folder))
