"""Prove to each other, over a fresh TCP connection, that both ends belong to one job.

They exchange four short lines of text, of bounded length, in bounded time. The listening rank (called rank 0 here, as
it is for the watchdogs) sends a random challenge. The other rank sends its number, a challenge of its own, and a proof:
a keyed hash that only an owner of the job's secret can compute. Rank 0 sends its own proof. The rank confirms. So the
secret itself is never sent, a recorded exchange proves nothing, and rank 0 accepts a link only once the other rank
knows that it is connected to rank 0.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import socket
import time
from dataclasses import dataclass, field

_LONGEST_LINE = 200  # bytes
_CHALLENGE = re.compile(r"dapple ([0-9a-f]{32})")
_ANSWER = re.compile(r"([0-9]{1,9}) ([0-9a-f]{32}) ([0-9a-f]{64})")
_CONFIRMATION = "connected"


def _proof(secret: str, *parts: object) -> str:
    return hmac.new(secret.encode(), " ".join(map(str, parts)).encode(), hashlib.sha256).hexdigest()


@dataclass
class Guest:
    """Rank 0's end of a handshake, on a non-blocking connection; ``deadline``: when it must have ended.

    ``deadline`` is in monotonic seconds. ``rank``: the number of the rank that has proven itself, None before.
    ``refused``: the handshake has failed.
    """

    connection: socket.socket
    secret: str
    deadline: float
    rank: int | None = None
    refused: bool = False
    _challenge: str = field(default_factory=lambda: secrets.token_hex(16))
    _claimed: int | None = None
    _unread: bytes = b""

    def start(self) -> None:
        """Send the challenge."""
        self._send(f"dapple {self._challenge}")

    def receive(self) -> None:
        """Read the data that has arrived, and answer a complete line."""
        try:
            data = self.connection.recv(_LONGEST_LINE + 1 - len(self._unread))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._unread += data
        line, newline, rest = self._unread.partition(b"\n")
        if newline:
            self._unread = rest
            self._answer(line.decode("ascii", "replace"))
        if not data or rest or len(self._unread) > _LONGEST_LINE:  # no rank sends more before it gets an answer
            self.refused = True

    def _answer(self, line: str) -> None:
        match = _ANSWER.fullmatch(line)
        if self._claimed is not None:
            self.rank = self._claimed if line == _CONFIRMATION else None
            self.refused = self.rank is None
        elif match and hmac.compare_digest(match[3], _proof(self.secret, "rank", match[1], self._challenge, match[2])):
            self._claimed = int(match[1])
            self._send(_proof(self.secret, "rank 0", match[1], match[2], self._challenge))
        else:
            self.refused = True

    def _send(self, line: str) -> None:
        data = line.encode() + b"\n"
        try:
            self.refused |= self.connection.send(data) != len(data)  # a fresh connection has room for so few bytes
        except OSError:
            self.refused = True


def prove_rank(connection: socket.socket, rank: int, secret: str, deadline: float) -> bool:
    """Return whether rank 0 is at the other end; then it knows that ``rank`` is at this end.

    Raises OSError if the connection fails, or if the handshake has not ended at ``deadline`` (monotonic seconds).
    """
    challenge = _CHALLENGE.fullmatch(_read_line(connection, deadline))
    if not challenge:
        return False
    own = secrets.token_hex(16)
    connection.sendall(f"{rank} {own} {_proof(secret, 'rank', rank, challenge[1], own)}\n".encode())
    if not hmac.compare_digest(_read_line(connection, deadline), _proof(secret, "rank 0", rank, own, challenge[1])):
        return False
    connection.sendall(f"{_CONFIRMATION}\n".encode())
    return True


def _read_line(connection: socket.socket, deadline: float) -> str:
    """Read one short line, byte by byte, so that the data after it stays unread."""
    line = b""
    while len(line) <= _LONGEST_LINE:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        byte = connection.recv(1)
        if byte in (b"", b"\n"):
            break
        line += byte
    return line.decode("ascii", "replace")
