"""Ranks connect to rank 0 whatever else connects to it: strangers who are silent, slow, talkative, or lie."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from dapple_tf.distributed import rendezvous
from dapple_tf.distributed.handshake import prove_rank
from dapple_tf.distributed.links import Link
from dapple_tf.distributed.messages import FinishedMessage
from dapple_tf.distributed.rendezvous import accept_ranks, connect_to
from dapple_tf.errors import JobError

SECRET = "5ec7e7"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=400) as made:
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def accept(pool: ThreadPoolExecutor, listener: socket.socket, size: int, seconds: float) -> Future[list[Link]]:
    """Rank 0's links to all other ranks of a job of ``size``, once they have connected."""
    return pool.submit(accept_ranks, [listener], SECRET, range(1, size), 0, seconds)


def connect(rank: int, listener: socket.socket, secret: str = SECRET, seconds: float = 30.0) -> Link:
    """The link of a rank to rank 0."""
    return connect_to(0, [listener.getsockname()], secret, rank, "a test needs it", seconds)


def stranger(listener: socket.socket, data: bytes = b"") -> socket.socket:
    made = socket.create_connection(listener.getsockname(), timeout=5)
    made.sendall(data)
    return made


def connect_all(
    listener: socket.socket, pool: ThreadPoolExecutor, size: int, seconds: float = 10
) -> tuple[Sequence[Link], Sequence[Link]]:
    """Return rank 0's links and those of the other ranks."""
    accepted = accept(pool, listener, size, seconds)
    connected = [pool.submit(connect, rank, listener) for rank in range(1, size)]
    return accepted.result(20), [link.result(20) for link in connected]


def assert_connected(ends: tuple[Sequence[Link], Sequence[Link]]) -> None:
    """Each link carries messages both ways between the ranks that it names."""
    for rank, (here, there) in enumerate(zip(*ends, strict=True), 1):
        assert (here.rank, there.rank) == (rank, 0)
        for sender, receiver in ((here, there), (there, here)):
            receiver.connection.settimeout(30)
            sender.send(FinishedMessage(rank))
            assert receiver.receive() == [FinishedMessage(rank)]


def close(ends: tuple[Sequence[Link], Sequence[Link]], *others: socket.socket) -> None:
    for link in (*ends[0], *ends[1]):
        link.connection.close()
    for other in others:
        other.close()


def test_all_ranks_connect(listener: socket.socket, pool: ThreadPoolExecutor) -> None:
    ends = connect_all(listener, pool, 4)
    assert_connected(ends)
    close(ends)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"[" * 1023,
        b"[" * 100_000,
        b"\n" * 10,
        b'{"rank": 1, "secret": "?"}\n',
        b"1 " + b"0" * 32 + b" " + b"0" * 64 + b"\n",
        b"\xff" * 150 + b"\n",
    ],
)
def test_strangers_neither_end_nor_delay_the_ranks(
    listener: socket.socket, pool: ThreadPoolExecutor, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand brackets once ended rank 0 with a RecursionError, and silent strangers made rank 1 give up."""
    monkeypatch.setattr(rendezvous, "_CONNECT_SECONDS", 100.0)  # so a rank that waits for a stranger is late
    strangers = [stranger(listener, said) for _ in range(20)]
    begin = time.monotonic()
    ends = connect_all(listener, pool, 3)
    assert time.monotonic() - begin < 20
    assert_connected(ends)
    close(ends, *strangers)


def test_more_strangers_than_are_kept_do_not_keep_the_ranks_out(
    listener: socket.socket, pool: ThreadPoolExecutor
) -> None:
    strangers = [stranger(listener) for _ in range(350)]
    ends = connect_all(listener, pool, 2)
    assert_connected(ends)
    close(ends, *strangers)


def test_a_rank_that_gives_up_and_comes_again_has_its_last_connection(
    listener: socket.socket, pool: ThreadPoolExecutor
) -> None:
    """Rank 0 must not take the dead connection for good."""
    accepted = accept(pool, listener, 3, 10)
    first = pool.submit(connect, 1, listener).result(10)
    first.connection.close()
    links = [pool.submit(connect, rank, listener).result(10) for rank in (1, 2)]
    ends = accepted.result(10), links
    assert_connected(ends)
    close(ends)


def test_a_rank_that_does_not_confirm_is_no_link(listener: socket.socket, pool: ThreadPoolExecutor) -> None:
    """It has proven itself, but does not know that it is connected: it may have gone."""
    accepted = accept(pool, listener, 2, 3.0)  # seconds in which the rank proves itself

    class Silent(socket.socket):
        def sendall(self, data: bytes, *flags: int) -> None:  # type: ignore[override]  # the socket takes any buffer
            if data != b"connected\n":
                super().sendall(data)

    with Silent() as gone:
        gone.connect(listener.getsockname())
        assert prove_rank(gone, 1, SECRET, time.monotonic() + 5)
        with pytest.raises(JobError, match=r"rank\(s\) \[1\] have not connected to rank 0 in 3 s"):
            accepted.result(30)


@pytest.mark.parametrize("rank", [0, 2, 999_999_999])
def test_a_rank_of_an_impossible_number_is_no_link(
    listener: socket.socket, pool: ThreadPoolExecutor, rank: int
) -> None:
    accepted = accept(pool, listener, 2, 3.0)  # seconds in which the rank connects
    link = connect(rank, listener)
    with pytest.raises(JobError, match=r"rank\(s\) \[1\] have not connected"):
        accepted.result(30)
    link.connection.close()


def test_a_rank_of_another_job_is_no_link(listener: socket.socket, pool: ThreadPoolExecutor) -> None:
    accepted = accept(pool, listener, 2, 1.0)
    with pytest.raises(JobError, match=r"rank 1 cannot connect to rank 0 at any of its addresses \(127\.0\.0\.1 port"):
        connect(1, listener, "another", seconds=3.1)
    with pytest.raises(JobError, match="have not connected"):
        accepted.result(30)


def test_a_slow_sender_is_cut_off_in_time(listener: socket.socket, pool: ThreadPoolExecutor) -> None:
    """A byte now and then once held rank 0 far past its limit."""
    stop = threading.Event()

    def drip() -> None:
        with stranger(listener) as slow:
            while not stop.wait(0.1):
                try:
                    slow.sendall(b"1")
                except OSError:
                    return

    slow = pool.submit(drip)
    accepted = accept(pool, listener, 2, 1.5)
    try:
        with pytest.raises(JobError):
            accepted.result(30)
        slow.result(30)
    finally:
        stop.set()


def test_a_rank_gives_up_on_what_is_not_rank_0(pool: ThreadPoolExecutor) -> None:
    """The listening process sends a byte now and then, and never a challenge."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0.2)

        def drip() -> None:
            held = []
            while not stop.wait(0.2):
                with contextlib.suppress(TimeoutError):
                    held.append(other.accept()[0])
                for connection in held:
                    connection.sendall(b"d")
            for connection in held:
                connection.close()

        dripping = pool.submit(drip)
        begin = time.monotonic()
        with pytest.raises(JobError, match="timed out"):
            connect(1, other, seconds=1.0)
        assert time.monotonic() - begin < 30
        stop.set()
        dripping.exception(30)


def test_the_secret_is_not_sent(listener: socket.socket, pool: ThreadPoolExecutor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as between:

        def relay() -> bytes:
            seen = b""
            here, _ = between.accept()
            with here, stranger(listener) as there:
                for source, target in ((there, here), (here, there), (there, here), (here, there)):
                    source.settimeout(30)
                    data = source.recv(4096)
                    seen += data
                    target.sendall(data)
            return seen

        seen = pool.submit(relay)
        accepted = accept(pool, listener, 2, 30)
        link = connect(1, between)
        close((accepted.result(30), [link]))
        assert SECRET.encode() not in seen.result(30)
