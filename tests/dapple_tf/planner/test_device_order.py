"""The order of devices, server by server."""

from __future__ import annotations

from dapple_tf.planner.systems.device_order import list_devices
from tests.dapple_tf.planner.builders import make_cluster


def test_devices_follow_their_servers() -> None:
    assert list_devices(make_cluster(2, 1, 2), (2, 0, 1)) == (3, 4, 0, 1, 2)
