"""Figures 12 and 14 of the paper: the speed-up of the best plan, and of DP with and without overlap."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from benchmarks.common import Row
from benchmarks.figures import line_figure
from benchmarks.papers.planning import fastest
from benchmarks.papers.published import AMOEBA, MODELS, Model, find_missing_profiles
from benchmarks.papers.table5 import FREE, WHOLE
from dapple_tf.planner.baselines import data_parallel
from dapple_tf.planner.best import plan_best
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem
from dapple_tf.profiler.cluster import config

BATCHES = (32, 64, 128, 256, 512, 1024, 2048)
DEVICES = (2, 4, 6, 8, 10, 12, 14, 16)
LINES = ("best hybrid", "DP with overlap", "DP")
# Section VI.C, at a global batch of 128: the best hybrid over DP with overlap, on average over the models.
PUBLISHED = {"a": 1.71, "b": 1.37, "c": 1.79}
# Strong scaling uses Table V's batch, except for AmoebaNet-36, for which the figure names another.
SCALED = {model: 256 if model is AMOEBA else model.global_batch for model in MODELS}


def run() -> Iterator[Row]:
    """Yield what must hold for the curves; the curves are saved as plots."""
    if why := find_missing_profiles():
        yield Row("speed-ups", "Fig. 12 and Fig. 14", why, True)
        return
    yield from _over_batches()
    yield from _over_devices()


def _over_batches() -> Iterator[Row]:
    panels, ratios = {}, {}
    for model in MODELS:
        for letter in "abc":
            points = [speedups(FREE.make_problem(model, letter, batch)) for batch in BATCHES]
            panels[f"{model.title}, config {letter.upper()}"] = BATCHES, by_line(points)
            ratios[letter, model] = [best / overlapped for best, overlapped, _ in points]
    path = line_figure(
        "speedups-batch.png", panels, "simulated", x="global batch (samples)", y="speed-up, 16 devices", columns=3
    )
    yield _never_slower(f"Fig. 12 ({path.name}): best over DP with overlap, {len(panels)} curves", ratios.values())
    yield _never_falling({title: lines[LINES[0]] for title, (_, lines) in panels.items()})
    for letter in "abc":
        at = {model: ratios[letter, model][BATCHES.index(128)] for model in MODELS}
        yield _mean(letter, "batch 128, any M", at)
        points = {model: speedups(WHOLE.make_problem(model, letter)) for model in MODELS}
        at = {model: best / overlapped for model, (best, overlapped, _) in points.items()}
        yield _mean(letter, "Table V's batches, whole slices", at)


def _over_devices() -> Iterator[Row]:
    panels, ratios = {}, []
    for model in MODELS:
        points = [speedups(on_devices(model, devices)) for devices in DEVICES]
        panels[f"{model.title}, batch {SCALED[model]}"] = DEVICES, by_line(points)
        ratios.append([best / overlapped for best, overlapped, _ in points])
        text = ", ".join(f"{d}: {best:.1f}" for d, (best, _, _) in zip(DEVICES, points, strict=True))
        yield Row(f"Fig. 14, {model.title}, batch {SCALED[model]}, config A: best", "-", text, True)
    path = line_figure("speedups-devices.png", panels, "simulated", x="devices of config A", y="speed-up", columns=3)
    yield _never_slower(f"Fig. 14 ({path.name}): best over DP with overlap, {len(panels)} curves", ratios)


def speedups(problem: PlanningProblem) -> tuple[float, float, float]:
    """Return the speed-ups over one device of the best plan, DP with overlap and DP; NaN where none fits."""
    profile, batch = problem.profile, problem.global_batch_size
    alone = float(profile.forward_seconds(batch).sum() + profile.backward_seconds(batch).sum())
    decision = plan_best(problem, chunks=())  # one stage per device, as in the paper
    found = (decision and decision.chosen, _data_parallel(problem), _data_parallel(replace(problem, overlap=False)))
    best, overlapped, plain = (alone / candidate.seconds if candidate else math.nan for candidate in found)
    return best, overlapped, plain


def on_devices(model: Model, devices: int) -> PlanningProblem:
    """Return the problem of Fig. 14 on this number of devices of config A."""
    return replace(FREE.make_problem(model, "a", SCALED[model]), cluster=config("a", devices))


def _data_parallel(problem: PlanningProblem) -> Candidate | None:
    return fastest(problem.evaluate_all_sizes(data_parallel(problem), "DP"))


def by_line(points: Sequence[tuple[float, float, float]]) -> dict[str, list[float]]:
    """Return the points of each line."""
    return {name: [point[i] for point in points] for i, name in enumerate(LINES)}


def _never_slower(figure: str, ratios: Iterable[Sequence[float]]) -> Row:
    known = [r for curve in ratios for r in curve if not math.isnan(r)]
    return Row(figure, "at least 1 everywhere", f"{min(known):.3f} to {max(known):.2f}", min(known) >= 1 - 1e-9)


def _never_falling(curves: Mapping[str, Sequence[float]]) -> Row:
    """Check that the speed-up never falls: a plan with twice the micro-batches takes at most twice as long."""
    falls = [
        f"{title}, {batch} to {2 * batch}: {before:.2f} to {after:.2f}"
        for title, curve in curves.items()
        for batch, before, after in zip(BATCHES, curve, curve[1:], strict=False)
        if after < before * (1 - 1e-9)
    ]
    return Row("best: speed-up falls as the batch doubles", "nowhere", "; ".join(falls) or "nowhere", not falls)


def _mean(letter: str, title: str, ratios: Mapping[Model, float]) -> Row:
    known = [ratio for ratio in ratios.values() if not math.isnan(ratio)]
    text = ", ".join(f"{m.title} {'DP does not fit' if math.isnan(r) else f'{r:.2f}'}" for m, r in ratios.items())
    mean = sum(known) / len(known)
    figure = f"config {letter.upper()}, {title}: best over DP with overlap, mean"
    return Row(figure, f"at least 1 (paper, batch 128: {PUBLISHED[letter]:.2f})", f"{mean:.2f} ({text})", mean >= 1)
