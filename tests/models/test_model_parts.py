"""Parts of the papers' models against NumPy, written as the papers define them."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.examples import amoebanet, bert, gnmt, gpt2, llama, moe, t5, vit
from dapple_tf.examples.amoebanet import Size as AmoebaNetSize
from dapple_tf.examples.amoebanet import build_amoebanet
from dapple_tf.examples.bert import masked_pairs
from dapple_tf.examples.llama import rotate
from dapple_tf.examples.moe import SCALES as MOE_SCALES
from dapple_tf.examples.moe import Experts
from dapple_tf.examples.scales import choose_size
from dapple_tf.examples.t5 import bucket_numbers
from dapple_tf.examples.text import (
    CLASSIFY,
    FIRST_WORD,
    MASK,
    PAD,
    SEPARATOR,
    Corpus,
)
from dapple_tf.examples.transformer import HIDDEN, LONGEST_CONSTANT, RMSNorm, hidden_future
from dapple_tf.examples.translation import mean_of_words, sentence_pairs, shift_right
from dapple_tf.examples.xlnet import permuted_windows, take_distances
from tests.models.zoo import CORPUS, model_of, tiny
from tests.paths import ROOT

# --- options


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (bert, {"scale": "49"}, "there is no scale '49': choose one of paper, 48, large, base, tiny"),
        (bert, {"scale": "tiny", "context": 10**6}, "has .* words, but a context of 1000000 needs 1000001 or more"),
        (gnmt, {"scale": "tiny", "layers": 1}, "a GNMT has 2 layers or more in its encoder and decoder, not 1"),
        (moe, {"scale": "tiny", "balance": "none"}, "there is no balance 'none': choose one of sample, batch"),
        (moe, {"scale": "tiny", "experts": 1}, "2 of 1 experts cannot be chosen: use more experts"),
        (vit, {"scale": "tiny", "image_size": 18}, "images of 18x18 cannot be cut into patches of 4x4"),
        (amoebanet, {"cells": 4}, "3 groups cannot share 4 cells equally: use a multiple of 3"),
        (amoebanet, {"scale": "tiny", "filters": 20}, "20 filters cannot be divided by 16"),
    ],
)
def test_options_of_impossible_models_are_refused(build: Any, options: dict[str, Any], message: str) -> None:
    corpus = {"corpus": CORPUS} if build in (bert, moe) else {}
    with pytest.raises(ValueError, match=message):
        build(**options, **corpus)


def test_languages_and_sentences_without_words_are_refused() -> None:
    with pytest.raises(ValueError, match="a vocabulary of 5 has no word beside 5 marks"):
        sentence_pairs(vocabulary=5, length=4, batch_size=1)
    with pytest.raises(ValueError, match="sentences of length 1 have no room for a word and its end"):
        sentence_pairs(vocabulary=9, length=1, batch_size=1)


def test_the_first_scale_is_the_papers_and_numbers_are_names() -> None:
    scales = {"48": MOE_SCALES["8x7b"], "tiny": MOE_SCALES["tiny"]}
    assert choose_size(scales, "paper") is not None
    assert choose_size(scales, 48) == choose_size(scales, "paper") == scales["48"]
    assert choose_size(scales, "tiny", layers=5, context=None).layers == 5


# --- data


def draw(dataset: tf.data.Dataset, count: int = 1) -> list[list[np.ndarray]]:
    return [[tensor.numpy() for tensor in batch] for batch in itertools.islice(dataset, count)]


def test_a_masked_pair_is_the_text_with_a_share_of_its_words_hidden() -> None:
    corpus = Corpus(ROOT, np.arange(FIRST_WORD, 1000, dtype=np.int32), "words")
    dataset = masked_pairs(corpus, vocabulary=1000, context=43, batch_size=400)
    ((tokens, segments, positions, labels, follows),) = draw(dataset)
    assert positions.shape == labels.shape == (400, 6)
    assert all(len(set(row)) == 6 for row in positions)
    np.testing.assert_array_equal(tokens[:, [0, 21, 42]], np.tile([CLASSIFY, SEPARATOR, SEPARATOR], (400, 1)))
    np.testing.assert_array_equal(segments, np.tile([0] * 22 + [1] * 21, (400, 1)))

    shown = np.take_along_axis(tokens, positions, axis=1)
    assert np.mean(shown == MASK) == pytest.approx(0.8, abs=0.03)
    assert np.mean(shown == labels) == pytest.approx(0.1, abs=0.02)
    whole = tokens.copy()
    np.put_along_axis(whole, positions, labels, axis=1)
    assert (np.diff(whole[:, 1:21]) == 1).all()  # the corpus counts up
    np.testing.assert_array_equal(whole[:, 22] == whole[:, 20] + 1, follows == 1)
    assert follows.mean() == pytest.approx(0.5, abs=0.1)


def test_a_permuted_window_predicts_the_last_words_of_its_order() -> None:
    corpus = Corpus(ROOT, np.arange(FIRST_WORD, 500, dtype=np.int32), "words")
    ((tokens, order, positions, labels),) = draw(permuted_windows(corpus, context=12, batch_size=50))
    np.testing.assert_array_equal(np.sort(order), np.tile(np.arange(12), (50, 1)))
    np.testing.assert_array_equal(np.sort(np.take_along_axis(order, positions, axis=1)), np.tile([10, 11], (50, 1)))
    np.testing.assert_array_equal(np.take_along_axis(tokens, positions, axis=1), labels)
    assert len({tuple(row) for row in order}) > 45


def test_a_translation_is_reversed_and_has_one_word_for_each_word() -> None:
    ((source, target),) = draw(sentence_pairs(vocabulary=30, length=8, batch_size=300))
    dictionary: dict[int, int] = {}
    for words, translated in zip(source.tolist(), target.tolist(), strict=True):
        end = words.index(SEPARATOR)
        assert 4 <= end <= 7
        assert words[end + 1 :] == translated[end + 1 :] == [PAD] * (7 - end)
        for word, other in zip(words[:end], reversed(translated[:end]), strict=True):
            assert dictionary.setdefault(word, other) == other
    assert len(set(dictionary.values())) == len(dictionary)


def test_the_loss_of_a_translation_counts_words_only() -> None:
    target = tf.constant([[7, 8, SEPARATOR, PAD], [9, SEPARATOR, PAD, PAD]])
    losses = tf.constant([[1.0, 2.0, 3.0, 50.0], [4.0, 5.0, 60.0, 70.0]])
    assert float(mean_of_words(losses, target)) == 3.0
    np.testing.assert_array_equal(shift_right(target)[0], [SEPARATOR, 7, 8, SEPARATOR])


# --- layers


@pytest.mark.parametrize("length", [4, LONGEST_CONSTANT + 1])
def test_a_bias_hides_later_positions(length: int) -> None:
    bias = np.asarray(hidden_future(length, tf.float64))
    assert bias.dtype == np.float64
    np.testing.assert_array_equal(bias, np.where(np.tri(length) == 1, 0, HIDDEN))


def test_a_bias_of_float16_is_finite_and_hides_later_positions() -> None:
    bias = tf.constant(hidden_future(3, tf.float16))
    np.testing.assert_array_equal(tf.nn.softmax(tf.zeros([3, 3], tf.float16) + bias)[0], [1, 0, 0])
    assert np.isfinite(bias).all()


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 5))
    wanted = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(RMSNorm(epsilon=1e-6, name="norm", dtype="float64")(x), wanted, rtol=1e-12)


def test_products_of_rotated_vectors_depend_on_the_distance_only() -> None:
    q, k = np.random.default_rng(0).normal(size=(2, 6))
    turned = [rotate(tf.constant(np.tile(x, (1, 1, 9, 1))), 100.0).numpy()[0, 0] for x in (q, k)]
    products = turned[0] @ turned[1].T
    for distance in range(9):
        np.testing.assert_allclose(np.diag(products, distance), products[0, distance], rtol=1e-12)
    assert len(set(np.round(products[0], 9))) == 9


def test_row_i_of_distances_begins_at_column_n_minus_i() -> None:
    scores = np.random.default_rng(0).normal(size=(2, 3, 5, 10))
    wanted = np.stack([scores[:, :, i, 5 - i : 10 - i] for i in range(5)], axis=2)
    np.testing.assert_array_equal(take_distances(tf.constant(scores)), wanted)


def test_near_distances_have_a_bucket_each_and_far_ones_share() -> None:
    relative = np.arange(-200, 201)
    before = dict(zip(relative.tolist(), bucket_numbers(relative, causal=True).tolist(), strict=True))
    assert [before[-d] for d in range(16)] == list(range(16))
    assert [before[-d] for d in (16, 18, 19, 64, 127, 128, 200)] == [16, 16, 17, 26, 31, 31, 31]
    assert all(before[d] == 0 for d in range(200))
    both = dict(zip(relative.tolist(), bucket_numbers(relative, causal=False).tolist(), strict=True))
    assert [both[-d] for d in (0, 7, 8, 127, 128)] == [0, 7, 8, 15, 15]
    assert [both[d] for d in (1, 7, 8, 128)] == [17, 23, 24, 31]


@pytest.mark.parametrize("capacity", [8.0, 0.5])
def test_experts_equal_a_loop_over_tokens(capacity: float) -> None:
    size = dataclasses.replace(MOE_SCALES["tiny"], width=6, hidden=5, context=8, capacity=capacity)
    layer = Experts(size, "sample", random.Random(0), name="experts", dtype="float64")
    x = np.random.default_rng(0).normal(size=(3, 8, 6))
    found = layer(x).numpy()
    router, gate, up, down = (v.numpy() for v in (layer.router.kernel, layer.gate, layer.up, layer.down))

    wanted, balance, dropped = np.zeros_like(x), [], 0
    for b in range(3):
        scores = np.exp(x[b] @ router)
        ratings = scores / scores.sum(-1, keepdims=True)
        chosen = np.argsort(-ratings, axis=-1)[:, :2]
        waiting = np.zeros(4, int)
        for k, s in itertools.product(range(2), range(8)):
            e = chosen[s, k]
            if waiting[e] < layer.room:
                h = x[b, s] @ gate[e]
                share = ratings[s, e] / ratings[s, chosen[s]].sum()
                wanted[b, s] += share * (h / (1 + np.exp(-h)) * (x[b, s] @ up[e])) @ down[e]
            else:
                dropped += 1
            waiting[e] += 1
        balance.append(4 * np.sum(waiting / 16 * ratings.mean(0)))
    assert bool(dropped) == (capacity < 1)
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-15)
    np.testing.assert_allclose(layer.losses[0], 0.02 * np.mean(balance), rtol=1e-12)


# --- whole models


@pytest.mark.parametrize("build", [gpt2, llama])
def test_a_decoder_does_not_see_later_words(build: Any) -> None:
    model = model_of(tiny(build.__name__, dtype="float64"))
    tokens = np.arange(16)[None]
    changed = tokens.copy()
    changed[0, 9] = 99
    before, after = model(tokens), model(changed)
    np.testing.assert_allclose(before[0, :9], after[0, :9], rtol=1e-12)
    assert not np.allclose(before[0, 9:], after[0, 9:])


@pytest.mark.parametrize("build", [gnmt, t5])
def test_a_translator_does_not_see_padding_or_later_words(build: Any) -> None:
    model = model_of(tiny(build.__name__, dtype="float64"))
    source, target = np.full((1, 8), 7), np.full((1, 8), 9)
    source[0, 5:] = PAD
    later = target.copy()
    later[0, 6] = 10
    before, after = model([source, target]), model([source, later])
    np.testing.assert_allclose(before[0, :6], after[0, :6], rtol=1e-12)
    assert not np.allclose(before[0, 6:], after[0, 6:])
    source[0, 4] = 11
    assert not np.allclose(model([source, target])[0, 0], before[0, 0])


def test_a_predicted_word_sees_those_of_lower_order_only() -> None:
    model = model_of(tiny("xlnet", dtype="float64"))
    order = np.random.default_rng(0).permutation(18)[None]
    positions = np.argsort(order[0])[None, -3:]
    tokens = np.full((1, 18), 20)
    before = model([tokens, order, positions])
    for changed in range(18):
        other = tokens.copy()
        other[0, changed] = 30
        same = np.isclose(model([other, order, positions])[0], before[0], rtol=1e-9, atol=0).all(-1)
        np.testing.assert_array_equal(same, order[0, changed] >= order[0, positions[0]])


def test_a_class_token_sees_every_patch() -> None:
    model = model_of(tiny("vit", dtype="float64"))
    images = np.zeros((1, 16, 16, 3))
    before = model(images)
    for row, column in itertools.product(range(0, 16, 4), repeat=2):
        changed = images.copy()
        changed[0, row, column] = 1
        assert not np.allclose(model(changed), before)


def test_every_cell_of_an_amoebanet_reads_the_two_cells_before_it() -> None:
    size = AmoebaNetSize(cells=2, filters=16, groups=2, image_size=32, classes=5)
    with dapple.scope():
        model = build_amoebanet(size, dropout=0.0, dtype="float32", seed=0)
    names = [layer.name for layer in model.layers if "cell" in layer.name]
    assert names == ["stem_cell_0", "stem_cell_1", "cell_0", "reduction_cell_0", "cell_1"]
    for name, last, before in zip(names[2:], names[1:], names, strict=False):
        inputs = [tensor._keras_history.operation.name for tensor in model.get_layer(name).input]
        assert inputs == [last, before]
    sizes = [model.get_layer(name).output.shape[1:] for name in names]
    assert sizes == [(8, 8, 12), (4, 4, 24), (4, 4, 64), (2, 2, 96), (2, 2, 128)]
