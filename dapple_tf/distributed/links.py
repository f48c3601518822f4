"""A connection between two ranks, beside Horovod's, which may be blocked: it carries JSON objects, one a line."""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_LONGEST_BYTES = 65536  # of a message; the watchdogs send shorter ones
# Errors by which the system says that the network has failed, and not the process at the other end.
_NETWORK_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


@dataclass
class Link:
    """The connection to ``rank``. Any thread may send, one thread may receive.

    ``open``: the other end has not closed it. ``network_error``: the system's text if the network has failed, else "".
    """

    rank: int
    connection: socket.socket
    open: bool = True
    network_error: str = ""
    _unread: bytes = field(default=b"", repr=False)
    _sending: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def send(self, content: Mapping[str, Any]) -> None:
        """Send a JSON object. If that fails it is lost, and ``receive`` will find the connection closed."""
        try:
            with self._sending:
                self.connection.sendall(json.dumps(content).encode() + b"\n")
        except OSError as error:  # the system reports it once, here or to ``receive``
            self._note_network_error(error)

    def receive(self) -> list[dict[str, Any]]:
        """Return the objects that have arrived; ``open`` is False afterwards if the other end has closed."""
        try:
            data = self.connection.recv(_LONGEST_BYTES)
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # the socket's own timeout: nothing has arrived
                return []
            self._note_network_error(error)
            data = b""
        self.open = bool(data) and len(self._unread) < _LONGEST_BYTES
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _note_network_error(self, error: OSError) -> None:
        if error.errno in _NETWORK_ERRORS:
            self.network_error = str(error.strerror)
