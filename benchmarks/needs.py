"""Requirements of some benchmarks that a machine may lack; such a benchmark is left out, with the reason."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Mapping

from benchmarks.emulated_hosts import find_missing_requirement
from benchmarks.named_hosts import find_missing_for_names
from benchmarks.peers import find_missing_python
from dapple_tf.distributed.native.library import find_obstacle


def find_missing_for_ranks() -> str | None:
    """Return why no job of several processes can run here, or None if one can."""
    if importlib.util.find_spec("horovod") is None or shutil.which("mpirun") is None:
        return "it needs Horovod and Open MPI: make horovod"
    return None


def find_missing_for_native_exchanges() -> str | None:
    """Return why ranks cannot exchange tensors natively here, or None if they can."""
    return find_missing_for_ranks() or find_obstacle() or None


def find_missing_for_peers() -> str | None:
    """Return why no job of ours can be compared with one of PyTorch here, or None if one can."""
    return find_missing_for_native_exchanges() or find_missing_python()


def find_missing_for_first_step() -> str | None:
    """Return why no BERT of keras_hub can be made here, or None if one can."""
    return None if importlib.util.find_spec("keras_hub") else "it needs keras_hub: pip install keras-hub"


def find_missing_for_hosts() -> str | None:
    """Return why no job can exchange natively on several emulated hosts here, or None if one can."""
    return find_missing_for_native_exchanges() or find_missing_requirement()


def find_missing_for_lost_hosts() -> str | None:
    """Return why no job can run on hosts that are lost here, or None if one can."""
    return find_missing_for_ranks() or find_missing_for_names()


# By the benchmark's name.
NEEDS: Mapping[str, Callable[[], str | None]] = {
    "kills": find_missing_for_ranks,
    "elastic": find_missing_for_lost_hosts,
    "ranks": find_missing_for_ranks,
    "models": find_missing_for_ranks,
    "remainders": find_missing_for_ranks,
    "exchange": find_missing_for_native_exchanges,
    "all_reduce": find_missing_for_native_exchanges,
    "startup": find_missing_for_ranks,
    "first_step": find_missing_for_first_step,
    "build_time": find_missing_for_first_step,
    "hosts": find_missing_for_hosts,
    "contention": find_missing_for_hosts,
    "table4": find_missing_for_hosts,
    "peers": find_missing_for_peers,
}
