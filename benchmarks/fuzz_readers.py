"""The readers of this project: what each reads, and the errors that it is documented to raise."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapple_tf.errors import ClusterError, ProfileError, ScheduleError, TextError


@dataclass(frozen=True)
class Reader:
    """``read`` takes data and a file that holds it, and raises ``errors`` where ``seeds`` have been damaged."""

    seeds: Sequence[bytes]
    read: Callable[[bytes, Path], object]
    errors: tuple[type[Exception], ...]


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


_LAYER = {"name": "a", "forward_seconds": 1, "backward_seconds": 2, "activation_bytes": 3, "stash_bytes": 4}
_PROFILE = _json(
    format="dapple-profile/1",
    model="m",
    batch_size=8,
    device="cpu",
    edges=[[0, 1]],
    uncuttable=[1],
    error=0.1,
    layers=[{**_LAYER, "parameter_bytes": 5}, {**_LAYER, "name": "b", "parameter_bytes": 0, "weights_seconds": 1}],
    timings=[{"batch_size": 4, "forward_seconds": [1, 1], "backward_seconds": [1, 2]}],
)
_PLAN: Mapping[str, Any] = {
    "format": "dapple-plan/1",
    "model": "m",
    "planner": "dp",
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "micro_batches": 4,
    "schedule": "dapple-a:D=2",
    "recompute": [0],
    "predicted": {"step_seconds": 1},
    "stages": [{"first_layer": i, "last_layer": i, "devices": [i]} for i in range(2)],
}
_CLUSTER = b"""format: dapple-cluster/1
device_memory: 16GB
servers: [{name: a, devices: 2}, {name: b, devices: 2}]
intra_server: &link {bandwidth: 130GB/s, latency: 5us}
inter_server: {bandwidth: 25Gbps, latency: 20us}
links: [{between: [a, b], <<: *link}]
"""
_GRAPH = b"""\
node1 -- Input0 -- forward_compute_time=0.0, backward_compute_time=0, activation_size=1.0, parameter_size=0.0
node2 -- Conv2d(3, 64) -- forward_compute_time=1.5, backward_compute_time=2e1, activation_size=[3; 4], parameter_size=9
\tnode1 -- node2
"""
_SPAN = {"start": 0.0, "end": 1.5}
_TRACE = _json(
    traceEvents=[],
    dapple={
        "format": "dapple-timeline/1",
        "title": "t",
        "measured": {
            "actions": [
                {"stage": s, "kind": "F", "micro_batch": 0, "replica": 0, "device": "d", **_SPAN} for s in range(2)
            ],
            "transfers": [{"source": 0, "target": 1, "micro_batch": 0, **_SPAN}],
            "stage_events": [{"kind": "update", "stage": 0, "replica": 0, "device": "d", **_SPAN}],
        },
        "planned_seconds": 1.0,
    },
)
_TEXT = b"""graph step
inputs %x
%stage0/forward = MatMul(%x:0, %w:0) {transpose_a=False, shape=shape([2, None])} -> (float32[?,8]) @'CPU:0' !read
%b = Add(%x:0) ^%stage0/forward 'order'
outputs %b:0
end
"""


def _checkpoint_seed() -> bytes:
    content: dict[str, Any] = {
        "__metadata__": {"format": "dapple-checkpoint/1", "steps": "3", "batches": "3", "sha256": "0" * 64},
        "w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "I64", "shape": [1], "data_offsets": [16, 24]},
    }
    header = json.dumps(content).encode()
    return len(header).to_bytes(8, "little") + header + bytes(24)


def _read_checkpoint(data: bytes, path: Path) -> None:
    """Read the data as it is, and with the checksum that belongs to it."""
    from dapple_tf.checkpoint.content import read_position
    from dapple_tf.checkpoint.file import DamagedError, open_checkpoint

    with contextlib.suppress(DamagedError):
        read_position(open_checkpoint(path))
    path.write_bytes(data.replace(b"0" * 64, hashlib.sha256(data).hexdigest().encode(), 1))
    found = open_checkpoint(path)
    read_position(found)
    for _ in found.read():
        pass


def _shake_hands(data: bytes, path: Path) -> None:
    from dapple_tf.distributed.handshake import Guest

    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        there.setblocking(False)
        guest = Guest(here, "secret", time.monotonic() + 1)
        guest.start()
        for begin in range(0, min(len(data), 1000), 100):
            with contextlib.suppress(OSError):
                there.send(data[begin : begin + 100])
            if not guest.refused:
                guest.receive()
        if guest.rank is not None:
            raise AssertionError("a stranger was taken for a rank")


def _read_schedule(data: bytes, path: Path) -> None:
    from dapple_tf.graph_passes.schedules.spec import ScheduleSpec

    text = data.decode(errors="replace")
    ScheduleSpec.parse(text).check(2, 4)
    ScheduleSpec.parse(text).build(2, 4)


def _read_units(data: bytes, path: Path) -> None:
    from dapple_tf.profiler.units import BYTES_A_SECOND, parse_quantity

    parse_quantity(data.decode(errors="replace"), BYTES_A_SECOND)


def _readers() -> dict[str, Reader]:
    from dapple_tf.checkpoint.file import DamagedError
    from dapple_tf.errors import CheckpointError, PlanError, TraceError
    from dapple_tf.graph_passes.ir.text import parse_graph
    from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
    from dapple_tf.plans import Plan
    from dapple_tf.profiler.cluster import Cluster
    from dapple_tf.profiler.importers import read_graph_file, read_profile
    from dapple_tf.timeline.trace_file import read_recording

    plans = [
        _json(**_PLAN),
        _json(**{**_PLAN, "schedule": "0F0 0B0; 1F0 1B0", "micro_batches": 1}),
        _json(**{**_PLAN, "micro_batch_size": 4, "micro_batch_sizes": [1, 1, 2, 4]}),
    ]
    cluster_json = _json(format="dapple-cluster/1", device_memory="16GB", servers=[{"name": "a", "devices": 1}])
    schedules = [b"dapple-a:D=3", b"K=2,1", b"zb-h1", str(ScheduleSpec.parse("dapple-b").build(2, 4)).encode()]
    return {
        "cluster": Reader([_CLUSTER, cluster_json], lambda _, path: Cluster.load(path), (ClusterError,)),
        "profile": Reader([_PROFILE], lambda _, path: read_profile(path), (ProfileError,)),
        "graph.txt": Reader([_GRAPH], lambda _, path: read_graph_file(path, 8), (ProfileError,)),
        "plan": Reader(plans, lambda _, path: Plan.load(path), (PlanError,)),
        "trace": Reader([_TRACE], lambda _, path: read_recording(path), (TraceError,)),
        "checkpoint": Reader([_checkpoint_seed()], _read_checkpoint, (DamagedError, CheckpointError)),
        "schedule": Reader(schedules, _read_schedule, (ScheduleError,)),
        "quantity": Reader([b"25Gbps", b"1.5e3 GB/s", b"-.5B/s"], _read_units, (ClusterError,)),
        "graph text": Reader([_TEXT], lambda data, _: parse_graph(data.decode(errors="replace")), (TextError,)),
        "handshake": Reader([b"1 " + b"0" * 32 + b" " + b"0" * 64 + b"\n", b"connected\n"], _shake_hands, ()),
    }


NAMES = (
    *("cluster", "profile", "graph.txt", "plan", "trace", "checkpoint", "schedule", "quantity", "graph text"),
    "handshake",
)


def reader_named(name: str) -> Reader:
    """Return one of the readers; loads what it needs."""
    return _readers()[name]
