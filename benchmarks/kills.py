"""Jobs that are killed at random moments end in time, name the rank that failed, and resume bit for bit.

``python -m benchmarks kills [--jobs N] [--first NUMBER] [--seed S] [--launcher mpirun gloo] [--exchange native
horovod] [--ranks 2 3 4] [--every STEPS] [--sharded]``. A job, which its number and the seed decide, is ``dapple
train`` on 2 to 4 ranks, which saves every tenth step (``--every 1``: kills hit saves). At a random moment between its
launch and its end one rank gets SIGKILL, SIGSTOP, SIGTERM or SIGINT, or the launcher SIGKILL, SIGTERM or SIGINT. Then
the same command is run again to its end, and its losses are compared with those of a job that nothing happened to.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common import Row, print_table
from benchmarks.killed_jobs import LAYOUTS, SHARDED_LAYOUTS, Ended, Kill, Launch, train

JOBS, SEED = 10, 0
LAUNCHERS = ("mpirun", "gloo")
EXCHANGES = ("native", "horovod")
EVERY = 10
_TIMEOUT = 8.0  # of the jobs, in seconds
_GRACE = 10.0  # for the launcher to notice and to end all processes
_WANTED = f"ends within {_TIMEOUT + _GRACE:g} s, the rank is named, no process is left, resumes bit for bit"


def run(
    jobs: int = JOBS,
    seed: int = SEED,
    launchers: Sequence[str] = LAUNCHERS,
    sizes: Sequence[int] = tuple(LAYOUTS),
    exchanges: Sequence[str] = EXCHANGES,
    every: int = EVERY,
    first: int = 0,
    *,
    sharded: bool = False,
) -> Iterator[Row]:
    """Yield a row for each job, and one for all.

    ``sizes``: numbers of ranks; ``every``: steps from save to save; ``first``: number of the first job; ``sharded``:
    replicas share the optimizer's slots out.
    """
    layouts = SHARDED_LAYOUTS if sharded else LAYOUTS
    usable = [launcher for launcher in launchers if launcher == "mpirun" or _has_horovodrun()]
    references: dict[Launch, Ended] = {}
    missed = 0
    for job in range(first, first + jobs):
        numbers = random.Random(f"{seed}/{job}")
        launcher, ranks = numbers.choice(usable), numbers.choice(sizes)
        launch = Launch(launcher, numbers.choice(layouts[ranks]), numbers.choice(exchanges), every, sharded)
        if launch not in references:
            references[launch] = _run_undisturbed(launch)
        reference = references[launch]
        kill = _choose(numbers, ranks, reference.seconds)
        row = _kill_and_resume(f"job {job}: {launch}", launch, kill, reference)
        missed += not row.ok
        yield row
    yield Row(
        f"jobs {first} to {first + jobs - 1}, seed {seed}", "all of them", f"{jobs - missed} of {jobs}", not missed
    )


def main(arguments: Sequence[str]) -> int:
    """Print the table for the ``arguments``; return 1 if a job did not end as it must."""
    parser = argparse.ArgumentParser("python -m benchmarks kills", description=__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS, help="jobs to kill")
    parser.add_argument("--first", type=int, default=0, help="number of the first job: parts of a long run")
    parser.add_argument("--seed", type=int, default=SEED, help="of the random choices")
    parser.add_argument("--launcher", nargs="+", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--ranks", nargs="+", type=int, choices=tuple(LAYOUTS), default=tuple(LAYOUTS))
    parser.add_argument("--exchange", nargs="+", choices=EXCHANGES, default=EXCHANGES)
    parser.add_argument("--every", type=int, default=EVERY, help="steps from save to save")
    parser.add_argument("--sharded", action="store_true", help="replicas share the optimizer's slots out")
    options = parser.parse_args(arguments)
    chosen = options.launcher, options.ranks, options.exchange, options.every, options.first
    return 1 if print_table(run(options.jobs, options.seed, *chosen, sharded=options.sharded)) else 0


def _has_horovodrun() -> bool:
    return Path(sys.executable).with_name("horovodrun").is_file()


def _run_undisturbed(launch: Launch) -> Ended:
    with tempfile.TemporaryDirectory() as folder:
        ended = train(launch, Path(folder))
    if ended.exit_code != 0 or not ended.losses:
        raise RuntimeError(f"the job that nothing happens to ended with {ended.exit_code}: {ended.output[-2000:]}")
    return ended


def _choose(numbers: random.Random, ranks: int, seconds: float) -> Kill:
    """Return a kill at any moment of a job that takes ``seconds``."""
    rank = numbers.choice([*range(ranks), None])
    names = ("KILL", "TERM", "INT") if rank is None else ("KILL", "STOP", "TERM", "INT")
    return Kill(numbers.choice(names), rank, numbers.uniform(0.0, seconds))


def _kill_and_resume(figure: str, launch: Launch, kill: Kill, reference: Ended) -> Row:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ended = train(launch, folder, kill, timeout=_TIMEOUT)
        done = max([0, *map(_steps_of, folder.glob("checkpoint-*.safetensors"))])
        problems = _find_problems(ended, kill)
        if done == len(reference.losses):
            resumed = "had finished"
        else:
            again = train(launch, folder)
            resumed = f"resumed after step {done}"
            if again.losses != reference.losses[done:]:
                problems.append(f"{resumed} with other losses, or not: code {again.exit_code}")
    measured = f"code {ended.exit_code} after {ended.seconds:.1f} s; {resumed}"
    return Row(f"{figure}, {kill}", _WANTED, "; ".join([measured, *problems]), not problems)


def _find_problems(ended: Ended, kill: Kill) -> list[str]:
    problems = []
    if ended.exit_code is None:
        problems.append("HUNG, or left processes")
    elif ended.seconds > _TIMEOUT + _GRACE:
        problems.append("TOO LATE")
    finished = ended.exit_code == 0 and ended.losses
    if kill.rank is not None and not finished and not re.search(_naming(kill.rank), ended.output):
        problems.append("NOT NAMED")
    if ended.exit_code == 0 and not ended.losses:
        problems.append("ended well without a result")
    return problems


def _naming(rank: int) -> str:
    """Return what names a failed rank: another rank's line, its own, mpirun's, or horovodrun's."""
    return rf"rank {rank}\b|process rank {rank} |Process name: .*,{rank}\]|Process {rank} exit|\[{rank}\]<std"


def _steps_of(path: Path) -> int:
    return int(path.stem.removeprefix("checkpoint-"))
