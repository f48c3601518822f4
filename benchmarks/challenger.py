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
from dapple_tf.errors import PlanError
from dapple_tf.planner.api import make_problem, plan
from dapple_tf.planner.search.annealer import Annealer
from dapple_tf.profiler.cluster import Cluster, DeviceKind, Link, Server, config
from dapple_tf.profiler.importers import read_profile as read_any
from dapple_tf.profiler.profile import KindSeconds, Profile
from dapple_tf.simulator.simulate import simulate

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
    draw, known, clusters = random.Random(seed), _profiles(), _unequal_clusters() if unequal else _clusters()
    for _ in range(count):
        name, cluster, batch = draw.choice(sorted(known)), draw.choice(sorted(clusters)), draw.choice(BATCHES)
        profile = known[name]
        if unequal and draw.random() < 0.2:
            name, profile = f"{name} with seconds of each kind", _measure_kinds(profile, clusters[cluster], draw)
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


# --- Clusters of devices of different kinds, and profiles with seconds of each kind

_SPEEDS = {"V100": 1.0, "P100": 0.6, "T4": 0.4, "K80": 0.05}
_V, _T = ("V100", 4), ("T4", 4)
_HALF = [("V100", 2), ("T4", 2)]


def _unequal_clusters() -> dict[str, Cluster]:
    """Return clusters of 4 to 32 devices by name: kinds by server and within servers, little memory, racks."""
    return {
        "2 servers of 4 V100, 2 of 4 T4": _servers([[_V], [_V], [_T], [_T]]),
        "2 servers of 4 V100, 2 of 4 T4, 10 Gbps": _servers([[_V], [_V], [_T], [_T]], between=10),
        "3 servers of 4 T4, 1 of 4 V100": _servers([[_T], [_T], [_T], [_V]]),
        "4 servers of 2 V100 and 2 T4": _servers([_HALF] * 4),
        "2 servers of 2 V100 and 2 T4, 10 Gbps": _servers([_HALF] * 2, between=10),
        "4 servers of 3 V100 and 1 T4, 100 Gbps": _servers([[("V100", 3), ("T4", 1)]] * 4, between=100),
        "4 servers of 4, T4 of 4 GB": _servers([[_V], [_T], [_V], [_T]], memory={"T4": 4e9}),
        "4 servers of 2 V100 and 2 T4 of 8 GB": _servers([_HALF] * 4, memory={"T4": 8e9}),
        "2 servers of 2 V100 of 8 GB and 2 T4 of 4 GB": _servers([_HALF] * 2, memory={"V100": 8e9, "T4": 4e9}),
        "4 servers of 4, V100 of 4 GB": _servers([[_V], [_T], [_V], [_T]], memory={"V100": 4e9}),
        "3 servers of 5": _servers([[("V100", 5)], [("T4", 5)], [("V100", 3), ("T4", 2)]]),
        "3 servers of 5, three kinds": _servers([[("V100", 5)], [("P100", 5)], [("T4", 5)]]),
        "V100 and very slow K80": _servers([[_V], [("K80", 4)], [_V], [("K80", 4)]]),
        "racks of 2 servers": _servers(
            [[("V100", 2)], [("T4", 2)]] * 4, between=10, links={(i, i + 1): 100 for i in range(0, 8, 2)}
        ),
        "8 servers of 4": _servers([[_V], [_T], *[_HALF] * 2] * 2),
        "4 devices in 1 server": _servers([_HALF]),
    }


def _measure_kinds(profile: Profile, cluster: Cluster, draw: random.Random) -> Profile:
    """Return the profile with seconds of every slower kind, up to 30% off what its speed says, each layer its own."""
    slower = [kind for kind in dict.fromkeys(cluster.device_kinds) if kind is not None and kind != "V100"]
    layers = []
    for layer in profile.layers:
        seconds = {
            kind: KindSeconds(
                *(
                    own / _SPEEDS[kind] * draw.uniform(0.7, 1.3)
                    for own in (layer.forward_seconds, layer.backward_seconds)
                )
            )
            for kind in slower
        }
        layers.append(replace(layer, kinds=seconds))
    return replace(profile, layers=tuple(layers))


def _servers(
    servers: Sequence[Sequence[tuple[str, int]]],
    *,
    between: int = 25,
    memory: dict[str, float] | None = None,
    links: dict[tuple[int, int], int] | None = None,
) -> Cluster:
    """Return servers of these kinds and counts; links in Gbps, PCI Express within servers; 16 GB where not given."""
    named = tuple(Server.of_kinds(f"h{i}", groups) for i, groups in enumerate(servers))
    used = {kind for groups in servers for kind, _ in groups}
    kinds = {kind: DeviceKind((memory or {}).get(kind, 16e9), _SPEEDS[kind]) for kind in used}
    own = {(f"h{a}", f"h{b}"): _ETHERNET[speed] for (a, b), speed in (links or {}).items()}
    return Cluster(named, None, _PCI, _ETHERNET[between], own, kinds=kinds)
