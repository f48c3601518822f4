"""Transformers by their shapes, their stages of half layers, and SPP's printed rows, on numbers worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.papers.autopipe_figures import TABLE_2
from benchmarks.papers.spp_figures import SPP_TABLE_3, SPP_TESTBEDS
from benchmarks.papers.transformer_profiles import (
    BERT_LARGE,
    GPT2_345M,
    GPT2_762M,
    Transformer,
    megatron_stages,
    stages_of_halves,
    transformer_profile,
)

SMALL = Transformer("small", 2, 4, 10, 3)


def test_an_analytic_profile_by_hand() -> None:
    profile = transformer_profile(SMALL, 2)
    names = ["embedding", "layer_0/attention", "layer_0/ffn", "layer_1/attention", "layer_1/ffn", "head"]
    assert [layer.name for layer in profile.layers] == names
    # Six tokens: 8 x 16 + 4 x 3 x 4, 16 x 16, and 2 x 4 x 10 operations each.
    wanted = [0, 6 * 176, 6 * 256, 6 * 176, 6 * 256, 6 * 80]
    assert [layer.forward_seconds * 35e12 for layer in profile.layers] == pytest.approx(wanted)
    assert [layer.parameter_bytes for layer in profile.layers] == [2 * x for x in (52, 64, 128, 64, 128, 40)]
    assert profile.crossing_bytes().tolist() == [48] * 5


@pytest.mark.parametrize(("model", "millions"), [(GPT2_345M, 345), (GPT2_762M, 762), (BERT_LARGE, 340)])
def test_the_models_have_the_parameters_of_table_1(model: Transformer, millions: int) -> None:
    profile = transformer_profile(model, 1)
    tied = model.vocabulary * model.hidden  # the head has the embedding's weights
    assert profile.parameter_bytes.sum() / 2 - tied == pytest.approx(millions * 1e6, rel=0.04)


def test_stages_of_half_layers() -> None:
    found = stages_of_halves((1, 3))
    assert [(s.first_layer, s.last_layer, s.devices) for s in found] == [(0, 1, (0,)), (2, 5, (1,))]
    assert megatron_stages(SMALL, 2) == stages_of_halves((2, 2))
    for halves in TABLE_2:
        stages, layers = stages_of_halves(halves), range(1, 2 * GPT2_345M.layers + 1)  # without embedding and head
        assert tuple(sum(s.first_layer <= i <= s.last_layer for i in layers) for s in stages) == halves


def test_the_printed_rows_are_of_the_testbeds() -> None:
    assert all(set(row.speedups) == set(row.size) == set(SPP_TESTBEDS) for row in SPP_TABLE_3)
    assert [cluster.devices for cluster in SPP_TESTBEDS.values()] == [8, 4]
