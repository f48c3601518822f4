"""Train; rank 1 is stopped when its script has ended: ``python -m tests...stopped_at_end before``.

``before`` or ``after``: Horovod has ended on it, and so on all ranks.
"""

from __future__ import annotations

import os
import signal
import sys

import horovod.tensorflow as hvd

import dapple_tf as dapple
from dapple_tf.distributed.membership import current
from tests.equality.small_models import chain, data, sgd, weights


def main() -> None:
    dapple.init()
    job = current()
    assert not job.is_alone, "start it with mpirun"
    if job.rank == 1:
        end_horovod = hvd.shutdown

        def stop() -> None:
            if sys.argv[1] == "after":
                end_horovod()
            os.kill(os.getpid(), signal.SIGSTOP)

        hvd.shutdown = stop
    step = dapple.pipeline(chain(weights(4)), optimizer=sgd(), stages=2, micro_batches=2)
    step(*data(8))


if __name__ == "__main__":
    main()
