"""Compare analytic profiles of our models for a V100 with the published profiles, and fit rates to these.

The kernels of each model are listed once, which takes up to three minutes, and kept in ``out/papers``: ``python -m
benchmarks.papers.analytic`` makes the lists that are missing, each in a process of its own, and prints the fitted
rates, which ``dapple_tf.profiler.peaks`` has for the V100.
"""

from __future__ import annotations

import itertools
import re
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from benchmarks.papers import pipedream_published, published
from benchmarks.papers.figure import Exhibit, Figure, claim
from dapple_tf.graph_passes.analysis.op_costs import OpClass
from dapple_tf.planner.api import make_problem, run_planner
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.cluster import config
from dapple_tf.profiler.peaks import HOST_BYTES, Peak, find_peak
from dapple_tf.profiler.profile import LayerCost, Profile

FOLDER = Path(__file__).parents[2] / "out" / "papers"
KINDS: tuple[OpClass, ...] = get_args(OpClass)
UNFITTED = 0.7  # the part that all kinds reached before the fit, an assumption
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Pair:
    """A published profile and our model of it. ``options``: of the model. ``fits``: whether the fit may see it.

    ``theirs``, ``ours``: patterns for the names of the layers that are compared one by one, in their order; layers of
    ours with the same text in the pattern's group are one.
    """

    title: str
    profile: published.Model | pipedream_published.Profiled
    model: str
    options: Mapping[str, Any]
    fits: bool
    theirs: str
    ours: str

    @property
    def name(self) -> str:
        """The name of the file of what is kept."""
        return self.title.lower()

    def read_published(self) -> Profile:
        """Return the published profile."""
        if isinstance(self.profile, published.Model):
            return published.read_profile(self.profile)
        return pipedream_published.read_profile(self.profile)


_BERT = {"theirs": r"layer_\d+", "ours": r"bert/(block_\d+)"}
_VGG = r"vgg\d+/(block\d_conv\d|fc\d|predictions)$"
_GNMT = {"theirs": published.GNMT.units, "ours": r"gnmt/((?:en|de)coder_\d+)/"}
_CONVOLUTIONS = r"(node\d+ )?(?:Conv2d|Linear)"
PAIRS = (
    Pair("VGG-19", published.VGG, "vgg", {"scale": "19", "batch_size": 32}, True, r"Conv2d|FC|Prediction", _VGG),
    Pair(
        "ResNet-50",
        published.RESNET,
        "resnet",
        {"scale": "50", "batch_size": 128},
        True,
        _CONVOLUTIONS,
        r"resnet50/(.*conv|predictions)$",
    ),
    Pair("BERT-48", published.BERT, "bert", {"scale": "48", "context": 384, "batch_size": 2}, True, **_BERT),
    Pair("GNMT-16", published.GNMT, "gnmt", {"scale": "16", "batch_size": 64}, True, **_GNMT),
    Pair("VGG-16", pipedream_published.VGG_16, "vgg", {"scale": "16", "batch_size": 128}, False, _CONVOLUTIONS, _VGG),
    Pair("BERT-24", published.BERT_LARGE, "bert", {"scale": "large", "context": 384, "batch_size": 6}, False, **_BERT),
    Pair("XLNet-36", published.XLNET, "xlnet", {"batch_size": 1}, False, r"Layer_\d+", r"xlnet/(block_\d+)"),
    Pair(
        "GNMT-8",
        pipedream_published.GNMT_8,
        "gnmt",
        {"layers": 4, "length": 24, "batch_size": 64},
        False,
        **_GNMT,
    ),
    Pair(
        "AmoebaNet-36",
        published.AMOEBA,
        "amoebanet",
        {"batch_size": 1},
        False,
        r"cell_\d",
        r"amoebanet/(cell_\d+)/",
    ),
)


# Of docs/models.md, without published profiles.
OTHERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "T5-base": ("t5", {"batch_size": 8}),
    "Llama-8B": ("llama", {"batch_size": 1}),
    "MoE-8x7B": ("moe", {"batch_size": 1}),
}


@dataclass(frozen=True, eq=False)
class Kernels:
    """The kernels of one direction of a model: of each its kind (a number of KINDS), its layer, and how often it runs.

    ``seconds``: at the data sheet's rates; ``launched``: whether the device runs it.
    """

    kinds: npt.NDArray[np.int64]
    layers: npt.NDArray[np.int64]
    counts: Floats
    seconds: Floats
    launched: npt.NDArray[np.bool_]

    def total(self, rates: Rates, layers: int) -> Floats:
        """Return the seconds of each of the ``layers``."""
        seconds = self.seconds / np.array([rates.efficiency[kind] for kind in KINDS])[self.kinds]
        seconds = np.where(self.launched, np.maximum(seconds, rates.launch_seconds), seconds)
        return np.bincount(self.layers, self.counts * seconds, minlength=layers)


@dataclass(frozen=True)
class Rates:
    """The part of the data sheet's rates that each kind of op reaches, and what a kernel takes at least."""

    efficiency: Mapping[OpClass, float]
    launch_seconds: float

    @staticmethod
    def of(peak: Peak) -> Rates:
        """Return the rates of a device."""
        return Rates({kind: peak.by_class.get(kind, peak.attainable) for kind in KINDS}, peak.launch_seconds)


@dataclass(frozen=True, eq=False)
class Work:
    """A model's profile without seconds, and its kernels; ``cpu_seconds``, ``peak_bytes``: what listing them took."""

    profile: Profile
    forward: Kernels
    backward: Kernels
    cpu_seconds: float
    peak_bytes: float

    def at(self, rates: Rates) -> Profile:
        """Return the profile by the roofline with these rates."""
        count = len(self.profile.layers)
        seconds = zip(self.profile.layers, *(k.total(rates, count) for k in (self.forward, self.backward)), strict=True)
        layers = tuple(replace(layer, forward_seconds=float(f), backward_seconds=float(b)) for layer, f, b in seconds)
        return replace(self.profile, layers=layers)


# --- Compute and keep the work of a model


def examine(title: str) -> None:
    """Compute the work of the model of this title, of PAIRS or OTHERS, and keep it."""
    import dapple_tf as dapple
    from dapple_tf import examples, variable_values
    from dapple_tf.commands.model_loading import load_workload
    from dapple_tf.frontend.trace import trace_loss
    from dapple_tf.profiling.analytic import make_profile
    from dapple_tf.profiling.layer_facts import examine_layers

    dapple.init(1)
    begin = time.process_time()
    model, options = {**{pair.title: (pair.model, pair.options) for pair in PAIRS}, **OTHERS}[title]
    workload = load_workload(f"{examples.__name__}:{model}", dict(options))
    arguments, size = next(iter(workload.dataset)), options["batch_size"]
    with variable_values.without_values():
        facts = examine_layers(trace_loss(workload.loss_fn, arguments, size, "allow"), size)
    sheet = replace(find_peak("V100"), attainable=1.0, by_class={}, launch_seconds=0.0)
    arrays = {}
    for direction, kernels in (("forward", facts.forward_kernels()), ("backward", facts.backward_kernels())):
        rows = [
            (KINDS.index(k.kind), k.layer, k.count, sheet.seconds(k.flops, k.moved), k.moved > HOST_BYTES)
            for k in kernels
        ]
        arrays[direction] = np.array(rows, dtype=np.float64)
    none = np.zeros(len(facts.names))
    FOLDER.mkdir(parents=True, exist_ok=True)
    make_profile(facts, title, "V100 (analytic)", none, none).save(FOLDER / f"{title.lower()}-profile.json")
    taken = time.process_time() - begin, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    np.savez_compressed(FOLDER / f"{title.lower()}.npz", taken=taken, **arrays)


@cache
def read_work(name: str) -> Work:
    """Return the work of the model of this title; what is not kept is listed in another process."""
    path = FOLDER / f"{name.lower()}.npz"
    if not path.is_file():
        subprocess.run([sys.executable, "-m", "benchmarks.papers.analytic", name], check=True, timeout=1800)
    kept = np.load(path)

    def kernels(direction: str) -> Kernels:
        kinds, layers, counts, seconds, launched = kept[direction].T
        return Kernels(kinds.astype(np.int64), layers.astype(np.int64), counts, seconds, launched.astype(np.bool_))

    profile = Profile.load(FOLDER / f"{name.lower()}-profile.json")
    return Work(profile, kernels("forward"), kernels("backward"), *map(float, kept["taken"]))


# --- The fit


def totals(profile: Profile) -> tuple[float, float]:
    """Return the seconds of forward and of backward."""
    forward, backward = (f(profile.batch_size).sum() for f in (profile.forward_seconds, profile.backward_seconds))
    return float(forward), float(backward)


def fit(works: Sequence[tuple[Work, tuple[float, float]]]) -> Rates:
    """Return the rates with the least squares of relative errors of totals, F and B apart, by coordinate descent.

    ``works``: each with the seconds of forward and of backward that it should take.
    """

    def rates_at(logarithms: Floats) -> Rates:
        *efficiency, launch = map(float, np.exp(logarithms))
        return Rates(dict(zip(KINDS, efficiency, strict=True)), launch)

    def error(logarithms: Floats) -> float:
        rates = rates_at(logarithms)
        found = ((totals(work.at(rates)), wanted) for work, wanted in works)
        return sum((o / t - 1) ** 2 for ours, theirs in found for o, t in zip(ours, theirs, strict=True))

    best = np.log([*(UNFITTED for _ in KINDS), 1e-5])
    least, steps = error(best), np.full(len(best), 0.5)
    while steps.max() > 1e-3:
        for i, step in itertools.product(range(len(best)), (1, -1)):
            tried = best.copy()
            tried[i] += step * steps[i]
            if (now := error(tried)) < least:
                best, least = tried, now
                break
        else:
            steps /= 2
    return rates_at(best)


# --- The comparison


def compare_by_layer(pair: Pair, ours: Profile) -> float | None:
    """Return Spearman's rank correlation of the seconds of the compared layers; None where theirs are all alike.

    Layers of the same parameters are matched in their order where both sides have as many of each, else all are.
    """
    theirs, own = _units(pair.read_published(), pair.theirs), _units(ours, pair.ours)
    if len(theirs) != len(own) or len({seconds for seconds, _ in theirs}) < 2:
        return None
    if sorted(size for _, size in theirs) == sorted(size for _, size in own):
        theirs, own = (sorted(units, key=lambda unit: unit[1]) for units in (theirs, own))
    ranks = [_ranks(np.array([seconds for seconds, _ in units])) for units in (theirs, own)]
    return float(np.corrcoef(*ranks)[0, 1])


def _units(profile: Profile, pattern: str) -> list[tuple[float, float]]:
    """Return seconds of forward and backward, and bytes of parameters, of each of the compared layers."""
    found: dict[str, tuple[float, float]] = {}
    for layer in profile.layers:
        if key := _unit_of(layer, pattern):
            seconds, size = found.get(key, (0.0, 0.0))
            seconds += layer.forward_seconds + layer.backward_seconds
            found[key] = seconds, size + layer.parameter_bytes
    return list(found.values())


def _unit_of(layer: LayerCost, pattern: str) -> str:
    """Return the name of the compared layer that a layer belongs to; empty if there is none."""
    match = re.match(pattern, layer.name)
    if match is None:
        return ""
    return match[1] if match.re.groups and match[1] else layer.name


def _ranks(values: Floats) -> Floats:
    """Return the ranks of the values; equal ones have their mean rank."""
    order = values.argsort().argsort().astype(np.float64)
    for value in set(values.tolist()):
        same = np.isclose(values, value, rtol=1e-6)
        order[same] = order[same].mean()
    return order


def middle_bytes(profile: Profile, pattern: str) -> float:
    """Return the bytes that cross the cut behind the middle one of the compared layers, where the fewest cross."""
    starts = unit_starts(profile, pattern)
    middle = len(starts) // 2
    crossing = profile.crossing_bytes()
    return float(min(crossing[p - 1] for p in range(starts[middle - 1] + 1, starts[middle] + 1)))


def unit_starts(profile: Profile, pattern: str) -> list[int]:
    """Return the first layer of each of the compared layers."""
    seen: dict[str, int] = {}
    for index, layer in enumerate(profile.layers):
        if key := _unit_of(layer, pattern):
            seen.setdefault(key, index)
    return sorted(seen.values())


def compare_plans(pair: Pair, ours: Profile, letter: str) -> float:
    """Return the step of the plan from our profile over that of the plan from the published one, both under the latter.

    Both plans are those of planner "best" on 16 devices, with stages that start at the compared layers.
    """
    assert isinstance(pair.profile, published.Model)
    problems, starts = [], []
    for profile, pattern in ((pair.read_published(), pair.theirs), (ours, pair.ours)):
        at = unit_starts(profile, pattern)
        crossing = profile.crossing_bytes()
        cuts = [min(range(a + 1, b + 1), key=lambda p: (crossing[p - 1], p)) for a, b in itertools.pairwise(at)]
        others = set(range(1, len(profile.layers))) - set(cuts)
        only = replace(profile, uncuttable=tuple(sorted(others)), unsplittable=())
        problems.append(
            make_problem(
                only,
                config(letter),
                global_batch_size=pair.profile.global_batch,
                optimizer_slots=pair.profile.slots,
                contention=False,
            )
        )
        starts.append(cuts)
    theirs, own = (run_planner(problem, "best", chunks=()).chosen for problem in problems)
    moved = _evaluate(problems[0], own, dict(zip(starts[1], starts[0], strict=True)))
    return moved / theirs.seconds


def _evaluate(problem: PlanningProblem, candidate: Candidate, start_of: Mapping[int, int]) -> float:
    """Return the seconds of a plan whose stages start at other numbers of layers; infinity where it does not fit."""
    firsts = [0, *(start_of[stage.first_layer] for stage in candidate.stages[1:])]
    ends = [*firsts[1:], len(problem.profile.layers)]
    stages = [
        StagePlan(first, end - 1, stage.devices)
        for first, end, stage in zip(firsts, ends, candidate.stages, strict=True)
    ]
    found = [
        problem.evaluate(stages, candidate.micro_batch_size, "moved", schedule)
        for schedule in (candidate.schedule, "auto")
    ]
    return min((each.seconds for each in found if each is not None), default=float("inf"))


def exhibit() -> Exhibit:
    """Return totals, parameters, boundary bytes, rank correlation and plans of all models."""
    peak = find_peak("V100")
    fitted, unfitted = Rates.of(peak), Rates(dict.fromkeys(KINDS, UNFITTED), 0.0)
    figures: list[Figure] = []
    near: dict[tuple[str, bool], list[bool]] = {}
    for pair in PAIRS:
        work, theirs = read_work(pair.title), pair.read_published()
        ours = work.at(fitted)
        group = f"{pair.title} ({'fitted' if pair.fits else 'tested'})"
        before = totals(work.at(unfitted))
        for name, printed, now, then in zip(("forward", "backward"), totals(theirs), totals(ours), before, strict=True):
            why = f"with {UNFITTED} for all kinds and launches that take no time {1e3 * then:.0f} ms"
            figures.append(Figure(group, name, 1e3 * printed, 1e3 * now, "ms", why))
            for title, seconds in (("as fitted", now), (f"with {UNFITTED} for all kinds and without launches", then)):
                near.setdefault((title, pair.fits), []).append(abs(seconds / printed - 1) <= 0.25)
        sizes = [float(p.parameter_bytes.sum()) / 4e6 for p in (theirs, ours)]
        figures.append(Figure(group, "parameters", *sizes, "millions"))
        sent = [middle_bytes(p, pattern) / 1e6 for p, pattern in ((theirs, pair.theirs), (ours, pair.ours))]
        why = "the files of BERT and XLNet pass masks on, that of AmoebaNet counts an output for each of its readers"
        figures.append(Figure(group, "bytes at the cut in the middle", *sent, "MB", why))
        correlation = compare_by_layer(pair, ours)
        if correlation is not None:
            figures.append(Figure(group, "rank correlation of the layers' seconds", 1.0, correlation, ""))
        if isinstance(pair.profile, published.Model):
            for letter in "abc":
                ratio = compare_plans(pair, ours, letter)
                name = f"config {letter.upper()}: plan from ours over plan from theirs"
                figures.append(Figure(group, name, 1.0, ratio, "x step"))
    for (title, fits), found in near.items():
        figures.append(claim(f"totals within 25%, {'fitted' if fits else 'tested'} models, {title}", found))
    text = ", ".join(f"{kind} {x:.2f}" for kind, x in fitted.efficiency.items())
    return Exhibit(
        "Analytic profiles",
        "What `dapple profile --device V100` says of our models, beside the published profiles. The part of the data "
        f"sheet's rates that each kind of op reaches ({text}) and what a kernel takes at least "
        f"({1e6 * fitted.launch_seconds:.1f} µs, as the host launches it) were fitted to the totals of four models, by "
        "least squares of relative errors, and tested on five others. Convolutions exceed 1, since cuDNN's need fewer "
        "products than are counted. A plan from our profile is costed under the published one, and so is the plan "
        "from that.",
        tuple(figures),
        "python -m benchmarks.papers analytic",
    )


# --- DAPPLE's Table II

_PARAMETERS = {
    "GNMT-16": 291.0,
    "BERT-48": 640.0,
    "XLNet-36": 500.0,
    "ResNet-50": 24.5,
    "VGG-19": 137.0,
    "AmoebaNet-36": 933.0,
}


def table_2() -> Exhibit:
    """Return the parameters of our models, and the memory of one device that trains one batch."""
    figures = []
    for pair in PAIRS:
        if pair.title not in _PARAMETERS or not isinstance(pair.profile, published.Model):
            continue
        profile = read_work(pair.title).profile
        count = float(profile.parameter_bytes.sum()) / 4e6
        figures.append(Figure("parameters", pair.title, _PARAMETERS[pair.title], count, "millions"))
        fixed = 4e6 * count * (2 + pair.profile.slots)
        stash = float(profile.stash_bytes.sum())
        total = (fixed + stash + float(profile.working_bytes().max())) / 1e9
        figure = Figure("memory", pair.title, pair.profile.memory / 1e9, total, "GB")
        why = (
            ""
            if abs(figure.off) <= 0.1
            else f"weights, gradients and slots {fixed / 1e9:.1f} GB, activations {stash / 1e9:.1f} GB"
        )
        figures.append(replace(figure, why=why))
    return Exhibit(
        "DAPPLE, Table II",
        "Parameters of our models, and the bytes of one device that trains one batch of the profile's size: weights, "
        "gradients and slots of the optimizer, what TensorFlow's backward keeps of forward, and the largest gradients. "
        "Nothing is run: it is `dapple profile --device V100` of our models.",
        tuple(figures),
        "python -m benchmarks.papers dapple-table-2",
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        examine(sys.argv[1])
    else:
        for each in PAIRS:
            kept = read_work(each.title)
            print(f"{each.title}: {kept.cpu_seconds:.0f} s of CPU, {kept.peak_bytes / 1e9:.2f} GB")
        for title, chosen in (("half", [p for p in PAIRS if p.fits]), ("all", PAIRS)):
            print(title, fit([(read_work(pair.title), totals(pair.read_published())) for pair in chosen]))
