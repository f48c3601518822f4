"""The report of tensors that a rank has waited for too long."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
import tensorflow as tf

from dapple_tf.distributed.exchange_network import describe_stall, report_stalls
from dapple_tf.distributed.native.library import load_library
from tests.dapple_tf.distributed.native.peers import connect_pair, needs_library


def test_the_report_names_exchanges_by_the_rank_that_has_not_sent_them() -> None:
    text = describe_stall(2, {3: ["c"], 1: ["a", "b"]}, 10)
    assert text == "rank 2 has waited for tensors for 10 s. Missing ranks:\n1: [a, b]\n3: [c]"


class RecordedWaits:
    """Waits for one exchange; ``asked`` is set at the third question."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._questions = 0

    def find_waits(self, seconds: float) -> Mapping[int, list[str]]:
        self._questions += 1
        if self._questions == 3:
            self.asked.set()
        return {1: ["exchange/outputs"]}


def test_a_stall_is_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    waits = RecordedWaits()
    report_stalls(0, waits.find_waits, {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.05"})
    assert waits.asked.wait(20)
    assert capfd.readouterr().err.count("1: [exchange/outputs]") == 1


def test_zero_turns_the_report_off() -> None:
    before = set(threading.enumerate())
    report_stalls(0, RecordedWaits().find_waits, {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0"})
    assert not set(threading.enumerate()) - before


@needs_library
def test_the_library_knows_what_its_ops_wait_for() -> None:
    pair = connect_pair(load_library())
    receiving = threading.Thread(target=lambda: pair.receive([tf.float32], exchange="exchange/outputs (program 1)"))
    receiving.start()
    found: dict[int, list[str]] = {}
    while not found:
        found = pair.library.find_waits(0)
    assert found == {pair.here: ["exchange/outputs (program 1)"]}
    assert pair.library.find_waits(1000) == {}
    pair.send([tf.ones([2])], exchange="exchange/outputs (program 1)")
    receiving.join(20)
    assert pair.library.find_waits(0) == {}
