"""Run training steps of ``tests.equality.training_steps`` as a rank of a job, beside one device.

``training_steps STAGES REPLICAS MICRO_BATCHES [CASE ...]``: REPLICAS is such as 1,1. Fails at the first difference.
"""

from __future__ import annotations

import sys
import traceback

import dapple_tf as dapple
from tests.equality.test_training_steps import check
from tests.equality.training_steps import CASES
from tests.floats import in_float64


def main(stages: int, replicas: list[int], micro_batches: int, names: list[str]) -> int:
    """Return the number of cases that differ."""
    dapple.init()
    wrong = []
    with in_float64():
        for name in names or CASES:
            try:
                check(name, stages=stages, replicas=replicas, micro_batches=micro_batches)
            except Exception as error:
                wrong.append(name)
                if isinstance(error, AssertionError):
                    print(f"{name}: differs from one device: {error}", file=sys.stderr)
                else:
                    traceback.print_exc()
    print(f"wrong: {wrong}", file=sys.stderr)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), [int(n) for n in sys.argv[2].split(",")], int(sys.argv[3]), sys.argv[4:]))
