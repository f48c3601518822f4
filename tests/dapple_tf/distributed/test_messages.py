"""Messages between watchdogs survive the trip through JSON."""

from __future__ import annotations

import os

import pytest

from dapple_tf.distributed.call_order_check import RankCall
from dapple_tf.distributed.messages import (
    AgreementMessage,
    CallMessage,
    CallMismatch,
    FailureReport,
    FinishedMessage,
    Heartbeat,
    LeaveMessage,
    Message,
    StopMessage,
    decode,
    encode,
)
from dapple_tf.distributed.progress import RankStatus

STATUS = RankStatus(stages=(0, 2), step=4, running=True, exchange="exchange/stage0-1", collective_calls=7)


@pytest.mark.parametrize(
    "message",
    [
        Heartbeat(2, STATUS),
        LeaveMessage(2, RankStatus()),
        AgreementMessage(),
        FinishedMessage(2),
        FailureReport(1, STATUS, "raised KeyError: 'ä'", 0.4, 130, raised=True),
        CallMessage(1, RankCall(3, "run step 2", " of float32[4]")),
        CallMismatch("rank 0 is about to save"),
        StopMessage(1, 4, "SIGUSR1", STATUS),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    assert decode(encode(message)) == message


def test_a_message_has_a_question_mark_for_what_is_not_utf_8() -> None:
    """The rank whose error it was once ended without a report: the others said that it had crashed."""
    name = os.fsdecode(b"caf\xe9.txt")
    received = decode(encode(FailureReport(1, STATUS, f"raised ValueError: no rows in {name}")))
    assert received == FailureReport(1, STATUS, "raised ValueError: no rows in caf?.txt")
