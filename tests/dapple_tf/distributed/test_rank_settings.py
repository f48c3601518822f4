"""``dapple.init`` sets threads and waiting for the ranks of a job, except where the user has chosen."""

from __future__ import annotations

import json

from tests.processes import needs_horovod, run_ranks

PROGRAM = """
import json, os
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import tensorflow as tf
import dapple_tf as dapple
if rank == 0:
    del os.environ["OMPI_MCA_mpi_yield_when_idle"]  # set by the launcher of the tests
else:
    os.environ["OMPI_MCA_mpi_yield_when_idle"] = "0"
    os.environ["HOROVOD_CYCLE_TIME"] = "3"
    tf.config.threading.set_inter_op_parallelism_threads(5)
dapple.init()
from dapple_tf.distributed.membership import current
threads = tf.config.threading.get_inter_op_parallelism_threads()
print(json.dumps([threads, os.environ["HOROVOD_CYCLE_TIME"], os.environ["OMPI_MCA_mpi_yield_when_idle"]]))
current().gather(None)
"""


@needs_horovod
def test_a_rank_of_one_core_has_a_thread_for_exchanges_unless_the_user_chose() -> None:
    found = [json.loads(rank.stdout) for rank in run_ranks(["-c", PROGRAM], 2, timeout_seconds=60)]
    assert found == [[2, "0.2", "1"], [5, "3", "0"]]
