"""Inject faults into jobs of ``dapple launch``, and measure how long a restart takes and what snapshots cost.

``python -m benchmarks elastic [--jobs N] [--first NUMBER] [--seed S]`` signals a rank or the launcher, or removes a
host with its memory, in each of N jobs, while the job imports, builds, trains, takes a snapshot, saves or plans again.
A job is ``dapple train --elastic --snapshot-every`` on three ranks of two hosts, in float64. It must end with the same
loss at each step as a job without a fault, or with exit code 1 if fewer ranks than --min-np are left. In that case, and
if the launcher has ended, the benchmark runs the same command again, which must go on to the end. ``--part``: which of
the tables to print.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.common import Row, print_table, run_for_json
from benchmarks.goodput import Inputs, goodput
from benchmarks.named_hosts import NamedHosts, named_hosts

JOBS, SEED = 6, 0
PARTS = ("losses", "restart", "sizes", "cost", "goodput")
_STEPS, _SNAPSHOT, _SAVE = 300, 10, 50
_SLOTS = {"nodea": 2, "nodeb": 1}
_TIMEOUT = 10.0  # DAPPLE_TIMEOUT_SECONDS of the jobs
_PATIENCE = 420.0  # after which a job that has not ended is called hung
_LAUNCHES = 3  # how often one job may be launched
_TOLERANCE = 1e-6  # under other plans sums have another order, and their rounding errors grow over up to 300 steps
_MOMENTS = ("import", "build", "step", "snapshot", "save", "re-planning")
_KINDS = ("rank KILL", "rank STOP", "rank TERM", "host", "launcher KILL", "launcher TERM")


@dataclass(frozen=True)
class Fault:
    """A fault of a rank, a host or the launcher, ``after`` seconds after a ``moment`` of the run has come."""

    kind: str
    moment: str
    rank: int
    host: str
    after: float

    def __str__(self) -> str:
        target = {"rank": f"rank {self.rank}", "host": self.host}.get(self.kind.split()[0], "")
        return f"{self.kind} {target} at {self.moment} + {self.after:.1f} s".replace("  ", " ")


@dataclass
class Launch:
    """A launch that runs, or has ended, and its ``lines``: the time of each, in seconds since 1970, and its text."""

    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def find(self, pattern: str, after: float = 0.0) -> float | None:
        """Return when the first line with ``pattern`` came."""
        return next((when for when, line in list(self.lines) if when > after and re.search(pattern, line)), None)

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(line for _, line in self.lines)


@dataclass(frozen=True)
class Job:
    """A job to launch: a model of ``benchmarks/killed_model.py``, with a rank in each slot of the hosts.

    ``slots``: of each host, by name. ``least``: the job ends if fewer ranks than this are left. ``options``: further
    options of ``dapple train``.
    """

    model: str = "chain"
    slots: Mapping[str, int] = field(default_factory=lambda: _SLOTS)
    least: int = 2
    steps: int = _STEPS
    options: tuple[str, ...] = ("--stages", "3", "--replicas", "1,1,1", "--micro-batches", "2")


_CHAIN = Job()


def launch(hosts: NamedHosts, folder: Path, job: Job = _CHAIN) -> Launch:
    """Start the job on all hosts."""
    model = f"{Path(__file__).with_name('killed_model.py')}:{job.model}"
    ranks = str(sum(job.slots.values()))
    words = ["-m", "dapple_tf", "launch", "--hosts", str(hosts.write_list(job.slots)), "-np", ranks]
    words += ["--min-np", str(job.least), "--restarts", "5", "--check-every", "2"]
    words += ["--mpirun", " ".join(hosts.mpirun_options), "--", sys.executable, "-m", "dapple_tf", "train", model]
    words += [*job.options, "--steps", str(job.steps), "--json", "--elastic", "--snapshot-every", str(_SNAPSHOT)]
    words += ["--checkpoint-dir", str(folder), "--checkpoint-every", str(_SAVE)]
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("OMPI_", "PMIX_", "HOROVOD_"))}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", "DAPPLE_TIMEOUT_SECONDS": str(_TIMEOUT), "PYTHONUNBUFFERED": "1"}
    started = Launch(
        subprocess.Popen(
            [sys.executable, *words],
            env=environment | {"PYTHONPATH": str(Path(__file__).parents[1])} | hosts.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    )

    def read() -> None:
        assert started.process.stdout is not None
        for line in started.process.stdout:
            started.lines.append((time.time(), line.rstrip()))

    started.threads.append(threading.Thread(target=read, daemon=True))
    started.threads[0].start()
    return started


def losses_in(folder: Path) -> dict[int, float]:
    """Return the training losses in the record of the run, by step."""
    found: dict[int, float] = {}
    with contextlib.suppress(OSError):
        for line in (folder / "run.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                step = json.loads(line).get("step")
                if step:
                    found[step["number"]] = step["loss"]
    return found


def _moment_has_come(moment: str, started: Launch, hosts: NamedHosts, folder: Path) -> bool:
    match moment:
        case "import":
            return started.find("starts the job") is not None
        case "build":
            return started.find("starts TensorFlow") is not None
        case "step":
            return len(losses_in(folder)) > _STEPS // 6
        case "snapshot":
            return any(hosts.snapshots(name) for name in hosts.names) and any(hosts.memory.rglob("*.part"))
        case "save":
            return any(folder.glob("checkpoint-*"))
        case _:
            return started.find(r"starts the job again") is not None


def inject(fault: Fault, started: Launch, hosts: NamedHosts) -> None:
    """Send the signal, or remove the host."""
    what, _, name = fault.kind.partition(" ")
    if what == "host":
        hosts.lose(fault.host)
        return
    number = started.process.pid if what == "launcher" else None
    end = time.monotonic() + 20
    while number is None and time.monotonic() < end and started.process.poll() is None:
        number = hosts.rank_process(fault.rank)
        time.sleep(0.02)  # no event says that a rank has started
    if number is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, getattr(signal, f"SIG{name}"))


def _wait(condition: Callable[[], bool], seconds: float, every: float = 0.02) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(every)  # watched processes send no event
    return True


def _has_ended_or(started: Launch, condition: Callable[[], bool]) -> bool:
    return started.process.poll() is not None or condition()


def _run_job(number: int, seed: int, reference: Mapping[int, float]) -> tuple[Row, Fault, str]:
    numbers = random.Random(f"elastic/{seed}/{number}")
    fault = Fault(
        numbers.choice(_KINDS),
        numbers.choice(_MOMENTS),
        numbers.randrange(3),
        numbers.choice(list(_SLOTS)),
        numbers.uniform(0, 3),
    )
    problems: list[str] = []
    ends: list[str] = []
    with tempfile.TemporaryDirectory() as name, named_hosts(list(_SLOTS)) as hosts:
        folder = Path(name)
        started = launch(hosts, folder)
        if fault.moment == "re-planning":  # kill a rank first, so that the job is started again
            _wait(lambda: len(losses_in(folder)) > _STEPS // 6 or started.process.poll() is not None, _PATIENCE)
            inject(Fault("rank KILL", "step", 1, "", 0.0), started, hosts)
        come = _wait(
            lambda: started.process.poll() is not None or _moment_has_come(fault.moment, started, hosts, folder),
            _PATIENCE,
        )
        if come:
            _wait(lambda: started.process.poll() is not None, fault.after)
        begin = time.monotonic()
        inject(fault, started, hosts)
        for attempt in range(_LAUNCHES):
            if not _wait(partial(_has_ended_or, started, lambda: False), _PATIENCE, 0.2):
                problems.append("HUNG")
                break
            code = started.process.returncode
            if not _wait(lambda: not hosts.processes(), _TIMEOUT + 20):
                problems.append("PROCESSES LEFT")
            started.threads[0].join(5)
            resumed = re.findall(r"resumed after step (\d+) from (the memory|\S+)", started.text)
            where = ["memory" if place == "the memory" else "file" for _, place in resumed]
            ends.append(f"code {code}" + (f", resumed from {' and '.join(where)}" if where else ""))
            # If the launcher was killed, its ranks may have trained to the last step.
            if code == 0 or f"{_STEPS} steps already" in started.text:
                break
            few = "fewer than --min-np" in started.text
            if few and code != 1:
                problems.append("WRONG CODE")
            if not few and not fault.kind.startswith("launcher"):
                problems.append("GAVE UP")
            for host in hosts.names:
                hosts.return_host(host)
            if attempt == _LAUNCHES - 1:
                problems.append("NEVER ENDED")
                break
            started = launch(hosts, folder)
        found = losses_in(folder)
        if sorted(found) != sorted(reference):
            problems.append(f"{len(found)} OF {len(reference)} STEPS")
        else:
            errors = [abs(found[step] / reference[step] - 1) for step in reference]
            ends.append(f"losses equal to {max(errors):.0e}")
            if max(errors) > _TOLERANCE:
                problems.append("OTHER LOSSES")
        if any(hosts.memory.rglob("*.st")):
            problems.append("MEMORY NOT FREED")
        if problems:
            Path(f"out/elastic-{number}.log").parent.mkdir(exist_ok=True)
            Path(f"out/elastic-{number}.log").write_text(started.text)
    seconds = time.monotonic() - begin
    result = "went on" if not problems else ", ".join(problems)
    measured = f"{'; '.join(ends)}; {seconds:.0f} s after the fault{''.join(f'; {text}' for text in problems)}"
    wanted = "ends with the losses of an undisturbed run"
    return Row(f"job {number}: {fault}", wanted, measured, not problems), fault, result


def run_losses(jobs: int, first: int, seed: int) -> Iterator[Row]:
    """Yield a row for each job, and one for each kind of fault."""
    reference = _reference(_CHAIN)
    results: dict[str, Counter[str]] = {}
    for number in range(first, first + jobs):
        row, fault, result = _run_job(number, seed, reference)
        yield row
        results.setdefault(fault.kind, Counter())[result] += 1
    for kind, counts in results.items():
        text = ", ".join(f"{count} {what}" for what, count in counts.items())
        yield Row(f"all: {kind}", "all went on", text, set(counts) == {"went on"})


# --- where the seconds of a restart go

_PHASES = (
    ("a rank is killed: detection, and the end of all processes", r"the job failed"),
    ("hosts are asked, mpirun starts", r"starts the job again"),
    ("Python starts", r"starts TensorFlow"),
    ("TensorFlow starts, ranks join", r"loads "),
    ("the model is traced, planned and built, and the state restored", r"resumed after"),
)


def run_restart() -> Iterator[Row]:
    """Yield where the seconds go from the kill of one of three ranks to the first new step, and the steps repeated."""
    with tempfile.TemporaryDirectory() as name, named_hosts(list(_SLOTS)) as hosts:
        folder = Path(name)
        started = launch(hosts, folder)
        _wait(lambda: len(losses_in(folder)) > _STEPS // 3, _PATIENCE)
        victim = hosts.rank_process(1)
        assert victim is not None, started.text[-2000:]
        killed = before = time.time()
        os.kill(victim, signal.SIGKILL)
        lines = 0
        _wait(lambda: started.find("resumed after", killed) is not None, _PATIENCE)
        lines = len((folder / "run.jsonl").read_text().splitlines())
        _wait(lambda: len((folder / "run.jsonl").read_text().splitlines()) > lines + 1, _PATIENCE)
        first = time.time()
        for label, pattern in _PHASES:
            came = started.find(pattern, before) or before
            yield Row(label, "-", f"{came - before:.1f} s", True)
            before = came
        yield Row("the first step, with its build", "-", f"{first - before:.1f} s", True)
        yield Row("in all, 3 ranks", "at most 30 s on 2 cores", f"{first - killed:.1f} s", first - killed <= 30)
        repeated = re.search(r"repeats (\d+) step", started.text)
        count = int(repeated[1]) if repeated else -1
        most = 2 * _SNAPSHOT
        yield Row("steps repeated, a snapshot every 10", f"at most {most}", str(count), 0 <= count <= most)
        started.process.send_signal(signal.SIGTERM)
        started.process.wait(60)


# --- a job that loses its ranks one by one, and then gets them back


# With 800 steps enough are left at the end that more ranks save more time than a slow start on a busy machine takes.
_HEAVY = Job("heavy", {"nodea": 4}, 1, 800, ("--micro-batches", "4"))


def run_sizes() -> Iterator[Row]:
    """Yield how soon a job of four ranks trains again: it loses three, one by one, and then gets them back.

    The last row compares its losses with those of a job without a fault.
    """
    reference = _reference(_HEAVY)
    (host,) = _HEAVY.slots
    with tempfile.TemporaryDirectory() as name, named_hosts([host]) as hosts:
        folder = Path(name)
        started = launch(hosts, folder, _HEAVY)
        for ranks in (3, 2, 1, 4):
            _wait_for_steps(started, folder, _SAVE // 2)
            begin = time.time()
            hosts.write_list({host: ranks})
            if ranks < 4:
                inject(Fault("rank KILL", "step", ranks, "", 0.0), started, hosts)
            restart = _wait_for_line(started, rf"starts the job again .* with {ranks} rank", begin)
            _wait_for_line(started, "resumed after", restart)
            _wait_for_steps(started, folder, 1)
            first = time.time()
            wanted = "at most 30 s on 2 cores" if ranks < 4 else "-"
            what = "a rank is killed" if ranks < 4 else "all slots are back (decided at the next save)"
            measured = f"{first - begin:.1f} s, of which {restart - begin:.1f} s until the job is started again"
            yield Row(f"{what}: {ranks} ranks train", wanted, measured, ranks == 4 or first - begin <= 30)
        code = started.process.wait(_PATIENCE)
        found = losses_in(folder)
        error = max(abs(found.get(step, np.inf) / loss - 1) for step, loss in reference.items())
        text = f"exit code {code}, {len(found)} of {len(reference)} steps, losses equal to {error:.0e}"
        ok = code == 0 and len(found) == len(reference) and error <= _TOLERANCE
        yield Row("4, 3, 2, 1 and 4 ranks, beside a job that nothing happens to", f"at most {_TOLERANCE}", text, ok)


def _reference(job: Job) -> dict[int, float]:
    """Return the training losses of a job without a fault, by step."""
    with tempfile.TemporaryDirectory() as name, named_hosts(list(job.slots)) as hosts:
        started = launch(hosts, Path(name), job)
        if started.process.wait(3 * _PATIENCE):
            raise RuntimeError(f"the job without a fault failed:\n{started.text[-3000:]}")
        return losses_in(Path(name))


def _wait_for_line(started: Launch, pattern: str, after: float) -> float:
    """Return when the first line with ``pattern`` came after a moment; raise RuntimeError if none comes."""
    _wait(partial(_has_ended_or, started, lambda: started.find(pattern, after) is not None), _PATIENCE)
    if not _wait(lambda: started.find(pattern, after) is not None, 1):  # the last lines of a launch that has ended
        raise RuntimeError(f"no line has {pattern!r}:\n{started.text[-3000:]}")
    return started.find(pattern, after) or after


def _wait_for_steps(started: Launch, folder: Path, count: int) -> None:
    """Wait until the job has made ``count`` further steps; raise RuntimeError if it makes none."""
    record = folder / "run.jsonl"
    lines = len(record.read_text().splitlines()) if record.exists() else 0
    if not _wait(lambda: record.exists() and len(record.read_text().splitlines()) >= lines + count, _PATIENCE):
        raise RuntimeError(f"the job stands still:\n{started.text[-3000:]}")


# --- what snapshots cost


def run_cost() -> Iterator[Row]:
    """Yield how much time snapshots every ten steps take, for the dense stack and the gpt on two ranks of two hosts."""
    for model in ("dense", "gpt"):
        found = measure_cost(model)
        share = found["waited"] / (_SNAPSHOT * found["step"])
        processor = found["snapshot_processor"] / (_SNAPSHOT * found["step_processor"])
        text = (
            f"{100 * share:.2f}% of a step waiting ({1e3 * found['waited']:.1f} ms in ten steps of "
            f"{1e3 * found['step']:.0f} ms; copying {found['bytes'] / 1e6:.1f} MB alone takes "
            f"{1e3 * found['copy']:.1f} ms); with writing and sending beside training {100 * processor:.2f}% of the "
            f"processor time ({found['snapshot_processor']:.2f} s in ten steps of {found['step_processor']:.2f} s)"
        )
        yield Row(f"{model}, Adam, 2 ranks: snapshots every 10 steps", "at most 3% of a step", text, share <= 0.03)


def measure_cost(model: str) -> Mapping[str, float]:
    """Run ``benchmarks.elastic_ranks`` on two emulated hosts; return what rank 0 prints."""
    with named_hosts(["nodea", "nodeb"]) as hosts, tempfile.TemporaryDirectory() as folder:
        words = ["mpirun", "-np", "2", "--host", "nodea:1,nodeb:1", *hosts.mpirun_options, "-x", "PYTHONPATH"]
        words += ["-x", "DAPPLE_SNAPSHOT_DIR", sys.executable, "-m", "benchmarks.elastic_ranks", model, folder]
        variables = {**hosts.environment, "PYTHONPATH": str(Path(__file__).parents[1])}
        found = run_for_json(words, variables=variables, timeout=900)
        assert isinstance(found, dict)
        return found


# --- goodput


def measure_write_rate(size: int = 200_000_000) -> float:
    """Return the bytes a second at which a checkpoint's file is written, with its checksum and until it is on disk."""
    import tensorflow as tf

    from dapple_tf.checkpoint.file import write_checkpoint

    values = [np.random.default_rng(0).normal(size=size // 40).astype("float32") for _ in range(10)]
    variables = {f"v{i}": tf.Variable(value) for i, value in enumerate(values)}
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(3):
            begin = time.perf_counter()
            write_checkpoint(Path(folder, f"{turn}"), variables, values, {})
            taken.append(time.perf_counter() - begin)
    return size / min(taken)


def run_goodput(restart_seconds: float, snapshot_share: float) -> Iterator[Row]:
    """Yield the simulated goodput (the useful share of the time) with measured inputs, and draw it."""
    inputs = Inputs(restart_seconds, snapshot_share, measure_write_rate())
    found, path = goodput(inputs)
    about = (
        f"a restart takes {restart_seconds:.0f} s, snapshots {100 * snapshot_share:.2f}%, files "
        f"{inputs.write_rate / 1e6:.0f} MB/s (measured); a host is back after {inputs.repair_seconds / 60:.0f} min "
        "(assumed)"
    )
    for hosts, shares in found.items():
        text = ", ".join(f"{policy} {share:.2f}" for policy, share in shares.items())
        best = shares["snapshots"] >= max(shares.values())
        yield Row(f"goodput, {hosts} hosts: {about}", "snapshots are best", f"{text}; {path.name}", best)


def run() -> Iterator[Row]:
    """Yield all tables."""
    restart = list(run_restart())
    yield from restart
    yield from run_sizes()
    cost = list(run_cost())
    yield from cost
    seconds = float(next(row for row in restart if row.figure.startswith("in all")).measured.split()[0])
    share = max(float(row.measured.partition("%")[0]) / 100 for row in cost)
    yield from run_goodput(seconds, share)
    yield from run_losses(JOBS, 0, SEED)


def main(arguments: Sequence[str]) -> int:
    """Print the tables for the ``arguments``; return 1 if a figure misses what is wanted."""
    parser = argparse.ArgumentParser("python -m benchmarks elastic", description=__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS, help="number of jobs into which a fault is injected")
    parser.add_argument("--first", type=int, default=0, help="number of the first job, to run a part of many jobs")
    parser.add_argument("--seed", type=int, default=SEED, help="of the random choices")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--restart-seconds", type=float, default=30.0, help="measured by --part restart")
    parser.add_argument("--snapshot-share", type=float, default=0.01, help="measured by --part cost")
    given = parser.parse_args(arguments)
    parts = {
        "restart": run_restart,
        "sizes": run_sizes,
        "cost": run_cost,
        "goodput": lambda: run_goodput(given.restart_seconds, given.snapshot_share),
        "losses": lambda: run_losses(given.jobs, given.first, given.seed),
    }
    rows = itertools.chain.from_iterable(parts[part]() for part in given.part)
    return 1 if print_table(rows) else 0
