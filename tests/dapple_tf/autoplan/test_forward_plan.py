"""The plan of a function that only runs forward: its stages and devices, where it lacks layers of training."""

from __future__ import annotations

import pytest

from dapple_tf.autoplan.forward_plan import follow_plan
from dapple_tf.autoplan.layer_estimates import EstimatedCosts
from dapple_tf.graph_passes.analysis.layers import Layers, find_layers
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, tensor
from tests.dapple_tf.builders import make_plan


def layers_called(names: str) -> Layers:
    """A chain of layers with names of one letter."""
    nodes = [Node("x", "arg", outputs=(tensor("float32", None, 2),))]
    for name in names:
        nodes.append(Node(name, "Exp", (Value(nodes[-1].name),), (tensor("float32", None, 2),)))
    return find_layers(Graph("net", tuple(nodes), ("x",), (Value(nodes[-1].name),)))


@pytest.mark.parametrize(
    ("devices", "layers", "followed"),
    [
        # one stage per worker
        (((0,), (1,), (2,), (3,)), "abcd", [(0,), (1,), (2,), (3,)]),
        (((0,), (1,), (2,), (3,)), "acd", [(0, 1), (2,), (3,)]),
        (((0,), (1,), (2,), (3,)), "a", [(0, 1, 2, 3)]),
        # stages 0 and 2 share a device, and so do 1 and 3
        (((0,), (1,), (0,), (1,)), "abc", [(0,), (1,), (0,)]),
        (((0,), (1,), (0,), (1,)), "acd", [(0,), (0,), (1,)]),
        (((0,), (1,), (0,), (1,)), "ac", [(0, 1), (0, 1)]),
        (((0, 1), (2,), (2,), (0, 1)), "ad", [(0, 1, 2), (0, 1, 2)]),
    ],
)
def test_in_a_job_every_device_has_a_stage(
    devices: tuple[tuple[int, ...], ...], layers: str, followed: list[tuple[int, ...]]
) -> None:
    plan = make_plan(*((stage, stage, own) for stage, own in enumerate(devices)))
    costs = EstimatedCosts([1.0] * len(layers), [0.0] * (len(layers) - 1))
    found = follow_plan(plan, "abcd", layers_called(layers), costs, all_devices=True)
    assert [stage.devices for stage in found.stages] == followed
    assert found.starts == tuple(range(1, len(layers)))
    kept = [own for own, name in zip(devices, "abcd", strict=True) if name in layers]
    found = follow_plan(plan, "abcd", layers_called(layers), costs, all_devices=False)
    assert [stage.devices for stage in found.stages] == kept
