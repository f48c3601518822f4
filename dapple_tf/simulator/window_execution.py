"""Execute an asynchronous window under the costs of its stages: the times of all events on every replica.

Planners simulate few windows, so this is plain Python: a window of 64 minibatches on 16 stages takes some milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import Action, dependencies
from dapple_tf.graph_passes.schedules.weight_versions import Versions
from dapple_tf.graph_passes.schedules.window import Window
from dapple_tf.simulator.shared_flows import FlowDemand, SharedFlows
from dapple_tf.timeline.stage_costs import StageCosts
from dapple_tf.wording import format_count

Place = tuple[int, int]
"""Stage and replica."""


@dataclass(frozen=True)
class Route:
    """A transfer between a replica of a stage and one of the next: ``seconds``, and the ``channels`` that it occupies.

    Each channel carries one transfer in each direction at a time, first in, first out. ``demand``: what it shares with
    transfers of other boundaries and with AllReduces.
    """

    seconds: float
    channels: tuple[str, ...] = ("all",)
    demand: FlowDemand = field(default_factory=FlowDemand)


Routes = Mapping[tuple[int, int, int], tuple[Route, Route]]


@dataclass(frozen=True)
class WindowCosts:
    """Costs of the stages of a window.

    ``stages``: of an action on one replica, and of the AllReduce of one update (``allreduce_seconds``).
    ``routes``: forward and backward, by the first stage of a boundary, its replica, and that of the next stage;
    replicas that share micro-batches send them together, and have one entry, for replicas 0. ``update_seconds``:
    of each stage's update. ``rings``: the demand of each stage's AllReduce; empty if it shares nothing.
    """

    stages: tuple[StageCosts, ...]
    routes: Routes
    update_seconds: tuple[float, ...]
    rings: tuple[FlowDemand, ...] = ()


@dataclass(frozen=True)
class Timed:
    """Start and end of something, in seconds."""

    start: float
    end: float


@dataclass(frozen=True, eq=False)
class WindowExecution:
    """The times of a window's events.

    ``actions``: by action and replica. ``transfers``: by the action whose result is sent, also those that take no time.
    ``reductions``: the AllReduces before the updates, and ``updates``: the updates, both by stage and the number of the
    update in the window.
    """

    versions: Versions
    costs: WindowCosts
    actions: Mapping[tuple[Action, int], Timed]
    transfers: Mapping[Action, Timed]
    reductions: Mapping[tuple[int, int], Timed]
    updates: Mapping[tuple[int, int], Timed]

    @property
    def window(self) -> Window:
        """The window that was executed."""
        return self.versions.window

    @property
    def seconds(self) -> float:
        """End of the last event."""
        return max(timed.end for timed in (*self.actions.values(), *self.updates.values()))


def execute_window(versions: Versions, costs: WindowCosts) -> WindowExecution:
    """Run the window of ``versions`` on stages with these ``costs``.

    A replica runs its actions in the window's order. A forward takes what the previous stage sent, a backward what the
    next one sent. The AllReduce of an update starts when all backwards of its group have ended. The update starts when
    this AllReduce and the stage's previous update have ended. Neither occupies a device. A forward waits for the
    updates that belong to the backwards before it on its replica; with weights "latest" a backward does too. A transfer
    starts when its producer has ended and its channels are free. Transfers and AllReduces share network interfaces as
    their demands say (see ``contention``). Raises ScheduleError for costs of another number of stages, and where the
    order deadlocks.
    """
    if len(costs.stages) != versions.window.stages:
        raise ScheduleError(
            f"the window has {format_count(versions.window.stages, 'stage')}, but there are costs of "
            f"{format_count(len(costs.stages), 'stage')}"
        )
    run = _Run(versions, costs)
    run.run()
    left = sum(map(len, versions.window.rows.values())) - len(run.actions)
    if left:
        raise ScheduleError(f"the window deadlocks with {left} actions to run")
    return WindowExecution(versions, costs, run.actions, run.transfers, run.reductions, run.updates)


@dataclass
class _WaitingTransfer:
    """A transfer that waits for its channels.

    ``waits``: the number of transfers before it, on any of the channels, that have not ended. ``followers``: the
    transfers that wait for this one.
    """

    action: Action
    route: Route
    places: list[Place]
    waits: int = 0
    followers: list[_WaitingTransfer] = field(default_factory=list)
    ended: bool = False


class _Run:
    """The state of a window that is being executed."""

    def __init__(self, versions: Versions, costs: WindowCosts) -> None:
        self._versions = versions
        self._window = versions.window
        self._costs = costs
        self._heads = dict.fromkeys(self._window.rows, 0)
        self._busy = dict.fromkeys(self._window.rows, False)
        self._waits = dict.fromkeys(self._window.rows, 0)  # the updates that a replica's next forward waits for
        self._arrived: set[tuple[Action, Place]] = set()
        self._pending: dict[Action, int] = {}  # replicas of an action that have not run it
        self._missing: dict[tuple[int, int], int] = {}  # backwards that an update's AllReduce waits for
        for stage, groups in enumerate(self._window.updates):
            for number, group in enumerate(groups):
                self._missing[stage, number] = sum(len(self._window.replicas_of(stage, m)) for m in group)
        self._updated = [0] * self._window.stages
        self._reduced: set[tuple[int, int]] = set()
        self._last: dict[tuple[str, int, str], _WaitingTransfer] = {}  # on each channel
        self._events = SharedFlows()
        self.actions: dict[tuple[Action, int], Timed] = {}
        self.transfers: dict[Action, Timed] = {}
        self.reductions: dict[tuple[int, int], Timed] = {}
        self.updates: dict[tuple[int, int], Timed] = {}

    def run(self) -> None:
        """Run all events in order of time; of those at one time the first that was found comes first."""
        for place in self._window.rows:
            self._start(place, 0.0)
        while self._events.run_next():
            pass

    def _start(self, place: Place, now: float) -> None:
        """Start a replica's next action, if it is idle and what the action needs is there."""
        row, head = self._window.rows[place], self._heads[place]
        if self._busy[place] or head == len(row) or not self._is_ready(place, row[head]):
            return
        action, cost = row[head], self._costs.stages[place[0]]
        end = now + (cost.forward_seconds if action.kind == "F" else cost.backward_seconds)
        self._busy[place] = True
        self.actions[action, place[1]] = Timed(now, end)
        self._events.at(end, lambda time: self._end(place, action, time))

    def _is_ready(self, place: Place, action: Action) -> bool:
        waits = action.kind == "F" or self._versions.policy == "latest"
        if waits and self._updated[place[0]] < self._waits[place]:
            return False
        inputs = (a for a in dependencies(action, self._window.stages) if a.kind in "FB" and a.stage != action.stage)
        return all((other, place) in self._arrived for other in inputs)

    def _end(self, place: Place, action: Action, now: float) -> None:
        stage = place[0]
        self._busy[place] = False
        self._heads[place] += 1
        pending = self._pending.get(action, len(self._window.replicas_of(stage, action.micro_batch))) - 1
        self._pending[action] = pending
        if not pending:
            self._send(action, now)
        if action.kind == "B":
            number = self._window.update_of(stage, action.micro_batch)
            if self._window.ends_update(action):
                self._waits[place] = number + 1
            self._missing[stage, number] -= 1
            if not self._missing[stage, number]:
                self._reduce(stage, number, now)
        self._start(place, now)

    def _send(self, action: Action, now: float) -> None:
        """Send the results of an action, which all its replicas have run, to the next stage or to the one before."""
        target = action.stage + (1 if action.kind == "F" else -1)
        if not 0 <= target < self._window.stages:
            return
        sender, *_ = self._window.replicas_of(action.stage, action.micro_batch)
        receivers = self._window.replicas_of(target, action.micro_batch)
        boundary, backward = min(action.stage, target), action.kind == "B"
        first, second = (receivers[0], sender) if backward else (sender, receivers[0])
        route = self._costs.routes[boundary, first, second][backward]
        transfer = _WaitingTransfer(action, route, [(target, replica) for replica in receivers])
        if route.seconds:
            channels = [(action.kind, boundary, channel) for channel in route.channels]
            before = {id(last): last for channel in channels if (last := self._last.get(channel)) and not last.ended}
            for last in before.values():
                last.followers.append(transfer)
            transfer.waits = len(before)
            self._last |= dict.fromkeys(channels, transfer)
        if not transfer.waits:
            self._begin(transfer, now)

    def _begin(self, transfer: _WaitingTransfer, now: float) -> None:
        """Begin a transfer whose channels are free."""

        def end(time: float) -> None:
            transfer.ended = True
            self.transfers[transfer.action] = Timed(now, time)
            for follower in transfer.followers:
                follower.waits -= 1
                if not follower.waits:
                    self._begin(follower, time)
            self._arrived |= {(transfer.action, place) for place in transfer.places}
            for place in transfer.places:
                self._start(place, time)

        self._events.start(now, transfer.route.seconds, transfer.route.demand, end)

    def _reduce(self, stage: int, number: int, now: float) -> None:
        def end(time: float) -> None:
            self.reductions[stage, number] = Timed(now, time)
            self._update(stage, number, time)

        demand = self._costs.rings[stage] if self._costs.rings else FlowDemand()
        self._events.start(now, self._costs.stages[stage].allreduce_seconds, demand, end)

    def _update(self, stage: int, number: int, now: float) -> None:
        """Start the update of a group whose gradients are complete, unless the one before it has not ended."""
        self._reduced.add((stage, number))
        if number == self._updated[stage]:
            end = now + self._costs.update_seconds[stage]
            self.updates[stage, number] = Timed(now, end)
            self._events.at(end, lambda time: self._end_update(stage, time))

    def _end_update(self, stage: int, now: float) -> None:
        self._updated[stage] += 1
        for replica in range(self._window.replicas[stage]):
            self._start((stage, replica), now)
        if (stage, self._updated[stage]) in self._reduced:
            self._update(stage, self._updated[stage], now)
