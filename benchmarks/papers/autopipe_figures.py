"""AutoPipe's Table II and Figures 9 to 14, simulated from profiles computed from shapes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.papers.figure import OOM, Exhibit, Figure, claim, draw
from benchmarks.papers.planning import WholeSlices, plan_or_none
from benchmarks.papers.transformer_profiles import (
    BERT_LARGE,
    GPT2_345M,
    GPT2_762M,
    Transformer,
    megatron_stages,
    stages_of_halves,
    transformer_profile,
)
from dapple_tf.planner.api import make_problem, run_planner
from dapple_tf.planner.baselines import even_pipeline
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem
from dapple_tf.profiler.cluster import Cluster, Link, Server
from dapple_tf.timeline.timeline import Timeline


def make_autopipe(
    model: Transformer, size: int, depth: int, micro_batches: int, head_rate: float = 1.0
) -> PlanningProblem:
    """Return the problem of a pipeline of ``depth`` devices in servers of 4, with activation checkpoints.

    ``head_rate``: see ``transformer_profile``.
    """
    sizes = [4] * (depth // 4) + [depth % 4] * (depth % 4 > 0)
    servers = tuple(Server(f"server{i}", devices) for i, devices in enumerate(sizes))
    cluster = Cluster(servers, 24e9, Link(12e9, 0.0), Link(100e9 / 8, 0.0))
    return make_problem(
        transformer_profile(model, size, head_rate),
        cluster,
        global_batch_size=size * micro_batches,
        micro_batch_size=size,
        recompute=True,
        contention=False,
    )


# --- Table II and Fig. 11: seven schemes

# Layers of each stage of GPT-2 345M (Table II), doubled.
TABLE_2 = (
    (10, 14, 12, 12),
    (12, 13, 13, 10),
    (12, 14, 12, 10),
    (13, 13, 13, 9),
    (13, 13, 12, 10),
    (14, 11, 12, 11),
    (14, 13, 11, 10),
)


def table_2() -> Exhibit:
    """Return the simulated steps of the seven listed schemes, and of the Planner's."""
    problem = make_autopipe(GPT2_345M, 4, 4, 8)
    listed = [problem.evaluate(stages_of_halves(halves), 4, "listed", "dapple-a") for halves in TABLE_2]
    seconds = [candidate.seconds * 1e3 for candidate in listed if candidate is not None]
    found = run_planner(problem, "autopipe", stages=4, sliced=False).chosen
    text = "; ".join(f"{i + 1}: {each:.0f} ms" for i, each in enumerate(seconds))
    figures = [
        claim(
            "no listed scheme is faster than the Planner's",
            (found.seconds * 1e3 <= each * (1 + 1e-9) for each in seconds),
            text,
        )
    ]
    panels = {"": (range(1, 8), {"simulated": seconds})}
    return Exhibit(
        "AutoPipe, Table II and Fig. 11",
        "Steps of the seven partition schemes of GPT-2 345M on four devices, beside the Planner's. The numbers of Fig. "
        "11 are not in the text.",
        tuple(figures),
        "python -m benchmarks.papers autopipe-table-2",
        (draw("autopipe-figure-11.png", panels, x="partition of Table II", y="ms of a step"),),
    )


# --- Figures 9 and 10: AutoPipe over Megatron-LM

_FIGURE_10 = (
    (GPT2_345M, 4, (2, 4, 8, 12)),
    (GPT2_762M, 4, (2, 4, 9, 12)),
    (BERT_LARGE, 16, (2, 4, 8, 12)),
)
_FIGURE_9 = ((GPT2_345M, (4, 8, 16, 32)), (GPT2_762M, (4, 8, 16, 24)), (BERT_LARGE, (4, 8, 16, 32)))


def over_megatron(
    model: Transformer, size: int, depth: int, micro_batches: int, head_rate: float = 1.0
) -> tuple[float, float]:
    """Return the speed-ups over Megatron-LM of the Planner alone, and with the Slicer."""
    problem = make_autopipe(model, size, depth, micro_batches, head_rate)
    megatron = problem.evaluate(megatron_stages(model, depth), size, "Megatron-LM", "dapple-a")
    assert megatron is not None, "24 GB are enough with activation checkpoints"
    planner, both = (run_planner(problem, "autopipe", stages=depth, sliced=sliced).chosen for sliced in (False, True))
    return megatron.seconds / planner.seconds, megatron.seconds / both.seconds


_NAMES = (
    "AutoPipe, the least",
    "AutoPipe, the largest",
    "Planner alone, the least",
    "Planner alone, the largest",
    "Slicer, the largest",
)
_PRINTED = {"Fig. 9, 4 stages": (1.07, 1.12, 1.05, 1.10, 1.03), "Fig. 10": (1.02, 1.30, 1.0, 1.25, 1.04)}
_HEAD_RATES = (1.0, 2.0)


def _summarise(found: Iterable[tuple[float, float]]) -> tuple[float, ...]:
    """Return the figures of _NAMES."""
    pairs = list(found)
    both, planner, slicer = [b for _, b in pairs], [p for p, _ in pairs], [b / p for p, b in pairs]
    return min(both), max(both), min(planner), max(planner), max(slicer)


def figures_9_and_10() -> Exhibit:
    """Return the speed-ups by micro-batch size at 4 stages, and by the number of stages."""
    by_rate = {
        rate: {
            "Fig. 9, 4 stages": {
                (m.title, size): over_megatron(m, size, 4, 8, rate) for m, sizes in _FIGURE_9 for size in sizes
            },
            "Fig. 10": {
                (m.title, d): over_megatron(m, size, d, 2 * d, rate) for m, size, depths in _FIGURE_10 for d in depths
            },
        }
        for rate in _HEAD_RATES
    }
    figures = []
    for where, printed in _PRINTED.items():
        each = [_summarise(by_rate[rate][where].values()) for rate in _HEAD_RATES]
        for name, paper, *ours in zip(_NAMES, printed, *each, strict=True):
            why = "the head's share of a step decides how uneven Megatron-LM's stages are; it is not printed"
            figures.append(Figure(where, name, paper, ours[0], "x Megatron-LM", why, (min(ours), max(ours))))
    by_size, by_depth = by_rate[1.0].values()
    never = (planner >= 1 - 1e-9 for planner, _ in (*by_size.values(), *by_depth.values()))
    figures.append(claim("Planner alone is no slower than Megatron-LM", never))
    deeper = (by_depth[m.title, d[-1]][1] > by_depth[m.title, d[0]][1] for m, _, d in _FIGURE_10)
    figures.append(claim("more stages gain more (first and last of each model)", deeper))
    of_two = (by_depth[m.title, 2] for m, _, _ in _FIGURE_10)
    figures.append(claim("the Slicer is of no use for two stages", (b <= p * (1 + 1e-9) for p, b in of_two)))
    larger = (by_size[m.title, s[-1]][1] > by_size[m.title, s[0]][1] * (1 + 1e-6) for m, s in _FIGURE_9)
    why = "our profiles are of one batch size, so time is proportional to samples and the speed-up is the same"
    figures.append(claim("larger micro-batches gain more", larger, why))
    panels: dict[str, tuple[Sequence[float], Mapping[str, Sequence[float]]]] = {}
    for m, _, depths in _FIGURE_10:
        each = [by_depth[m.title, d] for d in depths]
        panels[m.title] = depths, {"Planner": [p for p, _ in each], "Planner and Slicer": [b for _, b in each]}
    return Exhibit(
        "AutoPipe, Figs. 9 and 10",
        "Speed-ups over Megatron-LM's even stages. Profiles are computed from shapes, at one rate for all products; "
        "the other end of the range has the head, whose product is the largest, at twice that rate. The text has the "
        "least and largest speed-ups only.",
        tuple(figures),
        "python -m benchmarks.papers autopipe-figures-9-10",
        (draw("autopipe-figure-10.png", panels, x="stages", y="speed-up over Megatron-LM", columns=3),),
    )


# --- Figures 12 and 13: search time and balance, beside DAPPLE's planner and Piper

_PLANNERS = ("autopipe", "piper", "dapple")
_DEVICES = (4, 8)


def make_tight(devices: int) -> PlanningProblem:
    """Return the problem of GPT-2 345M with at least 32 samples for each replica, and memory that two stages fill."""
    usual = make_autopipe(GPT2_345M, 32, devices, 16)
    sizes = tuple(32 * r for r in (1, 2, 4, 8) if r <= devices)
    problem = WholeSlices(usual.profile, usual.cluster, 512, sizes, recompute=True, contention=False)
    halves = even_pipeline(problem, 2, devices // 2)
    timeline = problem.simulate(problem.make_plan(halves, 32 * devices // 2, "dapple-a", "even"))
    memory = 1.25 * max(timeline.peak_memory_bytes)
    return replace(problem, cluster=replace(problem.cluster, device_memory=memory))


def figures_12_and_13() -> Exhibit:
    """Return the seconds of planning and the balance of the plans of three planners."""
    seconds: dict[str, list[float]] = {name: [] for name in _PLANNERS}
    spread: dict[str, list[float]] = {name: [] for name in _PLANNERS}
    for devices in _DEVICES:
        for name in _PLANNERS:
            problem = make_tight(devices)
            options = {"stages": 2, "sliced": False} if name == "autopipe" else {}  # as many as the paper has
            plan_or_none(problem, name, **options)  # compiles and caches
            begin = time.process_time()
            found = plan_or_none(make_tight(devices), name, **options)
            seconds[name].append(time.process_time() - begin)
            spread[name].append(_spread(problem, found))
    figures = [
        claim(
            "AutoPipe plans faster than Piper",
            (a < p for a, p in zip(seconds["autopipe"], seconds["piper"], strict=True)),
            _list(seconds, "s"),
        ),
        claim(
            "AutoPipe plans faster than DAPPLE's planner",
            (a < d for a, d in zip(seconds["autopipe"], seconds["dapple"], strict=True)),
        ),
        claim(
            "AutoPipe's stages are at least as well balanced as DAPPLE's",
            (a <= d for a, d in zip(spread["autopipe"], spread["dapple"], strict=True)),
            _list(spread, "ms"),
        ),
        claim(
            "AutoPipe's stages are at least as well balanced as Piper's",
            (a <= p for a, p in zip(spread["autopipe"], spread["piper"], strict=True)),
        ),
    ]
    return Exhibit(
        "AutoPipe, Figs. 12 and 13",
        "CPU seconds of planning GPT-2 345M with micro-batches of 32 samples for each replica on 4 and 8 devices, and "
        "the standard deviation of the stages' seconds. All planners are ours, in C++ and NumPy: not the Python of the "
        "paper. Memory is a quarter more than two even stages need.",
        tuple(figures),
        "python -m benchmarks.papers autopipe-figures-12-13",
    )


def _spread(problem: PlanningProblem, found: Candidate | None) -> float:
    """Return the standard deviation of the stages' milliseconds for a micro-batch; infinity without a plan."""
    if found is None:
        return float("inf")
    timeline = problem.simulate(problem.plan_of(found, "spread"))
    return float(np.std([1e3 * (cost.forward_seconds + cost.backward_seconds) for cost in timeline.costs]))


def _list(found: Mapping[str, Sequence[float]], unit: str) -> str:
    each = (f"{name} {' and '.join(f'{x:.3g}' for x in values)} {unit}" for name, values in found.items())
    return f"on {' and '.join(map(str, _DEVICES))} devices: {'; '.join(each)}"


# --- Fig. 14: start-up overhead


def figure_14() -> Exhibit:
    """Return the start-up with the Slicer, and with interleaved stages, over that of 1F1B."""
    ways: dict[str, Callable[[int, int], float]] = {
        "Slicer": _sliced,
        "interleaved": _interleaved,
        "AutoPipe": _autopipe,
    }
    sizes, depths = (4, 8, 16, 32), (2, 4, 8, 12)
    figures = []
    panels: dict[str, tuple[Sequence[float], Mapping[str, Sequence[float]]]] = {}
    for title, cases in {
        "micro-batch size, 4 stages": [(s, 4) for s in sizes],
        "stages, 4 samples": [(4, d) for d in depths],
    }.items():
        usual = [_plain(*case) for case in cases]
        found = {
            name: [way(*case) / whole for case, whole in zip(cases, usual, strict=True)] for name, way in ways.items()
        }
        panels[title] = [s if "size" in title else d for s, d in cases], found
        for name in ("Slicer", "interleaved"):
            each = zip(cases, found[name], strict=True)
            deep = [ratio for (_, depth), ratio in each if depth > 2 and not math.isnan(ratio)]
            mean = sum(deep) / len(deep)
            why = (
                ""
                if abs(mean / 0.5 - 1) <= 0.1
                else "halves of forwards that are sent together wait for each other at the last stages"
            )
            figures.append(
                Figure(
                    f"start-up over 1F1B, by {title}",
                    f"{name}, mean beyond 2 stages",
                    0.5,
                    mean,
                    "x",
                    why,
                    (min(deep), max(deep)),
                )
            )
        figures.append(
            claim(
                f"AutoPipe's start-up is a little longer than the Slicer's, by {title}",
                (1 <= a / s <= 1.25 for a, s in zip(found["AutoPipe"], found["Slicer"], strict=True)),
            )
        )
    return Exhibit(
        "AutoPipe, Fig. 14",
        "Start-up (from the first forward to the first forward of the last stage) of GPT-2 345M with Megatron-LM's "
        "stages: with the Slicer, with two interleaved stages per device, and with AutoPipe's own stages and the "
        "Slicer, over 1F1B.",
        tuple(figures),
        "python -m benchmarks.papers autopipe-figure-14",
        (draw("autopipe-figure-14.png", panels, x="", y="start-up over 1F1B", columns=2),),
    )


def _startup(timeline: Timeline, stage: int) -> float:
    return min(event.start for event in timeline.events if event.action.stage == stage)


def _plain(size: int, depth: int) -> float:
    problem = make_autopipe(GPT2_345M, size, depth, 2 * depth)
    return _startup(
        problem.simulate(problem.make_plan(megatron_stages(GPT2_345M, depth), size, "dapple-a", "even")), depth - 1
    )


def _sliced(size: int, depth: int) -> float:
    from dapple_tf.graph_passes.schedules.slicer import count_slices, slice_sizes, sliced_1f1b

    problem = make_autopipe(GPT2_345M, size, depth, 2 * depth)
    plan = problem.make_plan(megatron_stages(GPT2_345M, depth), size, "dapple-a", "even")
    costs = problem.simulate(plan).costs
    send = max(cost.send_forward_seconds for cost in costs)
    count = count_slices([c.forward_seconds for c in costs], [c.backward_seconds for c in costs], send)
    if not count:
        return _startup(problem.simulate(plan), depth - 1)
    sizes = slice_sizes((size,) * 2 * depth, count)
    plan = replace(
        plan,
        schedule=str(sliced_1f1b(depth, 2 * depth, count)),
        micro_batches=len(sizes),
        micro_batch_size=max(sizes),
        micro_batch_sizes=sizes,
    )
    return _startup(problem.simulate(plan), depth - 1)


def _interleaved(size: int, depth: int) -> float:
    if GPT2_345M.layers % (2 * depth):
        return OOM  # as in the paper, an X: Megatron-LM divides the layers evenly
    problem = make_autopipe(GPT2_345M, size, depth, 2 * depth)
    stages = [replace(stage, devices=(stage.devices[0] % depth,)) for stage in megatron_stages(GPT2_345M, 2 * depth)]
    plan = problem.make_plan(stages, size, "interleaved-1f1b:v=2", "interleaved")
    return _startup(problem.simulate(plan), depth - 1)  # the first forward on the last device


def _autopipe(size: int, depth: int) -> float:
    problem = make_autopipe(GPT2_345M, size, depth, 2 * depth)
    found = run_planner(problem, "autopipe", stages=depth, sliced=True).chosen
    return _startup(problem.simulate(problem.plan_of(found, "autopipe")), depth - 1)
