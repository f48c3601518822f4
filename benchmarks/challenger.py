"""A challenger of planner "best": simulated annealing over cuts, device sets, M and schedule, for seconds a case.

It shares no code with the planners. The simulator's costs and discrete-event engine give the step of a plan, and what
is compared in the end is ``dapple.simulate`` of both plans. ``python -m benchmarks challenger`` is a short run,
``python -m benchmarks challenger --cases 100 --seconds 30`` a whole one. With ``--unequal`` the devices of each cluster
are of different kinds, and a round starts from the plan of "best" itself.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from benchmarks.common import Row
from benchmarks.published import BERT_LARGE, MODELS, PROFILES, find_missing_profiles, read_profile
from benchmarks.unequal_clusters import measure_kinds, unequal_clusters
from dapple_tf.errors import PlanError
from dapple_tf.planner.api import plan
from dapple_tf.plans import Plan, StagePlan
from dapple_tf.simulator.contention import Flows, plan_flows
from dapple_tf.simulator.costs import stage_costs
from dapple_tf.simulator.engine import step_seconds
from dapple_tf.simulator.named_orders import named_order
from dapple_tf.simulator.rings import make_rings
from dapple_tf.simulator.shared_engine import shared_step_seconds
from dapple_tf.simulator.simulate import simulate
from dapple_tf.timeline.stage_costs import StageCosts
from graph_passes.schedules.spec import warm_up
from profiler.cluster import Cluster, Link, Server, config
from profiler.importers import read_profile as read_any
from profiler.profile import Profile

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
    yield from challenge(cases=20, seconds=5.0, seed=0)


def challenge(cases: int, seconds: float, seed: int, *, unequal: bool = False) -> Iterator[Row]:
    """Yield a row for each of ``cases`` random cases that annealing for ``seconds`` wins by more than 1%, and a sum.

    ``unequal``: on devices of different kinds.
    """
    if why := find_missing_profiles():
        yield Row("challenger", "at most 2 of 100 cases won by more than 1%", why, True)
        return
    ratios = []
    for case in draw_cases(cases, seed, unequal=unequal):
        try:
            ours = plan(case.profile, case.cluster, global_batch_size=case.batch, chunks=())
        except PlanError:  # nothing fits
            continue
        found = anneal(case, seconds, seed, ours if unequal else None)
        ratio = simulate(ours, case.profile, case.cluster).step_seconds / (
            simulate(found, case.profile, case.cluster).step_seconds if found else math.inf
        )
        ratios.append(ratio)
        if ratio > 1.01:
            yield Row(case.name, "at most 1.03", f"best takes {ratio:.3f} of the challenger's step", ratio <= 1.03)
    won = sum(ratio > 1.01 for ratio in ratios)
    worst = max(ratios, default=1.0)
    text = f"{won} of {len(ratios)}, the worst by {worst - 1:.1%}; {seconds:g} s each"
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


def anneal(case: Case, seconds: float, seed: int, start: Plan | None = None) -> Plan | None:
    """Return the fastest plan that annealing finds within ``seconds`` of processor time; None if none fits.

    ``start``: where one round begins, beside those at random.
    """
    draw, search = random.Random(seed), _Challenge(case)
    best: tuple[float, Plan | None] = (math.inf, None)
    rounds = 4
    for turn in range(rounds):
        begin = time.process_time()
        now = search.start(draw) if turn < rounds - 1 or best[1] is None else best[1]
        if start is not None and turn == rounds - 2 and start.recompute is False:
            now = start
        current = search.simulate(now)
        while (done := (time.process_time() - begin) * rounds / seconds) < 1:
            trial = search.move(now, draw, draw.choice((1, 1, 1, 2, 3)))
            if trial is None:
                continue
            found = search.simulate(trial)
            temperature = 0.1 * 0.005**done
            worse = (found[0] / current[0] - 1) if found[0] < math.inf else math.inf
            if worse <= 0 or current[0] == math.inf or draw.random() < math.exp(-min(worse / temperature, 700)):
                now, current = trial, found
                if current[0] < best[0]:
                    best = current[0], replace(now, schedule=current[1])
    return best[1]


class _Challenge:
    """Plans of a case: a random one to start from, changes, and simulated steps."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.cuts = list(case.profile.positions())
        self.unsplittable = set(case.profile.unsplittable)
        self.sizes = [b for b in range(1, case.batch + 1) if case.batch % b == 0]
        self.seen: dict[tuple[object, ...], tuple[float, str]] = {}
        own = {kind: case.profile.of_kind(kind, case.cluster.kind_speed(kind)) for kind in case.cluster.device_kinds}
        self.device_seconds = {k: p.forward_seconds(1) + p.backward_seconds(1) for k, p in own.items()}

    def start(self, draw: random.Random) -> Plan:
        """Return a pipeline of a random number of stages with equally many devices each, dealt in order or in turn."""
        cluster, devices = self.case.cluster, self.case.cluster.devices
        count = draw.randint(1, min(devices, len(self.cuts) + 1, 16))
        each = devices // count
        fitting = [b for b in self.sizes if b >= each] or self.sizes[-1:]
        order = list(range(devices))
        if not cluster.is_uniform and (sign := draw.choice((-1, 0, 1))):
            order.sort(key=lambda d: sign * (cluster.speed_of(d) or 1.0))
        work = np.cumsum(self.case.profile.forward_seconds(1) + self.case.profile.backward_seconds(1))
        in_turn = draw.random() < 0.5
        sets = [order[s::count] if in_turn else order[s * each : (s + 1) * each] for s in range(count)]
        sets = [own[: max(1, each)] for own in sets]
        speeds = np.cumsum([sum(cluster.speed_of(d) or 1.0 for d in own) for own in sets])
        cuts: list[int] = []
        for stage in range(1, count):
            left = [p for p in self.cuts if not cuts or p > cuts[-1]]
            if not left:
                break
            cuts.append(min(left, key=lambda p: abs(work[p - 1] - work[-1] * speeds[stage - 1] / speeds[-1])))
        return self._plan(cuts, [tuple(own) for own in sets[: len(cuts) + 1]], draw.choice(fitting))

    def move(self, plan: Plan, draw: random.Random, changes: int) -> Plan | None:
        """Return the plan after some random changes at once; None where one is impossible."""
        cuts, sets = list(plan.starts), [list(stage.devices) for stage in plan.stages]
        size = plan.micro_batch_size
        for _ in range(changes):
            stage = draw.randrange(len(sets))
            match draw.randrange(7):
                case 0:  # a cut
                    if not cuts:
                        return None
                    at = draw.randrange(len(cuts))
                    index = self.cuts.index(cuts[at]) + draw.choice((-3, -2, -1, -1, 1, 1, 2, 3))
                    if not 0 <= index < len(self.cuts):
                        return None
                    cuts[at] = self.cuts[index]
                case 1:  # devices to another stage, or to none
                    to = draw.randrange(-1, len(sets))
                    count = draw.choice((1, 1, 2, 4))
                    if to == stage or len(sets[stage]) <= count:
                        return None
                    moved = draw.sample(sets[stage], count)
                    sets[stage] = [d for d in sets[stage] if d not in moved]
                    if to >= 0:
                        sets[to] += moved
                case 2:  # unused devices
                    unused = set(range(self.case.cluster.devices)).difference(*sets)
                    if not unused:
                        return None
                    sets[stage] += draw.sample(sorted(unused), draw.randint(1, len(unused)))
                case 3:  # two stages exchange devices
                    other = draw.randrange(len(sets))
                    a, b = draw.randrange(len(sets[stage])), draw.randrange(len(sets[other]))
                    sets[stage][a], sets[other][b] = sets[other][b], sets[stage][a]
                case 4:  # two stages of one
                    bounds = [0, *cuts, len(self.case.profile.layers)]
                    inside = [p for p in self.cuts if bounds[stage] < p < bounds[stage + 1]]
                    if not inside or len(sets[stage]) < 2:
                        return None
                    cuts.insert(stage, draw.choice(inside))
                    share = draw.randint(1, len(sets[stage]) - 1)
                    own = draw.choice((sorted(sets[stage]), draw.sample(sets[stage], len(sets[stage]))))
                    sets[stage : stage + 1] = [own[:share], own[share:]]
                case 5:  # one stage of two
                    if stage + 1 == len(sets):
                        return None
                    cuts.pop(stage)
                    sets[stage : stage + 2] = [sets[stage] + sets[stage + 1]]
                case _:
                    size = draw.choice(self.sizes)
        if sorted(set(cuts)) != cuts or max(map(len, sets)) > size:
            return None
        if any(p in self.unsplittable and len(a) != len(b) for p, a, b in zip(cuts, sets, sets[1:], strict=False)):
            return None
        return self._plan(cuts, [tuple(sorted(own)) for own in sets], size)

    def simulate(self, plan: Plan) -> tuple[float, str]:
        """Return the least seconds of a step over the policies, and the schedule; infinite if it does not fit."""
        key = (plan.stages, plan.micro_batch_size)
        if key not in self.seen:
            costs = stage_costs(plan, self.case.profile, self.case.cluster)
            flows = None if self.case.cluster.is_uniform else plan_flows(plan.stages, self.case.cluster)
            meets = all(
                a.row_shares == b.row_shares and a.replicas == b.replicas
                for a, b in pairwise(plan.stages)
                if b.first_layer in self.unsplittable
            )
            found = [self._seconds(policy, plan, costs, flows) for policy in POLICIES] if meets else []
            self.seen[key] = min(found, default=(math.inf, POLICIES[0]))
        return self.seen[key]

    def _seconds(
        self, policy: str, plan: Plan, costs: tuple[StageCosts, ...], flows: Flows | None
    ) -> tuple[float, str]:
        """Return the seconds under a policy, and the schedule's name; with contention where ``flows`` are given."""
        micro_batches = plan.micro_batches
        held, limit = warm_up(policy, len(costs), micro_batches), micro_batches
        for k, cost, stage in zip(held, costs, plan.stages, strict=True):
            for device, part in zip(stage.devices, stage.fractions, strict=True):
                share = part / max(stage.fractions)
                room = self.case.cluster.memory_of(device) - cost.fixed_bytes - cost.working_bytes * share
                if room < k * cost.stash_bytes * share:
                    limit = min(limit, max(0, int(room / cost.stash_bytes / share)))
        if limit < 1 or (policy == "gpipe" and limit < micro_batches):
            return math.inf, policy
        name = policy if max(held) <= limit else f"{policy}:D={limit}"
        order = named_order(name, len(costs), micro_batches).order
        forward, backward, send, exposed = np.array(
            [(c.forward_seconds, c.backward_seconds, c.send_forward_seconds, c.exposed_seconds) for c in costs]
        ).T.copy()
        if flows is not None and flows.directions:
            rings = make_rings(costs)
            end, _ = shared_step_seconds(
                order, forward, backward, np.zeros(0), send, send, rings, flows, math.inf, False
            )
            return float(end), name
        return float(step_seconds(order, forward, backward, np.zeros(0), send, send, exposed)), name

    def _plan(self, cuts: list[int], sets: list[tuple[int, ...]], size: int) -> Plan:
        bounds = [0, *cuts, len(self.case.profile.layers)]
        stages = tuple(self._stage(a, b, own, size) for a, b, own in zip(bounds, bounds[1:], sets, strict=False))
        batch = self.case.batch
        return Plan(self.case.profile.model, "challenger", batch, size, batch // size, "dapple-a", False, stages)

    def _stage(self, first: int, end: int, devices: tuple[int, ...], size: int) -> StagePlan:
        """Return a stage whose devices take whole rows, each next one where it ends earliest."""
        if self.case.cluster.is_uniform:
            return StagePlan(first, end - 1, devices)
        seconds = [self.device_seconds[self.case.cluster.kind_of(d)][first:end].sum() for d in devices]
        if len(set(seconds)) == 1 or not min(seconds):
            return StagePlan(first, end - 1, devices)
        rows = [int(size / second / sum(1 / other for other in seconds)) for second in seconds]
        while sum(rows) < size:
            rows[min(range(len(rows)), key=lambda i: (rows[i] + 1) * seconds[i])] += 1
        own = [(device, float(row)) for device, row in zip(devices, rows, strict=True) if row]
        used, shares = zip(*own, strict=True)
        return StagePlan(first, end - 1, used, shares if len(set(shares)) > 1 else None)


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
    parser.add_argument("--seconds", type=float, default=30.0, help="processor time for each case (default: 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unequal", action="store_true", help="devices of different kinds")
    missed = 0
    for row in challenge(**vars(parser.parse_args(arguments))):
        print(f"{'ok' if row.ok else 'MISSED':7}{row.figure}: {row.measured} (wanted: {row.wanted})", flush=True)
        missed += not row.ok
    return 1 if missed else 0
