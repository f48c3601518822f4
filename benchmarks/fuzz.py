"""Every reader takes damaged data without an undocumented error, and without taking long or much memory.

``python -m benchmarks fuzz [--inputs N] [--seed S] [--only READER ...]``. Each reader runs in a process of its own. An
input is repeated by its seed and number: ``mutate(random.Random(f"{seed}/{reader}/{number}"), seeds)``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import Row, print_table, run_for_json
from benchmarks.fuzz_mutations import mutate
from benchmarks.fuzz_readers import NAMES, reader_named

INPUTS, SEED = 2000, 0
_MOST_SECONDS, _MOST_BYTES = 2.0, 500 * 10**6
_MOST_SECONDS_IN_ALL = 3600


@dataclass(frozen=True)
class Outcome:
    """The results of one reader on a number of ``inputs``.

    ``accepted``: how many were read without an error; ``wrong``: errors that are not documented, with the numbers of
    their inputs. ``peak_bytes``: by which the process grew, at most.
    """

    inputs: int
    accepted: int
    wrong: tuple[str, ...]
    slowest_seconds: float
    slowest_input: int
    peak_bytes: int


def fuzz(name: str, inputs: int, seed: int) -> Outcome:
    """Run the reader on damaged files, as many as ``inputs``, in this process, and return what it did."""
    reader = reader_named(name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "input")
        for data in reader.seeds:  # loads what the reader needs
            path.write_bytes(data)
            try:
                reader.read(data, path)
            except reader.errors as error:
                raise AssertionError(f"{name} refuses what is not damaged: {data[:60]!r}: {error}") from error
        before = _reset_peak()
        accepted, slowest, wrong = 0, (0.0, 0), []
        for number in range(inputs):
            data = mutate(random.Random(f"{seed}/{name}/{number}"), reader.seeds)
            path.write_bytes(data)
            begin = time.process_time()
            try:
                reader.read(data, path)
                accepted += 1
            except reader.errors:
                pass
            except Exception as error:  # any other type is a finding, which the table shows
                wrong.append(f"{type(error).__name__} (input {number})")
            slowest = max(slowest, (time.process_time() - begin, number))
    return Outcome(inputs, accepted, tuple(wrong), *slowest, _peak() - before)


def _reset_peak() -> int:
    """Make the system measure this process's peak anew; return it (bytes)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def run(inputs: int = INPUTS, seed: int = SEED, names: Sequence[str] = NAMES) -> Iterator[Row]:
    """Yield a row for each reader."""
    for name in names:
        yield _row(name, _fuzz_in_process(name, inputs, seed))


def main(arguments: Sequence[str]) -> int:
    """Print the table for the ``arguments``; return 1 if a reader misses its target."""
    parser = argparse.ArgumentParser("python -m benchmarks fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=INPUTS, help="damaged inputs for each reader")
    parser.add_argument("--seed", type=int, default=SEED, help="of the random changes")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="READER", help=", ".join(NAMES))
    options = parser.parse_args(arguments)
    return 1 if print_table(run(options.inputs, options.seed, options.only)) else 0


def _fuzz_in_process(name: str, inputs: int, seed: int) -> Outcome:
    command = [sys.executable, "-m", "benchmarks.fuzz", name, str(inputs), str(seed)]
    fields = run_for_json(command, timeout=_MOST_SECONDS_IN_ALL)
    return Outcome(**{**fields, "wrong": tuple(fields["wrong"])})


def _row(name: str, found: Outcome) -> Row:
    measured = (
        f"{len(found.wrong)} others in {found.inputs} inputs ({found.accepted} were still valid); slowest "
        f"{found.slowest_seconds:.3f} s (input {found.slowest_input}); at most {found.peak_bytes / 1e6:.0f} MB more"
    )
    if found.wrong:
        measured += f": {', '.join(found.wrong[:3])}"
    good = not found.wrong and found.slowest_seconds <= _MOST_SECONDS and found.peak_bytes <= _MOST_BYTES
    return Row(f"{name}, damaged at random", "documented errors only, none above 2 s or 500 MB", measured, good)


if __name__ == "__main__":
    print(json.dumps(asdict(fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
