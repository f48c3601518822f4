"""The benchmark that compares analytic profiles with published ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import published
from benchmarks.analytic import PAIRS, compare_profiles, find_units, rank_correlation
from dapple_tf.profiler.profile import LayerCost, Profile

NAMES = ("bert/embed/token", "bert/block_0/qkv", "bert/block_0/out", "bert/block_1/qkv", "bert/words/head")
OURS = Profile("bert", 2, "V100", tuple(LayerCost(name, 1.0, 2.0, 8e6, 0.0, 4e6) for name in NAMES))
BERT = next(pair for pair in PAIRS if pair.model is published.BERT)


def test_layers_of_one_part_are_one_unit() -> None:
    units = find_units(OURS, BERT.units)
    assert [[layer.name for layer in unit] for unit in units] == [list(NAMES[1:3]), [NAMES[3]]]


def test_rank_correlation_is_that_of_the_order() -> None:
    assert rank_correlation([1, 20, 300], [1, 2, 3]) == pytest.approx(1)
    assert rank_correlation([3, 2, 1], [1, 20, 300]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2, 3], [5, 5, 5, 9]) == pytest.approx(0.8165, abs=1e-4)


def test_a_total_beyond_a_factor_of_two_and_missing_layers_are_reported() -> None:
    theirs = replace(OURS, layers=tuple(replace(x, name=f"layer_{i}") for i, x in enumerate(OURS.layers[:2])))
    rows = list(compare_profiles(BERT, theirs, OURS))
    assert [row.ok for row in rows] == [False, False, False, True]
    assert rows[0].measured == "5000 ms (2.50x)"
    three = replace(OURS, layers=tuple(replace(x, name=f"layer_{i}") for i, x in enumerate(OURS.layers[:3])))
    assert "2 layers correspond to 3" in list(compare_profiles(BERT, three, OURS))[-1].measured
