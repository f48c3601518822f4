"""A profile as a chain of blocks: kept positions and summed costs; no useful cut is dropped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.profiler.importers import read_profile
from dapple_tf.profiler.linearise import linearise
from dapple_tf.profiler.profile import LayerCost, Profile, Timing
from tests.paths import SHARED_PROFILES
from tests.profiler.builders import make_layer, make_profile, profiles


def work(name: str, sent: float, kept: float = 3.0) -> LayerCost:
    return LayerCost(name, 1.0, 2.0, sent, kept, 5.0)


def view(name: str, sent: float) -> LayerCost:
    return make_layer(name, activation_bytes=sent)


def test_a_chain_of_working_layers_keeps_every_position() -> None:
    chain = linearise(make_profile(work("a", 10), work("b", 20), work("c", 30)))
    assert chain.positions == (0, 1, 2, 3)
    assert chain.crossing_bytes.tolist() == [10, 20]
    assert chain.parameter_bytes.tolist() == [5, 5, 5]
    assert chain.stash_bytes.tolist() == [3, 3, 3]
    assert chain.working_bytes.tolist() == [10, 30, 50]
    assert chain.splittable.tolist() == [True, True]
    assert chain.batch_size == 8


def test_of_cuts_around_free_layers_the_first_with_the_fewest_bytes_is_kept() -> None:
    # Cuts before layers 1 to 4 send 40, 10, 10 and 30 bytes; the views before the first work and after the last go.
    layers = [view("in", 1), work("a", 40), view("v", 10), view("w", 10), view("x", 30), work("b", 5), view("out", 9)]
    chain = linearise(make_profile(*layers))
    assert chain.positions == (0, 3, 7)
    assert chain.crossing_bytes.tolist() == [10]
    assert chain.stash_bytes.tolist() == [3, 3]
    assert chain.working_bytes.tolist() == [41, 35]  # a and b with what they read; views work on what is there


def test_a_position_where_no_stage_may_start_is_dropped() -> None:
    layers = [work("a", 40), view("v", 10), view("w", 20), work("b", 5)]
    assert linearise(make_profile(*layers, uncuttable=(2,))).positions == (0, 3, 4)
    assert linearise(make_profile(*layers, uncuttable=(1, 2, 3))).positions == (0, 4)


def test_the_best_cut_of_each_kind_is_kept() -> None:
    layers = [work("a", 40), view("v", 10), view("w", 20), work("b", 5)]
    chain = linearise(make_profile(*layers, unsplittable=(2,)))
    assert chain.positions == (0, 2, 3, 4)
    assert chain.splittable.tolist() == [False, True]
    assert linearise(make_profile(*layers, unsplittable=(1, 3))).positions == (0, 2, 4)


def test_of_equal_bytes_the_splittable_cut_is_kept() -> None:
    layers = [work("a", 10), view("v", 10), work("b", 5)]
    assert linearise(make_profile(*layers, unsplittable=(1,))).positions == (0, 2, 3)


@pytest.mark.parametrize("field", ["forward_seconds", "backward_seconds", "stash_bytes", "parameter_bytes"])
def test_a_layer_with_any_cost_is_not_free(field: str) -> None:
    middle = make_layer("m", activation_bytes=1.0, **{field: 1.0})
    assert linearise(make_profile(work("a", 4), middle, work("b", 4))).positions == (0, 1, 2, 3)


def test_a_layer_that_takes_time_at_another_batch_size_is_not_free() -> None:
    timing = Timing(64, (8.0, 0.5, 8.0), (8.0, 0.0, 8.0))
    assert linearise(make_profile(work("a", 4), view("v", 4), work("b", 4), timings=(timing,))).positions == (
        0,
        1,
        2,
        3,
    )


def test_a_model_without_cost_is_one_block() -> None:
    assert linearise(make_profile(view("a", 1), view("b", 1))).positions == (0, 2)


def test_the_bytes_of_a_skip_connection_cross_every_cut_between() -> None:
    layers = [work("a", 1), work("b", 10), work("c", 100), work("d", 1000)]
    chain = linearise(make_profile(*layers, edges=((0, 1), (1, 2), (2, 3), (0, 3))))
    assert chain.crossing_bytes.tolist() == [1, 11, 101]
    assert chain.working_bytes.tolist() == [1, 11, 110, 1101]


def test_working_bytes_are_a_layers_output_and_inputs() -> None:
    layers = [work("a", 1), work("b", 10), work("c", 100)]
    assert make_profile(*layers, edges=((0, 1), (0, 2), (1, 2))).working_bytes().tolist() == [1, 11, 111]


@given(profile=profiles(), samples=st.integers(1, 200))
def test_no_cost_is_lost_or_counted_twice(profile: Profile, samples: int) -> None:
    chain = linearise(profile)
    blocks = [slice(a, b) for a, b in zip(chain.positions, chain.positions[1:], strict=False)]
    assert (chain.positions[0], chain.positions[-1]) == (0, len(profile.layers))
    assert set(chain.positions[1:-1]) <= set(profile.positions())
    forward, backward = chain.block_seconds(samples)
    sums = {
        "parameter_bytes": chain.parameter_bytes,
        "stash_bytes": chain.stash_bytes,
    }
    for block, (f, b) in enumerate(zip(forward, backward, strict=True)):
        # Summing orders differ by rounding only.
        assert f == pytest.approx(sum(profile.forward_seconds(samples)[blocks[block]]), rel=1e-12)
        assert b == pytest.approx(sum(profile.backward_seconds(samples)[blocks[block]]), rel=1e-12)
        for field, values in sums.items():
            assert values[block] == sum(getattr(layer, field) for layer in profile.layers[blocks[block]])
        assert chain.working_bytes[block] == max(profile.working_bytes()[blocks[block]])
    crossing = profile.crossing_bytes()
    assert chain.crossing_bytes.tolist() == [crossing[p - 1] for p in chain.positions[1:-1]]
    assert chain.splittable.tolist() == [p not in profile.unsplittable for p in chain.positions[1:-1]]


def is_free(profile: Profile, first: int, end: int) -> bool:
    layers = range(first, end)
    return all(
        layer.forward_seconds == layer.backward_seconds == layer.parameter_bytes == layer.stash_bytes == 0
        for layer in profile.layers[first:end]
    ) and all(t.forward_seconds[k] == t.backward_seconds[k] == 0 for t in profile.timings for k in layers)


def is_no_worse(profile: Profile, p: int, q: int) -> bool:
    """Whether a cut at p divides the same work as one at q, for no more bytes, and splits if that does."""
    crossing = profile.crossing_bytes()
    return (
        is_free(profile, min(p, q), max(p, q))
        and crossing[p - 1] <= crossing[q - 1]
        and (p not in profile.unsplittable or q in profile.unsplittable)
    )


@given(profile=profiles(largest=9))
def test_a_cut_is_dropped_only_if_a_kept_one_is_no_worse(profile: Profile) -> None:
    kept, end = linearise(profile).positions[1:-1], len(profile.layers)
    for position in profile.positions():
        no_work = is_free(profile, 0, position) or is_free(profile, position, end)
        assert no_work != any(is_no_worse(profile, other, position) for other in kept)


@given(profile=profiles(largest=9))
def test_no_kept_cut_could_replace_another(profile: Profile) -> None:
    kept = linearise(profile).positions[1:-1]
    assert not [(p, q) for p in kept for q in kept if p != q and is_no_worse(profile, p, q)]


@pytest.mark.skipif(not SHARED_PROFILES.is_dir(), reason="the published profiles (../shared/profiles) are not here")
def test_gnmt_keeps_one_cut_for_each_layer_with_work() -> None:
    profile = read_profile(SHARED_PROFILES / "gnmt-16-pbs-64.txt")
    working = sum(layer.forward_seconds + layer.backward_seconds > 0 for layer in profile.layers)
    chain = linearise(profile)
    assert len(chain.positions) == working + 1
    # What crosses, by hand: an embedding and the encoder; dropout, the sum the next Add reads, and the attention's
    # context; a concatenation and that sum; the last sum.
    names = [profile.layers[position].name for position in chain.positions[1:-1]]
    crossing = dict(zip(names, chain.crossing_bytes.tolist(), strict=True))
    assert crossing["hidden"] == 9175040 + 9437184
    assert crossing["node83 Concat(2)"] == 9437184 + 9437184 + 262144
    assert crossing["__getitem__(7)"] == 9437184 + 9437184
    assert chain.crossing_bytes[-1] == 9437184
