"""A core of its own for each process of a job; imports nothing that counts the cores."""

import os


def keep_to_own_core(number: str) -> None:
    """Keep this process to one core: that of its ``number``, an environment variable of the launcher (default 0)."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ.get(number, "0")) % len(cores)]})
