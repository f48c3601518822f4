"""What the benchmark of a rank's start-up time measures."""

from __future__ import annotations

import time

from benchmarks.startup import describe
from tests.processes import run_python

TICK = 0.01


def test_the_age_of_a_process_is_the_time_since_its_start() -> None:
    program = "import time; time.sleep(0.3); from benchmarks.startup import process_age; print(process_age())"
    begin = time.monotonic()
    done = run_python("-c", program)
    took = time.monotonic() - begin
    assert 0.3 <= float(done.stdout) <= took + TICK


def test_parts_are_printed_with_their_sum() -> None:
    assert describe({"import": 1.26, "join": 0.5}) == "1.8 s (import 1.3, join 0.5)"
