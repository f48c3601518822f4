"""A device for each node."""

from __future__ import annotations

import pytest

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.passes.place import Place, PlaceRank
from tests.graph_passes.builders import assert_graph, graph, refused

BEFORE = """
    %x = input() -> (float32[?])
    %stage0/replica0/mb0/forward = forward() {replica=0, stage=0}
    %stage1/replica0/mb0/forward = forward() {replica=0, stage=1}
    %stage1/replica1/mb0/forward = forward() {replica=1, stage=1}
    %stage1/update = update() {place}
    %loss = merge() -> (float32[])
"""


def test_nodes_of_a_replica_are_on_its_device_and_others_on_the_home_device() -> None:
    assert_graph(
        Place((("gpu0",), ("gpu2", "gpu1")), "cpu")(graph(BEFORE)),
        """
        %x = input() -> (float32[?]) @'cpu'
        %stage0/replica0/mb0/forward = forward() {replica=0, stage=0} @'gpu0'
        %stage1/replica0/mb0/forward = forward() {replica=0, stage=1} @'gpu2'
        %stage1/replica1/mb0/forward = forward() {replica=1, stage=1} @'gpu1'
        %stage1/update = update() {place} @'gpu2'
        %loss = merge() -> (float32[]) @'cpu'
        """,
    )


def test_a_rank_s_nodes_are_on_its_device_and_those_of_no_stage_on_the_home_device() -> None:
    assert_graph(
        PlaceRank("gpu0", "cpu")(graph(BEFORE)),
        """
        %x = input() -> (float32[?]) @'cpu'
        %stage0/replica0/mb0/forward = forward() {replica=0, stage=0} @'gpu0'
        %stage1/replica0/mb0/forward = forward() {replica=0, stage=1} @'gpu0'
        %stage1/replica1/mb0/forward = forward() {replica=1, stage=1} @'gpu0'
        %stage1/update = update() {place} @'gpu0'
        %loss = merge() -> (float32[]) @'cpu'
        """,
    )


@pytest.mark.parametrize("devices", [(("a",), ("b",)), (("a",), ("b", "c"), ("d",)), (("a", "b"), ("c",))])
def test_devices_that_do_not_match_the_replicas_are_refused(devices: tuple[tuple[str, ...], ...]) -> None:
    counts = tuple(map(len, devices))
    with refused(GraphError, f"the stages have (1, 2) replicas, but there are {counts} devices for them"):
        Place(devices, "cpu")(graph(BEFORE))
