"""Launch a job of ``dapple train``, send a signal to one of its processes, and see how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MARK = "DAPPLE_BENCHMARK_JOB"  # in the environment of every process of one launch, and of no other
_RANK = re.compile(rb"(?:OMPI_COMM_WORLD_RANK|HOROVOD_RANK)=(\d+)")
_STEPS = 400
LAYOUTS: Mapping[int, Sequence[str]] = {2: ("1,1", "2"), 3: ("1,1,1", "2,1"), 4: ("1,1,1,1", "2,2")}
"""Replicas of each stage, by the number of ranks."""
SHARDED_LAYOUTS: Mapping[int, Sequence[str]] = {2: ("2",), 3: ("2,1", "3"), 4: ("2,2",)}
"""Those of a job whose replicas share the optimizer's slots out."""


@dataclass(frozen=True)
class Launch:
    """A job: how it is launched, the replicas of its stages, how tensors travel, and after how many steps it saves.

    ``launcher``: "mpirun" or "gloo". ``exchange``: a value of DAPPLE_EXCHANGE. ``sharded``: ``--shard-optimizer``.
    """

    launcher: str
    layout: str
    exchange: str
    every: int
    sharded: bool = False

    def __str__(self) -> str:
        sharded = ", sharded optimizer" * self.sharded
        return f"{self.launcher}, {self.exchange}, {self.layout}{sharded}, saves every {self.every} steps"


@dataclass(frozen=True)
class Kill:
    """A signal (``name``) that a rank, or the launcher (None), gets ``seconds`` after the launch."""

    name: str
    rank: int | None
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.name} to {'the launcher' if self.rank is None else f'rank {self.rank}'} after {self.seconds:.1f} s"
        )


@dataclass(frozen=True)
class Ended:
    """The end of a job.

    ``exit_code``: of the launcher; None if the job had to be ended from here. ``seconds``: from the kill (or the
    launch) to the end of its last process. ``losses``: that rank 0 printed. ``output``: of all ranks and the launcher.
    """

    exit_code: int | None
    seconds: float
    losses: tuple[float, ...]
    output: str


def train(
    launch: Launch, folder: Path, kill: Kill | None = None, *, timeout: float = 8.0, patience: float = 300.0
) -> Ended:
    """Run the job to its end, or for ``patience`` seconds, or after the kill for ``timeout`` and 20 seconds more.

    ``timeout``: the job's own, after which a silent rank has failed.
    """
    mark = uuid.uuid4().hex
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "HOROVOD_"))
    }
    environment |= {"DAPPLE_TIMEOUT_SECONDS": str(timeout), "DAPPLE_EXCHANGE": launch.exchange}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", _MARK: mark}
    with tempfile.TemporaryDirectory(prefix="kills-") as scratch, open(f"{scratch}/launcher", "w+") as log:
        process = subprocess.Popen(
            [*_launcher(launch, Path(scratch)), *_command(launch, folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
        try:
            begin = time.monotonic()
            if kill is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(kill.seconds)
                _send(kill, process, mark)
                begin, patience = time.monotonic(), timeout + 20.0
            while (process.poll() is None or find_marked(mark)) and time.monotonic() < begin + patience:
                time.sleep(0.05)  # ranks are no children of this process, so it cannot wait for them
            seconds, ended = time.monotonic() - begin, process.poll() is not None and not find_marked(mark)
        finally:
            while found := find_marked(mark):
                for number in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)
                time.sleep(0.01)  # until the kernel has ended them
            process.wait()
        output = "".join(
            f"--- {path.parent.name}\n" + path.read_text(errors="replace")
            for path in sorted(Path(scratch).glob("out/**/std*"))
        )
        output += f"--- launcher\n{Path(scratch, 'launcher').read_text(errors='replace')}"
    return Ended(process.returncode if ended else None, seconds, _losses(output), output)


def find_marked(mark: str) -> dict[int, int | None]:
    """Return the live processes of a launch, each with its rank; None: the launcher, or a helper of it."""
    wanted = f"{_MARK}={mark}".encode()
    found = {}
    for number, values in _environments():
        if wanted in values:
            rank = next(filter(None, map(_RANK.fullmatch, values)), None)
            found[number] = None if rank is None else int(rank[1])
    return found


def _environments() -> Iterator[tuple[int, list[bytes]]]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            yield int(entry.name), (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile, or belongs to another user
            continue


def _send(kill: Kill, launcher: subprocess.Popen[bytes], mark: str) -> None:
    """Send the signal; a rank's goes to its first process, which is Python, as soon as the launcher has started it.

    Nothing is sent where the job has ended.
    """
    target = launcher.pid if kill.rank is None else None
    while target is None and launcher.poll() is None:
        ranks = [number for number, rank in sorted(find_marked(mark).items()) if rank is not None and rank == kill.rank]
        target = next(iter(ranks), None)
        time.sleep(0.02)  # the launcher tells nobody when it has started a rank
    if target is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, getattr(signal, f"SIG{kill.name}"))


def _launcher(launch: Launch, folder: Path) -> list[str]:
    ranks = str(sum(map(int, launch.layout.split(","))))
    if launch.launcher == "gloo":
        program = str(Path(sys.executable).with_name("horovodrun"))
        return [sys.executable, program, "--gloo", "-np", ranks, "--output-filename", f"{folder}/out"]
    tcp = "--mca btl tcp,self --mca btl_tcp_if_include lo --mca oob_tcp_if_include lo --mca mpi_yield_when_idle 1"
    words = f"mpirun --allow-run-as-root --oversubscribe --bind-to none {tcp} --mca orte_tmpdir_base {folder}"
    return [*words.split(), "--output-filename", f"{folder}/out", "-np", ranks]


def _command(launch: Launch, folder: Path) -> list[str]:
    stages = launch.layout.count(",") + 1
    model = str(Path(__file__).with_name("killed_model.py"))
    words = f"-m dapple_tf train {model}:chain --replicas {launch.layout} --stages {stages} --micro-batches 2"
    saving = ["--checkpoint-dir", str(folder), "--checkpoint-every", str(launch.every)]
    sharded = ["--shard-optimizer"] * launch.sharded
    return [sys.executable, *words.split(), *sharded, "--steps", str(_STEPS), "--json", *saving]


def _losses(output: str) -> tuple[float, ...]:
    found = re.findall(r'^(?:\[0\]<stdout>:)?(\{"steps": .*\})$', output, re.MULTILINE)
    return tuple(json.loads(found[-1])["losses"]) if found else ()
