"""The exchange ops: what is sent arrives, in any order, and a lost peer or a cancelled step ends the wait."""

from __future__ import annotations

import ctypes
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.distributed.native.library import ExchangeLibrary, load_library
from tests.dapple_tf.distributed.native.peers import DTYPES, Pair, connect_pair, connect_socket, needs_library
from tests.paths import ROOT

pytestmark = needs_library

FarEnd = tuple[int, socket.socket]


@pytest.fixture(scope="module")
def library() -> ExchangeLibrary:
    return load_library()


@pytest.fixture
def pair(library: ExchangeLibrary) -> Pair:
    return connect_pair(library)


@pytest.fixture
def far_end(library: ExchangeLibrary) -> Iterator[FarEnd]:
    """A peer of this process, and the other end of its connection, which the test reads and writes."""
    peer, other = connect_socket(library)
    with other:
        yield peer, other


def receive_error(library: ExchangeLibrary, peer: int) -> str:
    with pytest.raises(tf.errors.OpError) as caught:
        library.ops.dapple_receive([], T=[tf.float32], shapes=[[2]], peer=peer, exchange="x")
    return str(caught.value)


def test_values_of_all_dtypes_and_shapes_arrive_in_one_message(pair: Pair) -> None:
    random = np.random.default_rng(0)
    values = [tf.cast(tf.constant(random.integers(0, 2, (3, i))), dtype) for i, dtype in enumerate(DTYPES)]
    values += [tf.constant(2.5), tf.zeros([0, 4]), tf.ones([2, 1, 3], tf.int32)]
    sent_bytes = pair.send(values)
    received = pair.receive([value.dtype for value in values], [[None] * len(value.shape) for value in values])
    assert int(sent_bytes) == sum(value.dtype.size * int(tf.size(value)) for value in values)
    for sent, got in zip(values, received, strict=True):
        assert sent.dtype == got.dtype
        np.testing.assert_array_equal(sent.numpy(), got.numpy())


def test_a_tensor_larger_than_any_buffer_arrives_and_the_sender_does_not_wait_for_it(pair: Pair) -> None:
    value = tf.random.stateless_uniform([6_000_001], [1, 2])
    pair.send([value])
    (received,) = pair.receive([tf.float32])
    assert bool(tf.reduce_all(received == value))


def test_executions_of_an_exchange_match_in_order_and_exchanges_by_name(pair: Pair) -> None:
    for i in range(3):
        pair.send([tf.constant(i)], exchange="a")
        pair.send([tf.constant(10 + i)], exchange="b")
    found = [int(pair.receive([tf.int32], exchange=name)[0]) for name in ("b", "a", "a", "b", "a", "b")]
    assert found == [10, 0, 1, 11, 2, 12]


def test_a_receive_that_begins_first_completes_when_the_message_comes(pair: Pair) -> None:
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.extend(pair.receive([tf.float32])))
    waiting.start()
    pair.send([tf.constant([1.0, 2.0])])
    waiting.join(20)
    np.testing.assert_array_equal(found[0].numpy(), [1, 2])


def test_ops_of_a_graph_are_neither_folded_merged_nor_left_out(pair: Pair) -> None:
    """As in a rank's step: equal receives without inputs, sends of constants, results that only a token uses."""
    ops = pair.library.ops

    @tf.function(autograph=False)
    def step() -> Any:
        tokens = [ops.dapple_send([tf.ones([2])], [], peer=pair.there, exchange=name) for name in ("m0", "m1")]
        kinds = {"T": [tf.float32], "shapes": [[2]], "peer": pair.here}
        received = [ops.dapple_receive([], **kinds, exchange=name) for name in ("m0", "m1")]
        return tf.add_n([*tokens, *(token for _, token in received)])

    assert [int(step()) for _ in range(3)] == [4 * 8] * 3


def test_a_name_has_numbers_that_are_computed(pair: Pair) -> None:
    """As in a loop over micro-batches: iterations run side by side, and of eight the first takes the last message."""
    ops = pair.library.ops

    def body(i: Any, received: Any) -> Any:
        sent = ops.dapple_send([2 * i], [tf.bitwise.bitwise_xor(i, 7)], peer=pair.there, exchange="mb*")
        (value,), size = ops.dapple_receive([i], T=[tf.int64], shapes=[[]], peer=pair.here, exchange="mb*")
        return i + 1, received + value * (sent + size)

    # As steps are built: automatic control dependencies would order the receives.
    @tf.function(autograph=False, experimental_attributes={internals.NO_AUTOMATIC_CONTROL: True})
    def loop(count: Any) -> Any:
        zero = tf.constant(0, tf.int64)
        return tf.while_loop(lambda i, _: i < count, body, [zero, zero], parallel_iterations=8)[1]

    for count in (8, 32, 32):
        assert int(loop(tf.constant(count, tf.int64))) == 16 * count * (count - 1)


def test_executions_are_counted_for_each_number(pair: Pair) -> None:
    for i, number in enumerate((3, 12, 3)):
        pair.send([tf.constant(i)], "a * b*", [tf.constant(number, tf.int64), tf.constant(7, tf.int64)])
    for i, name in ((0, "a 3 b7"), (2, "a 3 b7"), (1, "a 12 b7")):
        assert int(pair.receive([tf.int32], exchange=name)[0]) == i


@pytest.mark.parametrize("numbers", [[], [tf.constant([1], tf.int64)]])
def test_a_name_without_its_number_is_an_error(pair: Pair, numbers: Any) -> None:
    for act in (
        lambda: pair.send([tf.ones([1])], "mb*", numbers),
        lambda: pair.receive([tf.float32], None, "mb*", numbers),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"there is no scalar for each \* of mb\*"):
            act()


def test_the_static_shape_is_what_the_attributes_say(pair: Pair) -> None:
    with tf.Graph().as_default():
        values, token = pair.library.ops.dapple_receive([], T=[tf.int64], shapes=[[None, 3]], peer=1, exchange="x")
        assert values[0].shape.as_list() == [None, 3]
        assert token.shape.as_list() == []
        assert values[0].op.op_def.is_stateful


@pytest.mark.parametrize(
    ("types", "shapes"),
    [([tf.float64], [[2]]), ([tf.float32], [[3]]), ([tf.float32, tf.float32], [[2], [2]])],
    ids=["dtype", "shape", "number"],
)
def test_other_tensors_than_expected_are_an_error(pair: Pair, types: Any, shapes: Any) -> None:
    pair.send([tf.ones([2])])
    with pytest.raises(tf.errors.InternalError, match="has sent other dtypes or shapes than expected in x of step 1"):
        pair.receive(types, shapes)


def test_text_cannot_be_sent(pair: Pair) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="cannot send a tensor of dtype string"):
        pair.send([tf.constant("a")])


def test_a_rank_without_a_connection_is_an_error(library: ExchangeLibrary) -> None:
    with pytest.raises(tf.errors.FailedPreconditionError, match="there is no connection to rank 77"):
        library.ops.dapple_send([tf.ones([2])], [], peer=77, exchange="x")


def test_a_peer_has_one_connection(library: ExchangeLibrary, far_end: FarEnd) -> None:
    peer, _ = far_end
    first, second = socket.socketpair()
    with first, second:
        assert not library.connect(peer, first.fileno())


# --- failures


def test_a_lost_peer_ends_the_wait_and_every_later_one(library: ExchangeLibrary, far_end: FarEnd) -> None:
    peer, other = far_end
    threading.Timer(0.2, other.close).start()
    for step in (1, 2):
        text = f"lost the connection to rank {peer}: the other end has closed it (waiting for x of step {step})"
        assert text in receive_error(library, peer)
    with pytest.raises(tf.errors.UnavailableError, match=f"lost the connection to rank {peer}"):
        library.ops.dapple_send([tf.ones([2])], [], peer=peer, exchange="x")


def test_a_peer_lost_in_the_middle_of_a_message_ends_the_wait(library: ExchangeLibrary, far_end: FarEnd) -> None:
    """Gloo's TCP transport does not do this."""
    peer, other = far_end
    header = struct.pack("=qII", 1, 1, 1) + b"x" + struct.pack("=iiq", 1, 1, 1000)
    other.sendall(b"DXMT" + struct.pack("=I", len(header)) + header + b"\0" * 100)
    threading.Timer(0.2, other.close).start()
    assert f"lost the connection to rank {peer}" in receive_error(library, peer)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"DXMT" + struct.pack("=I", 2**31),
        b"DXMT" + struct.pack("=I", 3) + b"abc",
        b"DXMT" + struct.pack("=IqII", 41, 1, 1, 1) + b"x" + struct.pack("=iiqq", 1, 2, -1, 5) + b"\0" * 20,
        b"DXMT" + struct.pack("=IqII", 25, 1, 1, 1) + b"x" + struct.pack("=ii", 1, 10**6) + b"\0" * 20,
    ],
    ids=["not ours", "too long", "too short", "negative size", "too many dimensions"],
)
def test_damaged_data_end_the_connection_not_the_process(
    library: ExchangeLibrary, far_end: FarEnd, data: bytes
) -> None:
    peer, other = far_end
    other.sendall(data)
    assert f"lost the connection to rank {peer}: it has sent a damaged message" in receive_error(library, peer)


def test_the_receives_of_a_failed_step_end_when_aborted_and_the_cause_is_reported(pair: Pair) -> None:
    """They do not end by themselves: the error of a stage function comes after the cancellation that it causes."""

    @tf.function(autograph=False, experimental_attributes={internals.NO_INLINE: True})
    def work(x: Any) -> Any:
        return tf.debugging.check_numerics(x, "bad input")

    # As steps are built: automatic control dependencies would order the check after the receive.
    @tf.function(autograph=False, experimental_attributes={internals.NO_AUTOMATIC_CONTROL: True})
    def step(x: Any) -> Any:
        (values, _) = pair.library.ops.dapple_receive([], T=[tf.float32], shapes=[[2]], peer=pair.here, exchange="x")
        return work(x) + values[0]

    errors = []

    def run() -> None:
        with pytest.raises(tf.errors.InvalidArgumentError, match="bad input") as caught:
            step(tf.constant([np.nan, 1.0]))
        errors.append(caught.value.message)

    running = threading.Thread(target=run)
    running.start()
    running.join(1)
    end = time.monotonic() + 30
    while not pair.library.has_cancelled_waits(0.1):
        assert time.monotonic() < end
        time.sleep(0.01)  # the check of the input cancels the receive
    assert running.is_alive()
    assert not pair.library.has_cancelled_waits(600)
    pair.library.abort()
    running.join(20)
    assert not pair.library.has_cancelled_waits(0)
    assert len(errors) == 1
    assert "elsewhere" not in errors[0]


def test_a_receive_that_only_waits_is_not_cancelled(pair: Pair) -> None:
    found = []
    running = threading.Thread(target=lambda: found.append(pair.receive([tf.float32])))
    running.start()
    running.join(0.5)
    assert running.is_alive()
    assert not pair.library.has_cancelled_waits(0)
    pair.send([tf.ones([2])])
    running.join(20)
    assert len(found) == 1


# --- memory


def test_bytes_in_flight_are_counted_until_an_op_takes_them(pair: Pair) -> None:
    pair.library.take_peak_bytes()
    for _ in range(3):
        pair.send([tf.ones([1000])])
    pair.send([tf.zeros([0])], exchange="after these")
    # A message in the socket's buffer counts nowhere. A connection keeps the order: before this one, all three came.
    pair.receive([tf.float32], exchange="after these")
    for _ in range(3):
        pair.receive([tf.float32])
    assert 3 * 4000 <= pair.library.take_peak_bytes() <= 2 * 3 * 4000
    assert pair.library.take_peak_bytes() == 0


# --- tensors that the receiver copies from the sender's memory


def read_bytes(other: socket.socket, size: int) -> bytes:
    """Return the next ``size`` bytes. MSG_WAITALL would not do: a socket with a time limit returns what has come."""
    other.settimeout(20)
    found = b""
    while len(found) < size:
        part = other.recv(size - len(found))
        assert part, f"the connection ended after {len(found)} of {size} bytes"
        found += part
    return found


def read_messages(other: socket.socket, number: int) -> list[tuple[bytes, bytes]]:
    """Return kind and header of the next messages, none of which has tensors by value."""
    found = []
    for _ in range(number):
        prefix = read_bytes(other, 8)
        (size,) = struct.unpack("=I", prefix[4:])
        found.append((prefix[3:4], read_bytes(other, size)))
    return found


def references(address: int, elements: int) -> bytes:
    """Return a message of one float32 vector, the first of exchange x, that is at an address."""
    header = struct.pack("=qII", 1, 1, 1) + b"x" + struct.pack("=iiqQ", 1, 1, elements, address)
    return b"DXMR" + struct.pack("=I", len(header)) + header


def wait_for_bytes_in_flight(library: ExchangeLibrary, wanted: int) -> None:
    """Poll until ``wanted`` bytes are in flight. A message counts until the sender's thread has sent all of it."""
    end = time.monotonic() + 20
    while (found := library.take_peak_bytes()) != wanted:
        assert time.monotonic() < end, f"{found} bytes are in flight, {wanted} expected"


def test_a_large_tensor_is_kept_until_the_peer_has_copied_it(library: ExchangeLibrary, far_end: FarEnd) -> None:
    peer, other = far_end
    ((kind, probe),) = read_messages(other, 1)
    address, number = struct.unpack("=QQ", probe)
    assert kind == b"P"
    assert ctypes.c_uint64.from_address(address).value == number
    other.sendall(b"DXMY" + struct.pack("=I", 0))
    value = np.arange(100_000, dtype=np.float32)
    for _ in range(100):  # the first ones may be on their way before the answer to the probe is read
        library.ops.dapple_send([tf.constant(value)], [], peer=peer, exchange="x")
        kind = read_bytes(other, 8)[3:4]
        if kind == b"R":
            break
        read_bytes(other, 33 + value.nbytes)
    assert kind == b"R"
    *_, size, address = struct.unpack("=iiqQ", read_bytes(other, 41)[17:])
    assert size == len(value)
    wait_for_bytes_in_flight(library, value.nbytes)
    np.testing.assert_array_equal(np.ctypeslib.as_array((ctypes.c_float * size).from_address(address)), value)
    assert library.take_peak_bytes() == value.nbytes
    other.sendall(b"DXMC" + struct.pack("=I", 0))
    wait_for_bytes_in_flight(library, 0)


def test_a_tensor_is_copied_from_the_memory_of_the_sender(library: ExchangeLibrary, far_end: FarEnd) -> None:
    peer, other = far_end
    value = np.random.default_rng(0).standard_normal(3_000_000).astype(np.float32)
    other.sendall(references(value.ctypes.data, len(value)))
    values, bytes_received = library.ops.dapple_receive([], T=[tf.float32], shapes=[[None]], peer=peer, exchange="x")
    np.testing.assert_array_equal(values[0].numpy(), value)
    assert int(bytes_received) == value.nbytes
    assert [kind for kind, _ in read_messages(other, 2)] == [b"P", b"C"]


@pytest.mark.parametrize(("claimed", "answers"), [(17, [b"P", b"Y", b"C"]), (18, [b"P", b"C"])])
def test_a_probe_is_answered_if_its_number_is_found(far_end: FarEnd, claimed: int, answers: list[bytes]) -> None:
    """In another container a process number may mean another process."""
    _, other = far_end
    number = ctypes.c_uint64(17)
    other.sendall(b"DXMP" + struct.pack("=IQQ", 16, ctypes.addressof(number), claimed))
    other.sendall(references(0, 0))  # its answer comes after that to the probe
    assert [kind for kind, _ in read_messages(other, len(answers))] == answers


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (references(8, 1000), "cannot copy a tensor from its memory: Bad address"),
        (b"DXMC" + struct.pack("=I", 0), "it has sent a damaged message"),
        (b"DXMP" + struct.pack("=IQ", 8, 1), "it has sent a damaged message"),
    ],
    ids=["no such memory", "nothing to copy", "a short probe"],
)
def test_wrong_references_end_the_connection(
    library: ExchangeLibrary, far_end: FarEnd, data: bytes, reason: str
) -> None:
    peer, other = far_end
    other.sendall(data)
    assert f"lost the connection to rank {peer}: {reason}" in receive_error(library, peer)


# --- two processes

OTHER_END = """
import socket, sys
import tensorflow as tf
from dapple_tf.distributed.native.library import load_library
library = load_library()
library.connect(0, int(sys.argv[1]))
for step in range(50):
    values, _ = library.ops.dapple_receive([], T=[tf.float32], shapes=[[None]], peer=0, exchange="there")
    library.ops.dapple_send([values[0] + 1], [], peer=0, exchange="back")
library.ops.dapple_receive([], T=[tf.float32], shapes=[[None]], peer=0, exchange="never")
"""


def test_two_processes_exchange_and_notice_that_one_is_killed(library: ExchangeLibrary, far_end: FarEnd) -> None:
    peer, other = far_end
    with other:
        other.set_inheritable(True)
        process = subprocess.Popen(
            [sys.executable, "-c", OTHER_END, str(other.fileno())], cwd=ROOT, pass_fds=[other.fileno()]
        )
    for step in range(50):
        sent = tf.fill([1 + step**3], float(step))
        library.ops.dapple_send([sent], [], peer=peer, exchange="there")
        values, _ = library.ops.dapple_receive([], T=[tf.float32], shapes=[[None]], peer=peer, exchange="back")
        assert bool(tf.reduce_all(values[0] == sent + 1))
    process.kill()
    assert f"lost the connection to rank {peer}" in receive_error(library, peer)
    process.wait(20)
