"""The files that planning commands read."""

from __future__ import annotations

from pathlib import Path

from profiler.cluster import Cluster
from profiler.importers import read_profile
from profiler.presets import named
from profiler.profile import Profile


def load_profile(path: str, batch_size: int | None = None, size_scale: float = 1.0) -> Profile:
    """A profile from a dapple-profile JSON or a graph.txt."""
    return read_profile(path, batch_size, size_scale)


def load_cluster(name: str) -> Cluster:
    """A cluster from its file, or a preset by name where there is no such file."""
    if name.startswith("config-") and not Path(name).exists():
        return named(name)
    return Cluster.load(name)
