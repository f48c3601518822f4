"""Two ranks of unequal devices: a core, and half a core, whose process is stopped half of the time.

The plans of ``best`` and ``bapipe`` for these two devices are compared with the even one: the ratio of their measured
steps with the ratio of the simulated ones. The profile is measured on the core. The profiler leaves out the time for
which its process is stopped, so the speed of half a core is measured by whole steps. The link between the two ranks is
measured by ``dapple_tf.profiler.links``.
"""

from __future__ import annotations

import os
import sys

from benchmarks.own_core import run_on_own_core

if __name__ == "__main__":  # before any library counts the cores
    run_on_own_core("OMPI_COMM_WORLD_LOCAL_RANK")

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from benchmarks.common import Row, available_cores, median, run_on_cores, run_ranks, time_interleaved
from benchmarks.needs import find_missing_for_ranks

PLANNERS = ("best", "bapipe")
LAYERS, WIDTH, BATCH, MICRO_BATCH = 12, 768, 1024, 128
SIZES = (16, 32, 64)  # samples of a replica, at which the profile is taken too
TURNS, STEPS = 3, 7
_PAUSE = 0.002  # seconds; far less than a stage takes for a micro-batch
_STOP_HALF_OF_THE_TIME = """
import os, signal, sys, time
parent, pause = os.getppid(), float(sys.argv[1])
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
while os.getppid() == parent:
    for signal_number in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(parent, signal_number)
        time.sleep(pause)
"""


def run() -> Iterator[Row]:
    """Yield for each planner its plan's step over the even plan's: measured, and over the simulated ratio."""
    lack = "one core" if len(available_cores()) < 2 else find_missing_for_ranks()
    lack = lack or ("" if os.geteuid() == 0 else "only root can stop a process on time")
    if lack:
        yield Row("a core and half a core", "-", f"left out: {lack}", True)
        return
    with tempfile.TemporaryDirectory() as folder:
        simulated = make_plans(Path(folder))
        turns = [
            {name: run_ranks("benchmarks.unequal", 2, "steps", f"{folder}/{name}.json") for name in simulated}
            for _ in range(TURNS)
        ]
    for name in PLANNERS:
        measured = median([turn[name] / turn["even"] for turn in turns])
        predicted = simulated[name][0] / simulated["even"][0]
        seconds = median([turn[name] for turn in turns])
        figure = f"a core and half a core: {name}'s plan over the even one, measured over simulated"
        text = f"{measured / predicted:.2f}: {measured:.2f} measured, {predicted:.2f} simulated "
        text += f"({seconds * 1e3:.0f} ms; {simulated[name][1]})"
        yield Row(figure, "within 15%", text, abs(measured / predicted - 1) <= 0.15)


def make_plans(folder: Path) -> dict[str, tuple[float, str]]:
    """Profile both kinds of device, save the plans in ``folder``, and return the simulated seconds and text of each."""
    import dapple_tf as dapple
    from dapple_tf.plans import StagePlan
    from dapple_tf.profiler.cluster import Cluster, DeviceKind, Server

    core = available_cores()[:1]
    run_on_cores("benchmarks.unequal", core, "profile", f"{folder}/profile.json")
    profile = dapple.Profile.load(f"{folder}/profile.json")
    whole, half_as_fast = (
        median([run_on_cores("benchmarks.unequal", core, "speed", kind) for _ in range(TURNS)])
        for kind in ("core", "half")
    )
    run_ranks("benchmarks.unequal", 2, "links", f"{folder}/links.json")
    probed = Cluster.load(folder / "links.json")
    cluster = replace(
        probed,
        servers=(Server.of_kinds("host", [("core", 1), ("half", 1)]),),
        kinds={"core": DeviceKind(speed=1.0), "half": DeviceKind(speed=whole / half_as_fast)},
    )
    plans = {
        name: dapple.plan(profile, cluster, global_batch_size=BATCH, micro_batch_size=MICRO_BATCH, planner=name)
        for name in PLANNERS
    }
    half = len(profile.layers) // 2
    ends = ((0, half - 1, 0), (half, len(profile.layers) - 1, 1))
    stages = tuple(StagePlan(first, last, (device,)) for first, last, device in ends)
    plans["even"] = dapple.Plan(
        profile.model, "even", BATCH, MICRO_BATCH, BATCH // MICRO_BATCH, "dapple-a", False, stages
    )
    found = {}
    for name, plan in plans.items():
        plan.save(folder / f"{name}.json")
        text = plan.headline
        found[name] = dapple.simulate(plan, profile, cluster).step_seconds, text
    return found


@contextmanager
def half_a_core() -> Iterator[None]:
    """Let another process stop this one half of the time.

    A busy process on the same core would take less than half of it: the scheduler favours a process that has waited.
    The one that stops this one has real-time priority, or it would often wait for the core itself.
    """
    stopper = subprocess.Popen([sys.executable, "-c", _STOP_HALF_OF_THE_TIME, str(_PAUSE)])
    try:
        yield
    finally:
        stopper.kill()  # this line runs only while this process is not stopped
        stopper.wait()


def save_profile(path: str) -> None:
    """Profile the model on this device."""
    import dapple_tf as dapple
    from benchmarks.workloads import dense

    timed = dense(LAYERS, WIDTH, MICRO_BATCH)
    dapple.profile(timed.workload.loss_fn, batch=timed.batch, batch_sizes=SIZES).save(path)


def measure_alone() -> float:
    """Return the median seconds of a step of one micro-batch on this device, without dapple_tf."""
    import tensorflow as tf

    from benchmarks.workloads import dense

    timed = dense(LAYERS, WIDTH, MICRO_BATCH)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = timed.workload.loss_fn(*timed.batch)
        gradients = tape.gradient(loss, tape.watched_variables())
        return loss + tf.add_n([tf.reduce_sum(gradient) for gradient in gradients])

    steps = {"step": lambda: float(step())}
    time_interleaved(steps, 5)
    return median(time_interleaved(steps, 40)["step"])


def save_links(path: str) -> None:
    """Measure the link between the two ranks of this job; rank 0 saves it in ``path``."""
    from dapple_tf.profiler.links import probe

    cluster = probe()
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        cluster.save(path)


def measure(path: str) -> float:
    """Return the median seconds of a step of the plan in this job."""
    import dapple_tf as dapple
    from benchmarks.workloads import dense

    timed = dense(LAYERS, WIDTH, BATCH)
    step = timed.pipeline(plan=dapple.Plan.load(path))
    steps = {"step": lambda: float(step(*timed.batch))}
    time_interleaved(steps, 2)
    return median(time_interleaved(steps, STEPS)["step"])


def main() -> None:
    """Profile the core, measure the speed of one kind of device or the link, or train as one of the two ranks."""
    import dapple_tf as dapple

    if sys.argv[1] == "profile":
        dapple.init(1)
        save_profile(sys.argv[2])
        print("null")
        return
    if sys.argv[1] == "speed":
        with half_a_core() if sys.argv[2] == "half" else nullcontext():
            print(measure_alone())
        return
    dapple.init()
    task = {"links": save_links, "steps": measure}[sys.argv[1]]
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        with half_a_core():
            task(sys.argv[2])
    else:
        print(json.dumps(task(sys.argv[2])))


if __name__ == "__main__":
    main()
