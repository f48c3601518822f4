"""Offers of more ranks, as rank 0 reads them from its standard input, and what an elastic job makes of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import tensorflow as tf

from dapple_tf.distributed.membership import Job
from dapple_tf.launcher.restart import VARIABLE, Offers, Start, offer_ranks
from dapple_tf.launcher.supervisor import is_read
from dapple_tf.runtime.growth import Growth
from tests.dapple_tf.builders import step_of


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return a function that writes to standard input of this process, which a launcher has started."""
    reader, writer = os.pipe()
    monkeypatch.setenv(VARIABLE, Start(0).to_text())
    with os.fdopen(reader) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        yield lambda text: (os.write(writer, text.encode()), None)[1]
        os.close(writer)


def test_the_last_offer_counts_once(write: Callable[[str], None]) -> None:
    offers = Offers()
    assert offers.read() == []
    write(offer_ranks([("nodea", 2)]) + "other words\n" + offer_ranks([("nodea", 2), ("nodeb", 12)]))
    assert offers.read() == [("nodea", 2), ("nodeb", 12)]
    assert offers.read() == []


def test_a_line_that_comes_in_parts_is_read_as_a_whole(write: Callable[[str], None]) -> None:
    """Mpirun passes on 4096 bytes at a time: the names of 500 hosts are more."""
    offers, hosts = Offers(), [(f"node{number}", 12) for number in range(500)]
    line = offer_ranks(hosts)
    write(line[:4096])
    assert offers.read() == []
    write(line[4096:])
    assert offers.read() == hosts


def test_nothing_is_written_to_a_pipe_that_is_not_read() -> None:
    """The launcher would wait for the reader, and no longer for its job."""
    reader, writer = os.pipe()
    with os.fdopen(reader) as stream, os.fdopen(writer, "w") as pipe:
        assert is_read(pipe)
        pipe.write(offer_ranks([("nodea", 2)]))
        pipe.flush()
        assert not is_read(pipe)
        stream.readline()
        assert is_read(pipe)


def test_no_host_is_no_offer(write: Callable[[str], None]) -> None:
    write(offer_ranks([]))
    assert Offers().read() == []


def test_standard_input_of_another_launcher_is_not_read(write: Callable[[str], None]) -> None:
    write(offer_ranks([("nodea", 2)]))
    assert Offers({}).read() == []


def test_a_job_does_not_end_for_an_offer_that_is_withdrawn(write: Callable[[str], None]) -> None:
    told: list[str] = []
    growth = Growth(step_of(lambda x: tf.reduce_mean(x), stages=1), Job(), told.append)
    write(offer_ranks([("nodea", 2)]) + offer_ranks([("nodea", 1)]))
    assert not growth.wants_more_ranks(10)
    assert told == []
    write(offer_ranks([("nodea", 2)]))
    assert growth.wants_more_ranks(10)
    assert told == ["2 ranks are possible: the step time with them is not known, so the job goes on with them"]
