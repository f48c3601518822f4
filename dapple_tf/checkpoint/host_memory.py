"""The memory of the hosts of a run, in which its snapshots are kept: names, room, and what other runs have left."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dapple_tf.distributed.membership import Job
from dapple_tf.errors import CheckpointError
from dapple_tf.launcher.restart import read_start
from dapple_tf.profiler.files import write_atomically

FOLDER_VARIABLE = "DAPPLE_SNAPSHOT_DIR"
"""The environment variable that names another folder than /dev/shm on every host."""

RUN_ID = "run-id"
"""The file in the folder of checkpoints that names the runs, in order, whose snapshots are of the same training."""

_MEMORY = "/dev/shm"
_NAME = re.compile(r"snapshot-(?P<steps>[0-9]{1,18})-(?P<writer>[0-9a-f]{8})-(?P<part>[0-9]+)-of-(?P<parts>[0-9]+)\.st")
_KEPT = 2  # a snapshot that is complete, and the one that is being written
_MOST_RUNS = 16  # whose snapshots are looked for: those of a run serve until a later one has a complete snapshot


@dataclass(frozen=True, order=True)
class Snapshot:
    """The name of a snapshot: after how many ``steps``, of how many ``parts``, and the ``run`` and job that took it."""

    steps: int
    run: str
    writer: str
    parts: int

    def path(self, part: int) -> Path:
        """Return the path of a part in the folder of a host."""
        return Path(self.run, f"snapshot-{self.steps}-{self.writer}-{part}-of-{self.parts}.st")


class HostMemory:
    """The folders in memory for the snapshots of the run that saves in ``checkpoints``, one on each host.

    Every rank must make it. ``hosts``: the host of each rank. ``folder``: the folder on this host, with a subfolder for
    each of ``runs``, the ids of the runs before in the same folder of checkpoints and, at the end, of this run.
    ``is_first``: this rank is the first one on its host. ``writer``: an id of this job. Raises CheckpointError where a
    host has no folder in memory, or where it is not known whether the snapshots there are of this run.
    """

    def __init__(self, job: Job, checkpoints: Path) -> None:
        self._job = job
        self.hosts: list[str] = job.gather(socket.gethostname())
        self.is_first = self.hosts.index(self.host) == job.rank
        place, self.runs, certain, self.writer = job.run_on_rank_0(partial(_identify, checkpoints))
        self.folder = _memory_folder() / self.host / place
        job.run_on_all(self._make_folder)
        self._remove_foreign(checkpoints, certain)

    @property
    def host(self) -> str:
        """The host of this rank."""
        return self.hosts[self._job.rank]

    def name_snapshot(self, steps: int) -> Snapshot:
        """Return the name of the snapshot of this job after this number of steps."""
        return Snapshot(steps, self.runs[-1], self.writer, self._job.size)

    def list_parts(self) -> list[tuple[Snapshot, int]]:
        """Return the parts of known runs in the memory of this host, in order."""
        parts = []
        for run in self.runs:
            with contextlib.suppress(OSError):
                for found in filter(None, map(_NAME.fullmatch, os.listdir(self.folder / run))):
                    snapshot = Snapshot(int(found["steps"]), run, found["writer"], int(found["parts"]))
                    parts.append((snapshot, int(found["part"])))
        return sorted(parts)

    def remove_older(self, complete: int) -> None:
        """Remove from this host what is older than the last complete snapshot, where this job has taken one."""
        if complete:
            self._remove(lambda one: one.steps < complete or (one.steps == complete and one.writer != self.writer))

    def keep_only(self, steps: int) -> None:
        """Remove from this host all snapshots but those after this number of steps."""
        if self.is_first:
            self._remove(lambda one: one.steps != steps)

    def _remove(self, unwanted: Callable[[Snapshot], bool]) -> None:
        """Remove from this host the parts of the unwanted snapshots; another rank may have removed some."""
        for snapshot, part in self.list_parts():
            if unwanted(snapshot):
                (self.folder / snapshot.path(part)).unlink(missing_ok=True)

    def make_room(self, sizes: Sequence[int], buddies: Sequence[int | None]) -> None:
        """Remove what killed processes have left half written; raise CheckpointError where there is not room enough.

        Each host keeps the parts of its own ranks, of these ``sizes`` (bytes), and of the ranks whose ``buddies`` are
        on it.
        """
        for part in (self.folder / self.runs[-1]).glob("*.part") if self.is_first else ():
            part.unlink(missing_ok=True)
        here = [rank for rank, host in enumerate(self.hosts) if host == self.host]
        kept = sum(sizes[rank] for rank in here) + sum(sizes[r] for r, one in enumerate(buddies) if one in here)
        known = sum((self.folder / snapshot.path(part)).stat().st_size for snapshot, part in self.list_parts())
        free = shutil.disk_usage(self.folder).free + known
        if free < _KEPT * kept:
            raise CheckpointError(
                f"snapshots need {_KEPT * kept / 1e6:.0f} MB in the memory of {self.host}, for two of "
                f"them, but {self.folder} has {free / 1e6:.0f} MB: make it larger, give another folder by "
                f"{FOLDER_VARIABLE}, or leave snapshot_every out",
                lasts=False,
            )

    def remove_all(self) -> None:
        """Remove the snapshots of all runs from the memory of this host."""
        if self.is_first:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _make_folder(self) -> None:
        try:
            (self.folder / self.runs[-1]).mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder} cannot hold snapshots: {error.strerror}; give a folder in memory by {FOLDER_VARIABLE}",
                lasts=False,
            ) from error

    def _remove_foreign(self, checkpoints: Path, certain: bool) -> None:
        """Remove the snapshots of other runs in the same folder of ``checkpoints``.

        Raises CheckpointError where it is not ``certain`` that they are of others: the folder is new, the memory not.
        """
        foreign = [name for name in os.listdir(self.folder) if name not in self.runs] if self.is_first else []
        found = [(self.hosts[rank], names) for rank, names in enumerate(self._job.gather(foreign)) if names]
        if found and not certain:
            host, (name, *_) = found[0]
            raise CheckpointError(
                f"{host} has snapshots of a run that saved in {checkpoints}, where no file {RUN_ID} names it: to go on "
                f"from them, write {name} to {checkpoints / RUN_ID}; to begin anew, remove {self.folder} on every host"
            )
        for name in foreign:
            shutil.rmtree(self.folder / name, ignore_errors=True)


def _identify(checkpoints: Path) -> tuple[str, tuple[str, ...], bool, str]:
    """Return where the run's snapshots are, the ids of its runs, whether these are certain, and an id of this job.

    ``checkpoints``: the folder, which keeps these ids for the next start. Under ``dapple launch`` the id of this run is
    that of the launch, which is known even where the folder is gone.
    """
    path, start = checkpoints / RUN_ID, read_start()
    try:
        before = _read_runs(path)
        run = start.launch if start is not None else before[-1] if before else secrets.token_hex(8)
        # This run may fail before it has a snapshot, so those of the runs before must be found again.
        runs = (*(one for one in before if one != run), run)[-_MOST_RUNS:]
        if runs != before:
            write_atomically(path, "".join(f"{one}\n" for one in runs))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read or written: {error.strerror}", lasts=False) from error
    place = hashlib.sha256(str(checkpoints.absolute()).encode()).hexdigest()[:16]
    certain = bool(before) or (start is not None and start.number > 0)
    return place, runs, certain, secrets.token_hex(4)


def _read_runs(path: Path) -> tuple[str, ...]:
    """Return the ids of the runs in a file; none where it is no regular file, or names anything else."""
    words = path.read_text(encoding="utf-8", errors="replace").split() if path.is_file() else []
    return tuple(words) if all(re.fullmatch(r"[0-9a-f]{1,64}", word) for word in words) else ()


def _memory_folder() -> Path:
    """Return the folder of this user's snapshots on a host.

    Raises CheckpointError where there is no folder in memory, or another user has made it.
    """
    base = Path(os.environ.get(FOLDER_VARIABLE) or _MEMORY)
    folder = base / f"dapple-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise CheckpointError(
            f"{base} cannot hold snapshots: {error.strerror}; give a folder in memory by {FOLDER_VARIABLE}", lasts=False
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise CheckpointError(f"{folder} belongs to another user, or is no folder: remove it, or set {FOLDER_VARIABLE}")
    return folder
