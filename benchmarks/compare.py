"""All planners on all published profiles and many clusters: how much slower each is than the fastest."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks.common import Row
from benchmarks.figures import FOLDER, say_origin
from benchmarks.papers import pipedream_published
from benchmarks.papers.published import BERT_LARGE, MODELS, find_missing_profiles, read_profile
from dapple_tf.planner.compare import Comparison, compare
from dapple_tf.planner.registry import PLANNERS
from dapple_tf.profiler.cluster import Cluster, DeviceKind, Link, Server, config, route
from dapple_tf.profiler.profile import Profile

_NVLINK, _ETHERNET, _CABLE = Link(130e9, 5e-6), Link(25e9 / 8, 20e-6), Link(1e9 / 8, 20e-6)
_NAMES = tuple(f"s{index}" for index in range(4))
_RING = dict.fromkeys(zip(_NAMES, (*_NAMES[1:], _NAMES[0]), strict=True), _ETHERNET)
_KINDS = {"V100": DeviceKind(16e9, 1.0), "T4": DeviceKind(16e9, 0.4)}

# Seconds of a planner on 16 devices: PipeDream 1, torchgpipe 0.5, Piper 10, the others 2; best has its own benchmark.
_WANTED = {"pipedream": 1.0, "torchgpipe": 0.5, "piper": 10.0, "autopipe": 0.5, "bapipe": 0.5}
_USUAL = 2.0


def _servers(counts: Sequence[int], links: Mapping[tuple[str, str], Link]) -> Cluster:
    servers = tuple(Server(f"s{index}", count) for index, count in enumerate(counts))
    return Cluster(servers, 16e9, _NVLINK, _ETHERNET, links)


def clusters() -> dict[str, Cluster]:
    """Return the clusters by name; devices of 16 GB, NVLink inside servers and 25 Gbps between, unless said."""
    unequal = [Server.of_kinds(name, [(kind, 4)]) for name, kind in zip(_NAMES, ["V100"] * 2 + ["T4"] * 2, strict=True)]
    return {
        **{f"{letter.upper()}:{n}": config(letter, n) for letter in "abc" for n in (8, 16, 32, 64)},
        "V100 + T4": Cluster(tuple(unequal), None, _NVLINK, _ETHERNET, {}, _KINDS),
        "3 x 5": _servers((5, 5, 5), {}),
        "ring of 4 x 4": _servers((4, 4, 4, 4), route(_NAMES, _RING)),
        "slow cable": _servers((4, 4, 4, 4), {("s0", "s1"): _CABLE}),
    }


def profiles() -> dict[str, tuple[Profile, int, int]]:
    """Return the profiles with their global batches and optimizer slots (PipeDream's: 16 minibatches, 2 slots)."""
    found = {model.title: (read_profile(model), model.global_batch, model.slots) for model in (*MODELS, BERT_LARGE)}
    of = pipedream_published
    for model in (of.VGG_16, of.RESNET_50, of.ALEXNET, of.GNMT_8, of.GNMT_16):
        found[f"{model.title} (PD)"] = of.read_profile(model), 16 * model.minibatch, 2
    return found


def run() -> Iterator[Row]:
    """Yield a row for each cluster and for each planner, and draw the heat map."""
    if why := find_missing_profiles():
        yield Row("shared profiles", "-", why, True)
        return
    found: dict[tuple[str, str], Comparison] = {}
    for place, cluster in clusters().items():
        for title, (profile, batch, slots) in profiles().items():
            print(f"compare: {place}, {title}", file=sys.stderr, flush=True)
            found[place, title] = compare(profile, cluster, global_batch_size=batch, optimizer_slots=slots)
        yield _cluster_row(place, [comparison for (where, _), comparison in found.items() if where == place])
    yield from (_planner_row(name, found) for name in PLANNERS)
    yield from (_seconds_row(name, found) for name in PLANNERS if name != "best")
    _draw(found)


def _ratio(comparison: Comparison, planner: str) -> float:
    """Return the planner's step over the fastest; NaN without a plan."""
    (row,) = [row for row in comparison.rows if row.planner == planner]
    if row.plan is None or comparison.fastest is None:
        return math.nan
    return row.step_seconds / comparison.fastest.step_seconds


def _mean(comparisons: Sequence[Comparison], planner: str) -> float:
    """Return the geometric mean of the planner's ratios; NaN where it never has a plan."""
    logs = [math.log(ratio) for ratio in (_ratio(c, planner) for c in comparisons) if not math.isnan(ratio)]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _cluster_row(place: str, comparisons: Sequence[Comparison]) -> Row:
    means = {name: _mean(comparisons, name) for name in PLANNERS}
    texts = [f"{name} {'-' if math.isnan(mean) else f'{mean:.2f}'}" for name, mean in means.items()]
    return Row(f"{place}: step over the fastest, mean of {len(comparisons)} profiles", "-", ", ".join(texts), True)


def _planner_row(planner: str, found: Mapping[tuple[str, str], Comparison]) -> Row:
    ratios = {case: _ratio(comparison, planner) for case, comparison in found.items()}
    known = {case: ratio for case, ratio in ratios.items() if not math.isnan(ratio)}
    worst = max(known, key=lambda case: known[case])
    wins = sum(ratio <= 1 + 1e-9 for ratio in known.values())
    text = f"mean {_mean(list(found.values()), planner):.3f}, fastest in {wins} of {len(found)}"
    text += f", largest {known[worst]:.2f} ({worst[1]} on {worst[0]})"
    text += f", no plan in {len(ratios) - len(known)}" if len(known) < len(ratios) else ""
    if planner != "best":
        return Row(f"{planner}: step over the fastest", "-", text, True)
    # Plans with virtual workers are only simulated, and best does not choose them.
    slower = {case: r for case, r in known.items() if r > 1 + 1e-9 and not _is_only_simulated(found[case])}
    return Row("best: step over the fastest that can be run", "1.000", text, not slower and len(known) == len(ratios))


def _is_only_simulated(comparison: Comparison) -> bool:
    fastest = comparison.fastest
    return fastest is not None and fastest.plan is not None and bool(fastest.plan.virtual_workers)


def _seconds_row(planner: str, found: Mapping[tuple[str, str], Comparison]) -> Row:
    wanted = _WANTED.get(planner, _USUAL)
    seconds = {
        (row.planner_seconds, place, title)
        for (place, title), comparison in found.items()
        if comparison.devices <= 16
        for row in comparison.rows
        if row.planner == planner
    }
    most, place, title = max(seconds)
    return Row(
        f"{planner}: its longest planning on up to 16 devices",
        f"at most {wanted} s",
        f"{most:.3f} s ({title} on {place})",
        most <= wanted,
    )


def _draw(found: Mapping[tuple[str, str], Comparison]) -> None:
    places, titles = (list(dict.fromkeys(case[index] for case in found)) for index in (0, 1))
    by_place = [[_mean([found[p, t] for t in titles], name) for p in places] for name in PLANNERS]
    by_title = [[_mean([found[p, t] for p in places], name) for t in titles] for name in PLANNERS]
    panels = {
        "clusters (mean over profiles)": (list(PLANNERS), places, by_place),
        "profiles (mean over clusters)": (list(PLANNERS), titles, by_title),
    }
    _heat_map("compare.png", panels, "Predicted step over that of the fastest planner, where it has a plan")


_MOST = 3.0  # the darkest colour is for this ratio and more
# Rows, columns, and the values; NaN where there is none.
Panel = tuple[Sequence[str], Sequence[str], Sequence[Sequence[float]]]


def _heat_map(name: str, panels: Mapping[str, Panel], title: str) -> None:
    """Draw ratios from 1 on, the panels side by side by title, with their values, and save the PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    widths = [len(columns) for _, columns, _ in panels.values()]
    rows = max(len(names) for names, _, _ in panels.values())
    figure = Figure(figsize=(0.52 * sum(widths) + 2.2 * len(widths), 0.36 * rows + 2.2), dpi=90, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    say_origin(figure, "simulated")
    for axes, (heading, (names, columns, values)) in zip(
        np.atleast_1d(figure.subplots(1, len(panels), width_ratios=widths)), panels.items(), strict=True
    ):
        shown = np.ma.masked_invalid(np.log(np.array(values, float)))
        axes.imshow(shown, cmap="YlOrRd", vmin=0, vmax=math.log(_MOST), aspect="auto")
        axes.set_facecolor("#dddddd")
        axes.set_xticks(range(len(columns)), columns, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=9)
        axes.set_title(heading, fontsize=9, loc="left")
        for (row, column), value in np.ndenumerate(np.array(values, float)):
            text = "none" if math.isnan(value) else f"{value:.2f}" if value < 10 else f"{value:.0f}"
            colour = "white" if value > math.exp(0.7 * math.log(_MOST)) else "black"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
    FOLDER.mkdir(parents=True, exist_ok=True)
    canvas.draw()
    # 128 colours are enough, and make the file smaller.
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(128).save(FOLDER / name, optimize=True)
