"""Train; in the last step rank 1 takes another batch: ``python -m tests...last_batch END STAGES FOLDER``.

END: what follows the step on all ranks: "end" (of the script), "gather" or "save".
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import dapple_tf as dapple
from dapple_tf.distributed.membership import current
from tests.equality.small_models import chain, data, sgd, weights


def main(end: str, stages: int, folder: str) -> None:
    """Write a file for each rank that has come through what follows the last step."""
    dapple.init()
    job = current()
    assert not job.is_alone, "start it with mpirun"
    options: Any = {"stages": stages, "replicas": [job.size // stages] * stages, "micro_batches": 2}
    step = dapple.pipeline(chain(weights(4)), optimizer=sgd(), **options)
    x, y = data(8)
    batches = [(x, y), (x[:6], y[:6])]
    for _ in range(2):  # both sizes are built: the last step waits for nothing
        for batch in batches:
            step(*batch)
    step(*batches[job.rank == 1])
    if end == "gather":
        step.gather()
    elif end == "save":
        dapple.Checkpoints(folder, step).save(5)
    if end != "end":
        Path(folder, f"came-through-{job.rank}").touch()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
