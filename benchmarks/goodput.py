"""Two hours of training under random losses of hosts, simulated: what is left of the speed, by how a job survives.

A trace of losses (exponential, one a day a host) and of returns is the same for all. The times that a loss costs were
measured: see ``Inputs``. Step times with fewer hosts are those of the plans that the planner makes for them.
"""

from __future__ import annotations

import bisect
import heapq
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.figures import line_figure
from benchmarks.papers.transformer_profiles import BERT_LARGE, transformer_profile
from dapple_tf.planner.api import plan
from dapple_tf.profiler.cluster import config

HOSTS = (64, 512)
SECONDS = 7200.0
_DAY = 86400.0
_TRACES = 20
_SAVE_SECONDS = 600.0
_SAMPLES_A_HOST = 4
_WEIGHT_VALUES = 6  # of 2 bytes: a weight in single precision, and Adam's two slots

Policy = Literal["snapshots", "files", "no elasticity"]
POLICIES: Mapping[Policy, str] = {
    "snapshots": "snapshots, a new plan",
    "files": "from files, a new plan",
    "no elasticity": "from files, waits for a host",
}


@dataclass(frozen=True)
class Inputs:
    """The measured times: ``restart_seconds`` from a loss until steps run again, and what saving costs.

    ``snapshot_share``: by which snapshots lengthen a step, taken every ``snapshot_every`` steps. ``write_rate``: bytes
    a second of a checkpoint's file. Assumed, not measured: a host is back, or replaced, after ``repair_seconds``.
    """

    restart_seconds: float
    snapshot_share: float
    write_rate: float
    snapshot_every: int = 10
    repair_seconds: float = 600.0


@dataclass(frozen=True)
class Steps:
    """Seconds of a step with as many hosts as are left of ``hosts``, and the seconds of saving a file."""

    hosts: int
    seconds: Mapping[int, float]
    save_seconds: float

    def of(self, hosts: int) -> float:
        """Return the seconds with ``hosts`` hosts: between planned numbers, interpolated."""
        known = sorted(self.seconds)
        at = bisect.bisect_left(known, hosts)
        if at < len(known) and known[at] == hosts:
            return self.seconds[hosts]
        low, high = known[at - 1], known[at]
        part = (hosts - low) / (high - low)
        return (1 - part) * self.seconds[low] + part * self.seconds[high]


def plan_steps(hosts: int, inputs: Inputs) -> Steps:
    """Plan BERT-large for ``hosts`` hosts of one device each at 25 Gbps, and for fewer of them."""
    profile, batch = transformer_profile(BERT_LARGE, 1), _SAMPLES_A_HOST * hosts
    counts = {hosts, *(hosts - part * hosts // 16 for part in range(1, 5)), hosts - 1}
    seconds = {}
    for count in sorted(counts):
        found = plan(profile, config("b", count), global_batch_size=batch)
        seconds[count] = (found.predicted or {})["step_seconds"]
    size = sum(layer.parameter_bytes for layer in profile.layers) * _WEIGHT_VALUES
    return Steps(hosts, seconds, size / inputs.write_rate)


@dataclass
class _Run:
    """A run at time ``now``: the hosts that are ``up`` and that it uses; its useful seconds, ``done`` and ``saved``."""

    now: float
    up: int
    used: int
    done: float = 0.0
    saved: float = 0.0
    since_save: float = 0.0


def losses_of(hosts: int, seed: int) -> list[float]:
    """Return the times of losses in a trace; each host fails once a day on average."""
    numbers = random.Random(seed)
    times, now = [], 0.0
    while (now := now + numbers.expovariate(hosts / _DAY)) < SECONDS:
        times.append(now)
    return times


def simulate(policy: Policy, steps: Steps, inputs: Inputs, losses: Sequence[float]) -> list[tuple[float, float]]:
    """Return points (seconds, useful seconds): of a run without losses the two would be equal.

    Files are saved after Young's interval, which is best for those that go on from files; beside snapshots, which
    serve the loss of one host, after ten minutes.
    """
    every = math.sqrt(2 * steps.save_seconds * _DAY / steps.hosts) if policy != "snapshots" else _SAVE_SECONDS
    events = [(time, "loss") for time in losses]
    heapq.heapify(events)
    run = _Run(0.0, steps.hosts, steps.hosts)
    points = [(0.0, 0.0)]
    while run.now < SECONDS:
        time, kind = heapq.heappop(events) if events else (SECONDS, "end")
        _train_until(run, min(time, SECONDS), policy, steps, inputs, every)
        points.append((run.now, run.done))
        if kind == "loss":
            run.up -= 1
            heapq.heappush(events, (run.now + inputs.repair_seconds, "return"))
            run.done = run.saved
            run.used = run.up
            _restart(run, events, policy, steps, inputs)
        elif kind == "return":
            run.up += 1
            gain = (SECONDS - run.now) * (1 - steps.of(run.up) / steps.of(run.used))
            if policy != "no elasticity" and run.up > run.used and gain > inputs.restart_seconds:
                run.used, run.saved = run.up, run.done  # it ends after a save
                _restart(run, events, policy, steps, inputs)
        points.append((run.now, run.done))
    return points


def _train_until(run: _Run, time: float, policy: Policy, steps: Steps, inputs: Inputs, every: float) -> None:
    """Train until ``time``; useful seconds count as with all hosts."""
    if time <= run.now:
        return
    step = steps.of(run.used)
    share = inputs.snapshot_share if policy == "snapshots" else 0.0
    saving = steps.save_seconds / (every + steps.save_seconds)
    rate = steps.of(steps.hosts) / step / (1 + share) * (1 - saving)
    passed = time - run.now
    run.done += passed * rate
    # The state that a loss goes back to: of the last snapshot that is complete, or of the last file.
    interval = 2 * inputs.snapshot_every * step if policy == "snapshots" else every + steps.save_seconds
    run.since_save += passed
    if run.since_save >= interval:
        run.since_save %= interval
        run.saved = run.done - run.since_save * rate
    run.now = time


def _restart(run: _Run, events: list[tuple[float, str]], policy: Policy, steps: Steps, inputs: Inputs) -> None:
    """Pass the time until steps run again; losses meanwhile begin it anew."""
    run.since_save = 0.0
    ready = run.now + inputs.restart_seconds
    if policy == "no elasticity":
        missing = steps.hosts - run.up
        returns = sorted(time for time, kind in events if kind == "return")
        ready = max(ready, *returns[:missing], run.now) + (inputs.restart_seconds if missing else 0.0)
    while events and events[0][0] < min(ready, SECONDS):
        time, kind = heapq.heappop(events)
        run.now = max(run.now, time)
        if kind == "return":
            run.up += 1
            continue
        run.up -= 1
        heapq.heappush(events, (time + inputs.repair_seconds, "return"))
        ready = max(ready, time + inputs.restart_seconds)
        if policy == "no elasticity":
            ready = max(ready, time + inputs.repair_seconds + inputs.restart_seconds)
    run.used = steps.hosts if policy == "no elasticity" else run.up
    run.now = min(ready, SECONDS)


def goodput(inputs: Inputs) -> tuple[dict[int, dict[Policy, float]], Path]:
    """Return the share of useful time by hosts and policy, the mean of some traces, and draw it over time."""
    found: dict[int, dict[Policy, float]] = {}
    panels = {}
    minutes = list(range(15, int(SECONDS / 60) + 1, 15))
    for hosts in HOSTS:
        steps = plan_steps(hosts, inputs)
        lines: dict[str, list[float]] = {}
        found[hosts] = {}
        for policy, label in POLICIES.items():
            runs = [simulate(policy, steps, inputs, losses_of(hosts, seed)) for seed in range(_TRACES)]
            shares = [[_at(points, 60.0 * minute) / (60.0 * minute) for minute in minutes] for points in runs]
            lines[label] = [statistics.mean(column) for column in zip(*shares, strict=True)]
            found[hosts][policy] = lines[label][-1]
        panels[f"{hosts} hosts, a loss every {_DAY / hosts / 60:.1f} min"] = (minutes, lines)
    path = line_figure("goodput.png", panels, "simulated", x="minutes", y="useful share of the time", columns=2)
    return found, path


def _at(points: Sequence[tuple[float, float]], time: float) -> float:
    """Return the useful seconds at ``time``: the least of later points too, since what is lost was not useful."""
    before = [point for point in points if point[0] <= time]
    after = [done for when, done in points if when > time]
    start, done = before[-1]
    following = next(((when, value) for when, value in points if when > time), None)
    if following is not None and following[0] > start:
        done += (following[1] - done) * (time - start) / (following[0] - start)
    return min([done, *after])
