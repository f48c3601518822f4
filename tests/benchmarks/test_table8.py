"""BERT-L from its shapes, and the search for its largest size."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from benchmarks.papers.bert import profile_two_layers, repeat_layer
from benchmarks.papers.table8 import find_largest, simulate_straight
from dapple_tf.profiler.profile import Profile


@pytest.fixture(scope="module")
def two() -> Profile:
    return profile_two_layers(1)


def total(profile: Profile, name: str) -> float:
    return sum(layer.parameter_bytes for layer in profile.layers if layer.name.split("/")[0] == name)


def test_the_weights_have_the_bytes_of_the_published_profile(two: Profile) -> None:
    assert total(two, "embeddings") == 127131648
    assert [total(two, f"layer_{i}") for i in range(2)] == [50384896, 50384896]


def test_more_layers_repeat_the_same_layer(two: Profile) -> None:
    deep = repeat_layer(two, 48)
    assert [total(deep, f"layer_{i}") for i in range(49)] == [50384896] * 48 + [0]
    assert deep.parameter_bytes.sum() * 4 == pytest.approx(10.2e9, rel=0.01)  # the table's first row, 16 bytes each
    assert [astuple(cost)[1:] for cost in repeat_layer(two, 2).layers] == [astuple(cost)[1:] for cost in two.layers]
    assert [deep.layers[p].name.split("/")[0] for p in deep.positions()] == [f"layer_{i}" for i in range(48)]


def test_the_largest_fits_and_one_layer_more_does_not(two: Profile) -> None:
    layers, timeline = find_largest(two, 2, 1)
    assert all(timeline.fits)
    assert len(timeline.plan.stages) == 2
    assert timeline.plan.recompute
    assert simulate_straight(repeat_layer(two, layers), 2, 1) is not None
    assert simulate_straight(repeat_layer(two, layers + 1), 2, 1) is None
