"""A limit on the work of a reader: a small file must not keep a process busy."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """The block takes at most ``seconds`` of this process's own time: what other processes do does not count.

    Objects that earlier tests have left are not looked at again by Python's garbage collector meanwhile.
    """
    gc.collect()
    gc.freeze()
    begin = time.process_time()
    try:
        yield
    finally:
        gc.unfreeze()
    took = time.process_time() - begin
    assert took <= seconds, f"it took {took:.1f} s"
