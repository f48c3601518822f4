"""Connections between two ranks, as socket pairs in one process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from dapple_tf.distributed.links import Link
from dapple_tf.distributed.messages import CallMismatch, encode


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    sockets = socket.socketpair()
    for end in sockets:
        end.settimeout(5)
    yield Link(1, sockets[0]), Link(0, sockets[1])
    for end in sockets:
        end.close()


def test_messages_of_several_threads_arrive_whole(links: tuple[Link, Link]) -> None:
    """The main thread announces calls while the watchdog's thread sends heartbeats."""
    sender, receiver = links
    threads = [threading.Thread(target=send_many, args=(sender, text * 50_000)) for text in "ab"]
    for thread in threads:
        thread.start()
    received: list[str] = []
    while len(received) < 100:
        received += texts(receiver)
    assert sorted(text[:1] for text in received) == ["a"] * 50 + ["b"] * 50
    for thread in threads:
        thread.join(5)


def send_many(link: Link, text: str) -> None:
    for _ in range(50):
        link.send(CallMismatch(text))


def texts(link: Link) -> list[str]:
    """The texts of the messages that have arrived."""
    return [message.what for message in link.receive() if isinstance(message, CallMismatch)]


def test_a_message_that_arrives_in_two_parts_is_received_once_it_is_complete(links: tuple[Link, Link]) -> None:
    sender, receiver = links
    first, second = (encode(CallMismatch(text)) + b"\n" for text in "ab")
    sender.connection.sendall(first + second[:5])
    assert receiver.receive() == [CallMismatch("a")]
    sender.connection.sendall(second[5:])
    assert receiver.receive() == [CallMismatch("b")]
    assert receiver.open


def test_a_closed_connection_is_noticed_by_the_receiver_and_ignored_by_the_sender(links: tuple[Link, Link]) -> None:
    sender, receiver = links
    sender.connection.close()
    assert receiver.receive() == []
    assert not receiver.open
    assert receiver.failure == ""
    receiver.send(CallMismatch("lost"))


def test_a_network_error_is_kept_in_words(links: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable:
        def recv(self, size: int) -> bytes:
            raise OSError(113, "No route to host")

    link = Link(1, Unreachable())  # type: ignore[arg-type]  # a socket that fails cannot be had otherwise
    assert link.receive() == []
    assert not link.open
    assert link.failure == "cannot be reached (No route to host): its host is cut off from the network"


def test_an_idle_connection_is_open(links: tuple[Link, Link]) -> None:
    _, receiver = links
    receiver.connection.settimeout(0.01)
    assert receiver.receive() == []
    assert receiver.open


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n",
        b'{"kind": "Unknown"}\n',
        b"\xff\n",
        b'{"kind": "call mismatch", "what": "\xff"}\n',
        b'{"kind": "agreement", "more": ' + b"[" * 30000 + b"\n",
        b"x" * 65536 + b"y" * 65536,
    ],
    ids=["other protocol", "unknown kind", "no JSON", "no UTF-8", "deep", "long"],
)
def test_what_is_no_message_closes_the_connection_with_the_reason(links: tuple[Link, Link], sent: bytes) -> None:
    sender, receiver = links
    sender.connection.sendall(encode(CallMismatch("a")) + b"\n")
    sending = threading.Thread(target=sender.connection.sendall, args=(sent,))
    sending.start()
    received = list[str]()
    while receiver.open:
        received += texts(receiver)
    sending.join(5)
    assert received == ["a"]
    assert (
        receiver.failure
        == "has sent a message that cannot be read: install the same version of dapple_tf on every host"
    )
