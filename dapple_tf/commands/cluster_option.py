"""``--cluster``: a cluster file, or the name of a preset."""

from __future__ import annotations

from pathlib import Path

from dapple_tf.commands.command import Completed
from dapple_tf.errors import ClusterError
from dapple_tf.profiler.cluster import Cluster, load_preset

CLUSTER = Completed("cluster", [f"config-{letter}" for letter in "abc"])
"""The type of the option, which the shell completes with the presets and with files."""


def load_cluster(name: str) -> Cluster:
    """Return the cluster in the file ``name``, or the preset (``config-a:8``) if there is no such file.

    Raises ClusterError where there is neither.
    """
    if Path(name).exists():
        return Cluster.load(name)
    if name.startswith("config-"):
        return load_preset(name)
    raise ClusterError(f"--cluster {name}: there is no such file; presets are such as config-a:8")
