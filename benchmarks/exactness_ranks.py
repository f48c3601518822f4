"""The cases of ``benchmarks.exactness`` as jobs of two processes: one launch runs many cases, each compared on rank 0.

``python -m benchmarks.exactness_ranks FILE NAME ...`` is a rank: rank 0 appends a line of JSON for each case to FILE.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import keras

import dapple_tf as dapple
from benchmarks.common import run_ranks
from benchmarks.exactness_cases import CASES
from benchmarks.exactness_cases.case import Case, Described
from benchmarks.exactness_check import RANKS, Checker, Configuration, Found, Outcome

RANKS_OF_A_JOB = 2
SECONDS_OF_A_CASE = 120


D = TypeVar("D", bound=Described)


def check_on_ranks(cases: Sequence[Case]) -> Iterator[tuple[Case, list[Found]]]:
    """Yield each case with its outcomes."""
    yield from run_jobs("benchmarks.exactness_ranks", cases, RANKS)


def run_jobs(
    module: str, cases: Sequence[D], configurations: Sequence[Configuration]
) -> Iterator[tuple[D, list[Found]]]:
    """Yield each case with its outcomes. After a case that ends the job, another job goes on with the next.

    ``module``: called with a file and names, it checks these as a rank by ``check_as_rank``.
    """
    left = list(cases)
    with tempfile.TemporaryDirectory() as folder:
        while left:
            results, failure = _launch(module, left, configurations, Path(folder) / f"{len(left)}.jsonl")
            yield from zip(left, results, strict=False)
            if len(results) < len(left):
                bad = [Found(configuration, Outcome.CRASHED, failure) for configuration in configurations]
                yield left[len(results)], bad
            left = left[len(results) + 1 :]


def _launch(
    module: str, cases: Sequence[Described], configurations: Sequence[Configuration], results: Path
) -> tuple[list[list[Found]], str]:
    """Run a job; return the outcomes of the cases that it finished, and its error or ""."""
    failure = ""
    try:
        run_ranks(
            module,
            RANKS_OF_A_JOB,
            str(results),
            *(case.name for case in cases),
            timeout=60 + SECONDS_OF_A_CASE * len(cases),
            options=("--mca", "mpi_yield_when_idle", "1", "--mca", "btl", "tcp,self"),
        )
    except Exception as error:  # cases that ran before the job failed keep their outcomes
        failure = str(error)[-1000:]
    lines = results.read_text().splitlines() if results.exists() else []
    return [
        [
            Found(configuration, Outcome(outcome), detail, tuple(said))
            for configuration, (outcome, detail, said) in zip(configurations, json.loads(line), strict=True)
        ]
        for line in lines
    ], failure


def check_as_rank(results: str, names: Sequence[str], check: Callable[[str, Any], list[Found]]) -> None:
    """Check the named cases as a rank of a job: ``check`` is called with each name and the job."""
    dapple.init()
    from dapple_tf.distributed.membership import current

    job = current()
    assert not job.is_alone, "start it with mpirun"
    for name in names:
        found = [job.gather(own) for own in check(name, job)]
        keras.utils.clear_session()
        if job.rank == 0:
            worst = [next((f for f in ranks if f.outcome is not Outcome.EQUAL), ranks[0]) for ranks in found]
            with Path(results).open("a") as file:
                file.write(json.dumps([(f.outcome.value, f.detail, f.warnings) for f in worst]) + "\n")
    if job.rank == 0:
        print("{}")
    job.gather(None)  # a rank that leaves early ends the job for all


def _check(name: str, job: Any) -> list[Found]:
    checker = Checker(CASES[name])
    return [checker.check(configuration, job) for configuration in RANKS]


if __name__ == "__main__":
    check_as_rank(sys.argv[1], sys.argv[2:], _check)
