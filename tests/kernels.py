"""List the kernels that TensorFlow runs in a call, with their times, as its profiler sees them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2


@dataclass(frozen=True, order=True)
class Kernel:
    """``begin`` and ``end`` in nanoseconds; ``name`` is the node's, with its function's where that is not inlined."""

    begin: float
    end: float
    name: str
    op: str


def run_kernels(work: Callable[[], Any]) -> list[Kernel]:
    """The kernels that ``work`` runs, in the order of their beginnings."""
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            work()
        (path,) = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
    found = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name, colon, op = plane.event_metadata[event.metadata_id].name.rpartition(":")
                begin = line.timestamp_ns + event.offset_ps / 1e3
                if colon:
                    found.append(Kernel(begin, begin + event.duration_ps / 1e3, name, op))
    return sorted(found)
