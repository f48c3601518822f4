"""Run a job by mpirun, and start it again on the hosts that are left when a rank or a host is lost.

mpirun cannot replace a process of a running job. So a job that has lost a rank ends as a whole, and the next start goes
on from what the job has saved; ``dapple train --elastic`` makes a plan for the number of ranks of that start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import math
import os
import secrets
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from dapple_tf.errors import ClusterError
from dapple_tf.launcher.hosts import Host, find_answering, is_local, read_hosts
from dapple_tf.launcher.restart import CONTINUE, REFUSED, VARIABLE, Start, offer_ranks
from dapple_tf.wording import format_count

_USAGE = 2  # the exit code of a command with a wrong option
ENDED_BY = 128
"""Plus the number of a signal: the exit code of a process that the signal has ended."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP comes when the terminal is closed
_POLL_SECONDS = 0.2
_PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


@dataclass(frozen=True)
class LaunchSettings:
    """The settings of ``dapple launch``: the command, the hosts and the numbers of ranks.

    ``hosts``: path of the list of hosts, or of a script that prints it. ``most`` and ``least``: the largest and the
    smallest number of ranks. ``restarts``: how many times the job may be started again after a failure. ``command``:
    what each rank runs. ``mpirun_options``: more words for mpirun. ``check_seconds``: time between two checks of the
    hosts while the job runs. ``timeout_seconds``: when a host has sent nothing for this time, the ranks on the other
    hosts end.
    """

    hosts: str
    most: int
    least: int
    restarts: int
    command: tuple[str, ...]
    mpirun_options: tuple[str, ...] = ()
    check_seconds: float = 15.0
    timeout_seconds: float = 30.0


class Supervisor:
    """Starts the job of ``settings``, watches it, and starts it again; calls ``tell`` with a line for each event."""

    def __init__(self, settings: LaunchSettings, tell: Callable[[str], None]) -> None:
        self._settings = settings
        self._tell = tell
        self._stopped_by: int | None = None
        self._signals = 0
        self._lost: tuple[str, ...] = ()

    def run(self) -> int:
        """Run until the job has ended and is not started again; return the launcher's exit code.

        It is 1 if the job has failed, or too few slots are left. Raises ClusterError before the first start if the
        hosts cannot be read, or have too few slots.
        """
        settings = self._settings
        hosts = self._choose_hosts(read_hosts(settings.hosts))
        if _count_slots(hosts) < settings.least:
            raise ClusterError(
                f"{settings.hosts}: {format_count(_count_slots(hosts), 'slot')} on hosts that answer, but --min-np "
                f"asks for {format_count(settings.least, 'rank')}: add hosts, or lower --min-np"
            )
        with self._passing_signals_on():
            failures, start = 0, Start(0, launch=secrets.token_hex(8))
            while True:
                began = time.monotonic()
                self._lost = ()
                code = self._run_once(hosts, dataclasses.replace(start, began=time.time()))
                start = dataclasses.replace(
                    start,
                    number=start.number + 1,
                    ended=time.time(),
                    cause=self._describe_end(code),
                    lost=_ranks_on(hosts, self._lost),
                )
                if self._stopped_by is not None and code != 0:
                    return ENDED_BY + self._stopped_by
                if code == 0:
                    return 0
                if code in (_USAGE, REFUSED):
                    self._tell(f"the job ended with {_describe_code(code)}: another start would end in the same way")
                    return _USAGE if code == _USAGE else 1
                if code == CONTINUE:
                    self._tell("the job has saved, to go on with more ranks")
                else:
                    failures += 1
                    self._tell(f"the job failed with {_describe_code(code)} after {time.monotonic() - began:.0f} s")
                    if failures > settings.restarts:
                        self._tell(
                            f"it has been started again {format_count(settings.restarts, 'time')} (--restarts): it "
                            "ends here"
                        )
                        return 1
                hosts = self._find_next_hosts(hosts)
                if self._stopped_by is not None:  # while the hosts were asked
                    return ENDED_BY + self._stopped_by
                if _count_slots(hosts) < settings.least:
                    self._tell(
                        f"the hosts that answer have {format_count(_count_slots(hosts), 'slot')}, fewer than --min-np "
                        f"{settings.least}: it ends here; what was saved stays"
                    )
                    return 1

    def _choose_hosts(self, named: Sequence[Host]) -> tuple[Host, ...]:
        """Return the hosts that answer, with no more slots than the job may have ranks."""
        answering = find_answering(named)
        for host in named:
            if host not in answering:
                self._tell(
                    f"host {host.name} does not answer: it is left out, with its {format_count(host.slots, 'slot')}"
                )
        return self._limit_slots(answering)

    def _limit_slots(self, answering: Sequence[Host]) -> tuple[Host, ...]:
        """Return the hosts with no more slots than the job may have ranks."""
        chosen: list[Host] = []
        left = self._settings.most
        for host in answering:
            if left:
                chosen.append(Host(host.name, min(host.slots, left)))
                left -= chosen[-1].slots
        return tuple(chosen)

    def _find_next_hosts(self, before: Sequence[Host]) -> tuple[Host, ...]:
        """Return the hosts for the next start.

        If a host of the last start does not answer, wait for the timeout first: then its ranks have ended, too.
        """
        try:
            hosts = self._choose_hosts(read_hosts(self._settings.hosts))
        except ClusterError as error:
            self._tell(f"{error}; the hosts of the last start are used")
            hosts = self._choose_hosts(before)
        answering = {host.name for host in find_answering(before)}
        if any(host.name not in answering for host in before):
            self._wait(self._settings.timeout_seconds)
        return hosts

    def _run_once(self, hosts: Sequence[Host], start: Start) -> int:
        """Run the job on the hosts; return mpirun's exit code."""
        ranks = _count_slots(hosts)
        again = f"again (number {start.number}) " if start.number else ""
        self._tell(f"starts the job {again}with {format_count(ranks, 'rank')} on {', '.join(map(str, hosts))}")
        environment = {**os.environ, VARIABLE: start.to_text()}
        process = subprocess.Popen(
            self._make_command(hosts, environment),
            env=environment,
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that the terminal signals this process only, which passes signals on
        )
        try:
            return self._watch(process, hosts)
        finally:
            _end(process, self._settings.timeout_seconds)

    def _make_command(self, hosts: Sequence[Host], environment: Mapping[str, str]) -> list[str]:
        """Return the command line of mpirun, whose ranks are numbered host by host."""
        passed = [name for name in environment if name in _PASSED_ON or name.startswith(("DAPPLE_", "HOROVOD_"))]
        return [
            *("mpirun", "--quiet", "-np", str(_count_slots(hosts)), "--map-by", "slot"),
            *("--host", ",".join(map(str, hosts))),
            *(word for name in sorted(passed) for word in ("-x", name)),
            *self._settings.mpirun_options,
            *self._settings.command,
        ]

    def _watch(self, process: subprocess.Popen[str], hosts: Sequence[Host]) -> int:
        """Wait for the job's end; end mpirun if a host is lost, and offer more ranks if there are more slots."""
        settings, offered = self._settings, _count_slots(hosts)
        check = time.monotonic() + settings.check_seconds
        while (code := process.poll()) is None:
            if self._stopped_by is not None:
                return self._stop(process, self._stopped_by)
            if time.monotonic() >= check:
                lost = self._find_lost(hosts)
                if lost:
                    return self._give_up(process, lost)
                offered = self._offer_ranks(process, _count_slots(hosts), offered)
                check = time.monotonic() + settings.check_seconds
            self._wait(_POLL_SECONDS)
        return code

    def _stop(self, process: subprocess.Popen[str], number: int) -> int:
        """Let the job save and end, by SIGUSR1, which mpirun passes on; end it at once at the second signal.

        After SIGTERM and SIGHUP the job is also ended when the timeout has passed: their sender may not wait longer.
        """
        # A check of the hosts may have delayed this message, and a user who saw nothing happen may have tried again.
        self._signals = 1
        self._tell(
            "asks the job to end: dapple train --checkpoint-dir saves the step that runs first, any other job ends as "
            "it is; a second signal ends it at once"
        )
        process.send_signal(signal.SIGUSR1)
        end = math.inf if number == signal.SIGINT else time.monotonic() + self._settings.timeout_seconds
        while process.poll() is None and self._signals == 1 and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)  # a second signal is noticed after this time
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._settings.timeout_seconds)
        # mpirun also ends with code 0 if the signal comes while it starts the ranks.
        return _end(process, self._settings.timeout_seconds) or ENDED_BY + number

    def _find_lost(self, hosts: Sequence[Host]) -> list[str]:
        """Return the names of the hosts that do not answer twice in a row."""
        others = [host for host in hosts if not is_local(host.name)]
        for _ in range(2):
            if others:
                answering = find_answering(others)
                others = [host for host in others if host not in answering]
        return [host.name for host in others]

    def _give_up(self, process: subprocess.Popen[str], lost: Sequence[str]) -> int:
        """Wait until the ranks have reported the lost hosts and ended; then end mpirun, which may wait 15 minutes."""
        self._lost = tuple(lost)
        self._tell(f"host {', '.join(lost)} does not answer any more")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self._settings.timeout_seconds)
        return _end(process, self._settings.timeout_seconds) or 1

    def _offer_ranks(self, process: subprocess.Popen[str], ranks: int, offered: int) -> int:
        """Write to a job of ``ranks`` how many are possible, if that is not ``offered``; return the newest offer.

        ``offered``: the number that was written before. If slots are gone again, the offer is withdrawn: else the job
        would end for nothing, and no new offer would be made when they are back.
        """
        if ranks >= self._settings.most or process.stdin is None or not is_read(process.stdin):
            return offered
        try:
            named = read_hosts(self._settings.hosts)
        except ClusterError:  # the next start reports it, if the list is still wrong
            return offered
        hosts = self._limit_slots(find_answering(named))
        possible = max(ranks, _count_slots(hosts))
        if possible == offered:
            return offered
        decides = (
            ": if it is elastic, it decides once it has saved whether to go on with them" if possible > ranks else ""
        )
        self._tell(f"there are slots for {format_count(possible, 'rank')} now, and the job has {ranks}{decides}")
        with contextlib.suppress(OSError):  # the job may have just ended
            process.stdin.write(offer_ranks([(host.name, host.slots) for host in hosts]))
            process.stdin.flush()
        return possible

    def _describe_end(self, code: int) -> str:
        """Return why the job has ended, in words: the hosts that were lost, or the exit code."""
        if self._lost:
            return f"host {', '.join(self._lost)} did not answer"
        return "more ranks are possible" if code == CONTINUE else _describe_code(code)

    @contextlib.contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        """Note Ctrl-C, SIGTERM and SIGHUP, at which ``_watch`` stops the job; what nohup ignores stays ignored."""

        def note(number: int, _: object) -> None:
            self._stopped_by = number
            self._signals += 1

        heeded = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _wait(self, seconds: float) -> None:
        """Sleep for these seconds, and end early when a signal has arrived."""
        end = time.monotonic() + seconds
        while self._stopped_by is None and (left := end - time.monotonic()) > 0:
            # In short parts, since a handler of a signal does not end time.sleep.
            time.sleep(min(left, _POLL_SECONDS))


def is_read(pipe: IO[str]) -> bool:
    """Return whether all that was written to a pipe has been read: then writing one more line does not block.

    mpirun stops reading its input while rank 0 does not read.
    """
    return not int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def _count_slots(hosts: Sequence[Host]) -> int:
    return sum(host.slots for host in hosts)


def _ranks_on(hosts: Sequence[Host], names: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks that run on the hosts with these names; ranks are numbered host by host."""
    names_of_ranks = [host.name for host in hosts for _ in range(host.slots)]
    return tuple(rank for rank, name in enumerate(names_of_ranks) if name in names)


def _end(process: subprocess.Popen[str], seconds: float) -> int:
    """End mpirun, by SIGKILL if SIGTERM does not; return its exit code."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.kill()
    return process.wait()


def _describe_code(code: int) -> str:
    """Return the exit code in words; mpirun gives 128 + n, and Popen -n, for signal n."""
    number = -code if code < 0 else code - 128
    names = {member.value: member.name for member in signal.Signals}
    return f"exit code {code}" + (f" ({names[number]})" if number in names else "")
