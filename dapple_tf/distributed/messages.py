"""Messages that the watchdogs of the ranks send each other, and their JSON form."""

from __future__ import annotations

import json
from typing import TypeAlias

import msgspec

from dapple_tf.distributed.call_order_check import RankCall
from dapple_tf.distributed.progress import RankStatus


class _Message(msgspec.Struct, frozen=True, tag_field="kind"):
    """A JSON object, whose field ``kind`` is the tag of its class."""


class Heartbeat(_Message, frozen=True, tag="heartbeat"):
    """``rank`` is alive; sent several times a second."""

    rank: int
    status: RankStatus


class LeaveMessage(_Message, frozen=True, tag="leave"):
    """The script of ``rank`` has ended without an error."""

    rank: int
    status: RankStatus


class AgreementMessage(_Message, frozen=True, tag="agreement"):
    """From rank 0: all ranks have left and have made the same calls, so every rank may end."""


class FinishedMessage(_Message, frozen=True, tag="finished"):
    """Horovod has ended on ``rank``, whose process ends now; from rank 0 it means that Horovod has ended on all."""

    rank: int


class FailureReport(_Message, frozen=True, tag="failure"):
    """``rank`` has failed: ``what`` happened to it, as a verb phrase ("was killed").

    The receiver ends after ``wait_seconds`` with ``exit_code``. ``raised``: the rank itself has raised the error, and
    prints it.
    """

    rank: int
    status: RankStatus
    what: str
    wait_seconds: float = 0.0
    exit_code: int = 1
    raised: bool = False


class CallMessage(_Message, frozen=True, tag="call"):
    """``rank`` is about to make ``call``; sent to rank 0, which compares the calls of all ranks."""

    rank: int
    call: RankCall


class CallMismatch(_Message, frozen=True, tag="call mismatch"):
    """The ranks make different calls; ``what`` says which rank makes which."""

    what: str


class StopMessage(_Message, frozen=True, tag="stop"):
    """A stop between two steps: ``rank`` asks rank 0 for it, or rank 0 says that all stop after step ``after``.

    The ranks answer rank 0 with the same ``after``. 0: rank 0 has not chosen a step yet. A rank that asks sends the
    name of the ``signal`` that it has got, and its ``status`` then.
    """

    rank: int
    after: int = 0
    signal: str = ""
    status: RankStatus = RankStatus()


Message: TypeAlias = (
    Heartbeat
    | LeaveMessage
    | AgreementMessage
    | FinishedMessage
    | FailureReport
    | CallMessage
    | CallMismatch
    | StopMessage
)


def encode(message: Message) -> bytes:
    """Return a message as a line of JSON, without its end; "?" is in place of each character that UTF-8 does not have.

    The text of an error may have such ones: Python reads a file name that is not UTF-8 as half surrogate pairs.
    """
    return json.dumps(msgspec.to_builtins(message), ensure_ascii=False).encode(errors="replace")


decode = msgspec.json.Decoder(Message).decode
"""Returns the message that ``encode`` wrote."""
