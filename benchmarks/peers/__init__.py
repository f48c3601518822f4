"""Steps of jobs in turn with those of PyTorch's own pipelining over gloo: the dense stack, the gpt, and waits.

A rank has a core; layers that wait in place of computing need none.

``python -m benchmarks peers [--python PATH] [--turns N] [--models NAME ...]``. PyTorch has an environment of its own,
out/peers in the project's folder by default; without one the benchmark is left out.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Row, available_cores, median, print_table, run_ranks

MICRO_BATCHES, TURNS, STEPS = 8, 5, 15
MOST_RATIO = 0.95
PYTHON = Path(__file__).parents[2] / "out" / "peers" / "bin" / "python"
_PROGRAM = Path(__file__).with_name("pytorch.py")
_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Pair:
    """A schedule of PyTorch and ours for the same; ``chunks``: the stages of a rank."""

    theirs: str
    ours: str
    chunks: int = 1


PAIRS = (
    Pair("1F1B", "dapple-b"),  # what "auto" chooses in a job: as many micro-batches in flight as PyTorch's warm-up has
    Pair("interleaved", "interleaved-1f1b:v=2", 2),
    Pair("zero-bubble", "interleaved-zb:v=2", 2),
    Pair("zero-bubble-v", "zb-v", 2),
)
MODELS = {"dense": (2,), "gpt": (2,), "waits": (2, 4)}
"""The numbers of ranks of each model; those that only sleep need no core each."""


def find_missing_python(python: Path = PYTHON) -> str | None:
    """Return why PyTorch cannot be run, or None if it can."""
    found = (
        python.exists()
        and not subprocess.run(
            [python, "-c", "import numpy, torch.distributed.pipelining"], capture_output=True, timeout=60, check=False
        ).returncode
    )
    made = f"python3 -m venv {python.parents[1]} && {python.with_name('pip')} install torch==2.13.0 numpy"
    return None if found else f"it needs PyTorch in an environment of its own: {made}"


def run(python: Path = PYTHON, turns: int = TURNS, models: Sequence[str] = tuple(MODELS)) -> Iterator[Row]:
    """Yield a row for each model, number of ranks and schedule: medians of the turns."""
    cores = len(available_cores())
    for model in models:
        for ranks in MODELS[model]:
            if model != "waits" and cores < ranks:
                yield Row(f"{model}, {ranks} ranks", "-", f"left out: this machine has {cores} core", ok=True)
                continue
            yield from _compare(model, ranks, python, turns)


def _compare(model: str, ranks: int, python: Path, turns: int) -> Iterator[Row]:
    most = 1.0 if model == "waits" else MOST_RATIO
    for pair in PAIRS:
        taken = [_measure_turn(model, pair, ranks, python, ours_first=turn % 2 == 0) for turn in range(turns)]
        ours, theirs = (median(each) for each in zip(*taken, strict=True))
        ratio = median([one / other for one, other in taken])
        text = f"{ratio:.3f} ({ours * 1e3:.0f} ms, {theirs * 1e3:.0f} ms; load {os.getloadavg()[0]:.1f})"
        figure = f"{model}, {ranks} ranks, M = {MICRO_BATCHES}: {pair.ours} over PyTorch's {pair.theirs}"
        yield Row(figure, f"at most {most}", text, ratio <= most)


def _measure_turn(model: str, pair: Pair, ranks: int, python: Path, *, ours_first: bool) -> tuple[float, float]:
    """Return the seconds of a step of ours and of PyTorch's, measured one after the other."""
    if ours_first:
        ours = run_ours(model, pair, ranks)
        return ours, run_theirs(model, pair, ranks, python)
    theirs = run_theirs(model, pair, ranks, python)
    return run_ours(model, pair, ranks), theirs


def run_ours(model: str, pair: Pair, ranks: int) -> float:
    """Return the median seconds of a step of ours."""
    arguments = model, pair.ours, str(ranks * pair.chunks), str(MICRO_BATCHES), str(STEPS)
    return float(run_ranks("benchmarks.peers.ours", ranks, *arguments, timeout=_TIMEOUT_SECONDS))


def run_theirs(model: str, pair: Pair, ranks: int, python: Path) -> float:
    """Return the median seconds of a step of PyTorch's; RuntimeError with the end of the errors where a rank fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    started = [
        subprocess.Popen(
            [python, _PROGRAM, model, pair.theirs, *map(str, (rank, ranks, port, MICRO_BATCHES, STEPS))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=_TIMEOUT_SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started):
        ends = "\n".join(errors[-1500:] for _, errors in outputs)  # one rank has the cause, the others lost it
        raise RuntimeError(f"{_PROGRAM.name} {model} {pair.theirs} failed:\n{ends}")
    return float(outputs[0][0].split()[-1])


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 1 where a figure misses what is wanted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    parser.add_argument("--python", type=Path, default=PYTHON, help="of an environment with PyTorch")
    parser.add_argument("--turns", type=int, default=TURNS, help="jobs of ours and PyTorch's in turn (default 5)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: all")
    options = parser.parse_args(arguments)
    missing = find_missing_python(options.python)
    if missing is not None:
        print(f"left out: {missing}", file=sys.stderr)
        return 0
    return 1 if print_table(run(options.python, options.turns, options.models)) else 0
