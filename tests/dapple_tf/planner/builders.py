"""Profiles, clusters and planning problems for the planners' tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from dapple_tf.profiler.cluster import Cluster, Link, Server
from dapple_tf.profiler.profile import LayerCost, Profile, Timing

TOPOLOGIES = ((6,), (3, 3), (2, 2, 2), (1, 1, 1, 1, 1, 1))
AMPLE = 1e9


class Case(NamedTuple):
    """Arguments of ``make_problem``; ``batch``: samples of the global batch."""

    profile: Profile
    cluster: Cluster
    batch: int
    options: dict[str, bool]


def make_profile(*layers: tuple[float, ...], **fields: Any) -> Profile:
    """Return a profile of a batch of 4 with layers of (forward, backward, activation, stash, parameters)."""
    costs = tuple(LayerCost(f"layer{i}", *layer, *[0.0] * (5 - len(layer))) for i, layer in enumerate(layers))
    return Profile(**{"model": "net", "batch_size": 4, "device": "test", "layers": costs, **fields})


def make_cluster(
    *servers: int,
    memory: float = AMPLE,
    inside: tuple[float, float] = (10.0, 0.0),
    between: tuple[float, float] = (1.0, 0.0),
    links: dict[tuple[str, str], tuple[float, float]] | None = None,
) -> Cluster:
    """Return servers s0, s1 ... with these numbers of devices; links are (bytes per second, seconds)."""
    return Cluster(
        tuple(Server(f"s{i}", count) for i, count in enumerate(servers)),
        memory,
        Link(*inside),
        Link(*between),
        {pair: Link(*link) for pair, link in (links or {}).items()},
    )


def figures(largest: float) -> st.SearchStrategy[float]:
    """Draw whole numbers, with which plans often tie, or any numbers."""
    return st.one_of(st.integers(0, int(largest)).map(float), st.floats(0, largest, allow_subnormal=False))


@st.composite
def layers(draw: st.DrawFn, free: bool) -> tuple[float, ...]:
    """Draw the costs of one layer: ordinary, heavy, or (if ``free``) without any work."""
    kind = draw(st.sampled_from(["some", "some", "some", "heavy", "free"]))
    if kind == "free" and free:
        return (0.0, 0.0, draw(figures(10)), 0.0, 0.0)
    most = (50, 50, 20, 10, 200) if kind == "heavy" else (10, 20, 10, 10, 10)
    found = tuple(draw(figures(largest)) for largest in most)
    return found if any(found[:2] + found[3:]) else (1.0, *found[1:])


@st.composite
def profiles(draw: st.DrawFn, largest: int, free: bool) -> Profile:
    """Draw chains and a few DAGs, with positions that cannot be cut or split, profiled at one batch size or two."""
    n = draw(st.integers(1, largest))
    found = [draw(layers(free)) for _ in range(n)]
    some = st.sets(st.integers(1, n - 1), max_size=2).map(sorted).map(tuple) if n > 1 else st.just(())
    fields: dict[str, Any] = {"uncuttable": draw(some), "unsplittable": draw(some)}
    if n > 2 and draw(st.booleans()):
        chain = {(i, i + 1) for i in range(n - 1)}
        fields["edges"] = tuple(sorted(chain | {(0, n - 1), (draw(st.integers(0, n - 2)), n - 1)}))
    batch_size = draw(st.sampled_from([1, 2, 4, 6]))
    if draw(st.booleans()):
        more = [tuple(draw(figures(60)) * (layer[i] > 0) for layer in found) for i in range(2)]
        fields["timings"] = (Timing(3 * batch_size, *more),)
    return make_profile(*found, batch_size=batch_size, **fields)


@st.composite
def clusters(draw: st.DrawFn, tight: bool, topologies: Sequence[tuple[int, ...]] = TOPOLOGIES) -> Cluster:
    """Draw clusters with slow and fast links, latency, and sometimes a pair of servers with a link of its own."""
    topology = draw(st.sampled_from(topologies))
    latency = draw(st.sampled_from([0.0, 0.0, 1.0, 4.0]))
    memory = draw(st.one_of(st.just(AMPLE), figures(800).map(lambda some: some + 20))) if tight else AMPLE
    speeds = st.sampled_from([0.5, 2.0, 10.0, 100.0])
    links = {}
    if len(topology) > 1 and draw(st.booleans()):
        links[("s0", "s1")] = (draw(speeds), latency)
    inside, between = (draw(speeds), latency / 10), (draw(speeds), latency)
    return make_cluster(*topology, memory=memory, inside=inside, between=between, links=links)


@st.composite
def cases(
    draw: st.DrawFn,
    largest: int = 5,
    free: bool = True,
    tight: bool = True,
    batches: Sequence[int] = (1, 2, 3, 4, 6, 8, 12),
) -> Case:
    """Draw planning problems that are small enough to enumerate all plans."""
    free = free and draw(st.booleans())
    options = {name: draw(st.booleans()) for name in ("recompute", "overlap")}
    profile, cluster = draw(profiles(largest, free)), draw(clusters(tight))
    return Case(profile, cluster, draw(st.sampled_from(batches)), options)


@st.composite
def busy_cases(draw: st.DrawFn) -> Case:
    """Draw problems whose best plans often send several stages' tensors through one network interface at one time."""
    whole = [st.integers(low, high).map(float) for low, high in ((1, 4), (2, 8), (2, 12), (0, 4), (50, 200))]
    profile = make_profile(*draw(st.lists(st.tuples(*whole), min_size=3, max_size=5)))
    servers = draw(st.sampled_from([(1, 1, 1), (1, 1, 1, 1), (2, 2), (2, 1, 1)]))
    between = draw(st.sampled_from([2.0, 4.0, 8.0])), draw(st.sampled_from([0.0, 0.25]))
    cluster = make_cluster(*servers, inside=(20.0, 0.0), between=between)
    return Case(profile, cluster, draw(st.sampled_from([8, 16])), {"recompute": False, "overlap": draw(st.booleans())})
