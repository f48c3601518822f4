"""Train as a rank of a job by a step that takes the model, the optimizer and numbers, beside one device."""

from __future__ import annotations

import dapple_tf as dapple
from tests.equality.test_python_arguments import IN_JOBS, assert_trains_as_the_function
from tests.floats import in_float64

if __name__ == "__main__":
    dapple.init()
    with in_float64():
        assert_trains_as_the_function(IN_JOBS, stages=2, micro_batches=3)
        assert_trains_as_the_function(IN_JOBS, stages=1, replicas=[2], micro_batches=3)
