"""Ctrl-C during planning, in real processes: how it ends, how soon, and that the process can plan again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.dapple_tf.planner.builders import make_profile
from tests.paths import ROOT

# SIGINT is sent some seconds after a function of planner "best" has begun.
INTERRUPT = """
import os, signal, sys, threading, time
from dapple_tf.planner import best

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in the background with SIGINT ignored

def interrupt(seconds):
    sender = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    sender.daemon = True
    sender.start()

def interrupt_during(name, seconds):
    original = getattr(best, name)
    def begin(*args, **options):
        interrupt(seconds)
        return original(*args, **options)
    setattr(best, name, begin)
"""

# Plans the profile that is the first argument, also while being interrupted.
PLAN = """
import dapple_tf as dapple
from dapple_tf.profiler.cluster import config
from dapple_tf.profiler.profile import Profile

def plan(planner="best"):
    return dapple.plan(Profile.load(sys.argv[1]), config("c", 16), global_batch_size=256, planner=planner)

def plan_interrupted(seconds, planner="best"):
    made, begin = [], time.monotonic()
    try:
        interrupt(seconds)
        made.append(plan(planner))
        time.sleep(60)
    except KeyboardInterrupt:
        return [] if made else [time.monotonic() - begin - seconds]
"""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile whose planning takes a few seconds."""
    layers = [(1e-3 * (1 + i % 5), 1e-3 * (2 + i % 7), 3e6 * (1 + i % 4), 5e6, 1e7 * (1 + i % 11)) for i in range(60)]
    path = tmp_path / "profile.json"
    make_profile(*layers).save(path)
    return path


def run(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run the code, after ``INTERRUPT``, in a new process with these arguments."""
    command = [sys.executable, "-X", "faulthandler", "-c", INTERRUPT + code, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("function", ["leading_baselines", "_annealed"])
def test_the_command_ends_with_one_line(profile: Path, function: str) -> None:
    code = f"""
from dapple_tf.cli import main
interrupt_during({function!r}, 0.05)
main()
"""
    done = run(code, "plan", "-q", profile, "--cluster", "config-c:16", "--global-batch-size", 256)
    lines = [line for line in done.stderr.splitlines() if line]
    assert (lines, done.stdout, done.returncode) == (["stopped"], "", 130)


def test_the_command_does_not_wait_for_a_thread_that_goes_on(profile: Path) -> None:
    """It is deaf to the interrupt, as a C++ compiler is."""
    code = """
from dapple_tf.cli import main
best.leading_baselines = lambda problem: time.sleep(1000)
interrupt_during("leading_baselines", 0.05)
main()
"""
    done = run(code, "plan", "-q", profile, "--cluster", "config-c:16", "--global-batch-size", 256)
    assert (done.stderr, done.returncode) == ("\nstopped\n", 130)


def test_a_process_can_plan_again_after_interrupts_at_many_moments(profile: Path) -> None:
    code = f"""
{PLAN}
first = plan()
begin = time.monotonic()
assert plan() == first
whole = time.monotonic() - begin
waits = [wait for share in range(20) for wait in plan_interrupted(whole * share / 25)]
assert plan() == first
print(len(waits), sorted(waits)[len(waits) // 2])
"""
    done = run(code, profile)
    assert done.returncode == 0, done.stderr
    interrupted, median = done.stdout.split()
    assert int(interrupted) >= 10
    assert float(median) < 1
