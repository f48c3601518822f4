"""Listening sockets of both kinds: what connects to their place is heard."""

from __future__ import annotations

import socket

import pytest

from dapple_tf.distributed.places import listen_on_host, open_connection, place_of, prepare_for_tensors


@pytest.mark.parametrize("unix", [True, False], ids=["Unix socket", "TCP"])
def test_a_place_can_be_connected_to_and_is_prepared_for_tensors(unix: bool) -> None:
    with listen_on_host(2) if unix else socket.create_server(("127.0.0.1", 0)) as listener:
        place = place_of(listener)
        assert (place[1] == 0) == unix
        with open_connection(place, 5) as connection:
            prepare_for_tensors(connection)
            connection.sendall(b"hello")
            accepted, _ = listener.accept()
            with accepted:
                accepted.settimeout(5)
                assert accepted.recv(10) == b"hello"
            if unix:
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > 200_000
            else:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_name_of_a_unix_socket_ends_with_it() -> None:
    with listen_on_host(2) as listener:
        place = place_of(listener)
    with pytest.raises(OSError, match="refused"):
        open_connection(place, 5)
