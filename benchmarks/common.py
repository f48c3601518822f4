"""What the benchmarks share: rows of the table, steps taken in turn, processes pinned to cores."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One figure: what was measured, what is wanted, what came out, and whether that is enough."""

    figure: str
    wanted: str
    measured: str
    ok: bool


def seconds_in_turn(steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Run the steps in turn, ``rounds`` times, so that all see the same noise; seconds of each run."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - begin)
    return taken


def median(values: Sequence[float]) -> float:
    """The median: a busy moment of the machine does not move it."""
    return statistics.median(values)


def pinned(module: str, cores: Sequence[int], *arguments: str, timeout: float = 600) -> Any:
    """Run ``python -m module arguments`` on these cores only; the JSON of its last line of output."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def report(rows: Sequence[Row]) -> None:
    """Print rows for ``pinned`` to read."""
    print(json.dumps([asdict(row) for row in rows]))


def cores() -> list[int]:
    """The cores this process may use."""
    return sorted(os.sched_getaffinity(0))
