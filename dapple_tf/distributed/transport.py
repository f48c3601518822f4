"""Send messages to the connected ranks, and wait for theirs."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from dapple_tf.distributed.links import Link
from dapple_tf.distributed.messages import Message, from_json, to_json

_SEND_SECONDS = 1.0  # the longest that a message may block its sender


@dataclass(frozen=True)
class Arrival:
    """The messages that came from ``rank``, and possibly the end of its connection.

    ``network_error``: see ``Link``.
    """

    rank: int
    messages: Sequence[Message]
    open: bool
    network_error: str


class Transport:
    """The ``links`` of a rank; data on ``wakeup`` ends a wait."""

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
        """Send a message to every connected rank ``but`` that one; any thread may call this."""
        for link in self._links:
            if link.rank != but and link.open:
                link.send(to_json(message))

    def wait(self, seconds: float) -> tuple[list[Arrival], bool]:
        """Wait at most ``seconds`` for data; return the arrivals, and whether there is data on ``wakeup``."""
        links = [key.data for key, _ in self._selector.select(max(0.0, seconds))]
        return [self._receive(link) for link in links if link is not None], None in links

    def _receive(self, link: Link) -> Arrival:
        messages = [from_json(content) for content in link.receive()]
        if not link.open:
            self._selector.unregister(link.connection)
        return Arrival(link.rank, messages, link.open, link.network_error)

    def close(self) -> None:
        """Close the connections."""
        for link in self._links:
            link.connection.close()
