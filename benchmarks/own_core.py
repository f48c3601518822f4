"""Give each process of a job its own core. Imported first: it imports nothing that counts the cores."""

import os


def run_on_own_core(number: str) -> None:
    """Run this process on one core, chosen by its rank: the launcher's environment variable ``number`` (default 0)."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ.get(number, "0")) % len(cores)]})
