"""Planner "piper": against every configuration, by hand, and its refusals."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dapple_tf as dapple
from dapple_tf.errors import PlanError
from dapple_tf.planner.api import make_problem, run_planner
from dapple_tf.planner.costs import ChainCosts
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.systems.piper import PiperStage, find_configuration, plan_piper
from dapple_tf.plans import Plan
from dapple_tf.profiler.linearise import without_unsplittable_cuts
from tests.dapple_tf.planner.builders import AMPLE, Case, cases, make_cluster, make_profile
from tests.dapple_tf.planner.comparators import all_bounds, compositions
from tests.graph_passes.builders import refused


class Reference:
    """Loads from the profile's layers, one by one (sections 3 and 4, with t = 1)."""

    def __init__(self, problem: PlanningProblem, size: int) -> None:
        self.problem, self.size = problem, size
        self.positions = without_unsplittable_cuts(problem.chain).positions
        cluster = problem.cluster
        homes = itertools.combinations(range(cluster.devices), 2)
        links = [cluster.link(cluster.homes[a], cluster.homes[b]).bandwidth for a, b in homes]
        self.bandwidth = min(links, default=math.inf)

    def crossing(self, position: int) -> float:
        profile = self.problem.profile
        sources = {a for a, b in profile.links if a < position <= b}
        return sum(profile.layers[a].activation_bytes for a in sources) * self.size / profile.batch_size

    def load(self, stage: PiperStage, s: int) -> float:
        """Return the load; infinity if it does not fit. ``s``: devices of this stage and of later ones."""
        profile, problem, d = self.problem.profile, self.problem, stage.degree
        if d > self.size or (problem.recompute and not stage.recompute):
            return math.inf
        first, end = self.positions[stage.first], self.positions[stage.end]
        own = range(first, end)
        forward, backward = profile.forward_seconds(self.size / d), profile.backward_seconds(self.size / d)
        m, scale = problem.global_batch_size // self.size, self.size / profile.batch_size / d
        weights = sum(profile.layers[i].parameter_bytes for i in own)
        stash = sum(profile.layers[i].stash_bytes for i in own) * scale
        working = max(profile.working_bytes()[i] for i in own) * scale
        held = min(math.ceil(s / d), m)
        if stage.recompute:
            working, stash = working + stash, self.crossing(first) / d
        if weights * (2 + problem.optimizer_slots) + working + held * stash > problem.cluster.device_memory:
            return math.inf
        compute = sum(forward[i] + backward[i] + stage.recompute * forward[i] for i in own)
        sent = 2 * (self.crossing(first) + self.crossing(end)) / d
        reduced = 2 * (d - 1) / d * weights / m
        return float(compute + (sent + reduced) / self.bandwidth)

    def largest(self, stages: tuple[PiperStage, ...]) -> float:
        """Return the maximum load."""
        used = [stage.degree for stage in stages]
        return max(self.load(stage, sum(used[i:])) for i, stage in enumerate(stages))

    def least(self) -> float:
        """Return the least maximum load of all cuts, degrees and choices of re-computation."""
        found, blocks, devices = [math.inf], len(self.positions) - 1, self.problem.cluster.devices
        for count in range(1, min(blocks, devices) + 1):
            for bounds, used in itertools.product(all_bounds(blocks, count), range(count, devices + 1)):
                for degrees in compositions(used, count):
                    loads = []
                    for i, ((a, b), d) in enumerate(zip(itertools.pairwise(bounds), degrees, strict=True)):
                        # A stage's choice of re-computation concerns no other stage.
                        loads.append(min(self.load(PiperStage(a, b, d, c), sum(degrees[i:])) for c in (False, True)))
                    found.append(max(loads))
        return min(found)


@given(cases(largest=5), st.data())
def test_no_configuration_has_a_smaller_maximum_load(case: Case, data: st.DataObject) -> None:
    problem = make_problem(case.profile, case.cluster, global_batch_size=case.batch, **case.options)
    size = data.draw(st.sampled_from(problem.micro_batch_sizes))
    reference, chain = Reference(problem, size), without_unsplittable_cuts(problem.chain)
    found = find_configuration(ChainCosts(problem, chain, size))
    if found:
        assert [stage.first for stage in found] == [0, *(stage.end for stage in found[:-1])]
        assert found[-1].end == len(reference.positions) - 1
    largest = reference.largest(found) if found else math.inf
    assert largest == pytest.approx(reference.least(), rel=1e-9, abs=1e-9)


LAYER = (1, 2, 1, 8, 4)


def plan(*servers: int, memory: float = AMPLE, layers: int = 4, **options: Any) -> Plan:
    profile = make_profile(*[LAYER] * layers)
    cluster = make_cluster(*servers, memory=memory, between=(1000, 0), inside=(1000, 0))
    options = {"global_batch_size": 16, "micro_batch_size": 4, "planner": "piper", **options}
    return dapple.plan(profile, cluster, **options)


def test_only_stages_that_lack_memory_recompute() -> None:
    """Weights take 2 x 16 bytes, working sets 2; the first stage holds two micro-batches, the second one."""
    found = plan(1, 1)
    assert (found.starts, found.recompute, found.schedule) == ((2,), False, "dapple-a")
    # 32 + 2 + 2 x 16 bytes are too much for the first stage; 32 + 2 + 16 are not for the second.
    found = plan(1, 1, memory=54)
    assert (found.starts, found.recompute) == ((2,), (0, 1))
    # What is re-computed is stashed once, beside the inputs of micro-batches: all stages do it.
    assert plan(1, 1, memory=54, recompute=True).recompute is True


def test_the_prediction_counts_what_is_computed_again() -> None:
    kept, again = plan(1, 1), plan(1, 1, memory=54)
    assert again.predicted["step_seconds"] > kept.predicted["step_seconds"]
    assert max(again.predicted["peak_memory_bytes"]) <= 54 < max(kept.predicted["peak_memory_bytes"])


def test_of_equal_loads_the_fewest_devices_are_used() -> None:
    # One sample cannot be shared by replicas, and the second layer takes no less than both on two devices.
    profile = make_profile((0, 0, 0, 1, 1), (2, 4, 0, 1, 1))
    problem = make_problem(profile, make_cluster(1, 1, 1), global_batch_size=1)
    result = run_planner(problem, "piper")
    assert result.chosen.device_count == 1


def test_a_model_that_does_not_fit_has_no_plan() -> None:
    profile = make_profile((1, 2, 1, 8, 100))
    problem = make_problem(profile, make_cluster(1, 1, memory=300), global_batch_size=4)
    assert plan_piper(problem) is None


def test_more_devices_than_it_is_for_are_refused() -> None:
    with refused(PlanError, "4097 devices", "planner 'best'"):
        plan(*[1] * 4097)
