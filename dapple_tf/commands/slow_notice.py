"""Tell on stderr that something takes longer than expected, while it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click

COMPILES = (
    "dapple: still planning; the first plan on a machine compiles the planners' code, which takes a minute or two"
)


@contextmanager
def tell_if_slow(text: str, seconds: float = 5.0) -> Iterator[None]:
    """Print ``text`` on stderr if the ``with`` block takes longer than ``seconds``."""
    timer = threading.Timer(seconds, click.echo, args=(text,), kwargs={"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
