"""Join a job; rank RANK does so only after MOMENT: ``python -m tests...slow_start MOMENT RANK``.

MOMENT: "stopped before init" or "stopped in init" (it stops itself), "exits", or "sleeps" (for 4 s).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import dapple_tf as dapple
from dapple_tf.profiler.detect import job_rank


def main(moment: str, rank: int) -> None:
    print(time.time(), flush=True)
    if job_rank(os.environ) == rank:
        if moment == "stopped before init":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif moment == "stopped in init":
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        elif moment == "exits":
            os._exit(0)
        elif moment == "sleeps":
            time.sleep(4)  # the delay that the other ranks must bear
    dapple.init()
    print("joined")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
