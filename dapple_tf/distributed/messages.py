"""Messages that the watchdogs of the ranks send each other, and their JSON form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dapple_tf.distributed.call_order_check import RankCall
from dapple_tf.distributed.progress import RankStatus


@dataclass(frozen=True)
class Heartbeat:
    """``rank`` is alive; sent several times a second."""

    rank: int
    status: RankStatus


@dataclass(frozen=True)
class LeaveMessage:
    """The script of ``rank`` has ended without an error."""

    rank: int
    status: RankStatus


@dataclass(frozen=True)
class AgreementMessage:
    """From rank 0: all ranks have left and have made the same calls, so every rank may end."""


@dataclass(frozen=True)
class FinishedMessage:
    """Horovod has ended on ``rank``, whose process ends now; from rank 0 it means that Horovod has ended on all."""

    rank: int


@dataclass(frozen=True)
class FailureReport:
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


@dataclass(frozen=True)
class CallMessage:
    """``rank`` is about to make ``call``; sent to rank 0, which compares the calls of all ranks."""

    rank: int
    call: RankCall


@dataclass(frozen=True)
class CallMismatch:
    """The ranks make different calls; ``what`` says which rank makes which."""

    what: str


@dataclass(frozen=True)
class StopMessage:
    """A stop between two steps: ``rank`` asks rank 0 for it, or rank 0 says that all stop after step ``after``.

    The ranks answer rank 0 with the same ``after``. 0: rank 0 has not chosen a step yet. A rank that asks sends the
    name of the ``signal`` that it has got, and its ``status`` then.
    """

    rank: int
    after: int = 0
    signal: str = ""
    status: RankStatus = field(default_factory=RankStatus)


Message = (
    Heartbeat
    | LeaveMessage
    | AgreementMessage
    | FinishedMessage
    | FailureReport
    | CallMessage
    | CallMismatch
    | StopMessage
)

_KINDS: Mapping[str, type[Message]] = {
    "heartbeat": Heartbeat,
    "leave": LeaveMessage,
    "agreement": AgreementMessage,
    "finished": FinishedMessage,
    "failure": FailureReport,
    "call": CallMessage,
    "call mismatch": CallMismatch,
    "stop": StopMessage,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def _read_status(value: Mapping[str, Any]) -> RankStatus:
    return RankStatus(**{**value, "stages": tuple(value["stages"])})  # JSON has no tuples


_NESTED: Mapping[str, Callable[[Any], Any]] = {"status": _read_status, "call": lambda value: RankCall(**value)}


def to_json(message: Message) -> dict[str, Any]:
    """Return the message as a JSON object."""
    return {"kind": _NAMES[type(message)], **asdict(message)}


def from_json(content: Mapping[str, Any]) -> Message:
    """Return the message that ``to_json`` wrote."""
    fields = {key: _NESTED[key](value) if key in _NESTED else value for key, value in content.items()}
    return _KINDS[fields.pop("kind")](**fields)
