"""Connections between ranks that carry messages, one a line; Horovod's own connections may be blocked."""

from __future__ import annotations

import errno
import selectors
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from dapple_tf.distributed.messages import Message, decode, encode

_LONGEST_BYTES = 65536  # longer than any message of a watchdog
# These errors mean that the network has failed, and not the process at the other end.
_NETWORK_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
_UNREADABLE = "has sent a message that cannot be read: install the same version of dapple_tf on every host"


@dataclass
class Link:
    """The connection to ``rank``. Any thread may send, one thread may receive.

    ``open``: both ends can use it. ``failure``: what has happened to the rank, in words, if it is known by other means
    than that the connection has closed; else "".
    """

    rank: int
    connection: socket.socket
    open: bool = True
    failure: str = ""
    _unread: bytes = field(default=b"", repr=False)
    _sending: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def send(self, message: Message) -> None:
        """Send a message. If that fails, it is lost, and ``receive`` will find the connection closed."""
        try:
            with self._sending:
                self.connection.sendall(encode(message) + b"\n")
        except OSError as error:  # the system reports an error once, here or to ``receive``
            self._note_network_error(error)

    def receive(self) -> list[Message]:
        """Return the messages that have arrived.

        ``open`` is False afterwards if the other end has closed, or has sent what is no message.
        """
        try:
            data = self.connection.recv(_LONGEST_BYTES)
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # the socket's own timeout: nothing has arrived
                return []
            self._note_network_error(error)
            data = b""
        self.open = bool(data)
        *lines, self._unread = (self._unread + data).split(b"\n")
        messages = list[Message]()
        try:
            messages.extend(decode(line) for line in lines)
            readable = len(self._unread) < _LONGEST_BYTES
        except (ValueError, RecursionError):  # no UTF-8, no message, or values in values too deep to read
            readable = False
        if not readable:
            self.open, self.failure = False, _UNREADABLE
        return messages

    def _note_network_error(self, error: OSError) -> None:
        if error.errno in _NETWORK_ERRORS:
            self.failure = f"cannot be reached ({error.strerror}): its host is cut off from the network"


# --- Send messages to the connected ranks, and wait for theirs


_SEND_SECONDS = 1.0  # the longest that a message may block its sender


class Transport:
    """Sends and receives over the ``links`` of a rank; data on the socket ``wakeup`` ends a wait."""

    def __init__(self, links: Sequence[Link], wakeup: socket.socket) -> None:
        self._links = tuple(links)
        self._selector = selectors.DefaultSelector()
        self._selector.register(wakeup, selectors.EVENT_READ, None)
        for link in links:
            link.connection.settimeout(_SEND_SECONDS)
            self._selector.register(link.connection, selectors.EVENT_READ, link)

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks at the other ends of the links."""
        return [link.rank for link in self._links]

    def send(self, message: Message, but: int | None = None) -> None:
        """Send a message to every connected rank except ``but``; any thread may call this."""
        for link in self._links:
            if link.rank != but and link.open:
                link.send(message)

    def wait(self, seconds: float) -> tuple[list[tuple[Link, list[Message]]], bool]:
        """Wait at most ``seconds`` for data; return what has come on which links, and if there is data on ``wakeup``.

        A link may have been closed at its other end.
        """
        ready = [key.data for key, _ in self._selector.select(max(0.0, seconds))]
        arrivals = [(link, link.receive()) for link in ready if link is not None]
        for link, _ in arrivals:
            if not link.open:
                self._selector.unregister(link.connection)
        return arrivals, None in ready

    def close(self) -> None:
        """Close the connections."""
        for link in self._links:
            link.connection.close()
