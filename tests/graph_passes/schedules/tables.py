"""Schedules as tables: the text of several of them."""

from __future__ import annotations


def read_tables(text: str) -> list[tuple[str, int, int, str]]:
    """Name, stages, micro-batches and table of each schedule of ``text``.

    The first line of a block has the name and the two counts, and perhaps a comment; each other line is a worker's
    actions.
    """
    found = []
    for block in text.strip().split("\n\n"):
        head, *table = (line.strip() for line in block.strip().splitlines())
        name, stages, micro_batches = head.partition("#")[0].split()
        found.append((name, int(stages), int(micro_batches), "\n".join(table)))
    return found
