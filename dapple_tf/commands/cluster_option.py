"""The cluster that a planning command names."""

from __future__ import annotations

from pathlib import Path

from profiler.cluster import Cluster
from profiler.presets import load_preset


def load_cluster(name: str) -> Cluster:
    """A cluster from its file, or a preset by name where there is no such file."""
    if name.startswith("config-") and not Path(name).exists():
        return load_preset(name)
    return Cluster.load(name)
