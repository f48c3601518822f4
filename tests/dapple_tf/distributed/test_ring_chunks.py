"""The chunks and rounds of a ring all-reduce: nothing is lost or summed twice, and all ranks end with the same sums."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.distributed.native_collectives import Piece, cut_chunks, ring_neighbours, ring_rounds


def test_tensors_are_cut_where_their_memory_is_aligned() -> None:
    """A third of 300 elements is 100: 30 of the first tensor, and 70 of the second, of which 64 are a multiple."""
    assert cut_chunks([30, 270], 3) == [
        [Piece(0, 0, 30), Piece(1, 0, 64)],
        [Piece(1, 64, 128)],
        [Piece(1, 128, 270)],
    ]


def test_a_large_tensor_is_cut_into_equal_parts() -> None:
    assert cut_chunks([64_000], 2) == [[Piece(0, 0, 32_000)], [Piece(0, 32_000, 64_000)]]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], [[], [], []]),
        ([0, 0], [[], [], []]),
        ([1], [[], [], [Piece(0, 0, 1)]]),
        ([2, 0, 1], [[], [Piece(0, 0, 2)], [Piece(2, 0, 1)]]),
    ],
    ids=["nothing", "empty tensors", "a scalar", "fewer elements than ranks have chunks"],
)
def test_small_tensors_are_not_cut(sizes: Sequence[int], expected: Sequence[Sequence[Piece]]) -> None:
    assert cut_chunks(sizes, 3) == expected


@given(st.lists(st.integers(0, 500), max_size=12), st.integers(2, 9))
def test_every_element_is_in_one_chunk_and_chunks_are_about_equal(sizes: list[int], count: int) -> None:
    chunks = cut_chunks(sizes, count)
    assert len(chunks) == count
    elements = [(piece.tensor, i) for chunk in chunks for piece in chunk for i in range(piece.begin, piece.end)]
    assert elements == [(tensor, i) for tensor, size in enumerate(sizes) for i in range(size)]
    assert all(piece.begin < piece.end for chunk in chunks for piece in chunk)
    for chunk in chunks:
        assert abs(sum(piece.end - piece.begin for piece in chunk) - sum(sizes) / count) <= 64


@pytest.mark.parametrize("count", range(2, 10))
def test_after_the_rounds_all_ranks_have_each_chunk_summed_in_the_same_order(count: int) -> None:
    """Each rank's value of each chunk is the text of its sum, as ``own + received``."""
    values = [[f"{chunk}{'abcdefghi'[rank]}" for chunk in range(count)] for rank in range(count)]
    rounds = [ring_rounds(place, count) for place in range(count)]
    for number in range(2 * (count - 1)):
        sent = [values[place][rounds[place][number].sends] for place in range(count)]
        for place in range(count):
            turn, before = rounds[place][number], (place - 1) % count
            assert turn.receives == rounds[before][number].sends
            own = values[place][turn.receives]
            values[place][turn.receives] = f"{own}+{sent[before]}" if turn.adds else sent[before]
    assert {len(each) for each in rounds} == {2 * (count - 1)}
    for chunk in range(count):
        (total,) = {values[place][chunk] for place in range(count)}
        assert sorted(total.split("+")) == [f"{chunk}{letter}" for letter in "abcdefghi"[:count]]


def test_neighbours_are_the_next_and_the_previous_rank_of_the_ring() -> None:
    assert [ring_neighbours((1, 4, 6), rank) for rank in (1, 4, 6)] == [(4, 6), (6, 1), (1, 4)]
    assert [ring_neighbours((2, 3), rank) for rank in (2, 3)] == [(3, 3), (2, 2)]
