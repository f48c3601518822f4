"""Progress of a rank: steps, collective calls, and the calls that all ranks must make."""

from __future__ import annotations

import pytest

from dapple_tf.distributed.call_order_check import RankCall
from dapple_tf.distributed.process_exit import name_rank
from dapple_tf.distributed.progress import Progress, RankStatus


def test_a_status_in_words() -> None:
    assert RankStatus().when == "before its first step"
    assert RankStatus(step=3, running=True).when == "in step 3"
    assert RankStatus(step=3).when == "after step 3"
    assert RankStatus(step=3, running=True).last_exchange == "none of step 3"
    assert RankStatus(step=3, running=True, forward=True).when == "in a run forward after step 3"
    assert RankStatus(running=True, forward=True).when == "in a run forward before its first step"
    assert RankStatus(step=3, running=True, forward=True).last_exchange == "none of this run"
    assert RankStatus(step=3, forward=True).when == "after step 3"
    assert RankStatus(step=3, exchange="exchange/outputs").last_exchange == "exchange/outputs"


def test_a_rank_is_named_with_all_its_stages() -> None:
    assert name_rank(1, RankStatus()) == "rank 1"
    assert name_rank(1, RankStatus(stages=(0,))) == "rank 1 (stage 0)"
    assert name_rank(1, RankStatus(stages=(1, 3))) == "rank 1 (stages 1, 3)"


def test_a_rank_waits_from_the_begin_of_a_collective_call_to_its_end() -> None:
    progress = Progress()
    assert progress.waiting_in is None
    for number in (1, 2):
        with progress.collective_call():
            assert progress.waiting_in == number
        assert progress.waiting_in is None
    assert progress.status().collective_calls == 2


def test_a_collective_call_that_raises_has_ended() -> None:
    progress = Progress()
    with pytest.raises(KeyError), progress.collective_call():
        raise KeyError
    assert progress.waiting_in is None


def test_calls_are_numbered_and_their_history_depends_on_their_order() -> None:
    heard: list[RankCall] = []
    one, other = Progress(call_listener=heard.append), Progress()
    for progress, calls in ((one, "ab"), (other, "ba")):
        for what in calls:
            progress.announce_call(what, " detail")
    assert heard == [RankCall(1, "a", " detail"), RankCall(2, "b", " detail")]
    assert one.call_history != other.call_history


def test_the_history_ignores_details() -> None:
    one, other = Progress(), Progress()
    one.announce_call("a", " of float32")
    other.announce_call("a", " of float64")
    assert one.call_history == other.call_history


def test_the_status_names_the_last_exchange() -> None:
    progress = Progress()
    assert progress.status().exchange == ""
    progress.exchange_variable.assign("exchange/b")
    assert progress.status().exchange == "exchange/b"
