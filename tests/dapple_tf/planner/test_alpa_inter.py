"""Planner "alpa-inter": against every slicing and choice of submeshes, by hand, and its refusals."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dapple_tf as dapple
from dapple_tf.errors import PlanError
from dapple_tf.planner.api import make_problem
from dapple_tf.planner.costs import ChainCosts
from dapple_tf.planner.systems.alpa import MeshCosts, MeshStage, list_submeshes, mesh_costs, slice_operators
from dapple_tf.plans import Plan
from dapple_tf.profiler.cluster import Cluster
from tests.dapple_tf.planner.builders import figures, make_cluster, make_profile
from tests.dapple_tf.planner.comparators import all_bounds
from tests.graph_passes.builders import refused


def plan(cluster: Cluster, *layers: tuple[float, ...], batch: int = 4, size: int = 1) -> Plan:
    profile = make_profile(*layers, batch_size=1)
    return dapple.plan(profile, cluster, global_batch_size=batch, micro_batch_size=size, planner="alpa-inter")


# --- against all slicings


class Instance(NamedTuple):
    """Seconds, fixed and stashed bytes of each operator and submesh, [submeshes][operators]."""

    seconds: list[list[float]]
    fixed: list[list[float]]
    stash: list[list[float]]
    sizes: tuple[int, ...]
    devices: int
    micro_batches: int
    memory: float

    def arrays(self) -> MeshCosts:
        tables = [self._runs(rows) for rows in (self.seconds, self.fixed, self.stash)]
        return MeshCosts(*tables, np.array(self.sizes), self.devices, self.micro_batches, self.memory)

    @staticmethod
    def _runs(rows: list[list[float]]) -> np.ndarray:
        k = len(rows[0])
        found = np.zeros((len(rows), k, k + 1))
        for c, i, j in itertools.product(range(len(rows)), range(k), range(k + 1)):
            found[c, i, j] = sum(rows[c][i:j])
        return found

    def latency(self, stages: tuple[MeshStage, ...]) -> float:
        """Return T of stages; infinity where memory or the number of devices is wrong."""
        if sum(self.sizes[c] for _, _, c in stages) != self.devices:
            return float("inf")
        for index, (i, j, c) in enumerate(stages):
            held = min(len(stages) - index, self.micro_batches)
            if sum(self.fixed[c][i:j]) + held * sum(self.stash[c][i:j]) > self.memory:
                return float("inf")
        t = [sum(self.seconds[c][i:j]) for i, j, c in stages]
        return sum(t) + (self.micro_batches - 1) * max(t)

    def least(self) -> float:
        """Return the least T of all slicings and submeshes."""
        k, found = len(self.seconds[0]), [float("inf")]
        for s in range(1, min(k, self.devices) + 1):
            for bounds in all_bounds(k, s):
                for meshes in itertools.product(range(len(self.sizes)), repeat=s):
                    cut = itertools.pairwise(bounds)
                    found.append(self.latency(tuple(MeshStage(a, b, c) for (a, b), c in zip(cut, meshes, strict=True))))
        return min(found)


@st.composite
def drawn_instances(draw: st.DrawFn) -> Instance:
    k, (sizes, devices) = draw(st.integers(1, 5)), draw(st.sampled_from([((1,), 3), ((1, 2, 4), 4), ((1, 2, 4, 8), 8)]))

    def rows(largest: float) -> list[list[float]]:
        return [[draw(figures(largest)) for _ in range(k)] for _ in sizes]

    memory = draw(st.sampled_from([1e9, 20.0, 40.0]))
    return Instance(rows(10), rows(10), rows(5), sizes, devices, draw(st.sampled_from([1, 2, 4, 64])), memory)


@given(drawn_instances())
def test_no_slicing_has_a_smaller_latency(instance: Instance) -> None:
    found, least = slice_operators(instance.arrays()), instance.least()
    if found:
        assert found[0].first == 0
        assert all(a.end == b.first for a, b in itertools.pairwise(found))
        assert found[-1].end == len(instance.seconds[0])
    assert (instance.latency(found) if found else float("inf")) == pytest.approx(least, rel=1e-9, abs=1e-9)


# --- what it is given


def test_submeshes_and_their_slowest_links() -> None:
    problem = make_problem(make_profile((1, 1)), make_cluster(4, 4, 4), global_batch_size=1)
    meshes = list_submeshes(problem)
    assert meshes.shapes == ((1, 1), (1, 2), (1, 4), (2, 4), (3, 4))
    assert meshes.bandwidths == (float("inf"), 10, 10, 1, 1)
    five = make_problem(make_profile((1, 1)), make_cluster(5, 5), global_batch_size=1)
    assert list_submeshes(five).shapes == ((1, 1), (1, 2), (1, 4), (1, 5), (2, 5))


def test_costs_of_a_run_on_two_devices_by_hand() -> None:
    # Two micro-batches of 4 samples: each device has 2, half of the profile's batch.
    profile = make_profile((1, 3, 2, 4, 10), (2, 4, 0, 6, 20))
    problem = make_problem(profile, make_cluster(2), global_batch_size=8, micro_batch_size=4)
    costs = mesh_costs(ChainCosts(problem, problem.chain, 4), list_submeshes(problem))
    # Half of 10 s, and AllReduce of 30 bytes at 10 bytes/s, 2 (2 - 1) / 2 x 3 s, divided among two micro-batches.
    assert costs.seconds[1, 0, 2] == pytest.approx(5 + 1.5)
    assert costs.fixed_bytes[1, 0, 2] == pytest.approx(30 * 4 + 2 / 2)
    assert costs.stash_bytes[1, 0, 2] == pytest.approx(10 / 2)
    again = make_problem(profile, make_cluster(2), global_batch_size=8, micro_batch_size=4, recompute=True)
    costs = mesh_costs(ChainCosts(again, again.chain, 4), list_submeshes(again))
    assert costs.seconds[1, 1, 2] == pytest.approx((2 + 2 + 4) / 2 + 20 / 10 / 2)
    assert costs.stash_bytes[1, 1, 2] == pytest.approx(2 / 2)
    assert costs.fixed_bytes[1, 1, 2] == pytest.approx(20 * 4 + (2 + 6) / 2)


def test_weights_are_not_replicated_where_links_are_slow_by_hand() -> None:
    # One stage: 6 s / 2 + 100 bytes. Two stages: 3 + 3 + 3 x 3 s.
    found = plan(make_cluster(1, 1), (1, 2, 1, 0, 50), (1, 2, 1, 0, 50), size=1)
    assert (found.replicas, found.schedule) == ((1, 1), "dapple-a")
    found = plan(make_cluster(1, 1), (1, 2, 1, 0, 0), (1, 2, 1, 0, 0), batch=8, size=2)
    assert found.replicas == (2,)


def test_large_submeshes_are_placed_first() -> None:
    # The weights of the first layer are heavy, so the second has both devices of one server, and one more.
    found = plan(make_cluster(2, 2), (1, 2, 1, 0, 500), (4, 8, 1, 0, 0), (1, 2, 1, 0, 500), batch=64, size=4)
    assert [stage.devices for stage in found.stages] == [(2,), (0, 1), (3,)]


def test_a_cluster_that_is_no_mesh_is_refused_with_what_helps() -> None:
    with refused(PlanError, "2, 3 devices", "planner 'best'"):
        plan(make_cluster(2, 3), (1, 2, 1, 0, 0))
    with refused(PlanError, "1025 devices", "planner 'best'"):
        plan(make_cluster(*[1] * 1025), (1, 2, 1, 0, 0))
