"""A challenger of planner "best": its own search by simulated annealing with far more work and other random numbers.

It shows how far the search is from its end, not from the best plan of another search; what is compared in the end is
``dapple.simulate`` of both plans. ``python -m benchmarks challenger`` is a short run, and
``python -m benchmarks challenger --cases 100 --work 1e9`` a whole one. With ``--unequal`` the devices of each cluster
are of different kinds. It needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.common import Row
from benchmarks.papers.published import BERT_LARGE, MODELS, PROFILES, find_missing_profiles, read_profile
from benchmarks.unequal_clusters import measure_kinds, unequal_clusters
from dapple_tf.errors import PlanError
from dapple_tf.planner.api import make_problem, plan
from dapple_tf.planner.search.annealer import Annealer
from dapple_tf.profiler.cluster import Cluster, Link, Server, config
from dapple_tf.profiler.importers import read_profile as read_any
from dapple_tf.profiler.profile import Profile
from dapple_tf.simulator.simulate import simulate

POLICIES = ("dapple-a", "dapple-b", "gpipe")
BATCHES = (64, 128, 512)
_ETHERNET = {speed: Link(speed * 1e9 / 8, 20e-6) for speed in (1, 10, 25, 100)}
_PCI = Link(12e9, 10e-6)


@dataclass(frozen=True)
class Case:
    """A profile, a cluster and a global batch (samples)."""

    name: str
    profile: Profile
    cluster: Cluster
    batch: int


def run() -> Iterator[Row]:
    """Yield the cases of a short run where the challenger wins by more than 1%, and how many there are."""
    yield from challenge(cases=20, work=1e8, seed=0)


def challenge(cases: int, work: float, seed: int, *, unequal: bool = False) -> Iterator[Row]:
    """Yield a row for each of ``cases`` random cases that annealing wins by more than 1%, and a sum.

    ``work``: of each case; 10^7 takes about 0.1 s. ``unequal``: on devices of different kinds.
    """
    if why := find_missing_profiles():
        yield Row("challenger", "at most 2 of 100 cases won by more than 1%", why, True)
        return
    ratios = []
    for case in draw_cases(cases, seed, unequal=unequal):
        try:
            ours = plan(case.profile, case.cluster, global_batch_size=case.batch)
        except PlanError:  # nothing fits
            continue
        problem = make_problem(case.profile, case.cluster, global_batch_size=case.batch)
        annealer = Annealer.of(problem, chunks=(2, 4))
        assert annealer is not None, "there is no C++ compiler"
        layouts = annealer.search(int(work), seed=seed + 2)
        ratio = simulate(ours, case.profile, case.cluster).step_seconds / (layouts[0].seconds if layouts else math.inf)
        ratios.append(ratio)
        if ratio > 1.01:
            yield Row(case.name, "at most 1.03", f"best takes {ratio:.3f} of the challenger's step", ratio <= 1.03)
    won = sum(ratio > 1.01 for ratio in ratios)
    worst = max(ratios, default=1.0)
    text = f"{won} of {len(ratios)}, the worst by {worst - 1:.1%}; work {work:g} each"
    yield Row("cases won by more than 1%", "at most 2%, none above 3%", text, won <= 0.02 * cases and worst <= 1.03)


def draw_cases(count: int, seed: int, *, unequal: bool = False) -> Iterator[Case]:
    """Yield random cases: the published profiles on clusters of every shape, with equal or unequal devices."""
    draw, known, clusters = random.Random(seed), _profiles(), unequal_clusters() if unequal else _clusters()
    for _ in range(count):
        name, cluster, batch = draw.choice(sorted(known)), draw.choice(sorted(clusters)), draw.choice(BATCHES)
        profile = known[name]
        if unequal and draw.random() < 0.2:
            name, profile = f"{name} with seconds of each kind", measure_kinds(profile, clusters[cluster], draw)
        yield Case(f"{name}, {cluster}, batch {batch}", profile, clusters[cluster], batch)


def _profiles() -> dict[str, Profile]:
    found = {model.title: read_profile(model) for model in (*MODELS, BERT_LARGE)}
    sizes = {"vgg16": 64, "gnmt": 64, "gnmt_large": 64, "resnet50": 128, "alexnet": 256}
    for name, size in sizes.items():
        if (path := PROFILES / "pipedream" / f"{name}.txt").is_file():
            found[f"PipeDream's {name}"] = read_any(path, size, 1.0)
    return found


def _clusters() -> dict[str, Cluster]:
    found = {f"config {letter.upper()} x {n}": config(letter, n) for letter in "abc" for n in (8, 16, 32, 64)}
    found["racks"] = _cluster([1] * 8, 25, {(i, i + 1): 100 for i in range(0, 8, 2)}, between=10)
    found["ring of servers"] = _cluster([2] * 4, 0, {(0, 2): 100, (2, 1): 100, (1, 3): 100, (3, 0): 100}, between=10)
    found["one slow cable"] = _cluster([4] * 4, 0, {(0, 1): 1}, between=25)
    found["unequal servers"] = _cluster([8, 4, 2, 2], 0, {}, between=10)
    found["3 servers of 5"] = _cluster([5] * 3, 0, {}, between=25)
    found["4 GB"] = replace(config("a"), device_memory=4e9)
    return found


def _cluster(sizes: list[int], inside: int, links: dict[tuple[int, int], int], between: int) -> Cluster:
    """Return servers of these sizes; links in Gbps, those inside servers PCI Express where ``inside`` is 0."""
    own = {(f"h{a}", f"h{b}"): _ETHERNET[speed] for (a, b), speed in links.items()}
    servers = tuple(Server(f"h{i}", count) for i, count in enumerate(sizes))
    return Cluster(servers, 16e9, _ETHERNET[inside] if inside else _PCI, _ETHERNET[between], own)


def main(arguments: Sequence[str]) -> int:
    """Print the rows of a run with these options of the command line; return 1 if a figure misses its target."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks challenger")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--work", type=float, default=1e9, help="for each case; 10^7 takes about 0.1 s (default: 1e9)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unequal", action="store_true", help="devices of different kinds")
    missed = 0
    for row in challenge(**vars(parser.parse_args(arguments))):
        print(f"{'ok' if row.ok else 'MISSED':7}{row.figure}: {row.measured} (wanted: {row.wanted})", flush=True)
        missed += not row.ok
    return 1 if missed else 0
