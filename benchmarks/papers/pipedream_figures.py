"""PipeDream's Table 1, and its Figures 11, 17 and 18."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.papers import pipedream_variants as variants
from benchmarks.papers.figure import Exhibit, Figure, claim, draw
from benchmarks.papers.pipedream_published import (
    GNMT_8,
    GNMT_16,
    RESNET_50,
    TABLE_1,
    VGG_16,
    Configuration,
    Profiled,
    make_cluster,
    read_profile,
)
from benchmarks.papers.pipedream_variants import OneLevel
from benchmarks.papers.published import stages_of
from dapple_tf.planner.api import make_problem, run_planner
from dapple_tf.planner.asynchronous import window_plan
from dapple_tf.planner.baselines import data_parallel, even_pipeline
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.systems.hierarchy import derive_hierarchy
from dapple_tf.window_plan import WindowPlan

# --- Table 1: configurations and speed-ups over data parallelism

# Printed speed-ups of an epoch, in the order of TABLE_1.
_SPEEDUPS = (5.28, 2.98, 1.0, 1.0, 4.92, 2.04, 1.46, 2.34, 3.14, 1.5, 2.95, 1.0)
_WAYS = (variants.one_after_the_other, variants.by_profiler, variants.printed)
_FRACTIONS = (1.0, 0.5, 0.25)  # of the bandwidth of all links


def table_1() -> Exhibit:
    """Return the speed-ups of the printed configurations, and how near they are to the best by the formulas."""
    speedups, near, chosen = [], [], dict[str, list[bool]]()
    for row, printed in zip(TABLE_1, _SPEEDUPS, strict=True):
        title = f"{row.model.title}, {row.servers}x{row.cluster.devices // row.servers} ({row.letter.upper()})"
        found = [speedup(row, fraction) for fraction in _FRACTIONS]
        why = "the paper's DP is slower: at full bandwidth a ring is the best that it can do"
        if found[0] > printed:
            why = "not explained: the printed speed-up is less than the AllReduce of 0.8 GB over 10 Gbps would give"
        span = (min(found), max(found))
        speedups.append(Figure("speed-up of an epoch over DP", title, printed, found[0], "x", why, span))
        level = _one_level(row)
        ratios = [level.best_cuts(row.replicas, way) / level.search(way)[0] for way in _WAYS]
        why = "one stage bounds the printed configuration; the formulas cut it, or give it more replicas"
        if len(row.replicas) == 1:
            why = "on one level AllReduce has the speed of Ethernet inside servers too"
        figure = Figure("printed configuration over the chosen one", title, 1.0, ratios[0], "x", why)
        near.append(replace(figure, span=(min(ratios), max(ratios))))
        for way in _WAYS:
            chosen.setdefault(way.__name__, []).append(level.search(way)[1] == row.replicas)
    names = {
        "one_after_the_other": "AllReduce as in the text on the profiler, added to computing",
        "by_profiler": "AllReduce as in the text on the profiler, beside computing",
        "printed": "AllReduce as printed in section 3.1",
    }
    text = "straight plans have as many stages as GPUs, of which the formulas replicate some"
    claims = (claim(f"the printed configuration is chosen, {names[way]}", cases, text) for way, cases in chosen.items())
    return Exhibit(
        "PipeDream, Table 1",
        "First: seconds of a minibatch of data parallelism with overlapped AllReduce, over those of the printed "
        "configuration in the steady state of a window, both in our simulator; the range is over links that reach "
        "100%, 50% and 25% of their bandwidth (the paper does not say what they reach). Then: how much slower the "
        "printed configuration is than the one that PipeDream's formulas choose on one level; the range is over three "
        "costs of AllReduce, of which the first is shown.",
        (*speedups, *near, *claims),
        "python -m benchmarks.papers pipedream-table-1",
    )


def make(row: Configuration) -> PlanningProblem:
    """Return the planning problem, with a global batch of one of the paper's minibatches per device."""
    profile = replace(read_profile(row.model))  # without the cached properties of an earlier call
    return make_problem(
        profile, row.cluster, global_batch_size=row.model.minibatch * row.cluster.devices, contention=False
    )


def name(replicas: Sequence[int]) -> str:
    """Return the replicas as the paper writes them."""
    return "straight" if len(replicas) > 1 and set(replicas) == {1} else "-".join(map(str, replicas))


def _one_level(row: Configuration) -> OneLevel:
    bandwidth = derive_hierarchy(row.cluster).flatten().levels[0].bandwidth
    return OneLevel(make(row).chain, row.model.minibatch, row.cluster.devices, bandwidth)


def speedup(row: Configuration, fraction: float) -> float:
    """Return DP's seconds of a minibatch over those of the printed configuration, with slower links."""
    if len(row.replicas) == 1:
        return 1.0
    size, devices = row.model.minibatch, row.cluster.devices
    cluster = replace(row.cluster, device_memory=1e15).with_faster_links(fraction)
    problem = replace(make(row), cluster=cluster, overlap=True)
    whole = replace(problem, micro_batch_sizes=(size * devices,))
    alone = whole.evaluate(data_parallel(whole), size * devices, "DP", "gpipe")
    assert alone is not None, "memory is not limited"
    level = _one_level(row)
    minibatches = 4 * math.lcm(*row.replicas) * devices // math.gcd(devices, math.lcm(*row.replicas))
    found = []
    for way, link in itertools.product(_WAYS, (cluster.intra_server, cluster.inter_server)):
        cuts = replace(level, bandwidth=link.bandwidth).find_cuts(row.replicas, way)[1]
        starts = [problem.chain.positions[cut] for cut in cuts]
        bare = problem.make_plan(stages_of(problem, starts, row.replicas), size, "dapple-a", "Table 1")
        plan = window_plan(bare, WindowPlan(minibatches), minibatches * size)
        phases = replace(problem, overlap=False).simulate(plan).phases
        assert phases is not None, "a window"
        found.append(phases.minibatch_seconds)
    return alone.seconds / devices / min(found)


# --- Fig. 17: bytes for a training sample

_MODELS_17 = (GNMT_8, GNMT_16, VGG_16, RESNET_50)


def figure_17() -> Exhibit:
    """Return the bytes that four GPUs of cluster A exchange for a sample: data parallel, and the best other plan."""
    dp, best, plans = [], [], []
    for model in _MODELS_17:
        problem = _on_four(model)
        parameters = float(problem.profile.parameter_bytes.sum())
        dp.append(2 * 3 / 4 * 4 * parameters / (4 * model.minibatch))
        found = min(_other_plans(problem, model), key=lambda plan: plan[0])
        best.append(found[1])
        plans.append(f"{model.title} {found[2]}")
    less = [b < d for b, d in zip(best, dp, strict=True)]
    wanted = [model is not RESNET_50 for model in _MODELS_17]
    text = "; ".join(
        f"{plan}: {b / 1e6:.2f} MB, DP {d / 1e6:.2f} MB" for plan, b, d in zip(plans, best, dp, strict=True)
    )
    figures = [
        claim(
            "the best other plan sends less than DP for GNMT-8, GNMT-16 and VGG-16, and more for ResNet-50",
            (a == b for a, b in zip(less, wanted, strict=True)),
            text,
        )
    ]
    return Exhibit(
        "PipeDream, Fig. 17",
        "Bytes that are sent for a training sample on four GPUs of cluster A, under data parallelism (a ring AllReduce "
        "for each minibatch) and under the plan with several stages that PipeDream's formulas find fastest. The "
        "figure's numbers are not in the text.",
        tuple(figures),
        "python -m benchmarks.papers pipedream-figure-17",
    )


def _on_four(model: Profiled) -> PlanningProblem:
    cluster = replace(make_cluster("a", 1), device_memory=1e15)
    return make_problem(
        replace(read_profile(model)),
        cluster,
        global_batch_size=4 * model.minibatch,
        micro_batch_size=model.minibatch,
        contention=False,
    )


def _other_plans(problem: PlanningProblem, model: Profiled) -> list[tuple[float, float, str]]:
    """Return seconds of a minibatch, bytes for a sample and replicas of the best cuts for all shapes but DP's."""
    size, devices = model.minibatch, problem.cluster.devices
    level = OneLevel(problem.chain, size, devices, problem.cluster.intra_server.bandwidth)
    shapes = [
        parts
        for count in range(2, devices + 1)
        for parts in itertools.product(range(1, devices), repeat=count)
        if sum(parts) == devices
    ]
    found = []
    for shape in shapes:
        seconds, starts = level.find_cuts(shape, variants.by_profiler)
        bounds = [0, *starts, len(problem.chain.parameter_bytes)]
        sent = sum(2 * float(problem.chain.crossing_bytes[cut - 1]) / problem.chain.batch_size for cut in starts)
        for (first, end), r in zip(itertools.pairwise(bounds), shape, strict=True):
            sent += 2 * (r - 1) * float(problem.chain.parameter_bytes[first:end].sum()) / (r * size)
        found.append((seconds, sent, name(shape)))
    return found


# --- Fig. 18: pipeline depth of GNMT-8 on four GPUs

_DEPTHS = tuple(range(1, 8))


def figure_18() -> Exhibit:
    """Return throughput and memory of windows of GNMT-8 by the number of minibatches in flight."""
    problem = _on_four(GNMT_8)
    stages = run_planner(problem, "pipedream", minibatch_size=GNMT_8.minibatch).chosen.stages
    if len(stages) < 4:
        stages = even_pipeline(problem, 4)
    throughput, memory = [], []
    for depth in _DEPTHS:
        bare = problem.make_plan(stages, GNMT_8.minibatch, "dapple-a", "figure 18")
        plan = window_plan(bare, WindowPlan(64, depth=depth), 64 * GNMT_8.minibatch)
        timeline = problem.simulate(plan)
        assert timeline.phases is not None, "a window"
        throughput.append(GNMT_8.minibatch / timeline.phases.minibatch_seconds)
        memory.append([held / 1e9 for held in timeline.peak_memory_bytes])
    figures = [
        claim(
            "throughput does not fall from one depth to the next",
            (b >= a * 0.999 for a, b in itertools.pairwise(throughput)),
        ),
        claim("depth 4 reaches 95% of the throughput of depth 7", [throughput[3] >= 0.95 * throughput[6]]),
        claim(
            "the memory of the first stage grows with each depth from 2 on",
            (b[0] > a[0] for a, b in itertools.pairwise(memory[1:])),
        ),
        claim("all stages fit 16 GB at depths 2 to 7", (max(each) <= 16 for each in memory[1:])),
    ]
    panels: dict[str, tuple[Sequence[float], dict[str, list[float]]]] = {
        "samples a second": (_DEPTHS, {"throughput": throughput}),
        "GB of each stage": (_DEPTHS, {f"stage {s}": [each[s] for each in memory] for s in range(4)}),
    }
    return Exhibit(
        "PipeDream, Fig. 18",
        "GNMT-8 in four stages on four GPUs of cluster A, with weight stashing, against the pipeline depth. The "
        "figure's numbers are not in the text. A profile file has a layer's outputs only, so memory is a lower bound.",
        tuple(figures),
        "python -m benchmarks.papers pipedream-figure-18",
        (draw("pipedream-figure-18.png", panels, x="minibatches in flight on the first stage", y="", columns=2),),
    )
