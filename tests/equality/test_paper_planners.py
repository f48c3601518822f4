"""Plans of the papers' planners run: a step under each equals one device's, in the order of its schedule."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.examples.gpt import gpt
from dapple_tf.planner.systems.autopipe import sub_layer_blocks
from dapple_tf.profiler.linearise import linearise
from tests.dapple_tf.planner.builders import make_cluster
from tests.equality.small_models import chain, data, sgd, weights


@pytest.mark.filterwarnings("ignore:the layers of")  # the times are replaced
@pytest.mark.parametrize(("planner", "options"), [("spp", {}), ("autopipe", {"stages": 3}), ("bapipe", {})])
def test_a_step_of_the_plan_equals_one_device(planner: str, options: dict[str, int]) -> None:
    loss_fn, batch = chain(weights(4)), data(12)
    measured = dapple.profile(loss_fn, batch=batch)
    layers = [dataclasses.replace(layer, forward_seconds=1.0, backward_seconds=2.0) for layer in measured.layers]
    profile = dataclasses.replace(measured, layers=tuple(layers), timings=())
    cluster = make_cluster(3, memory=1e9, inside=(1e6, 1e-6))
    found = dapple.plan(profile, cluster, global_batch_size=12, micro_batch_size=2, planner=planner, **options)
    assert len(found.stages) > 1
    report = dapple.verify(loss_fn, optimizer=sgd(), batch=batch, plan=found)
    assert report.ok, str(report)
    step = dapple.pipeline(loss_fn, optimizer=sgd(), plan=found)
    step.record(*batch)
    simulated = dapple.simulate(found, profile, cluster)
    for stage in range(len(found.stages)):
        assert step.timeline.actions(stage) == simulated.actions(stage)


@pytest.mark.filterwarnings("ignore:the layers of")
def test_the_blocks_of_a_captured_transformer_end_at_its_residual_additions() -> None:
    workload = gpt(layers=2, width=8, heads=2, context=4, batch_size=2)
    profile = dapple.profile(workload.loss_fn, batch=next(iter(workload.dataset)))
    chain = sub_layer_blocks(linearise(profile))
    ends = [profile.layers[position - 1].name for position in chain.positions[1:-1]]
    inside = [name for name in ends if "block" in name]
    assert inside == [f"gpt/block_{layer}/{name}" for layer in (0, 1) for name in ("add", "add_1")]


@pytest.mark.filterwarnings("ignore:the layers of")
def test_the_blocks_of_a_captured_keras_transformer_are_attention_and_ffn() -> None:
    """Layer norms behind the additions (as BERT has them) are small blocks of their own."""
    inputs = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(10, 8)(inputs)
    for _ in range(2):
        attended = keras.layers.MultiHeadAttention(2, 4)(x, x)
        x = keras.layers.LayerNormalization()(x + attended)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(8)(keras.layers.Dense(32, "relu")(x)))
    model = keras.Model(inputs, keras.layers.Dense(3)(x))

    def loss_fn(features: Any, targets: Any) -> Any:
        return tf.reduce_mean(tf.square(model(features) - targets))

    profile = dapple.profile(loss_fn, batch=(tf.ones((2, 4), tf.int32), tf.ones((2, 4, 3))))
    chain = sub_layer_blocks(linearise(profile))
    ends = [profile.layers[position - 1].name.split("/")[-1] for position in chain.positions[1:-1]]
    stream = [name for name in ends if name.startswith(("Add", "layer_norm"))]
    assert stream[:4] == ["Add", "layer_normalization", "Add_1", "layer_normalization_1"]
    assert len(stream) == 8
    assert not [name for name in ends if name in ("query", "key", "value", "attention_output", "Softmax")]
