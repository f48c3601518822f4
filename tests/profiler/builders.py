"""Profiles and clusters that several tests use."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from dapple_tf.profiler.cluster import Cluster, Link, Server
from dapple_tf.profiler.profile import LayerCost, Profile, Timing

FIGURES = st.integers(0, 10**6).map(float)


def make_layer(name: str = "a", **costs: float) -> LayerCost:
    """A layer with the given costs; the others are 0."""
    zero = dict.fromkeys(
        ("forward_seconds", "backward_seconds", "activation_bytes", "stash_bytes", "parameter_bytes"), 0.0
    )
    return LayerCost(name, **{**zero, **costs})


def make_profile(*layers: LayerCost, **fields: Any) -> Profile:
    """A profile of batch 8."""
    return Profile(**{"model": "m", "batch_size": 8, "device": "cpu", "layers": layers, **fields})


def make_cluster(**fields: Any) -> Cluster:
    """Two servers of two devices."""
    base = {
        "servers": (Server("a", 2), Server("b", 2)),
        "device_memory": 16e9,
        "intra_server": Link(130e9, 5e-6),
        "inter_server": Link(3.125e9, 20e-6),
    }
    return Cluster(**{**base, **fields})


@st.composite
def profiles(draw: st.DrawFn, largest: int = 7) -> Profile:
    """Profiles of DAGs, with free layers, further batch sizes, and positions that cannot be cut or split."""
    n = draw(st.integers(1, largest))
    layers = []
    for index in range(n):
        figures = [0.0] * 5 if draw(st.booleans()) else [draw(FIGURES) for _ in range(5)]
        if figures == [0.0] * 5:
            figures[2] = draw(FIGURES)  # a view has an output
        layers.append(LayerCost(f"layer{index}", *figures))
    edges = {(draw(st.integers(0, reader - 1)), reader) for reader in range(1, n)}
    for _ in range(draw(st.integers(0, 3)) if n > 1 else 0):
        reader = draw(st.integers(1, n - 1))
        edges.add((draw(st.integers(0, reader - 1)), reader))
    batch_size = draw(st.integers(1, 64))
    sizes = sorted(draw(st.sets(st.integers(1, 128).filter(lambda size: size != batch_size), max_size=3)))
    timings = tuple(Timing(size, *(tuple(draw(FIGURES) for _ in range(n)) for _ in range(2))) for size in sizes)
    some = st.sets(st.integers(1, n - 1)).map(sorted).map(tuple) if n > 1 else st.just(())
    return make_profile(
        *layers,
        batch_size=batch_size,
        edges=draw(st.sampled_from([None, tuple(sorted(edges))])),
        timings=timings,
        uncuttable=draw(some),
        unsplittable=draw(some),
    )
