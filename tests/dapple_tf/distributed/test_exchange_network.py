"""Connections between the ranks that exchange tensors: three ranks as threads, which send a word over each of them."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from dapple_tf.distributed.exchange_network import ExchangeNetwork
from dapple_tf.distributed.native_collectives import barrier_rounds, exchanging_pairs
from dapple_tf.errors import JobError
from dapple_tf.graph_passes.ir.graph import OTHER, Graph, Node, attributes, tensor
from tests.dapple_tf.distributed.test_membership import ThreadJob, on_three_ranks


@dataclass
class Sockets:
    """Keeps the sockets that are handed to it, in place of the library."""

    kept: dict[int, socket.socket] = field(default_factory=dict)
    closed: int = 0
    aborted: int = 0

    def connect(self, peer: int, descriptor: int) -> bool:
        assert peer not in self.kept
        self.kept[peer] = socket.socket(fileno=descriptor)
        return True

    def abort(self) -> None:
        self.aborted += 1

    def close_in_child(self) -> None:
        self.closed += 1

    def find_waits(self, seconds: float) -> Mapping[int, list[str]]:
        return {}


def greet(job: ThreadJob, sockets: Sockets) -> dict[int, str]:
    """Return what the peers of this rank say over its connections; close these."""
    for peer, connection in sockets.kept.items():
        connection.sendall(f"{job.rank} to {peer}".encode())
    heard = {}
    for peer, connection in sockets.kept.items():
        with connection:
            connection.settimeout(20)
            assert connection.family == socket.AF_UNIX
            heard[peer] = connection.recv(100).decode()
    return heard


def test_only_the_wanted_ranks_are_connected_and_each_pair_once() -> None:
    def connect(job: ThreadJob) -> tuple[dict[int, str], int]:
        sockets = Sockets()
        network: Any = ExchangeNetwork(job, sockets)  # type: ignore[arg-type]  # plain sockets, no ops
        network.connect([(0, 1)])
        calls = job.progress.calls
        network.connect([(0, 1)])
        assert job.progress.calls == calls
        network.connect([(0, 1), (0, 2)])
        return greet(job, sockets), len(sockets.kept)

    assert on_three_ranks(connect) == [
        ({1: "1 to 0", 2: "2 to 0"}, 2),
        ({0: "0 to 1"}, 1),
        ({0: "0 to 2"}, 1),
    ]


def test_all_ranks_may_be_connected_with_all() -> None:
    def connect(job: ThreadJob) -> list[int]:
        sockets = Sockets()
        ExchangeNetwork(job, sockets).connect([(0, 1), (0, 2), (1, 2)])  # type: ignore[arg-type]  # plain sockets, no ops
        return sorted(greet(job, sockets))

    assert on_three_ranks(connect) == [[1, 2], [0, 2], [0, 1]]


def test_a_rank_that_does_not_know_the_secret_is_refused() -> None:
    def connect(job: ThreadJob) -> None:
        gather = job.gather

        def forget_secret(value: Any) -> list[Any]:
            servers = gather(value)
            if job.rank != 1 or not isinstance(value[0], list):
                return servers
            return [(places, "another") for places, _ in servers]

        job.gather = forget_secret  # type: ignore[method-assign]  # of this job alone
        ExchangeNetwork(job, Sockets(), seconds=1.5).connect([(0, 1)])  # type: ignore[arg-type]  # plain sockets, no ops

    errors = on_three_ranks(connect)
    assert all(isinstance(error, JobError) for error in errors)
    assert any("rank 1 cannot connect to rank 0 at any of its addresses" in str(error) for error in errors)


def test_pairs_are_those_between_which_a_tensor_travels() -> None:
    def graph(*sent_to: tuple[int, ...]) -> Graph:
        nodes = [
            Node(f"exchange/{i}", "exchange", (), (), attributes({"to": to, "source": (), "ranks": (0, 1, 2)}))
            for i, to in enumerate(sent_to)
        ]
        return Graph("rank", tuple(nodes))

    assert exchanging_pairs([graph((1,), ()), graph((0,)), graph((1, 1))]) == {(0, 1), (1, 2)}


def test_pairs_include_those_of_barrier_messages() -> None:
    meet = Node("update/barrier", "barrier", (), (), attributes({"ranks": (0, 1, 2, 3, 4)}))
    every = exchanging_pairs([Graph("rank", (meet,))] * 5)
    assert every == {(0, 1), (1, 2), (2, 3), (3, 4), (0, 4), (0, 2), (1, 3), (2, 4), (0, 3), (1, 4)}
    assert exchanging_pairs([Graph("whole", (Node("update/barrier", "barrier"),))]) == set()


def test_pairs_include_the_neighbours_of_a_ring() -> None:
    def reduces(*ranks: int, dims: tuple[int | None, ...] = (3,)) -> Graph:
        kinds = (tensor("float32", *dims), tensor("int64"))
        return Graph("rank", (Node("stage0/allreduce", "allreduce", (), kinds, attributes({"ranks": ranks})),))

    other = Graph("rank", ())
    assert exchanging_pairs([reduces(0, 2), other, reduces(0, 2)]) == {(0, 2)}
    ring = reduces(0, 1, 3, 4)
    assert exchanging_pairs([ring, ring, other, ring, ring]) == {(0, 1), (1, 3), (3, 4), (0, 4)}
    for dims in ((3, None), (OTHER,)):  # a ring is cut by the shapes: Horovod sums these
        assert exchanging_pairs([reduces(0, 1, dims=dims)] * 2) == set()


@pytest.mark.parametrize("count", range(2, 18))
def test_a_rank_leaves_a_barrier_only_when_all_have_reached_it(count: int) -> None:
    """After the last round every rank knows of every other; their numbers need not be consecutive."""
    ranks = [3 * i + 1 for i in range(count)]
    rounds = {rank: barrier_rounds(ranks, rank) for rank in ranks}
    assert {len(found) for found in rounds.values()} == {(count - 1).bit_length()}
    known = {rank: {rank} for rank in ranks}
    for number in range((count - 1).bit_length()):
        before = {rank: frozenset(found) for rank, found in known.items()}
        for rank in ranks:
            after, _ = rounds[rank][number]
            assert rounds[after][number][1] == rank  # who sends is expected
            known[after] |= before[rank]
    assert all(found == set(ranks) for found in known.values())
