"""Snapshots: the state of a run in the memory of its hosts, so that the loss of a host costs few steps.

Each rank copies what it holds, and a thread writes it as a checkpoint of its own, a *part*, to a folder in the memory
of its host (tmpfs, which outlives the processes), and sends that file to a rank on another host, its buddy, which
writes it to the memory of its host. So each part is on two hosts. The parts of all ranks are a snapshot.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dapple_tf.checkpoint.content import Position, check_variables, read_position, read_value
from dapple_tf.checkpoint.file import CheckpointFile, DamagedError, Entry, open_checkpoint, write_checkpoint
from dapple_tf.checkpoint.host_memory import HostMemory, Snapshot
from dapple_tf.distributed.buddies import Buddies, choose_buddies
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.variable_transfer import load_values
from dapple_tf.errors import CheckpointError
from dapple_tf.messages import LOGGER
from dapple_tf.runtime.step import PipelinedStep
from dapple_tf.variable_values import variable_bytes
from dapple_tf.wording import format_count


@dataclass
class SnapshotCosts:
    """The cost of snapshots for this rank, one after each ``every`` steps.

    ``taken``: how many. ``left_out``: how many were not taken, since the one before was not done. ``waited``: seconds
    that each held up training. ``beside``: seconds in which each was written and sent beside it. ``part_bytes``: of
    this rank's part.
    """

    every: int
    taken: int = 0
    left_out: int = 0
    waited: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    part_bytes: int = 0

    def __str__(self) -> str:
        text = f"a snapshot every {format_count(self.every, 'step')}: {self.taken} taken"
        if self.waited:
            text += f"; each held up training for {1e3 * sum(self.waited) / len(self.waited):.2g} ms"
        if self.beside:
            text += (
                f", and was written and sent beside it in {1e3 * sum(self.beside) / len(self.beside):.2g} ms "
                f"({self.part_bytes / 1e6:.3g} MB of this rank)"
            )
        if self.left_out:
            text += f"; {self.left_out} left out, since the one before was not done: take them less often"
        return text


class Snapshots:
    """Takes the snapshots of a training run that saves in ``checkpoints``, and restores the last complete one.

    Every rank of a job must make the same calls. Raises CheckpointError where the memory of a host cannot hold the
    snapshots, or where it is not known whether the snapshots there are of this run.
    """

    def __init__(self, step: PipelinedStep, job: Job, checkpoints: Path, every: int) -> None:
        self._step, self._job, self._every = step, job, every
        self._memory = HostMemory(job, checkpoints)
        self._buddies: Buddies | None = None
        self._thread: _Worker | None = None
        self._lock = threading.Lock()
        self._done = defaultdict[int, tuple[int, int]](lambda: (0, 0))
        self._begun = 0
        self._failed = False
        self._stopped = False
        self.costs = SnapshotCosts(every)

    # --- restore

    def restore(self, after: int) -> Position | None:
        """Load the last complete snapshot of more than ``after`` steps; None where there is none."""
        found = self._find(after)
        if found is None:
            return None
        position, parts = found
        for files in parts:
            variables = {name: self._step.variables[name] for name in files.names}
            load_values(self._job, variables, partial(_read, files.file), files.rank)
        return position

    def _find(self, after: int) -> tuple[Position, list[_Part]] | None:
        """Return the position and the parts of the last snapshot whose parts all pass their checksums."""
        listed = self._job.gather(self._memory.list_parts() if self._memory.is_first else [])
        holders = defaultdict[Snapshot, dict[int, list[int]]](lambda: defaultdict(list))
        for rank, parts in enumerate(listed):
            for snapshot, part in parts:
                if snapshot.steps > after:
                    holders[snapshot][part].append(rank)
        for snapshot in sorted(holders, reverse=True):
            while sorted(holders[snapshot]) == list(range(snapshot.parts)):
                found = self._open(snapshot, {part: ranks[0] for part, ranks in holders[snapshot].items()})
                if isinstance(found, tuple):
                    return found
                for part in found:  # another host may have a good one
                    del holders[snapshot][part][0]
                    if not holders[snapshot][part]:
                        del holders[snapshot][part]
        return None

    def _open(self, snapshot: Snapshot, chosen: Mapping[int, int]) -> tuple[Position, list[_Part]] | list[int]:
        """Return the position and the parts of a snapshot, or the numbers of its damaged parts.

        ``chosen``: the rank that reads each part. Raises CheckpointError for a snapshot of another model.
        """
        files: dict[int, CheckpointFile] = {}
        contents: dict[int, tuple[Position, Mapping[str, Entry]]] = {}
        for part, rank in chosen.items():
            if rank == self._job.rank:
                with contextlib.suppress(DamagedError, CheckpointError, OSError):
                    file = open_checkpoint(self._memory.folder / snapshot.path(part))
                    contents[part] = read_position(file), dict(file.entries)
                    files[part] = file
        gathered: dict[int, tuple[Position, Mapping[str, Entry]]] = {}
        for of_rank in self._job.gather(contents):
            gathered |= of_rank
        damaged = [part for part in chosen if part not in gathered or gathered[part][0] != gathered[min(gathered)][0]]
        if damaged:
            self._tell(f"snapshot after step {snapshot.steps}: part {damaged[0]} is damaged on a host")
            return damaged
        entries = {name: entry for _, of_part in gathered.values() for name, entry in of_part.items()}
        where = Path(f"the snapshot after step {snapshot.steps}")
        self._job.run_on_rank_0(lambda: check_variables(CheckpointFile(where, {}, entries), self._step.variables))
        position = gathered[0][0]
        hosts = ", ".join(dict.fromkeys(self._memory.hosts[rank] for rank in chosen.values()))
        parts = [_Part(chosen[part], tuple(gathered[part][1]), files.get(part)) for part in sorted(chosen)]
        return Position(position.steps, position.batches, f"the memory of {hosts}"), parts

    # --- take snapshots

    def begin(self, position: Position) -> None:
        """Connect the ranks, and take a snapshot where steps are done: the one before may be on one host only.

        All others, which are older or not complete, are removed before: the memory need not hold three.
        """
        self._job.gather("restored")
        self._memory.keep_only(position.steps)
        if self._thread is None:
            self._connect()
        if position.steps:
            self._take(position)

    def _connect(self) -> None:
        buddies = choose_buddies(self._memory.hosts)
        sizes = self._job.gather(sum(map(variable_bytes, self._own_variables().values())))
        self._job.run_on_all(lambda: self._memory.make_room(sizes, buddies))
        self._thread = _Worker()
        if not self._job.is_alone:
            self._buddies = Buddies(
                self._job, buddies, self._memory.folder / self._memory.runs[-1], self._note_done, self._fail
            )

    def note_step(self, position: Position) -> None:
        """Take a snapshot where one is due; every rank calls this before each step, with the position so far.

        What the program does after a step, such as writing a record of it, is then done when there is a snapshot.
        """
        if self._thread is None:
            self._connect()
        if position.steps % self._every == 0 and position.steps != self._begun and not self._stopped:
            self._take(position)

    def close(self) -> None:
        """Stop, and remove all snapshots of the run from the memory of all hosts."""
        if self._thread is not None:
            self._thread.stop()
        if self._buddies is not None:
            self._buddies.stop()
            self._job.gather("stopped")
            self._buddies.close()
        self._job.gather("closed")
        self._memory.remove_all()
        self._stopped = True

    def _take(self, position: Position) -> None:
        """Copy this rank's variables, and have them written and sent; leave it out where a rank is not done yet."""
        begin = time.perf_counter()
        with self._lock:
            senders = () if self._buddies is None else self._buddies.senders
            states = [self._done[rank] for rank in (self._job.rank, *senders)]
            failed = self._failed
        finished, good = (min(values) for values in zip(*states, strict=True))
        row = [self._job.progress.call_history, finished < self._begun, good, failed]
        rows = self._job.gather_integers("take a snapshot", row)
        histories, unfinished, complete, failures = zip(*rows, strict=True)
        if len(set(histories)) > 1:
            self._job.check_call_history()  # variables trained on different batches are no state of one run
        if any(failures):
            self._stopped = True
            self._tell("no more snapshots are taken: a rank cannot write or send them; checkpoints are saved as before")
            return
        if any(unfinished):
            self.costs.left_out += 1
            return
        values = {name: variable.numpy() for name, variable in self._own_variables().items()}
        self._begun = position.steps
        assert self._thread is not None, "begin makes it"
        self._thread.run(partial(self._write, position, min(complete), values))
        self.costs.taken += 1
        self.costs.waited.append(time.perf_counter() - begin)

    def _write(self, position: Position, complete: int, values: Mapping[str, Any]) -> None:
        """Write this rank's part and send it; on the thread. ``complete``: the steps of the last complete snapshot."""
        begin = time.perf_counter()
        try:
            self._memory.remove_older(complete)
            variables = self._own_variables()
            trained = [name for name in values if variables[name].trainable and variables[name].dtype.is_floating]
            bad = any(not np.isfinite(values[name]).all() for name in trained)
            snapshot, rank = self._memory.name_snapshot(position.steps), self._job.rank
            path = None if bad else self._memory.folder / snapshot.path(rank)
            if path is not None:
                write_checkpoint(path, variables, values.values(), position.to_metadata())
                self.costs.part_bytes = path.stat().st_size
            if self._buddies is not None:
                self._buddies.send(path, position.steps)
            self._note_done(rank, position.steps, path is not None)
            self.costs.beside.append(time.perf_counter() - begin)
        except ConnectionError:
            self._fail("")
        except OSError as error:
            self._fail(
                f"rank {self._job.rank} cannot write or send a snapshot in {self._memory.folder}: {error.strerror}"
            )

    def _own_variables(self) -> dict[str, Any]:
        """Return the variables whose values this rank writes: the first rank that holds a variable writes it."""
        locations = self._job.variable_locations
        return {name: v for name, v in self._step.variables.items() if locations.source(v) == self._job.rank}

    def _note_done(self, rank: int, steps: int, good: bool) -> None:
        with self._lock:
            self._done[rank] = steps, steps if good else self._done[rank][1]

    def _fail(self, problem: str) -> None:
        with self._lock:
            first, self._failed = not self._failed, True
        if first and problem:
            LOGGER.warning("snapshots: %s", problem)

    def _tell(self, text: str) -> None:
        if self._job.rank == 0:
            LOGGER.warning("snapshots: %s", text)


@dataclass(frozen=True)
class _Part:
    """A part of a snapshot: the ``rank`` that reads it, the ``names`` of its variables, and there its ``file``."""

    rank: int
    names: tuple[str, ...]
    file: CheckpointFile | None


def _read(file: CheckpointFile | None, name: str) -> Any:
    assert file is not None, "only the rank that has the file reads it"
    return read_value(file, name)


class _Worker:
    """A thread that runs one function after the other."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_all, name="dapple-snapshots", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the thread, after what was given before."""
        self._waiting.put(work)

    def stop(self) -> None:
        """Let the thread end after what was given."""
        self._waiting.put(None)
        self._thread.join()  # else it would write into the folder that is removed next

    def _run_all(self) -> None:
        for work in iter(self._waiting.get, None):
            work()
