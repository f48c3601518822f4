"""A model that does not fit its process is refused before anything is allocated, with what is missing."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys

import pytest

from dapple_tf.backend.room import find_room
from tests.paths import ROOT
from tests.processes import RanksError, needs_horovod, run_ranks

PROGRAM = "tests.dapple_tf.backend.large_model"


def test_one_process_that_cannot_hold_the_model_says_how_many_could() -> None:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert re.fullmatch(
        r"dapple_tf\.errors\.NoFitError: this process, which runs 2 stages, needs 9\.6 GB \(6\.4 GB of weights and of "
        r"the optimizer's slots, 3\.2 GB of gradients and copies\), and may take \d\.\d+ GB more: ulimit -d, the limit "
        r"on its data, is 3 GB\. In [4-6] or more equal parts it would fit: use more stages, .*",
        last,
    )


@needs_horovod
def test_a_rank_that_cannot_hold_its_stage_is_named() -> None:
    with pytest.raises(RanksError) as raised:
        run_ranks(["-m", PROGRAM], 2, timeout_seconds=200)
    assert re.search(r"NoFitError: rank [01] \(stage [01]\) needs 4\.8 GB \(3\.2 GB of weights", str(raised.value))


def test_the_least_limit_counts() -> None:
    before = find_room()
    assert before is not None
    assert before.bytes > 0
    program = (
        "import resource; from dapple_tf.backend.room import find_room\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40)); wide = find_room()\n"
        "import os; used = int(open('/proc/self/statm').read().split()[0]) * os.sysconf('SC_PAGE_SIZE')\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 10**8, 2**40)); narrow = find_room()\n"
        "print(narrow.bytes <= 10**8 < wide.bytes, narrow.limit)"
    )
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("True ulimit -v, the limit on its address space, is "), done.stdout
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
