"""Variables are moved to the devices of the stages that use them."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from dapple_tf import variable_values
from dapple_tf.backend.program import move_to_device, move_to_stages
from dapple_tf.compiler import pipeline_graph, rank_graphs
from dapple_tf.frontend.capture import capture
from dapple_tf.graph_passes.analysis.layers import find_layers
from dapple_tf.plans import Plan
from dapple_tf.staged_model import StagedModel, stage_model
from tests.dapple_tf.backend.builders import DEVICES
from tests.dapple_tf.builders import X, make_plan


@pytest.fixture(scope="module")
def tied() -> tuple[StagedModel, Plan]:
    """Two stages that share the variable ``both``; ``only0`` and ``only1`` belong to one each."""
    only0, only1, both = (tf.Variable(tf.eye(4), name=name) for name in ("only0", "only1", "both"))

    def loss(x: tf.Tensor) -> tf.Tensor:
        with tf.name_scope("first"):
            hidden = tf.tanh(x @ both @ only0)
        with tf.name_scope("second"):
            return tf.reduce_mean(tf.square(hidden @ only1 @ both))

    captured = capture(loss, (X,))
    layers = find_layers(captured.graph)
    start = next(i for i, layer in enumerate(layers.layers) if layer.name.startswith("second"))
    model = stage_model(captured, layers, [start], keras.optimizers.Adam(0.1))
    return model, make_plan((0, start - 1, (0,)), (start, len(layers.layers) - 1, (1,)))


def devices(model: StagedModel) -> dict[str, str]:
    return {name: variable.device for name, variable in model.variables.items()}


def move_home(model: StagedModel) -> None:
    variable_values.move_variables([(variable, DEVICES[3]) for variable in model.variables.values()])


def test_variables_and_slots_move_to_their_stage_and_tied_ones_to_the_first(tied: tuple[StagedModel, Plan]) -> None:
    model, plan = tied
    move_home(model)
    move_to_stages(pipeline_graph(model, plan, DEVICES[1:], DEVICES[0]), model.variables)
    found = devices(model)
    assert {name: found[name] for name in ("only0", "only1", "both")} == {
        "only0": DEVICES[1],
        "only1": DEVICES[2],
        "both": DEVICES[1],
    }
    momenta = {name: device for name, device in found.items() if name.endswith("_momentum")}
    assert {device for name, device in momenta.items() if "only1" in name} == {DEVICES[2]}
    assert {device for name, device in momenta.items() if "only1" not in name} == {DEVICES[1]}
    assert len(momenta) == 3
    shared = [name for name in found if name.endswith(("iteration", "learning_rate"))]
    assert {found[name] for name in shared} == {DEVICES[3]}
    assert len(shared) == 2


def test_a_rank_moves_only_the_variables_that_it_holds(tied: tuple[StagedModel, Plan]) -> None:
    model, plan = tied
    move_home(model)
    graphs = rank_graphs(model, plan, 2)
    move_to_device(graphs[1], model.variables, DEVICES[2])
    found = devices(model)
    assert (found["only0"], found["only1"]) == (DEVICES[3], DEVICES[2])


def test_variables_that_are_in_place_are_not_moved(tied: tuple[StagedModel, Plan]) -> None:
    model, plan = tied
    graph = pipeline_graph(model, plan, DEVICES[1:], DEVICES[0])
    move_to_stages(graph, model.variables)
    handles = {name: variable.handle for name, variable in model.variables.items()}
    short = [f"/device:CPU:{i}" for i in range(1, 4)]  # without job and host
    move_to_stages(pipeline_graph(model, plan, short, DEVICES[0]), model.variables)
    assert all(variable.handle is handles[name] for name, variable in model.variables.items())
