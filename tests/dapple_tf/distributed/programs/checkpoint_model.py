"""MODELs for ``dapple train`` under mpirun: float64, Adam; one of their ranks can be made to fail."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.distributed import membership

_STOPS = ("SIGTERM", "SIGINT", "launcher SIGUSR1")  # ways to fail that let the job save


def chain(kill_rank: int = -1, at_batch: int = -1, in_save: str = "", how: str = "SIGKILL") -> dapple.Workload:
    """Return five dense layers, and batches in another order in every epoch.

    The rank ``kill_rank`` gets the signal ``how`` (or raises) before batch ``at_batch``, or its launcher gets it
    ("launcher SIGINT"), or it is killed while it writes a file into the folder ``in_save``. Rank 0 waits before that
    batch until it knows of a signal that asks the job to stop.
    """
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(2)
    weights = [tf.Variable(random.normal(size=(64, 64)) / 8, name=f"w{i}") for i in range(4)]
    data = tf.data.Dataset.from_tensor_slices((random.normal(size=(20, 64)), random.normal(size=(20, 64))))
    data = data.shuffle(20, seed=3).batch(8)  # two batches of 8, then one of 4
    job = membership.current()
    fails = not job.is_alone and job.rank == kill_rank
    if fails and in_save:
        threading.Thread(target=_kill_in_save, args=(Path(in_save),), daemon=True).start()

    def loss(x: Any, y: Any) -> Any:
        for i, weight in enumerate([*weights, weights[0]]):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ weight)
        return tf.reduce_mean(tf.reduce_sum(tf.square(x - y), 1))

    if fails:
        batches = _FailingStream(data, lambda: _fail(how), at_batch)
    elif job.rank == 0 and how in _STOPS:
        batches = _FailingStream(data, lambda: _wait_for_stop(job), at_batch)
    else:
        batches = _FailingStream(data)
    return dapple.Workload(loss, keras.optimizers.Adam(0.01, global_clipnorm=1.0), batches)


def straight(kill_rank: int = -1, in_window: int = -1) -> dapple.Workload:
    """Return four dense layers for asynchronous windows, without tied weights, and the batches of ``chain``.

    The rank ``kill_rank`` is killed inside of window ``in_window``, after an exchange with another rank.
    """
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(2)
    weights = [tf.Variable(random.normal(size=(64, 64)) / 8, name=f"w{i}") for i in range(4)]
    data = tf.data.Dataset.from_tensor_slices((random.normal(size=(20, 64)), random.normal(size=(20, 64))))
    job = membership.current()
    if not job.is_alone and job.rank == kill_rank:
        threading.Thread(target=_kill_in_window, args=(job, in_window), daemon=True).start()

    def loss(x: Any, y: Any) -> Any:
        for i, weight in enumerate(weights):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ weight)
        return tf.reduce_mean(tf.reduce_sum(tf.square(x - y), 1))

    batches = _FailingStream(data.shuffle(20, seed=3).batch(8))
    return dapple.Workload(loss, keras.optimizers.Adam(0.01), batches)


class _FailingStream:
    """Endless epochs of ``data``; ``act`` is called before batch ``at_batch``."""

    def __init__(self, data: Any, act: Callable[[], None] = lambda: None, at_batch: int = -1) -> None:
        self._data, self._act, self._at_batch = data, act, at_batch

    def __iter__(self) -> Iterator[Any]:
        number = 0
        while True:
            for batch in self._data:
                number += 1
                if number == self._at_batch:
                    self._act()
                yield batch


def _fail(how: str) -> None:
    print(f"failing at {time.time()}", file=sys.stderr, flush=True)
    if how == "raise":
        raise KeyError("no such sample")
    process = os.getppid() if how.startswith("launcher ") else os.getpid()
    os.kill(process, getattr(signal, how.rpartition(" ")[2]))


def _wait_for_stop(job: membership.Job) -> None:
    """Wait until rank 0 knows that the job must stop: on a busy machine all steps might be done before that."""
    end = time.monotonic() + 60
    while not job.watchdog._stops._asked:
        if time.monotonic() > end:
            raise TimeoutError("rank 0 did not hear within 60 s that the job must stop")
        time.sleep(0.001)  # the watchdog's thread hears it; no event says so


def _kill_in_window(job: membership.Job, number: int) -> None:
    while True:
        status = job.progress.status()
        if status.step >= number and status.running and status.exchange.startswith("exchange/"):
            print(f"failing at {time.time()}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.0002)


def _kill_in_save(folder: Path) -> None:
    while not any(folder.glob("*.part")):
        time.sleep(0.0002)
    os.kill(os.getpid(), signal.SIGKILL)
