"""Run steps of ``examples/steps/`` as a rank of a job, beside one device.

``phases STAGES REPLICAS MICRO_BATCHES [NAME ...]``: REPLICAS is such as 1,1. Fails at the first difference.
"""

from __future__ import annotations

import sys

import dapple_tf as dapple
from tests.equality.test_phases import STEPS, check
from tests.floats import in_float64


def main(stages: int, replicas: list[int], micro_batches: int, names: list[str]) -> None:
    """Compare the steps called ``names``, or all."""
    dapple.init()
    with in_float64():
        for name in names or STEPS:
            check(name, stages=stages, replicas=replicas, micro_batches=micro_batches)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(n) for n in sys.argv[2].split(",")], int(sys.argv[3]), sys.argv[4:])
