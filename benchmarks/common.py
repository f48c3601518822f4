"""Shared by the benchmarks: rows of the tables, interleaved timing, processes on chosen cores and under mpirun."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """A row of a table: the figure's name, its target, the measured value, and whether that meets the target."""

    figure: str
    wanted: str
    measured: str
    ok: bool


def print_table(rows: Iterable[Row], of: str = "figure") -> int:
    """Print each row as soon as it is measured; return how many miss what is wanted. ``of``: what a row is."""
    print(f"| {of} | wanted | measured | |\n|---|---|---|---|", flush=True)
    missed = 0
    for row in rows:
        print(f"| {row.figure} | {row.wanted} | {row.measured} | {'ok' if row.ok else 'MISSED'} |", flush=True)
        missed += not row.ok
    return missed


def time_interleaved(steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Run every step once per round, so that all see the same noise; return each one's seconds, by name."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - begin)
    return taken


def median(values: Sequence[float]) -> float:
    """Return the median, which a few disturbed runs do not move."""
    return statistics.median(values)


def run_on_cores(module: str, cores: Sequence[int], *arguments: str, timeout: float = 600) -> Any:
    """Run ``python -m module arguments`` on these cores only; return the JSON object of its last line of output.

    Raises RuntimeError with the end of its errors where it fails.
    """
    return run_for_json([sys.executable, "-m", module, *arguments], timeout=timeout, cores=cores)


def run_ranks(
    module: str,
    ranks: int,
    *arguments: str,
    timeout: float = 600,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Any:
    """Run ``python -m module arguments`` as ``ranks`` ranks under mpirun; return the JSON of rank 0's last line.

    ``options``: further ones of mpirun; ``variables``: further ones of the environment. Raises RuntimeError
    with the end of the errors where a rank fails.
    """
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *options]
    command += [sys.executable, "-m", module, *arguments]
    return run_for_json(command, timeout=timeout, variables=variables)


def run_for_json(
    command: Sequence[str],
    *,
    timeout: float,
    variables: Mapping[str, str] | None = None,
    folder: Path | None = None,
    cores: Sequence[int] | None = None,
) -> Any:
    """Run a command; return the JSON value of its last line of output.

    ``variables``: further ones of its environment. ``folder``: where it runs; ``cores``: on which, where it is not on
    all. Raises RuntimeError with the end of its errors where it fails.
    """
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(variables or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def print_rows(rows: Sequence[Row]) -> None:
    """Print rows as JSON, for ``run_on_cores`` to read."""
    print(json.dumps([asdict(row) for row in rows]))


def print_on_rank_0(found: Any) -> None:
    """Print what a job has found as JSON, for ``run_ranks`` to read; the other ranks print nothing."""
    import dapple_tf as dapple

    if dapple.rank() == 0:
        print(json.dumps(found))


def available_cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))
