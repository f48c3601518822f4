"""Read test data: schedules written as tables, with a line of actions for each worker."""

from __future__ import annotations


def read_tables(text: str) -> list[tuple[str, int, int, str]]:
    """Return the name, the number of stages, the number of micro-batches and the actions of each schedule of ``text``.

    Each block of lines is a schedule; blank lines separate blocks. The first line of a block has the name and the two
    numbers, then perhaps a comment after ``#``. Each other line has the actions of one worker.
    """
    found = []
    for block in text.strip().split("\n\n"):
        head, *table = (line.strip() for line in block.strip().splitlines())
        name, stages, micro_batches = head.partition("#")[0].split()
        found.append((name, int(stages), int(micro_batches), "\n".join(table)))
    return found
