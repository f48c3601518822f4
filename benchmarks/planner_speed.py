"""Seconds of planning: the published profiles on 16 devices, and a curve over layers and devices."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.common import Row, available_cores, median, run_on_cores
from benchmarks.figures import line_figure
from benchmarks.papers.published import BERT_LARGE, GNMT, MODELS, find_missing_profiles, read_profile
from dapple_tf.planner.api import plan
from dapple_tf.profiler.cluster import Cluster, config
from dapple_tf.profiler.profile import LayerCost, Profile

RUNS = 5
LAYERS, DEVICES = (50, 100, 200, 400), (16, 64, 256, 1024)
LARGEST = (1000, 4096)
# What the published planner, HPGO 0.9.2, needs for the same files and 16 devices, as measured in ../shared/facts.md.
HPGO = {"others": "0.2 to 6.9 s", "gnmt": "346 s or more"}


def run() -> Iterator[Row]:
    """Yield the seconds of a warm planner: each profile and config, then synthetic layers on up to 128 servers."""
    yield from _published()
    yield from _curve()
    layers, devices = LARGEST
    found = run_on_cores("benchmarks.planner_speed", available_cores()[:1], timeout=1800)
    text = (
        f"{found['seconds']:.1f} s, {found['peak'] / 2**30:.2f} GiB at the peak ({found['start'] / 2**30:.2f} at first)"
    )
    ok = found["seconds"] <= 120 and found["peak"] <= 2**30
    yield Row(f"{layers} layers, {devices} devices in servers of 8", "at most 120 s in 1 GiB", text, ok)


def _published() -> Iterator[Row]:
    if why := find_missing_profiles():
        yield Row("shared profiles", "at most 0.3 s", why, True)
        return
    for model in (*MODELS, BERT_LARGE):
        wanted, hpgo = 0.3, HPGO["gnmt" if model is GNMT else "others"]
        texts, worst = [], 0.0
        for letter in "abc":
            seconds = measure(read_profile(model), config(letter), model.global_batch)
            texts.append(f"{letter.upper()} {seconds * 1e3:.0f} ms")
            worst = max(worst, seconds)
        figure = f"{model.title}{', its DAG' if model is GNMT else ''}, 16 devices: median of {RUNS}"
        yield Row(figure, f"at most {wanted} s (HPGO: {hpgo})", ", ".join(texts), worst <= wanted)


def _curve() -> Iterator[Row]:
    curves = {f"{layers} layers": [] for layers in LAYERS}
    for layers in LAYERS:
        for devices in DEVICES:
            largest = layers == LAYERS[-1] and devices == DEVICES[-1]
            seconds = measure(synthetic(layers), config("a", devices), 4096, runs=1 if devices > 64 else 3)
            curves[f"{layers} layers"].append(seconds)
            wanted, ok = ("at most 15 s", seconds <= 15) if largest else ("-", True)
            yield Row(f"{layers} layers, {devices} devices in servers of 8", wanted, f"{seconds:.2f} s", ok)
    line_figure(
        "planner-speed.png",
        {"planner best, global batch 4096": (DEVICES, curves)},
        "measured",
        x="devices (servers of 8)",
        y="seconds",
        log_y=True,
    )


def measure(profile: Profile, cluster: Cluster, global_batch: int, runs: int = RUNS) -> float:
    """Return the median seconds of ``dapple.plan``, without a first call that compiles."""
    taken = []
    for _ in range(runs + 1):
        fresh = replace(profile)  # without the cached properties of an earlier call
        begin = time.perf_counter()
        plan(fresh, cluster, global_batch_size=global_batch)
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])


def measure_largest() -> dict[str, float]:
    """Return the seconds of one plan of the largest size, and the bytes of this process at its peak and before."""
    layers, devices = LARGEST
    plan(synthetic(50), config("a", 16), global_batch_size=4096)  # compiles, or reads what was compiled
    start, begin = _peak_bytes(), time.perf_counter()
    plan(synthetic(layers), config("a", devices), global_batch_size=4096)
    return {"seconds": time.perf_counter() - begin, "peak": _peak_bytes(), "start": start}


def _peak_bytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def synthetic(layers: int) -> Profile:
    """Return a made-up transformer with layers of unequal costs, profiled with a batch of 1."""
    return Profile(
        "synthetic",
        1,
        "none",
        tuple(
            LayerCost(f"layer{i}", 1e-3 * (1 + i % 7 / 10), 2e-3 * (1 + i % 5 / 10), 4e6, 2e7, 5e7 * (1 + i % 3 / 10))
            for i in range(layers)
        ),
    )


if __name__ == "__main__":
    print(json.dumps(measure_largest()))
