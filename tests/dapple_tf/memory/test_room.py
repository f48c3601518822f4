"""A model that does not fit its process is refused before anything is allocated, with what is missing."""

from __future__ import annotations

import re
import resource

import pytest

from dapple_tf.errors import NoFitError
from dapple_tf.memory.room import Need, Room, check_room, find_room
from tests.processes import RanksError, needs_horovod, run_python, run_ranks

PROGRAM = "tests.dapple_tf.memory.large_model"


def test_one_process_that_cannot_hold_the_model_says_how_many_could() -> None:
    done = run_python("-m", PROGRAM, exit_code=1, timeout_seconds=200)
    last = done.stderr.strip().splitlines()[-1]
    assert re.fullmatch(
        r"dapple_tf\.errors\.NoFitError: this process, which runs 2 stages, needs 12\.8 GB \(6\.4 GB of weights and of "
        r"the optimizer's slots, 3\.2 GB of gradients and copies, 3\.2 GB in a step\)\. That is \d+\.\d GB "
        r"too much: it may take \d\.\d+ GB more, since ulimit -d, the limit on its data, is 3 GB\. In [5-7] or more "
        r"equal parts it would fit: use more stages, .*, smaller micro-batches, re-computation, or a higher limit",
        last,
    ), last


@needs_horovod
def test_a_rank_that_cannot_hold_its_stage_is_named() -> None:
    with pytest.raises(RanksError) as raised:
        run_ranks(["-m", PROGRAM], 2, timeout_seconds=200)
    assert re.search(r"NoFitError: rank [01] \(stage [01]\) needs \d\.?\d* GB \(3\.2 GB of weights", str(raised.value))


def test_the_least_limit_counts() -> None:
    before = find_room()
    assert before.bytes > 0
    program = (
        "import resource; from dapple_tf.memory.room import find_room\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40)); wide = find_room()\n"
        "import os; used = int(open('/proc/self/statm').read().split()[0]) * os.sysconf('SC_PAGE_SIZE')\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 10**8, 2**40)); narrow = find_room()\n"
        "print(narrow.bytes <= 10**8 < wide.bytes, narrow.limit)"
    )
    done = run_python("-c", program)
    assert done.stdout.startswith("True ulimit -v, the limit on its address space, is "), done.stdout
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def test_processes_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = [Room(100, "its own limit is 100"), Room(150, "the machine has 200", shared=True)]
    monkeypatch.setattr("dapple_tf.memory.room._list_rooms", lambda: iter(rooms))
    own = Need("rank 1 (stage 1)", 50, 20, 10)
    check_room(own, [Need("rank 0 (stage 0)", 70, 0), None])
    message = (
        r"rank 1 \(stage 1\) needs 80 B \(50 B of weights .*, 20 B of gradients and copies, 10 B in a "
        r"step\), and with the 1 other rank of this host 151 B\. That is 1 B too much: it may take 150 B "
        r"more, since the machine has 200\. In 2 or more .* on more hosts"
    )
    with pytest.raises(NoFitError, match=message) as raised:
        check_room(own, [Need("rank 0 (stage 0)", 71, 0)])
    assert not raised.value.lasts, "other processes may have ended by the next start"
    with pytest.raises(NoFitError, match=r"needs 101 B .*That is 1 B too much: .*its own limit is 100"):
        check_room(Need("rank 1 (stage 1)", 101, 0))
