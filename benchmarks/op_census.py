"""Count TensorFlow's ops by class, and compare random programs of every ruled op with plain TensorFlow.

``python -m benchmarks op_census [--programs N] [--pipelines P] [--seed S] [--only OP ...]``. A program is repeated by
the seed, the op and its number: ``draw_program(op, number, seed)``.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.census import OpClass, census
from benchmarks.common import Row, print_table
from benchmarks.op_programs.applications import BY_HAND
from benchmarks.op_programs.check import Found, Outcome
from benchmarks.op_programs.pipelines import SETTINGS, check_parts, check_pipeline
from benchmarks.op_programs.program import Program
from dapple_tf import internals
from dapple_tf.frontend.dependence.analyse import RULED
from dapple_tf.frontend.dependence.random import is_stateless_draw

PROGRAMS, PIPELINES, SEED = 6, 1, 0
_NUMBERS = 60
_FAULTS = (Outcome.WRONG, Outcome.ERROR)


@dataclass
class Tally:
    """The outcomes of the programs of some ops, and what was wrong."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, program: Program, number: int, found: Found) -> None:
        """Count a program."""
        self.outcomes[found.outcome] += 1
        if found.outcome in _FAULTS:
            self.faults.append(f"{' then '.join(program.ops)} (number {number}), {found.outcome.value}: {found.why}")

    def __str__(self) -> str:
        return ", ".join(f"{self.outcomes[outcome]} {outcome.value}" for outcome in Outcome)


def draw_program(op: str, number: int, seed: int) -> Program:
    """Return a program of the op, or with an odd ``number`` of the op and another one."""
    drawn = random.Random(f"{seed}/{op}/{number}")
    ops = (op, drawn.choice(sorted(BY_HAND))) if number % 2 else (op,)
    return Program(ops, tuple(drawn.randrange(720720) for _ in range(_NUMBERS)))  # a multiple of all small numbers


def ops_to_try() -> list[str]:
    """Return the ruled ops for which programs are made: not those of control flow, lists and variables alone."""
    draws = {op for op in internals.op_names() if is_stateless_draw(op)}
    return sorted((RULED | draws | set(BY_HAND)) & set(internals.op_names()))


def try_op(op: str, programs: int, pipelines: int, seed: int) -> Tally:
    """Return the outcomes of programs of one op: the decision alone, and for some of them whole pipelines."""
    tally = Tally()
    for number in range(programs):
        program = draw_program(op, number, seed)
        found = check_parts(program)
        tally.add(program, number, found)
        if found.outcome is Outcome.EQUAL and pipelines:
            pipelines -= 1
            setting = SETTINGS[random.Random(f"{seed}/{op}").randrange(len(SETTINGS))]
            tally.add(program, number, check_pipeline(program, setting))
    return tally


def run(
    programs: int = PROGRAMS, pipelines: int = PIPELINES, seed: int = SEED, only: Sequence[str] = ()
) -> Iterator[Row]:
    """Yield a row for each class of ops, then one for each ruled op that was tried."""
    counts = Counter(op_class for (op_class, _), names in census().items() for _ in names)
    for op_class in OpClass:
        yield Row(f"ops {op_class.value}", "each op in one class", str(counts[op_class]), ok=True)
    total = Tally()
    for op in only or ops_to_try():
        found = try_op(op, programs, pipelines, seed)
        total.outcomes += found.outcomes
        total.faults += found.faults
        yield Row(op, "equal or refused", "; ".join([str(found), *found.faults]), not found.faults)
    yield Row("all programs", "equal or refused", str(total), not total.faults)


def main(arguments: Sequence[str]) -> int:
    """Print the table for the ``arguments``; return 1 if a program is wrong, or ends with a raw error."""
    parser = argparse.ArgumentParser("python -m benchmarks op_census", description=__doc__)
    parser.add_argument("--programs", type=int, default=PROGRAMS, help="programs of each op")
    parser.add_argument("--pipelines", type=int, default=PIPELINES, help="how many of them are built as pipelines too")
    parser.add_argument("--seed", type=int, default=SEED, help="of the programs")
    parser.add_argument("--only", nargs="+", default=(), metavar="OP", help="these ops")
    options = parser.parse_args(arguments)
    return 1 if print_table(run(options.programs, options.pipelines, options.seed, options.only)) else 0
