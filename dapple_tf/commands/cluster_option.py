"""``--cluster``: a cluster file, or the name of a preset."""

from __future__ import annotations

from pathlib import Path

from dapple_tf.commands.command import Completed
from dapple_tf.profiler.cluster import Cluster, load_preset

CLUSTER = Completed("cluster", [f"config-{letter}" for letter in "abc"])
"""The type of the option, which the shell completes with the presets and with files."""


def load_cluster(name: str) -> Cluster:
    """Return the cluster in the file ``name``, or the preset (``config-a:8``) if there is no such file."""
    if name.startswith("config-") and not Path(name).exists():
        return load_preset(name)
    return Cluster.load(name)
